"""Labelled rows as training wants them: with their difficulty, and with texts that each pass rewrites."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from workbench.config import RunConfig
from workbench.data import difficulty
from workbench.data.batching import evenly_spaced
from workbench.data.labelled.augmented_texts import AugmentedTexts
from workbench.data.labelled.labelled_data import LabelledSet
from workbench.data.labelled.row_reader import RowReader
from workbench.data.labelled.text_reader import TextReader
from workbench.data.labelled.token_rows import TokenRows
from workbench.errors import DataError

SAMPLED = 200
"""Rows that show whether an operator changes any."""
PRESERVED = (
    "Whether such texts keep their labels: `workbench features RECIPE` (recipe classify or crossval) tells how often "
    "each operator changes the class that the frozen backbone knows them by."
)
"""Sentence of `check` where a row has one class."""


def training_rows(rows: LabelledSet, config: RunConfig, reader: RowReader) -> LabelledSet:
    """Training rows as `data.curriculum` and `data.augment` ask for them; other rows are read as they are.

    Chance stands in for a difficulty that the backbone is to say: a run measures it after this.

    Raises:
        ConfigError: The user's file is wrong.
        DataError: A row has no number in the column, or an operator changes no row.
    """
    if config.data.curriculum.measured:
        rows = replace(rows, difficulty=difficulty.by_chance(len(rows), seed=config.seed))
    else:
        rows = rows.graded(config.data.curriculum)
    if not config.data.augment.is_on:
        return rows
    assert isinstance(reader, TextReader) and isinstance(rows.inputs, TokenRows), "pictures are refused"
    augmented = augmented_texts(rows, config, reader)
    _require_changes(rows.inputs, augmented, rows.source)
    return replace(rows, inputs=replace(rows.inputs, augmented=augmented))


def augmented_texts(rows: LabelledSet, config: RunConfig, reader: TextReader) -> AugmentedTexts:
    """Texts of rows as `data.augment` rewrites them."""
    texts, places = zip(*((record.fields, record.place) for record in rows.records), strict=True)
    return AugmentedTexts(texts, places, config.data.augment, config.seed, reader.encoder)


def in_words(rows: LabelledSet, *, one_class: bool) -> list[str]:
    """Sentences on the rows that the first pass rewrites, and some of them; none where there are none.

    Args:
        one_class: Whether a row's label is one class, which a probe can tell.
    """
    if not isinstance(rows.inputs, TokenRows) or rows.inputs.augmented is None:
        return []
    augmented = rows.inputs.augmented
    changed, after = augmented.changed(0), augmented.rewritten(0)
    text = augmented.encoder.text
    shown = [
        f"  {augmented.places[row]}: {text(augmented.texts[row])}\n    -> {text(after[row])}"
        for row in changed[np.linspace(0, max(0, len(changed) - 1), num=min(3, len(changed)), dtype=np.int64)]
    ]
    names = ", ".join(augmented.config.operators)
    return [
        f"Augmentation ({names}): the first pass rewrites {len(changed):,} of {len(rows):,} training rows, whose "
        "labels stay; each pass does so in another way.",
        *shown,
        *([PRESERVED] if one_class else ()),
    ]


def _require_changes(plain: TokenRows, augmented: AugmentedTexts, source: str) -> None:
    """Raise DataError where an operator changes none of some rows, as the model reads them."""
    chosen = evenly_spaced(len(augmented.texts), SAMPLED)
    before = plain.take(chosen)
    for name in augmented.config.operators:
        after = TokenRows(augmented.take(chosen).alone(name).tokens(0))
        if not before.differ(after).any():
            raise DataError(
                f"{source}: data.augment.operators: {name} changes none of {len(chosen):,} training rows as the model "
                "reads them: they have nothing that it would change, or the tokenizer does not see it, as an uncased "
                f"one does not see letters' case.\n  Leave {name} out."
            )
