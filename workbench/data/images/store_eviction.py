"""A limit for the disk that prepared pictures take: those that were used longest ago go first, never those in use.

Beside a store `NAME/` stands `NAME.used`: its time is that of the last use, and who uses the store holds a shared lock
on it, which ends with the process. `NAME.lock` is held by who makes the store.
"""

from __future__ import annotations

import fcntl
import logging
import math
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from workbench.errors import ConfigError
from workbench.runs import units

VARIABLE = "WORKBENCH_CACHE_GB"
"""Environment variable: gigabytes that prepared pictures may take together."""
SHARE = 0.5
"""Share of the disk's room, what they take and what is free, that they may take where VARIABLE is not set."""
_log = logging.getLogger(__name__)


def use(store: Path) -> Callable[[], None]:
    """Mark a store as in use until the function that is returned is called, or this process ends."""
    with suppress(OSError):  # a folder that may only be read is not cleared either
        used = store.with_suffix(".used").open("a")
        with suppress(OSError):
            fcntl.flock(used, fcntl.LOCK_SH)
            os.utime(used.fileno())
        return used.close
    return lambda: None


def make_room(folder: Path, needed: int) -> None:
    """Delete stores in `folder` until there is room for `needed` more bytes within the limit, and tell which.

    Raises:
        ConfigError: The limit is no number.
    """
    size_of = {path: _size(path) for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")}
    taken = sum(size_of.values())
    limit = _limit(taken + shutil.disk_usage(folder).free)
    for path in sorted(size_of, key=_last_use):
        if taken + needed <= limit:
            return
        if _removed(path):
            taken -= size_of[path]
            _log.warning(
                "%s: prepared pictures (%s) were deleted, used longest ago; all may take %s. Set %s to keep more.",
                *(path, units.size(size_of[path]), units.size(limit), VARIABLE),
            )


def _limit(room: int) -> float:
    given = os.environ.get(VARIABLE)
    if not given:
        return SHARE * room
    with suppress(ValueError):
        if math.isfinite(limit_gb := float(given)) and limit_gb >= 0:
            return limit_gb * 1e9
    raise ConfigError(f"{VARIABLE}={given}: expected a number of gigabytes, such as 50.")


def _size(store: Path) -> int:
    total_bytes = 0
    with suppress(OSError):  # another process deletes it
        total_bytes = sum(file.stat().st_size for file in store.iterdir())
    return total_bytes


def _last_use(store: Path) -> float:
    for path in (store.with_suffix(".used"), store):
        with suppress(OSError):
            return path.stat().st_mtime
    return 0.0


def _removed(store: Path) -> bool:
    """Delete a store that nobody uses or makes."""
    try:
        with store.with_suffix(".used").open("a") as used, store.with_suffix(".lock").open("a") as lock:
            for file in (used, lock):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(store)
    except OSError:  # in use, deleted by another process, or not ours to delete
        return False
    return True
