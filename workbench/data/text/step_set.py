"""Answers whose steps are rated as training examples: an answer is one example, with a label for each step.

Legend: B answers of a micro-batch, N its steps, S steps of the data set, R its answers.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow
import pyarrow.compute
import torch

from workbench.data import row_weights
from workbench.data.batching import Floats, Indices, MicroBatch, Weights, WholeRows
from workbench.data.text.tokenized_set import TokenizedSet

RIGHT = 0.5
"""The label, and the probability, from which on a step counts as right."""


@dataclass(frozen=True)
class StepSet(WholeRows):
    """Answers with a label for each of their steps; those that cutting left."""

    answers: TokenizedSet

    def __len__(self) -> int:
        return len(self.answers)

    @property
    def lengths(self) -> Indices:
        """Tokens of each answer with its prompt."""
        return self.answers.lengths

    @property
    def longest_sequences(self) -> Indices:
        """Tokens of the longest sequence that one stack of the model reads, of each answer."""
        return self.answers.longest_sequences

    @property
    def steps(self) -> Indices:
        """Steps of each answer (R,)."""
        return self.answers.supervised

    @cached_property
    def supervised(self) -> Weights:
        """Weight of each answer in the mean loss: its steps, times the weight of its row."""
        weight_R = self.answers.weights
        return self.steps if row_weights.uniform(weight_R) else self.steps * weight_R

    @cached_property
    def labels(self) -> Floats:
        """How right each step is (S,), answer by answer, from 0 to 1."""
        column = self.answers.table.data.column("step_labels").take(pyarrow.array(self.answers.rows))
        labels: Floats = pyarrow.compute.list_flatten(column).to_numpy()
        return labels

    @cached_property
    def row_of_step(self) -> Indices:
        """The answer of each step (S,)."""
        return np.repeat(np.arange(len(self)), self.steps)

    @cached_property
    def cut_steps(self) -> int:
        """How many steps cutting to `data.max_tokens` left out."""
        return int(self.answers.table.data.column("cut_steps").to_numpy()[self.answers.rows].sum())

    @property
    def sources(self) -> Collection[str]:
        """Names of the sets that answers are from; empty where there is one."""
        return self.answers.sources

    @property
    def source_N(self) -> Indices:
        """Number of the set of each answer, where there are several."""
        return self.answers.source_N

    def place(self, index: int) -> str:
        """File and row of an answer."""
        return self.answers.place(index)

    def batch(self, indices: Indices, *, epoch: int = 0) -> MicroBatch:
        """The answers `indices`, padded, with the label of each step (N,) float32 at its last token."""
        batch = self.answers.batch(indices, epoch=epoch)
        # A model rates a step at its last token, where the collated batch has the one before it, which predicts it.
        labels = torch.from_numpy(self.labels[self.steps_of(indices)].astype(np.float32))
        batch = replace(batch, positions_N=batch.positions_N + 1, labels_N=labels)
        weight_R = self.answers.weights
        return batch if row_weights.uniform(weight_R) else batch.weighted(weight_R[indices])

    def steps_of(self, indices: Indices) -> Indices:
        """Numbers of the steps (among S) of some answers, in their order."""
        ends = np.cumsum(self.steps)
        own = [np.arange(ends[row] - self.steps[row], ends[row]) for row in indices.tolist()]
        return np.concatenate(own) if own else np.zeros(0, dtype=np.int64)

    def subset(self, keep: Indices | npt.NDArray[np.bool_]) -> StepSet:
        """The answers that `keep` indexes or marks."""
        return StepSet(self.answers.subset(keep))

    def facts(self) -> dict[str, Any]:
        """Facts about this set for the manifest and the report."""
        cut = {"cut_steps": self.cut_steps} if self.cut_steps else {}
        right = int((self.labels >= RIGHT).sum())
        return {**self.answers.facts(), "steps": len(self.labels), "right_steps": right, **cut}
