"""Whether texts keep their labels when `data.augment` rewrites them, judged by a linear probe.

In the spirit of Wei and Zou 2019 (arXiv:1901.11196), "Does EDA conserve true labels?", who compared where a classifier
that was trained without augmentation puts original and augmented test sentences. Here the classifier is a linear probe
of the frozen backbone's features.

Legend: M rows that the probe was not fitted to, S those of them that an operator changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from workbench.config.sections.text_augment_config import NOISY, OperatorName
from workbench.data.batching import Indices, evenly_spaced
from workbench.data.labelled.text_reader import AugmentedTexts, TokenRows
from workbench.evaluation import comparison, metrics
from workbench.evaluation.comparison import PairedScore
from workbench.evaluation.metrics import Interval

MOST = 2000  # rows that each operator rewrites: the 95 % interval of a share is at most 2.2 points to each side
LEVEL = 0.05  # chance that any operator is called harmful where none is, at most (Bonferroni: each gets an equal part)
Classes = npt.NDArray[np.str_]


class Rewriting(NamedTuple):
    """Rows as one operator rewrites them."""

    operator: OperatorName
    changed_S: Indices  # numbers of the rows that the operator changes
    inputs: TokenRows  # these rows
    noise: float | None  # current `data.augment.noise`; None where a lower one would change as much


@dataclass(frozen=True)
class OperatorEffect:
    """Classes that a probe predicts before and after one operator rewrites the rows."""

    operator: OperatorName
    turned: Interval  # share of the rows whose predicted class changes, with Wilson's 95 % interval
    accuracy: PairedScore  # accuracy of the probe before (`first`) and after (`second`)
    level: float  # significance level of `accuracy`
    noise: float | None  # as in `Rewriting`

    @property
    def is_harmful(self) -> bool:
        """Whether the accuracy drops significantly, by the exact test of McNemar (1947)."""
        p = self.accuracy.p
        return p is not None and p < self.level and self.accuracy.difference < 0

    @property
    def sentence(self) -> str:
        """The finding in words, and what to write where the operator is harmful."""
        score, turned = self.accuracy, self.turned
        effect = (
            f"{self.operator}: {turned.mean:.1%} of {score.rows:,} changed rows get another class (95 % interval "
            f"{turned.low:.1%} to {turned.high:.1%}). Right before: {score.first:.1%}; after: {score.second:.1%}"
        )
        if not self.is_harmful:
            return f"{effect}."
        cure = "Leave" if self.noise is None else f"Write a lower data.augment.noise (now {self.noise:g}), or leave"
        return (
            f"{effect}, significantly fewer (p={score.p:.1g}): these texts lost what their labels are known by, or the "
            f"frozen backbone cannot read them. {cure} {self.operator} out of data.augment.operators."
        )


@dataclass(frozen=True)
class LabelPreservation:
    """Effects of all operators of a configuration."""

    plain: Interval  # accuracy of the probe on the plain rows, with its 95 % interval
    likeliest: float  # accuracy of always predicting the most frequent class
    effects: tuple[OperatorEffect, ...]

    @property
    def sentences(self) -> list[str]:
        """The findings in words."""
        if not self.effects:
            return ["data.augment: no operator changes any of the rows aside."]
        vague = "  The probe tells plain texts no better than by always naming the likeliest class: this says little."
        return [
            "data.augment: rows aside as the linear probe tells them, plain and once rewritten by each operator.",
            *(f"  {each.sentence}" for each in self.effects),
            *([vague] if self.plain.low <= self.likeliest else ()),
        ]


def chosen(rows: int) -> Indices:
    """Numbers of `MOST` evenly spaced rows, or of all where there are fewer."""
    return evenly_spaced(rows, MOST)


def rewritings(texts: AugmentedTexts) -> list[Rewriting]:
    """Rows as rewritten by each operator of the training, alone; the same for the same seed and texts.

    An operator that changes none of them is left out. `texts`: M rows that the probe is not fitted to.
    """
    plain, each_alone = TokenRows(texts.encoder.encode(texts.texts, texts.places)), []
    for name in texts.config.operators:
        alone = texts.alone(name)
        rewritten = TokenRows(alone.tokens(0))
        changed_S = np.flatnonzero(plain.differ(rewritten))
        # Half the noise changes texts less, but where each changes by one word or letter already.
        half = alone.config.model_copy(update={"noise": alone.config.noise / 2})
        yields = name in NOISY and replace(alone, config=half, _known={}).rewritten(0) != alone.rewritten(0)
        noise = texts.config.noise if yields else None
        each_alone.append(Rewriting(name, changed_S, rewritten.take(changed_S), noise))
    return [each for each in each_alone if len(each.changed_S)]


def compare(
    rewritten: Sequence[Rewriting], before_M: Classes, after: Sequence[Classes], wanted_M: Classes, *, likeliest: float
) -> LabelPreservation:
    """Compare the classes that a probe predicts for plain rows and for rewritten ones.

    Args:
        before_M: Predicted class of each plain row.
        after: Predicted classes (S,) of the rows of each rewriting.
        wanted_M: Labels.
        likeliest: Share of the rows that have the most frequent class.
    """
    right_M = before_M == wanted_M
    effects = []
    for (operator, changed_S, _, noise), after_S in zip(rewritten, after, strict=True):
        right_S = (after_S == wanted_M[changed_S]).astype(np.float64)
        effects.append(
            OperatorEffect(
                operator=operator,
                turned=metrics.accuracy_interval(int((before_M[changed_S] != after_S).sum()), len(changed_S)),
                accuracy=comparison.paired("accuracy", right_M[changed_S].astype(np.float64), right_S),
                level=LEVEL / len(rewritten),
                noise=noise,
            )
        )
    plain = metrics.accuracy_interval(int(right_M.sum()), len(right_M))
    return LabelPreservation(plain, likeliest, tuple(effects))
