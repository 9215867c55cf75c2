"""The command that continues a run, which messages tell."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path


def resume_command(run: Path | None = None, *changes: str) -> str:
    """The whole command that continues a run: as it was typed, where this process was told to run it.

    Args:
        run: Its directory; None where only the command line knows it.
        changes: `key=value` words that it takes besides.
    """
    if sys.argv[1:2] != ["run"]:
        return " ".join([finish(run or Path("RUN")), *map(shlex.quote, changes)])
    typed = sys.argv[1:]
    words = [*typed, *changes]
    if run is not None and not any(word.partition("=")[0] == "--out" for word in typed):
        words += ["--out", str(run)]
    return shlex.join(["workbench", *words, *([] if "--resume" in typed else ["--resume"])])


def finish(run: Path) -> str:
    """The whole command that continues another run than the one that a command line names."""
    return shlex.join(["workbench", "run", f"{run}/config.yaml", "--out", str(run), "--resume"])
