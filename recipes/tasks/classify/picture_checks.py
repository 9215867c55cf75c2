"""Findings of `check` on rows that are pictures: sizes, colours, what is done to them, a sheet that shows it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from workbench.config import RunConfig
from workbench.data import tta_views
from workbench.data.batching import evenly_spaced
from workbench.data.images import picture_checks, preparation
from workbench.data.images.picture_checks import pitfalls
from workbench.data.images.picture_reader import PictureReader, PictureRows
from workbench.data.labelled.labelled_data import LabelledSet
from workbench.data.labelled.labels import Label, Labels
from workbench.data.labelled.records import RowReader
from workbench.data.tta_views import PictureView
from workbench.runs.units import percent

SAMPLED = 1000
"""Pictures, from all over the training rows, whose sizes and colours are looked at."""
SHOWN = 3
"""Rows whose file and label are told."""
DRAWN, MOST_DRAWN = 8, 16
"""Rows of a sheet, and where there are more classes."""
EPOCHS = 4
"""Augmented forms of each of them."""
VIEWS = 8
"""Most test-time views of each of them."""


@dataclass(frozen=True)
class PictureFindings:
    """Training pictures as they come and as the model reads them."""

    reader: PictureReader
    rows: LabelledSet
    facts: list[tuple[str, str]]
    """Name and sentence of all that is found."""
    examples: list[tuple[str, str]]
    """File and label of some rows."""
    notes: list[str]
    """Changes that may be wrong for the labels."""
    views: list[PictureView]
    """Test-time views that are drawn."""
    names: tuple[str, ...] = ()
    """Names of the classes."""

    def sheet(self) -> Image.Image:
        """Draw some rows of all classes: as they come, after each preparation, in several epochs, and in views."""
        labels = self.rows.labels
        chosen = _of_all_classes(labels, most=MOST_DRAWN if self.names else DRAWN)
        return picture_checks.contact_sheet(
            [
                (f"label {in_words(labels[row])}: {_name(self.reader, self.rows, row)}", list(self._states(row)))
                for row in chosen
            ],
            note=_not_shown(self.names, [labels[row] for row in chosen]),
        )

    def _states(self, row: int) -> Iterator[tuple[str, NDArray[np.uint8]]]:
        for name, picture in self.reader.states(self.rows.records[row]):
            yield f"{name}, {_size(picture.shape)}", picture
        inputs = self.rows.inputs
        assert isinstance(inputs, PictureRows)
        if inputs.augmenter is not None:
            last = max(EPOCHS, round(inputs.augmenter.epochs)) - 1
            for epoch in np.linspace(0, last, EPOCHS).round().astype(int).tolist():
                grown = inputs.rewritten(epoch=epoch, progress=epoch / last)
                picture, other, share = grown.augmented(row, epoch=epoch)
                mix = {row: share, other: 1 - share} if share < 0.995 else {}
                parts = [
                    f"{in_words(self.rows.labels[each])} ({part:.0%})" for each, part in mix.items() if part >= 0.005
                ]
                yield f"epoch {epoch + 1}{': ' * bool(parts)}{' + '.join(parts)}", picture
        for view in self.views:
            yield f"view: {view.name}", view.picture(inputs.picture(row), row)


def inspect(config: RunConfig, reader: RowReader, rows: LabelledSet, labels: Labels) -> PictureFindings | None:
    """Look at training rows; None where they are texts."""
    inputs = rows.inputs
    if not isinstance(reader, PictureReader) or not isinstance(inputs, PictureRows):
        return None
    sample = evenly_spaced(len(rows), SAMPLED).tolist()
    grey = [_is_grey(inputs.picture(index)) for index in sample]
    names = labels.names if labels.kind in ("one", "several") else ()
    share = sum(grey) / len(grey)
    colours = f"{percent(share)} grey, the others in colour" if share else "in colour"
    colours = "all grey, as the model reads them" if share == 1 else colours
    sizes = sorted(((*reader.size(rows.records[index]), index) for index in sample), key=lambda each: each[0] * each[1])
    among = "" if len(sample) == len(rows) else f" ({len(sample):,} of {len(rows):,} looked at)"
    if sizes[0][:2] == sizes[-1][:2]:
        sentence = f"all {_size(sizes[0])} pixels{among}"
    else:
        low, middle, high = sizes[0], sizes[len(sizes) // 2], sizes[-1]
        sentence = (
            f"smallest {_size(low)} pixels ({_name(reader, rows, low[2])}), median {_size(middle)}, "
            f"largest {_size(high)} ({_name(reader, rows, high[2])}){among}"
        )
    wanted = min(reader.format.height, reader.format.width)
    if small := sum(min(each[:2]) < wanted for each in sizes):
        sentence += f"; {percent(small / len(sizes))} are enlarged, which adds no detail"
    facts = [
        ("Files", sentence),
        ("Colours", colours),
        *(
            [("Depth", depth)]
            if (depth := preparation.ranges_in_words(reader.value_ranges(), config.image.depth))
            else []
        ),
        ("The model reads", f"{_size((reader.format.height, reader.format.width))} pixels: {_squares(reader, inputs)}"),
        ("image.prepare", picture_checks.preparation_in_words(config.image.prepare, reader.format)),
        ("image.augment", picture_checks.augmentation_in_words(config.image.augment) or "nothing changes"),
    ]
    examples = [
        (_name(reader, rows, row), in_words(rows.labels[row])) for row in _of_all_classes(rows.labels, most=SHOWN)
    ]
    notes = pitfalls(config.image.augment, config.tta, names, grey=all(grey))
    views = tta_views.picture_views(config.tta, config.classes, example=inputs.picture(0)) if config.tta.views else []
    return PictureFindings(reader, rows, facts, examples, notes, views[:VIEWS], tuple(names))


def _squares(reader: PictureReader, inputs: PictureRows) -> str:
    """The squares that a picture counts as in batches and budgets: a transformer's patches, or as many of another."""
    return f"{inputs.patches:,} squares of {_size((reader.patch, reader.patch))}"


def in_words(label: Label | None) -> str:
    """A label in words."""
    return ", ".join(label) if isinstance(label, tuple) else f"{label:g}" if isinstance(label, float) else str(label)


def _name(reader: PictureReader, rows: LabelledSet, row: int) -> str:
    """The file of a row, without the folder or archive that all rows are from."""
    return reader.describe(rows.records[row]).removeprefix(f"{rows.source}/")


def _is_grey(picture_HW3: NDArray[np.uint8]) -> bool:
    return bool((picture_HW3 == picture_HW3[..., :1]).all())


def _size(shape: tuple[int, ...]) -> str:
    return f"{shape[1]} x {shape[0]}"


def _of_all_classes(labels: list[Label | None], *, most: int) -> list[int]:
    """The first row of each label, then the second ones: as many as are drawn, and no more than `most`."""
    seen: Counter[Label | None] = Counter()
    turns = []
    for row, label in enumerate(labels):
        turns.append((seen[label], row))
        seen[label] += 1
    return [row for _, row in sorted(turns)[: min(most, max(DRAWN, len(seen)))]]


def _not_shown(names: tuple[str, ...], labels: list[Label | None]) -> str:
    """How many classes have no row among those with these labels; empty where all have one."""
    shown = {name for label in labels for name in (label if isinstance(label, tuple) else (label,))}
    hidden = [name for name in names if name not in shown]
    return f"{len(hidden)} of {len(names)} classes are not shown: {', '.join(hidden)}" if hidden else ""
