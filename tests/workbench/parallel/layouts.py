"""Runs one recipe in several layouts, each in a folder of its own; torchrun starts this file in two processes.

layouts.py FOLDER JOBS.json    # JOBS: [[name, overrides, name of the run to go on from or null], ...]
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import workbench
from workbench.parallel.ranks import joined


def halfway(finished: Path, folder: Path) -> None:
    """The folder as a run leaves it that was killed after half of its steps."""
    shutil.copytree(finished, folder)
    last = sorted((folder / "checkpoints").glob("step-*"))[-1]
    shutil.rmtree(last)
    shutil.rmtree(folder / "adapter")


def main() -> None:
    folder, jobs = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())
    ranks = joined()
    for name, words, origin in jobs:
        if origin is not None and ranks.first:
            halfway(folder / origin, folder / name)
        ranks.wait()
        workbench.run(str(folder / "recipe.yaml"), words, out=folder / name, resume=origin is not None, quiet=True)


if __name__ == "__main__":
    main()
