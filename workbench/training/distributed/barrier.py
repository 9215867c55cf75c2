"""Waiting for what other processes write."""

from __future__ import annotations

import time
from collections.abc import Callable

from workbench.errors import Stopped
from workbench.training.callbacks import Callback

LOOK = 0.2
"""Seconds between two looks."""


def wait_for_ranks(done: Callable[[], bool], callback: Callback) -> None:
    """Return when `done` holds; unlike a process that waits in a collective, this one can be asked to stop.

    Raises:
        Stopped: the callback asked for it.
    """
    while not done():
        if callback.stop_requested():
            raise Stopped("Stopped while other processes train; all of this one's members are saved.")
        time.sleep(LOOK)
