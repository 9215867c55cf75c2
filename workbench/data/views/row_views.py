"""Views of labelled rows for test-time augmentation, of texts or pictures, and which of them are of use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from workbench.config import RunConfig
from workbench.config.sections.tta_config import MIN_CHANGED_SHARE
from workbench.data.images.picture_reader import PictureRows
from workbench.data.labelled.labelled_data import LabelledSet
from workbench.data.labelled.labels import Floats, Labels
from workbench.data.labelled.records import RowReader
from workbench.data.views import picture_views, text_views
from workbench.errors import DataError

SAMPLED = 500
"""Pictures that are looked at to see whether a view changes any."""


class RowView(Protocol):
    """Another look at the same rows."""

    @property
    def name(self) -> str:
        """Name of the view, as the report shows it."""

    def rows(self, rows: LabelledSet, reader: RowReader) -> LabelledSet:
        """The same rows in this view."""

    def outputs(self, outputs_NC: Floats) -> Floats:
        """Map outputs (or values) for rows in this view to outputs for the original rows."""

    def why_useless(self, rows: LabelledSet, changed: int) -> str:
        """Why this view changes so few rows."""


def make(config: RunConfig, labels: Labels, rows: LabelledSet) -> Sequence[RowView]:
    """Make the views that `tta.views` names.

    Args:
        rows: A user's function must return as many views of every row as of the first one.

    Raises:
        ConfigError: A view does not fit the rows or their labels, or the user's file is wrong.
    """
    if isinstance(rows.inputs, PictureRows):
        return picture_views.make(config.tta, config.classes, example=rows.inputs.picture(0))
    return text_views.make(config.tta, config.classes, labels, seed=config.seed, example=rows.records[0])


def useful(views: Sequence[RowView], rows: LabelledSet, reader: RowReader) -> tuple[list[RowView], list[str]]:
    """Select the views that change at least `MIN_CHANGED_SHARE` of the rows as the model reads them.

    Returns:
        The views, and a sentence about each one that was left out.

    Raises:
        DataError: No view does.
    """
    if isinstance(rows.inputs, PictureRows):
        rows = rows.subset(np.arange(0, len(rows), max(1, len(rows) // SAMPLED)))
    useless, reasons = [], []
    for view in views:
        count = int(rows.inputs.differ(view.rows(rows, reader).inputs).sum())
        if count < max(1, MIN_CHANGED_SHARE * len(rows)):
            useless.append(view.name)
            changes = f"view {view.name} changes {count or 'none'} of the {len(rows)} rows"
            reasons.append(f"{changes}: {view.why_useless(rows, count)}")
    if views and len(useless) == len(views):
        raise DataError(
            f"{rows.source}: {'; '.join(reasons)}. A view must change {MIN_CHANGED_SHARE:.0%} of the rows or more: "
            f"leave {', '.join(useless)} out of tta.views."
        )
    return [view for view in views if view.name not in useless], [f"tta: {reason}. Left out." for reason in reasons]
