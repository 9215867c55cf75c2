"""A run whose rows have several labels each, such as a tag for each word: what stages of a cross-validation ask of it.

Legend: R rows, S labels of a row, C classes.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from workbench.config.sections.tta_config import TtaConfig
from workbench.data.batching import Floats, Indices
from workbench.data.folds import held_fold
from workbench.data.folds.held_fold import FoldRow
from workbench.data.labelled.labels import Labels
from workbench.evaluation.forward_passes import ModelResults
from workbench.recipes.single.single_run import M, R, Scored, SingleRun

if TYPE_CHECKING:
    import pandas as pd

    from workbench.crossval.stages import JudgedLabels


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

    def decide_views(self, model: M, scoring: ModelResults) -> Mapping[str, Any] | None:
        from workbench.crossval import gains, run_views  # which few runs ask for

        config, rows = self.config, self.rows["held_out"]
        words, views = judged([self]), [rows, *self.in_views(rows, config.tta)]
        plain_NC, merged_NC = (np.concatenate(self.probabilities(model, each, scoring)) for each in (views[:1], views))
        gain = gains.gain(
            words.labels,
            plain_NC,
            merged_NC,
            words.targets_NC,
            least=config.tta.least_gain,
            groups_N=words.cluster_N,
        )
        gain = run_views.settled(config, gain)
        run_views.tell(config, self.run, self.callback, gain, f"{len(views) - 1} views of all rows. {gain.sentence}")
        return view_facts(config.tta) if gain.accepted else None

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


def judged(
    members: Sequence[WordRun[Any, Any]], scores: Callable[[Floats], dict[str, float]] = lambda values_NC: {}
) -> JudgedLabels:
    """The held-out words of all members; those of a row, and of its near-duplicates, are one witness."""
    from workbench.crossval.stages import JudgedLabels  # which few runs ask for

    labels = Labels("one", members[0].classes)
    labels_R = [own for each in members for own in each.labels(each.rows["held_out"])]
    texts = [text for each in members for text in each.texts(each.rows["held_out"])]
    cluster_R = np.unique(groups(members[0], texts), return_inverse=True)[1]
    targets_NC = np.eye(len(labels.names), dtype=np.float32)[np.concatenate(labels_R)]
    return JudgedLabels(labels, targets_NC, np.repeat(cluster_R, [len(own) for own in labels_R]), scores)


def groups(member: WordRun[Any, Any], texts: Sequence[str]) -> list[str]:
    """Group of each text; near-duplicates share one, as in folds."""
    return held_fold.groups([FoldRow(text, text, text) for text in texts], near=member.config.data.fold.near)


def view_facts(tta: TtaConfig) -> dict[str, Any]:
    """Views of words that stay, for decision.json."""
    return {"views": list(tta.views), "copies": tta.copies}
