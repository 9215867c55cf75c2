"""Do what `workbench run` does, and print one line of JSON: processor time at the end of each step, in seconds.

The list stands in the run directory too.

    python scripts/bench/our_steps.py RECIPE OUT [KEY=VALUE ...]

scripts/bench/freezing.py and others start this in a process of its own.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from measuring import PROCESSOR_TIMES

from workbench.runs.process_memory import restart_without_caches

if __name__ == "__main__":
    restart_without_caches()  # as `workbench run` begins

from workbench.recipes.load import load
from workbench.recipes.verbs.run import run


class Watch:
    """Notes the processor time of all threads when a step ends, also where the run is stopped before its end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.processor_s: list[float] = []

    def step(self, record: dict[str, Any], *, total: int) -> None:
        self.processor_s.append(time.process_time())
        self.path.write_text(json.dumps(self.processor_s), encoding="utf-8")

    def say(self, text: str) -> None:
        print(text)

    def stop_requested(self) -> bool:
        return False


def main(recipe: str, out: Path, overrides: Sequence[str]) -> dict[str, list[float]]:
    watch = Watch(out / PROCESSOR_TIMES)
    run(load(recipe, overrides), out=out, resume=False, callback=watch)
    return {"processor_s": watch.processor_s}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])))
