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
OF_STEPS: dict[str, tuple[str, Literal["low", "high"]]] = {
    "accuracy": ("Accuracy over steps", "high"),
    "error_found": ("Answers with an error of which the first wrong step is found", "high"),
    "all_right": ("Answers without an error in which none is found", "high"),
    "f1": ("F1: harmonic mean of these two", "high"),
    "auc_min": ("AUC of answers without an error: lowest step", "high"),
    "auc_product": ("AUC: product of the steps", "high"),
    "auc_mean": ("AUC: mean of the steps", "high"),
    "auc_last": ("AUC: last step", "high"),
    "brier": ("Brier score of a step", "low"),
    "calibration_error": ("Calibration error", "low"),
}
"""The same of a model that rates steps."""


def titles(run: RunRecord) -> dict[str, tuple[str, Literal["low", "high"]]]:
    """Title of each score of a run, and which direction is better."""
    return OF_STEPS if run.rates_steps else SCORES


def verdict(run: RunRecord) -> str:
    """Outcome of a run that was scored, in one sentence."""
    after: Any = run.scores["after"]
    if run.rates_steps:
        return _of_steps(run, after)
    text = f"The better answer has the higher reward in {after['accuracy']:.1%} of the held-out pairs"
    text += f" (95 %: {run.interval('accuracy')})"
    if "longer" in after:
        text += f"; the longer answer has it in {after['longer']:.1%}, and is the better one in "
        text += f"{after['longer_chosen']:.1%}"
    if folds := run.scores.get("out_of_fold"):
        low, high = (100 * folds[f"accuracy_{end}"] for end in ("low", "high"))
        text += f". Of all {folds['pairs']:,.0f} pairs, each rated by the member that did not train on it, "
        text += f"{folds['accuracy']:.1%} (95 %: {low:.1f} to {high:.1f} %)"
    return f"{text}."


def _of_steps(run: RunRecord, after: Any) -> str:
    text = f"{after['accuracy']:.1%} of the held-out steps are rated rightly (95 %: {run.interval('accuracy')})"
    if "error_found" in after:
        text += f"; of answers with an error the first wrong step is found in {after['error_found']:.1%}"
    if "all_right" in after:
        text += f", and of answers without one {after['all_right']:.1%} are let pass"
    return f"{text}."


def _wrong_steps(table: Any) -> Searches:
    gap = (table["probability"] - table["label"]).abs()
    mistakes = table[(table["probability"] >= 0.5) != (table["label"] >= 0.5)]
    mistakes = mistakes.loc[gap[mistakes.index].sort_values(ascending=False, kind="stable").index]
    names, first = ["row", "step", "text", "label", "probability"], mistakes.head(embed_section.SHOWN)
    title = f"Surest mistakes: {len(first):,} of {len(mistakes):,} steps"
    return Searches.of(title if len(first) else "No step is rated wrongly", first, names)


def wrong(run: RunRecord) -> Searches | None:
    """The surest mistakes; None where the run is no reward model, or was not scored."""
    table: Any = run.predictions
    if not run.rewards or table.empty:
        return None
    if run.rates_steps:
        return _wrong_steps(table)
    judged = table[~table["tie"]] if "tie" in table else table
    mistakes = judged[judged["margin"] <= 0].sort_values("margin")
    names = ["row", "text", "rejected", "chosen_reward", "rejected_reward"]
    first = mistakes.head(embed_section.SHOWN)
    title = f"Surest mistakes: {len(first):,} of {len(mistakes):,} pairs"
    return Searches.of(title if len(first) else "No pair is wrong", first, names)
