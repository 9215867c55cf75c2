"""Whether texts keep their labels when `data.augment` rewrites them, as a probe of plain texts tells.

In the spirit of Wei and Zou 2019 (arXiv:1901.11196), "Does EDA conserve true labels?": they drew where a classifier
that was trained without augmentation puts test sentences and augmented ones. Here a linear probe of the frozen
backbone's features takes its place, and where it puts a text is the class that it tells.

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
from workbench.evaluation import class_scores, paired_rows
from workbench.evaluation.class_scores import Interval
from workbench.evaluation.paired_rows import PairedScore

MOST = 2000
"""Rows that are rewritten by each operator: the interval of a share is at most 2.2 points to each side."""
LEVEL = 0.05
"""Chance that any operator of a recipe is told to harm where none does, at most: each has an equal part of it."""
Classes = npt.NDArray[np.str_]


class Rewriting(NamedTuple):
    """Rows as one operator rewrites them."""

    operator: OperatorName
    changed_S: Indices
    """Numbers of the rows that the model reads otherwise than before."""
    inputs: TokenRows
    """These rows."""
    noise: float | None
    """Present share of words or letters that changes; None where a lower one would change no less."""


@dataclass(frozen=True)
class OperatorEffect:
    """Classes that a probe tells of rows before and after one operator has rewritten them."""

    operator: OperatorName
    turned: Interval
    """Share of the rows that are told to have another class than before, with Wilson's 95 % interval."""
    accuracy: PairedScore
    """Share of the rows that are told right, before (`first`) and after (`second`)."""
    level: float
    """Significance level of `accuracy`."""
    noise: float | None
    """As in `Rewriting`."""

    @property
    def is_harmful(self) -> bool:
        """Whether significantly fewer rows are told right than before, by the exact test of McNemar (1947)."""
        p = self.accuracy.p
        return p is not None and p < self.level and self.accuracy.difference < 0

    @property
    def sentence(self) -> str:
        """The findings for a person, and what to write where the operator harms."""
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
    """Effects of all operators of a recipe."""

    plain: Interval
    """Share of the plain rows that are told right, with its 95 % interval."""
    likeliest: float
    """Share of the rows that always naming the likeliest class tells right."""
    effects: tuple[OperatorEffect, ...]

    @property
    def sentences(self) -> list[str]:
        """The findings for a person."""
        if not self.effects:
            return ["data.augment: no operator changes any of the rows aside."]
        vague = "  The probe tells plain texts no better than by always naming the likeliest class: this says little."
        return [
            "data.augment: rows aside as the linear probe tells them, plain and once rewritten by each operator.",
            *(f"  {each.sentence}" for each in self.effects),
            *([vague] if self.plain.low <= self.likeliest else ()),
        ]


def chosen(rows: int) -> Indices:
    """Numbers of `MOST` rows from all over them, or of all where there are fewer."""
    return evenly_spaced(rows, MOST)


def rewritings(texts: AugmentedTexts) -> list[Rewriting]:
    """Rows once rewritten by each operator that training draws from; the same for the same seed and texts.

    An operator that changes none of them is left out.

    Args:
        texts: M rows that the probe is not fitted to.
    """
    plain, each_alone = TokenRows(texts.encoder.encode(texts.texts, texts.places)), []
    for name in texts.config.operators:
        alone = texts.alone(name)
        rewritten = TokenRows(alone.tokens(0))
        changed_S = np.flatnonzero(plain.differ(rewritten))
        noise = texts.config.noise if name in NOISY and _yields(alone) else None
        each_alone.append(Rewriting(name, changed_S, rewritten.take(changed_S), noise))
    return [each for each in each_alone if len(each.changed_S)]


def compare(
    rewritten: Sequence[Rewriting], before_M: Classes, after: Sequence[Classes], wanted_M: Classes, *, likeliest: float
) -> LabelPreservation:
    """Compare the classes that a probe tells of plain rows and of rewritten ones.

    Args:
        before_M: Class of each plain row.
        after: Classes (S,) of the rows of each rewriting.
        wanted_M: Labels.
        likeliest: Share of the rows that have the likeliest class.
    """
    right_M = before_M == wanted_M
    effects = []
    for (operator, changed_S, _, noise), after_S in zip(rewritten, after, strict=True):
        right_S = (after_S == wanted_M[changed_S]).astype(np.float64)
        effects.append(
            OperatorEffect(
                operator=operator,
                turned=class_scores.accuracy_interval(int((before_M[changed_S] != after_S).sum()), len(changed_S)),
                accuracy=paired_rows.paired("accuracy", right_M[changed_S].astype(np.float64), right_S),
                level=LEVEL / len(rewritten),
                noise=noise,
            )
        )
    plain = class_scores.accuracy_interval(int(right_M.sum()), len(right_M))
    return LabelPreservation(plain, likeliest, tuple(effects))


def _yields(texts: AugmentedTexts) -> bool:
    """Whether half the noise changes texts less; not where one word or letter of each, the least, changes already."""
    half = texts.config.model_copy(update={"noise": texts.config.noise / 2})
    milder = replace(texts, config=half, _known={})
    return milder.rewritten(0) != texts.rewritten(0)
