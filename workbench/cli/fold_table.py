"""Tables of `check` on a cross-validation: the folds of its rows, and the duplicates among them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from workbench.data.labelled.fold_data import FoldData

CLASSES = 12
"""Classes of a table of folds; of more, the rarest are shown."""


def sizes(data: FoldData) -> Table:
    """Rows of each fold of the first deal, and of its classes or the mean of its numbers."""
    from workbench.data.labelled.labels import counts

    fold_labels = [data.rows.subset(data.folds.fold_RN[0] == fold).labels for fold in range(data.folds.k)]
    table = Table("", box=None, title="Folds", title_justify="left")
    for name in data.folds.names:
        table.add_column(escape(f"fold {name}"), justify="right")
    table.add_row("rows", *(f"{len(labels):,}" for labels in fold_labels))
    if data.labels.kind == "number":
        means = (
            sum(float(label) for label in labels if isinstance(label, float)) / len(labels) for labels in fold_labels
        )
        table.add_row("mean label", *(f"{mean:.4g}" for mean in means))
        return table
    total = counts([label for label in data.rows.labels if label is not None])
    own = [counts([label for label in labels if label is not None]) for labels in fold_labels]
    names = sorted(total, key=lambda name: -total[name])
    if len(names) > CLASSES:
        table.title = f"Folds, with the {CLASSES} rarest of {len(names)} classes"
    for name in names[-CLASSES:]:
        table.add_row(Text(name), *(f"{each[name]:,}" for each in own))
    return table


def duplicates(data: FoldData) -> str:
    """Sentence on the duplicates among the training rows."""
    report = data.duplicates
    if report is None:
        return "\nduplicates.on_duplicate=ignore: near-duplicates were not looked for."
    sentence = f"\nDuplicates: {report.exact:,} equal rows, {report.clusters:,} clusters of near-duplicates"
    if report.clusters:
        least = f"{report.least_similar:.2f}"
        sentence += f" with {report.clustered:,} rows (largest {report.largest:,}, least similar rows {least})"
    if data.conflicts:
        sentence += f"; {len(data.conflicts):,} clusters carry different labels, such as {', '.join(data.conflicts[0])}"
    leak = f"{data.leak:,} rows ({data.leak / max(1, report.rows):.1%})"
    return f"{sentence}.\nFolds that ignore them would validate {leak} beside a near-duplicate that trains."
