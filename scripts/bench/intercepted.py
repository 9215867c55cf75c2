"""A training of a command, handed to a measurement in the place of its loop."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from workbench.cli.console import Terminal
from workbench.config import RunConfig
from workbench.recipes.run import main_of
from workbench.runs import files, run_directory
from workbench.training.bank_trainer import BankTrainer
from workbench.training.trainer import Trainer


class _Enough(Exception):
    """Everything is measured."""


def measured(config: RunConfig, measure: Callable[[Any], None]) -> None:
    """Begin a run up to its training, of one adapter or of a bank, give that to `measure`, and end there."""

    def instead(fit: Trainer | BankTrainer) -> None:
        measure(fit)
        raise _Enough

    own = Trainer.work, BankTrainer.work
    Trainer.work = BankTrainer.work = instead  # type: ignore[method-assign, assignment]
    try:
        with tempfile.TemporaryDirectory() as folder:
            run = run_directory.start(Path(folder) / "run", config, resume=False)
            files.write_json(run.path / "before.json", {})  # nothing is scored before training
            with suppress(_Enough):
                main_of(config.recipe)(config, run, Terminal(quiet=True))
            run.close()
    finally:
        Trainer.work, BankTrainer.work = own  # type: ignore[method-assign]
