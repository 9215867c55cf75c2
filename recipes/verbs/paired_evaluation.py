"""`evaluate RUN --against OTHER` with no reward and no judge: scores of both runs on the same rows, in pairs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

from workbench.config import RunConfig
from workbench.errors import ConfigError
from workbench.evaluation import comparison, held_out_losses
from workbench.evaluation.comparison import PairedScore
from workbench.evaluation.held_out_losses import KeptLosses
from workbench.models import exported
from workbench.recipes.single.single_run import Scored, SingleRun
from workbench.recipes.task import implementation
from workbench.recipes.verbs.asked_config import asked_config
from workbench.runs import run_directory
from workbench.runs.run_directory import Run
from workbench.runs.trust import Trust
from workbench.training.callbacks import SILENT

if TYPE_CHECKING:
    import pandas as pd


class RowScores(NamedTuple):
    """What a run makes of each row."""

    table: pd.DataFrame
    losses: KeptLosses | None
    """Losses by tokens, where the task has them."""


def paired(
    run: Path | str, against: Path | str, overrides: Sequence[str] = (), *, trust: bool = False
) -> tuple[list[PairedScore], list[str]]:
    """Scores of `against` and of `run` on the rows of `run`, which each reads in its own tokens, and notes.

    Args:
        run: A run directory, such as a student's.
        against: Another run of the same task, over any backbone, such as its teacher's.
        overrides: `key=value` words of sections data and evaluate; `data.test=FILE` names other rows than the held-out.
        trust: Execute the Python code that the runs' config.yaml name.

    Raises:
        ConfigError: They are of different tasks, or one is no single model.
    """
    run, other, trusted = Path(run), Path(against), Trust(trust)
    config = asked_config(run, overrides, verb="evaluate", trust=trust)
    moved = [word for word in overrides if word.startswith("model.id=")]
    theirs = run_directory.shipped_config(other, trusted, moved)
    for path, own in ((run, config), (other, theirs)):
        if own.over is not None or own.task != config.task:
            raise ConfigError(
                f"--against: {path} is of recipe {own.recipe}, and two runs of one task with one model each are "
                "compared row by row. `workbench compare` puts any runs side by side."
            )
    first, second = _row_scores(other, theirs, config), _row_scores(run, config, config)
    scores, notes = comparison.compare(first.table, second.table), list[str]()
    if first.losses is not None and second.losses is not None:
        loss = held_out_losses.compare(first.losses, second.losses)
        if isinstance(loss, PairedScore):
            scores.insert(0, loss)
        else:
            notes.append(f"No paired difference of the loss, for {loss}.")
    return scores, notes


def _row_scores(run: Path, config: RunConfig, rows_of: RunConfig) -> RowScores:
    """Scores of a finished run on the held-out or test rows of a configuration."""
    plain = {name: type(getattr(config.data, name))() for name in ("select", "curriculum", "sampling")}
    data = rows_of.data.model_copy(update={"max_tokens": config.data.max_tokens, **plain})
    model = exported.model_under(config, run / "adapter")
    own = config.model_copy(update={"data": data, "seed": rows_of.seed, "model": model})
    with TemporaryDirectory() as aside:
        begun = implementation(own).begin(own, Run(Path(aside), None, resumed=False), SILENT)
        single: SingleRun[Any, Any] = replace(begun, run=Run(run, None, resumed=True))
        rows, saved = single.rows["held_out" if data.test is None else "test"], single.load()
        scored: Scored = single.score(saved, rows)
        table = single.predictions(saved, rows, scored.outputs, {})
        if (losses := getattr(scored.outputs, "losses", None)) is None:
            return RowScores(table, None)
        held_out_losses.write(Path(aside), rows, losses)
        return RowScores(table, held_out_losses.read(Path(aside)))
