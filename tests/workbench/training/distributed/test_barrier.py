from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from workbench.errors import Stopped
from workbench.training.distributed import barrier


def test_it_waits_until_others_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("time.sleep", slept.append)
    callback: Any = SimpleNamespace(stop_requested=lambda: False)
    barrier.wait_for_ranks(lambda: len(slept) == 3, callback)
    assert slept == [barrier.LOOK] * 3


def test_who_waits_can_be_asked_to_stop() -> None:
    callback: Any = SimpleNamespace(stop_requested=lambda: True)
    barrier.wait_for_ranks(lambda: True, callback)
    with pytest.raises(Stopped, match="while other processes train"):
        barrier.wait_for_ranks(lambda: False, callback)
