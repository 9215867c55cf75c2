"""Labelled rows as an epoch samples them: classes balanced, or several sources mixed, some rows several times.

A pure function of (seed, epoch), whatever the micro-batches and restarts.

Legend: S sources, N rows, M samples of an epoch, B rows of a micro-batch.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Self

import numpy as np
import torch

from workbench.config import RunConfig
from workbench.config.sections.classes_config import rarest
from workbench.data import mixture, resampling
from workbench.data.batching import Indices, MicroBatch, Weights
from workbench.data.labelled.labelled_data import LabelledSet
from workbench.data.mixture import MixedRows
from workbench.data.resampling import DealtRows, endless
from workbench.losses.class_losses import class_weights


@dataclass(frozen=True, eq=False)
class RepeatedRows(DealtRows[LabelledSet]):
    """Rows whose number `row + repeat * N` stands for the sample of a row that its epoch has sampled `repeat` times.

    Where it is read in the same way at each draw, as a text is, its number is always `row`.
    """

    @property
    @abstractmethod
    def most_draws(self) -> int:
        """Times that an epoch draws a row at most."""

    @property
    def lengths(self) -> Indices:
        return np.tile(self.rows.lengths, self._times)

    @property
    def supervised(self) -> Weights:
        weights: Weights = np.concatenate([self.rows.supervised] * self._times)
        return weights

    def row_of(self, numbers: Indices) -> Indices:
        """The row of each number."""
        row_numbers: Indices = numbers % len(self.rows)
        return row_numbers

    def place(self, index: int) -> str:
        return self.rows.place(index % len(self.rows))

    def batch(self, indices: Indices, *, epoch: int = 0) -> MicroBatch:
        return self.rows.batch(self.row_of(indices), epoch=epoch, repeats=indices // len(self.rows))

    def numbers(self, row_M: Indices, *, seed: int, epoch: int) -> Indices:
        """The number of each draw of an epoch, of its row and of the draws of the row in earlier steps. `row_M`: the
        row of each draw, of 0 to M - 1. `seed`: of the run, by which draws are dealt to steps."""
        if not self.rows.inputs.redrawn:
            return row_M
        return resampling.numbered(row_M, rows=len(self.rows), seed=seed, epoch=epoch)

    @property
    def _times(self) -> int:
        return self.most_draws if self.rows.inputs.redrawn else 1


@dataclass(frozen=True, eq=False)
class ClassBalancedRows(RepeatedRows):
    """Labelled rows that sample every class equally often in an epoch.

    The draws of a class are an endless row of shuffled passes over its rows, cut into epochs: a row comes again only
    when every other row of its class has come as often, across epochs too.
    """

    sampling: Literal["even", "over", "under"]
    """As many draws as rows, as many for each class as the most frequent one has rows, or as the rarest."""
    seed: int

    def __len__(self) -> int:
        return len(self.members) * self._each

    def table(self, epoch: int) -> Indices:
        """The number of each draw of an epoch (M,): as many draws for each class, in turn."""
        row_M = np.concatenate([self.taken(number, epoch) for number in range(len(self.members))])
        return self.numbers(row_M, seed=self.seed, epoch=epoch)

    def seen(self, *, epoch: int, step: int, steps: int | None = None) -> Self:
        """The rows as a step reads them; their classes are known already."""
        seen_rows = super().seen(epoch=epoch, step=step, steps=steps)
        if seen_rows is not self:
            vars(seen_rows)["members"] = self.members
        return seen_rows

    def taken(self, number: int, epoch: int) -> Indices:
        """The rows of the class `number` that an epoch takes, in order."""
        each = self._each
        return endless(self.members[number], first=epoch * each, count=each, seed=(self.seed, 3, number))

    @cached_property
    def members(self) -> list[Indices]:
        """Rows of each class that has any."""
        class_N = self.rows.targets_NC.argmax(1)
        return [np.flatnonzero(class_N == number) for number in np.unique(class_N)]

    @cached_property
    def most_draws(self) -> int:
        """Times that an epoch draws a row at most: it may begin and end within a pass over the rows of a class."""
        return max(-(-(self._each - 1) // len(rows)) + 1 for rows in self.members)

    @cached_property
    def _each(self) -> int:
        """Draws of a class in an epoch."""
        sizes = [len(rows) for rows in self.members]
        return {"even": round(len(self.rows) / len(sizes)), "over": max(sizes), "under": min(sizes)}[self.sampling]


def rare_class(rows: LabelledSet) -> int | None:
    """The class with the fewest rows, where that is less than a quarter of its equal share; else None."""
    return rarest((rows.targets_NC > 0.5).sum(0).tolist())


def balances(config: RunConfig) -> bool:
    """Whether `classes.sampling: auto` balances unequal classes: labels are one class, and no other setting does.

    A curriculum draws each row equally often, a sampler by its loss, and a mixture by its source; a cross-validation
    deals the rows of all sources as one set.
    """
    classes, data = config.classes, config.data
    mixed = bool(data.sources) and not config.crossvalidates
    ordered = data.curriculum.by != "none" or data.sampling.draws or mixed
    chosen = classes.weights != "none" or classes.logit_adjustment > 0 or ordered
    return classes.sampling == "auto" and classes.kind == "one" and not chosen


def balanced(rows: LabelledSet, config: RunConfig) -> LabelledSet | ClassBalancedRows:
    """The training rows with the class weights or the sampling that `classes` asks for."""
    classes = config.classes
    sampling = classes.sampling
    if sampling == "auto":
        sampling = "even" if balances(config) and rare_class(rows) is not None else "none"
    if sampling != "none":
        return ClassBalancedRows(rows, sampling, config.seed)
    if classes.weights == "none":
        return rows
    counts_C = torch.from_numpy(rows.targets_NC.sum(0, dtype=np.float64))
    weight_C = class_weights(counts_C, scheme=classes.weights, beta=classes.beta).double().numpy()
    return rows.reweighted(rows.targets_NC @ weight_C)


@dataclass(frozen=True, eq=False)
class MixedLabelledRows(MixedRows[LabelledSet], RepeatedRows):
    """Labelled rows of several sources, drawn by the plan of `MixedRows`; a picture is augmented anew at each draw."""

    def table(self, epoch: int) -> Indices:
        """The number of each draw of an epoch (M,), of rows of each source in turn."""
        return self.numbers(super().table(epoch), seed=self.seed, epoch=epoch)


def sampled_rows(rows: LabelledSet, config: RunConfig) -> LabelledSet | ClassBalancedRows | MixedLabelledRows:
    """The training rows as `data.sources` or `classes` ask for them."""
    balanced_rows = balanced(rows, config)
    if not config.data.sources:
        return balanced_rows
    assert isinstance(balanced_rows, LabelledSet), "classes.sampling beside data.sources is refused"
    return MixedLabelledRows(balanced_rows, *mixture.plan(balanced_rows, config))
