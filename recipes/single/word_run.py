"""A run whose rows have several labels each, such as a tag for each word: what stages of a cross-validation ask of it.

Legend: R rows, S labels of a row, C classes.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from typing_extensions import Self

from workbench.config.sections.tta_config import TtaConfig
from workbench.data.batching import Floats, Indices
from workbench.evaluation.forward_passes import ModelResults
from workbench.recipes.single.single_run import M, R, Scored, SingleRun

if TYPE_CHECKING:
    import pandas as pd


class WordRun(SingleRun[M, R]):
    """A run of a task with `TaskFacts.word_stages`."""

    @property
    @abstractmethod
    def classes(self) -> tuple[str, ...]:
        """Names of the classes, in the order of their numbers."""

    @abstractmethod
    def labels(self, rows: R) -> Sequence[Indices]:
        """The labels (S,) of each row."""

    @abstractmethod
    def texts(self, rows: R) -> Sequence[str]:
        """The text of each row, by which near-duplicates are found."""

    @abstractmethod
    def in_views(self, rows: R, tta: TtaConfig) -> Sequence[R]:
        """The rows in each view."""

    @abstractmethod
    def require_views(self, tta: TtaConfig) -> None:
        """Raise DataError where a view changes no training row."""

    @abstractmethod
    def probabilities(self, model: M, views: Sequence[R], scoring: ModelResults) -> list[Floats]:
        """Probabilities (S, C) of the labels of each row: their mean over views, of which the first has the rows."""

    @abstractmethod
    def scored(self, rows: R, p_RSC: Sequence[Floats]) -> Scored:
        """Scores of labelled rows, given the probabilities."""

    @abstractmethod
    def table(self, rows: R, p_RSC: Sequence[Floats], *, labelled: bool) -> pd.DataFrame:
        """The lines of predictions.parquet, given the probabilities."""

    @abstractmethod
    def unlabelled(self, source: str) -> R:
        """The rows of a file without their labels."""

    @abstractmethod
    def taught(self, rows: R, p_RSC: Sequence[Floats]) -> Self:
        """The same run, which trains on these rows too; their labels are the likeliest ones."""
