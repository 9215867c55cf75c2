"""The part of a page that is about embeddings: their scores, and what texts find."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from workbench.report.run_record import RunRecord

SCORES: dict[str, tuple[str, Literal["low", "high"]]] = {
    "accuracy": ("Accuracy of the nearest neighbour", "high"),
    "ndcg@10": ("nDCG at 10", "high"),
    "recall@1": ("Recall at 1", "high"),
    "recall@10": ("Recall at 10", "high"),
    "mrr": ("Mean reciprocal rank", "high"),
    "spearman": ("Rank correlation with the scores (Spearman)", "high"),
    "pearson": ("Linear correlation with the scores (Pearson)", "high"),
}
"""Title of each score, and which direction is better; the first that there is decides."""
SHOWN = 20
"""Texts that find something wrong, at most."""


class Searches(NamedTuple):
    """Texts and what they find."""

    title: str
    columns: list[str]
    rows: list[list[str]]

    @classmethod
    def of(cls, title: str, table: Any, names: list[str]) -> Searches:
        """The columns `names` of a table, numbers with three decimals."""
        rows = [
            [f"{each:.3f}" if isinstance(each, float) else str(each) for each in row] for row in table[names].values
        ]
        return cls(title, names, rows)


def main_score(run: RunRecord) -> str | None:
    """Name of the score that decides; None where nothing was scored."""
    return next((name for name in SCORES if name in run.scores.get("before", {})), None)


def verdict(run: RunRecord) -> str:
    """Outcome of a run that was scored, in one sentence."""
    name = main_score(run)
    if name is None:
        before, after = (run.scores[when]["loss"] for when in ("before", "after"))
        return f"Held-out loss went from {before:.2f} to {after:.2f}."
    title, _ = SCORES[name]
    before, after = (run.scores[when][name] for when in ("before", "after"))
    went = "rose" if after > before else "fell" if after < before else "stayed"
    low = run.scores["after"].get(f"{name}_low", after)
    chance = "" if low > before or after <= before else ": the interval holds what it was before"
    return f"{title} {went} from {before:.3f} to {after:.3f} (95 %: {run.interval(name)}){chance}."


def searches(run: RunRecord) -> Searches | None:
    """Texts whose first result is wrong, or whose similarity is farthest from its score; None where there are none."""
    table: Any = run.predictions
    if not run.embeds or table.empty:
        return None
    if "score" in table:
        gap = (table["similarity"].rank(pct=True) - table["score"].rank(pct=True)).abs()
        chosen, title = table.loc[gap.sort_values(ascending=False).index], "Pairs that are ranked worst"
        names = ["row", "text", "other", "score", "similarity"]
    else:
        wrong = table["label"] != table["nearest_label"] if "label" in table else ~table["right"]
        chosen, title = table[wrong], "Texts whose nearest neighbour is wrong"
        names = ["row", "text", "nearest", *(["label", "nearest_label"] if "label" in table else [])]
    first = chosen.head(SHOWN)
    title = f"{title}: {len(first):,} of {len(chosen):,}" if len(first) else "No text finds a wrong one"
    return Searches.of(title, first, names)
