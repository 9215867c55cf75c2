"""What a teacher was worth: a distilled student against its control, the same student on labels alone, row by row."""

from __future__ import annotations

from typing import Literal, NamedTuple

import pandas as pd

from workbench.evaluation import comparison, held_out_losses
from workbench.evaluation.comparison import PairedScore
from workbench.report import run_record
from workbench.report.run_record import RunRecord

CONTROL = "control"
"""Folder of the control in the run directory, and its column in scores.json."""
FALLING = ("loss", "rmse", "mae")
"""Scores of which less is better."""


class Worth(NamedTuple):
    """A verdict, and the sentence that gives its numbers."""

    verdict: Literal["helped", "no difference", "harmed"]
    sentence: str


def worth(record: RunRecord) -> Worth | None:
    """What the teacher was worth on the held-out rows; None where no control was scored."""
    folder = record.folder / CONTROL
    if CONTROL not in record.scores or not (folder / "scores.json").exists():
        return None
    return beside(record, run_record.read(folder))


def beside(record: RunRecord, control: RunRecord) -> Worth | None:
    """What the teacher was worth beside another run, of the same student on labels alone; None where nothing compares
    them. Where accuracy could differ as much by chance, the loss of the same rows decides: it shows smaller harm."""
    known = {each.name: each for each in _pairs(record, control)}
    main = _main(known, record)
    if main is None:
        return None
    found = main
    if main.name == "accuracy" and _verdict(main) == "no difference":
        found = known.get("loss", main)
    text = _told(found, "held-out", record)
    if found != main:
        text += f"; {_told(main, 'held-out', record)}"
    tables = [each.folder / "test_predictions.parquet" for each in (control, record)]
    if all(table.exists() for table in tables):
        pairs = comparison.compare(*map(pd.read_parquet, tables))
        if tested := next((each for each in pairs if each.name == found.name), None):
            text += f"; {_told(tested, 'test', record)}"
    verdict = _verdict(found)
    words = {"helped": "The teacher helped", "harmed": "The teacher harmed"}
    return Worth(verdict, f"{words.get(verdict, 'The teacher made no difference beyond chance')}: {text}.")


def _pairs(record: RunRecord, control: RunRecord) -> list[PairedScore]:
    losses = [held_out_losses.read(each.folder) for each in (control, record)]
    found = comparison.compare(control.predictions, record.predictions)
    if losses[0] is not None and losses[1] is not None:
        loss = held_out_losses.compare(losses[0], losses[1])
        found = found if isinstance(loss, str) else [loss, *found]
    return found


def _main(known: dict[str, PairedScore], record: RunRecord) -> PairedScore | None:
    """The score that decides: the task's own where rows have it, else the first. A student of written answers is judged
    by its own: it gives those of the data less probability, however good they are."""
    names = ("ndcg@10", "spearman") if record.embeds else ("accuracy",) if record.classifies else ()
    names = ("f1",) if _by_answers(record) else names
    return next((known[name] for name in names if name in known), next(iter(known.values()), None))


def _by_answers(record: RunRecord) -> bool:
    return "answers" in record.manifest.get("distill", {})


def _verdict(score: PairedScore) -> Literal["helped", "no difference", "harmed"]:
    if score.interval is None or score.interval[0] <= 0 <= score.interval[1]:
        return "no difference"
    return "helped" if (score.difference < 0) == (score.name in FALLING) else "harmed"


def _told(score: PairedScore, rows: str, record: RunRecord) -> str:
    without = "the answers of the data" if _by_answers(record) else "labels alone"
    low, high = score.interval or (0.0, 0.0)
    return (
        f"{rows} {score.name.replace('_', ' ')} {score.second:.4g}, on {without} {score.first:.4g} "
        f"({score.difference:+.4f}; 95 %: {low:+.4f} to {high:+.4f}, {score.rows:,} rows)"
    )
