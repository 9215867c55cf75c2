"""Tables of recipes embed, rerank and reward: rows as the model reads them, what texts find, what answers are worth."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    import pandas as pd

    from workbench.recipes.embeddings.embed_verbs import EmbedInspection


PREDICTS = {
    "embed": ("embeddings.parquet", "embed every text of a file"),
    "rerank": ("scores.csv", "score every pair of a query and a passage of a file"),
    "reward": ("answers.csv", "rate every answer of a file"),
}
"""A name for what `predict` writes, and what it does, by the recipe of the run."""


def inspection(inspection: EmbedInspection) -> Iterator[RenderableType]:
    """Yield some rows with their texts, and the sizes of the splits."""
    for place, texts in inspection.examples:
        yield Rule(Text(place))
        for name, text in texts:
            yield Text.assemble((f"{name:>10}  ", "bold"), (text, "bold green" if name == "positive" else "dim"))
    yield Rule()
    table = Table()
    for column in ("split", "rows", "texts", "tokens", "longest text", "cut", "left out"):
        table.add_column(column, justify="left" if column == "split" else "right")
    for name, rows in inspection.data._asdict().items():
        if rows is not None:
            tokens, longest = int(rows.units.lengths.sum()), int(rows.units.lengths.max())
            numbers = (len(rows), len(rows.units.texts), tokens, longest, rows.truncated, len(rows.skipped))
            table.add_row(name.replace("_", "-"), *(f"{number:,}" for number in numbers))
    yield table


def searched(predictions: pd.DataFrame) -> Iterator[RenderableType]:
    """Yield some texts, and what each finds first."""
    shown = ("nearest", "label", "nearest_label", "score", "similarity", "rejected", "chosen_reward", "rejected_reward")
    names = [name for name in shown if name in predictions]
    for _, row in predictions.iloc[:: max(1, len(predictions) // 3)].head(3).iterrows():
        yield Text(f"\n{str(row['text'])[:160].strip()}", style="dim")
        for name in names:
            yield Text.assemble((f"{name:>15}  ", "bold"), str(row[name])[:160])
