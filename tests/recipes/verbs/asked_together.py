"""Trains in several processes, which torchrun starts, the first of which is asked for an evaluation after step 2.

asked_together.py RECIPE OUT [ask]
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from workbench.recipes.load import load
from workbench.recipes.verbs.run import run
from workbench.runs import evaluation_request
from workbench.runs.ranks import joined
from workbench.training.callbacks import Silent


class AskingFirst(Silent):
    """Asks once."""

    def step(self, record: dict[str, Any], *, total: int) -> None:
        if record["step"] == 2 and joined().first:
            evaluation_request.ask(Path(sys.argv[2]), {"recipe": "sft"})


if __name__ == "__main__":
    callback = AskingFirst() if "ask" in sys.argv else Silent()
    run(load(sys.argv[1], []), out=Path(sys.argv[2]), resume=False, callback=callback)
