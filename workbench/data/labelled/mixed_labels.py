"""Labelled rows as an epoch draws them: mixed from several sources, or with classes balanced.

Legend: S sources, M draws of an epoch.
"""

from __future__ import annotations

from dataclasses import dataclass

from workbench.config import RunConfig
from workbench.data import mixture
from workbench.data.batching import Indices
from workbench.data.labelled.class_sampling import ClassBalancedRows, balanced
from workbench.data.labelled.labelled_data import LabelledSet
from workbench.data.labelled.repeated_rows import RepeatedRows
from workbench.data.mixture import MixedRows


@dataclass(frozen=True, eq=False)
class MixedLabelledRows(MixedRows[LabelledSet], RepeatedRows):
    """Labelled rows of several sources, drawn by the plan of `MixedRows`; a picture is augmented anew at each draw."""

    def table(self, epoch: int) -> Indices:
        """The number of each draw of an epoch (M,), of rows of each source in turn."""
        return self.numbers(super().table(epoch), seed=self.seed, epoch=epoch)


def drawn(rows: LabelledSet, config: RunConfig) -> LabelledSet | ClassBalancedRows | MixedLabelledRows:
    """The training rows as `data.sources` or `classes` ask for them."""
    balanced_rows = balanced(rows, config)
    if not config.data.sources:
        return balanced_rows
    assert isinstance(balanced_rows, LabelledSet), "classes.sampling beside data.sources is refused"
    return MixedLabelledRows(balanced_rows, *mixture.plan(balanced_rows, config))
