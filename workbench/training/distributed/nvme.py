"""DeepSpeed's asynchronous files, which it compiles at their first use."""

from __future__ import annotations

import fcntl
import time
from pathlib import Path

from workbench.errors import ConfigError

OLD = 600.0
"""Seconds after which a compilation that left its lock behind was killed: everybody would wait for it for ever."""


def require() -> None:
    """Compile them now, one process after the other; raises ConfigError where this machine cannot."""
    from deepspeed.ops.op_builder import AsyncIOBuilder
    from torch.utils import cpp_extension

    builder = AsyncIOBuilder()
    if not builder.is_compatible(verbose=False):
        raise ConfigError(
            "distributed.nvme: DeepSpeed writes to disk through libaio, which is not installed here. "
            "Run `apt install libaio-dev` (it is compiled once, in about a minute), or write cpu instead of nvme."
        )
    folder = Path(cpp_extension._get_build_directory("async_io", verbose=False))
    with (folder.parent / "workbench.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # given back also where this process is killed
        for left in (folder / "lock", folder.parent / "pin_memory" / "lock"):
            if left.exists() and time.time() - left.stat().st_mtime > OLD:
                left.unlink()
        builder.load(verbose=False)
