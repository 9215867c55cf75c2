"""The part of a page that is about a reward model: its scores, and the pairs that it gets wrong."""

from __future__ import annotations

from typing import Any, Literal

from workbench.report import embed_section
from workbench.report.embed_section import Searches
from workbench.report.run_record import RunRecord

SCORES: dict[str, tuple[str, Literal["low", "high"]]] = {
    "accuracy": ("Accuracy: the better answer has the higher reward", "high"),
    "log_loss": ("Log-loss of the judgements, nats", "low"),
    "brier": ("Brier score", "low"),
    "calibration_error": ("Calibration error", "low"),
}
"""Title of each score, and which direction is better."""


def verdict(run: RunRecord) -> str:
    """Outcome of a run that was scored, in one sentence."""
    after: Any = run.scores["after"]
    text = f"The better answer has the higher reward in {after['accuracy']:.1%} of the held-out pairs"
    text += f" (95 %: {run.interval('accuracy')})"
    if "longer" in after:
        text += f"; the longer answer has it in {after['longer']:.1%}, and is the better one in "
        text += f"{after['longer_chosen']:.1%}"
    return f"{text}."


def wrong(run: RunRecord) -> Searches | None:
    """The surest mistakes; None where the run is no reward model, or was not scored."""
    table: Any = run.predictions
    if not run.rewards or table.empty:
        return None
    judged = table[~table["tie"]] if "tie" in table else table
    mistakes = judged[judged["margin"] <= 0].sort_values("margin")
    names = ["row", "text", "rejected", "chosen_reward", "rejected_reward"]
    first = mistakes.head(embed_section.SHOWN)
    rows = [[f"{each:.3f}" if isinstance(each, float) else str(each) for each in row] for row in first[names].values]
    title = f"Surest mistakes: {len(first):,} of {len(mistakes):,} pairs"
    return Searches(title if rows else "No pair is wrong", names, rows)
