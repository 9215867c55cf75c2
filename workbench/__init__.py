"""peft-workbench: fine-tune pretrained backbones with small trainable parts, and know the truth about the result."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from workbench.config import RunConfig

# OpenMP threads that wait by spinning stall one another where other programs share the cores.
# Read once, when torch is first imported.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
# oneDNN and torch keep a compiled product for each of the last 1,024 shapes. Batches of many lengths fill that with
# most of a gigabyte, and come back to few of them: twelve steps of the quickstart are as fast with 64.
os.environ.setdefault("LRU_CACHE_CAPACITY", "64")
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
# On some CPUs bitsandbytes asks at its import for a package that would fetch kernels from the hub.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)

__version__ = "0.1.0"
__all__ = ["__version__", "run"]


def run(
    recipe: RunConfig | Path | str,
    overrides: Sequence[str] = (),
    *,
    out: Path | str | None = None,
    resume: bool = False,
    quiet: bool = False,
    began: float | None = None,
) -> Path:
    """Train, score and report, as the command `workbench run` does.

    Args:
        recipe: A configuration, a YAML file, or the name of a shipped recipe such as `sft/quickstart`.
        overrides: `key=value` words on top of a file or name.
        out: The run directory; by default a new one under `runs/`.
        resume: Continue the run in `out`.
        quiet: Draw no progress.
        began: The moment that `budget.time` counts from, by `time.monotonic`; by default that of the call.

    Returns:
        The run directory: scores.json, adapter/, report.html and the rest.

    Raises:
        WorkbenchError: something is wrong that the caller can mend.
        Stopped: ended on SIGTERM or Ctrl-C, with a checkpoint to resume from.
    """
    import time

    began = time.monotonic() if began is None else began
    from workbench.recipes.load import directory, load

    config = load(recipe, overrides)

    from workbench.cli.console import Terminal
    from workbench.recipes.verbs.run import run as run_config
    from workbench.runs.ranks import joined
    from workbench.runs.run_log import RunLog

    ranks = joined()
    path = ranks.agreed(Path(out) if out is not None else directory(recipe, resume=resume))
    log = RunLog()
    with Terminal(quiet=quiet or not ranks.first, log=log) as terminal:
        return run_config(config, out=path, resume=resume, callback=terminal, began=began, log=log)
