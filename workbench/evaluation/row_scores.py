"""Scores of training rows by the backbone as it is before training, by which rows are chosen.

Legend: N rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import numpy.typing as npt
from torch import nn

from workbench.data.batching import Indices, MicroBatch, Row, collate
from workbench.data.text.tokenized_set import TokenizedSet
from workbench.evaluation.result_store import ModelResults
from workbench.evaluation.scores import LikelihoodRows, row_likelihoods
from workbench.models.output_heads import Head

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class AnswersAlone:
    """Rows without anything but what carries loss, after one token that begins them.

    Args:
        start: Id that begins a text: the tokenizer's bos, or where there is none its eos.
    """

    rows: TokenizedSet
    start: int

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def lengths(self) -> Indices:
        """Tokens of each row."""
        return self.rows.supervised + 1

    def __getitem__(self, index: int) -> Row:
        row = self.rows[index]
        supervised = row.supervised.copy()
        supervised[0] = False  # predicted from nothing in the whole row, and so not in its loss
        ids = np.append(self.start, row.input_ids[supervised])
        return Row(ids, np.arange(len(ids)) > 0, digest=row.digest)

    def batch(self, indices: Indices, *, epoch: int = 0) -> MicroBatch:
        """The rows `indices`, padded."""
        return collate([self[index] for index in indices], epoch=epoch)


def row_scores(
    by: Literal["perplexity", "ifd"],
    model: nn.Module,
    head: Head,
    rows: TokenizedSet,
    *,
    start: int,
    scoring: Callable[[str], ModelResults],
) -> Floats:
    """Score (N,) of each row: its mean loss in nats, or its instruction-following difficulty.

    The difficulty is the mean loss of a row's answers after their prompts through that of the same tokens with nothing
    before them (Li et al. 2023, arXiv:2308.12032, equation 4). From 1 on the prompt does not help.

    Args:
        start: Id that begins a text.
        scoring: Results of an earlier process, where this one may be stopped, by a name.
    """
    whole_N = _mean_losses(model, head, rows, scoring("rows"))
    if by == "perplexity":
        return whole_N
    return whole_N / np.maximum(_mean_losses(model, head, AnswersAlone(rows, start), scoring("answers")), 1e-9)


def _mean_losses(model: nn.Module, head: Head, rows: LikelihoodRows, scoring: ModelResults) -> Floats:
    likelihood_by_row = row_likelihoods(model, head, rows, scoring=scoring)
    return np.array([loss / count for loss, _, count in (likelihood_by_row[row] for row in range(len(rows)))])
