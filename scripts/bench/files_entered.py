"""Counts the files of ours that one optimizer step of a run enters, and prints each with its calls.

    python scripts/bench/files_entered.py [sft/quickstart] [key=value ...] [--from-start]

A step begins before its rows are chosen and ends when the optimizer has moved the parameters. Calls are those that
`sys.setprofile` sees in the thread that trains, and in the one that collates the next micro-batch. The first steps are
left out, because they allocate; with --from-start everything from the start of the run to the end of its first step
counts, where configuration, data, model and planning are read.
"""

from __future__ import annotations

import argparse
import inspect
import sys
import tempfile
import threading
from collections import Counter
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

from workbench.errors import Stopped
from workbench.recipes.load import load
from workbench.recipes.verbs import run
from workbench.training.callbacks import Silent

ROOT = Path(__file__).resolve().parents[2]
OURS = ("workbench", "adapters", "recipes")
WARM_UP = 2
"""Steps before the one that is counted."""


class StepProfile(Silent):
    """Profiles the step after the first `WARM_UP` ones, until its optimizer has moved the parameters.

    Args:
        from_start: Profile from now on, until the first step's optimizer has moved them.
    """

    def __init__(self, *, from_start: bool) -> None:
        self.warm_up = 0 if from_start else WARM_UP
        self.calls: Counter[str] = Counter()
        """Calls of functions by file, with its path in the checkout."""
        self.changes = 0
        """Calls of a function from a function in another file, both ours."""
        self.steps = 0
        self._on = from_start
        register_optimizer_step_post_hook(self._end)
        threading.setprofile(self._see)  # threads that start later
        sys.setprofile(self._see)

    def step(self, record: dict[str, Any], *, total: int) -> None:
        """Count the steps that are done."""
        self.steps += 1

    def stop_requested(self) -> bool:
        """Asked as the last thing of a step: the next one begins here."""
        self._on = self.steps == self.warm_up > 0
        return self.steps > self.warm_up

    def _end(self, *_: Any) -> None:
        self._on = False

    def _see(self, frame: FrameType, event: str, argument: Any) -> None:
        if not self._on or event != "call" or (file := our_file(frame)) is None:
            return
        self.calls[file] += 1
        caller = frame.f_back
        self.changes += caller is not None and our_file(caller) not in (None, file)


def our_file(frame: FrameType) -> str | None:
    """Path in the checkout of the file of a function, without the links in `workbench`; None where it is not ours."""
    path = frame.f_code.co_filename
    if not path.startswith(f"{ROOT}/") or not frame.f_code.co_flags & inspect.CO_OPTIMIZED:  # modules and classes
        return None
    parts = Path(path).relative_to(ROOT).parts
    parts = parts[1:] if parts[:2] in (("workbench", "adapters"), ("workbench", "recipes")) else parts
    return "/".join(parts) if parts[0] in OURS else None


def main() -> None:
    found = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    found.add_argument("recipe", nargs="?", default="sft/quickstart")
    found.add_argument("settings", nargs="*", help="further settings, as of `workbench run`")
    found.add_argument("--from-start", action="store_true", help="count the run up to the end of its first step")
    arguments = found.parse_args()
    short = [f"train.steps={WARM_UP + 2}", "evaluate.answers=0", "evaluate.every=null"]
    profile = StepProfile(from_start=arguments.from_start)
    with tempfile.TemporaryDirectory() as folder:
        config = load(arguments.recipe, [*short, *arguments.settings])
        with suppress(Stopped):
            run.run(config, out=Path(folder) / "run", resume=False, callback=profile)
    for file, calls in sorted(profile.calls.items()):
        print(f"{calls:8,}  {file}")
    print(f"{len(profile.calls)} files, {sum(profile.calls.values()):,} calls, {profile.changes:,} from another file.")


if __name__ == "__main__":
    main()
