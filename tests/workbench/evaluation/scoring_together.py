"""Stops a run while two processes score together, and goes on with it; torchrun starts this file in both.

scoring_together.py FOLDER: FOLDER/config.json is run in FOLDER/straight, and stopped and resumed in FOLDER/broken.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from workbench.config import RunConfig
from workbench.errors import Stopped
from workbench.evaluation import forward_passes
from workbench.recipes.verbs.run import run
from workbench.runs.ranks import joined
from workbench.training import capacity


class Impatient:
    """A callback that asks for an end once so many sentences or forward passes have been."""

    def __init__(self, *, after: str = "nothing", passes: int = 0) -> None:
        self.after, self.passes, self.heard = after, passes, False

    def say(self, text: str) -> None:
        self.heard = self.heard or self.after in text

    def step(self, record: dict[str, Any], *, total: int) -> None: ...

    def stop_requested(self) -> bool:
        self.passes -= self.heard
        return self.heard and self.passes < 0


def main() -> None:
    """This process's part of both runs; only the second process is asked for an end."""
    capacity.FORWARD_TOKENS = 64
    rank, folder = joined().rank, Path(sys.argv[1])
    config = RunConfig.model_validate_json((folder / "config.json").read_text())
    run(config, out=folder / "straight", resume=False, callback=Impatient())
    home = re.escape(str(folder / "broken"))  # whichever process says so
    for number, after in enumerate(("Scoring the backbone", "Scoring what was saved")):
        asked = Impatient(after=after, passes=5) if rank == 1 else Impatient()
        with pytest.raises(Stopped, match=rf"kept\.\nContinue with: workbench run .*--out {home} --resume"):
            run(config, out=folder / "broken", resume=number > 0, callback=asked)
        assert rank or json.loads((folder / "broken" / forward_passes.FILE).read_text())
    run(config, out=folder / "broken", resume=True, callback=Impatient())


if __name__ == "__main__":
    main()
