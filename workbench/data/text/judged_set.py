"""Judged answers as training examples: a pair, or one answer, is one example, whose rows are computed together.

Legend: N labels (predicted tokens), S rows, P examples.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from workbench.data import row_weights
from workbench.data.batching import Indices, MicroBatch, Weights, WholeRows
from workbench.data.splits import Splits
from workbench.data.text.tokenized_set import TokenizedSet
from workbench.errors import DataError

TOKEN, ROW, ANSWER, PLACE = range(4)
"""Columns of a micro-batch's labels (N, 4): the predicted token; its row in the batch; the number of its answer in the
data set; the token's place among those of its answer, from 0."""
_OF_PAIR = re.compile(r", answer [12] of 2$")


@dataclass(frozen=True)
class JudgedSet(WholeRows):
    """Pairs of a chosen and a rejected answer, or single answers that are good or bad."""

    answers: TokenizedSet
    """All of them; first the chosen and then the rejected one of each pair."""
    paired: bool
    others: TokenizedSet | None = None
    """For each single answer an answer to another prompt, behind the prompt of this one."""

    def __len__(self) -> int:
        return len(self.answers) // self.each

    @property
    def each(self) -> int:
        """Rows of an example."""
        return 2 if self.paired else 1

    @cached_property
    def lengths(self) -> Indices:
        """Tokens of each example, those of both answers."""
        lengths: Indices = self.sequence_lengths.sum(1)
        return lengths

    @property
    def sequence_lengths(self) -> Indices:
        """Tokens of each answer of each example, (examples, answers)."""
        return self.answers.lengths.reshape(-1, self.each)

    @cached_property
    def longest_sequences(self) -> Indices:
        """Tokens of the longest sequence that one stack of the model reads, of each example."""
        longest: Indices = self.answers.longest_sequences.reshape(-1, self.each).max(1)
        return longest

    @cached_property
    def supervised(self) -> Weights:
        """Weight of each example in the mean loss."""
        weight_P = self.answers.weights[:: self.each]
        return np.ones(len(self), dtype=np.int64) if row_weights.uniform(weight_P) else weight_P

    @cached_property
    def desired(self) -> npt.NDArray[np.bool_]:
        """Whether each answer (S,) is the better or a good one."""
        desired: npt.NDArray[np.bool_] = self.answers.table.data.column("desired").to_numpy()[self.answers.rows] > 0
        return desired

    @cached_property
    def margins(self) -> npt.NDArray[np.float64]:
        """By how much the reward of the chosen answer of each example is to be higher."""
        answer_margins: npt.NDArray[np.float64] = self.answers.table.data.column("margin").to_numpy()[self.answers.rows]
        return answer_margins[:: self.each]

    @cached_property
    def ties(self) -> npt.NDArray[np.bool_]:
        """Whether the two answers of each example were judged equally good; the first one then stands for chosen."""
        tie_S = self.answers.table.data.column("tie").to_numpy(zero_copy_only=False)[self.answers.rows]
        ties: npt.NDArray[np.bool_] = tie_S[:: self.each]
        return ties

    @property
    def answer_tokens(self) -> Indices:
        """Predicted tokens of each answer (S,)."""
        return self.answers.supervised

    @cached_property
    def shared_tokens(self) -> Indices:
        """Predicted tokens of the shorter answer of the pair of each answer (S,); of a single answer all."""
        count_PE = self.answer_tokens.reshape(-1, self.each)
        return np.repeat(count_PE.min(1), self.each)

    @property
    def sources(self) -> Collection[str]:
        """Names of the sets that examples are from; empty where there is one."""
        return self.answers.sources

    @property
    def source_N(self) -> Indices:
        """Number of the set of each example, where there are several."""
        return self.answers.source_N[:: self.each]

    @property
    def good(self) -> TokenizedSet:
        """The chosen answers, or the good ones."""
        return self.answers.subset(self.desired)

    def place(self, index: int) -> str:
        """File and row of an example."""
        return _pair_of(self.answers.place(index * self.each)) if self.paired else self.answers.place(index)

    def batch(self, indices: Indices, *, epoch: int = 0) -> MicroBatch:
        """The rows of the examples `indices`, padded, with labels (N, 4)."""
        return labelled(self.answers, indices, self.each, epoch=epoch)

    def subset(self, keep: Indices | npt.NDArray[np.bool_]) -> JudgedSet:
        """The examples that `keep` indexes or marks."""
        chosen = np.arange(len(self))[keep]
        others = None if self.others is None else self.others.subset(chosen)
        return replace(self, answers=self.answers.subset(answer_rows(chosen, self.each)), others=others)

    def facts(self) -> dict[str, Any]:
        """Facts about this set for the manifest and the report."""
        kind = (
            {"pairs": len(self), **({"ties": int(self.ties.sum())} if self.ties.any() else {})}
            if self.paired
            else {"good": int(self.desired.sum()), "bad": int((~self.desired).sum())}
        )
        return {**self.answers.facts(), **kind}


class RatedPairs(JudgedSet):
    """Pairs whose batches have one label for each answer, at its last token: what a bank of reward models predicts."""

    def batch(self, indices: Indices, *, epoch: int = 0) -> MicroBatch:
        """The rows of the examples `indices`, padded, with the number (S, 1) of each answer as its label."""
        answers = answer_rows(indices, self.each)
        batch = self.answers.batch(answers, epoch=epoch)
        assert batch.lengths_B is not None, "padded rows say how long they are"
        last_S = torch.arange(len(answers)) * batch.width + batch.lengths_B - 1
        labels = torch.from_numpy(answers[:, None])
        batch = replace(batch, positions_N=last_S, labels_N=labels, rows_B=indices)
        return replace(batch, sequences=self.each, row_tokens=self.answers.lengths[answers])


class MismatchedRows:
    """The `others` of a set as examples with the same numbers.

    Args:
        rows: A set that has them.
    """

    def __init__(self, rows: JudgedSet) -> None:
        assert rows.others is not None
        self.rows = rows.others
        self.lengths = rows.others.lengths

    def batch(self, indices: Indices, *, epoch: int = 0) -> MicroBatch:
        """These rows, with labels (N, 4)."""
        return labelled(self.rows, indices, 1, epoch=epoch)


def judged(rows: TokenizedSet, *, pairs: bool) -> JudgedSet:
    """The examples of a tokenised set.

    Args:
        pairs: Whether two answers are compared; else each answer of a pair is an example of its own.

    Raises:
        DataError: Pairs are wanted, and a row has one answer.
    """
    single = next((place for place in rows.places() if _OF_PAIR.search(place) is None), None) if pairs else None
    if single is not None:
        raise DataError(
            f"{single}: it rates one answer (label), where two are compared. Give each row chosen and rejected; single "
            "answers are learnt from with recipe=prefer prefer.loss=kto."
        )
    return JudgedSet(rows, paired=pairs)


def without_ties(split: TokenizedSet, *, refuse: bool, loss: str, cure: str) -> TokenizedSet:
    """The answers of a set for what knows no ties: refused where there are some, or left out and counted.

    Args:
        refuse: Whether `data.on_bad_row` is refuse.
        loss: What has no target for ties.
        cure: What to write instead, as a sentence.

    Raises:
        DataError: There are ties, which are refused, or nothing else.
    """
    tie_S = split.table.data.column("tie").to_numpy(zero_copy_only=False)[split.rows]
    if not tie_S.any():
        return split
    first, count = int(np.flatnonzero(tie_S)[0]), len(set(map(_pair_of, split.subset(tie_S).places())))
    if refuse or tie_S.all():
        where = f"{_pair_of(split.place(first))}: is a tie, as {count:,} rows of its file are"
        raise DataError(f"{where}, and {loss} has no target for ties. {cure}")
    return split.subset(~tie_S, f"{count:,} ties, for which {loss} has no target")


def require_judgements(pairs: Splits[JudgedSet]) -> None:
    """Refuse pairs of which none says which answer is better: nothing could be learnt, or no accuracy measured."""
    for name, rows in pairs._asdict().items():
        if rows is not None and rows.paired and rows.ties.all():
            raise DataError(
                f"data.{name}: all of its {len(rows):,} pairs are ties, which nothing is learnt from and no accuracy "
                "measured of. Give it pairs with a better answer as well."
            )


def _pair_of(place: str) -> str:
    return _OF_PAIR.sub("", place)


def labelled(rows: TokenizedSet, indices: Indices, each: int, *, epoch: int) -> MicroBatch:
    """The rows of some examples, `each` of them one after another, with labels (N, 4)."""
    answers = answer_rows(indices, each)
    batch = with_answers(rows.batch(answers, epoch=epoch), answers)
    return replace(batch, rows_B=indices, sequences=each, row_tokens=rows.lengths[answers])


def with_answers(batch: MicroBatch, answers_B: Indices) -> MicroBatch:
    """The same rows with labels (N, 4), of which `answers_B` are the numbers of their answers."""
    row_N = batch.row_of_label.numpy()
    count_B = np.bincount(row_N, minlength=len(answers_B))
    place_N = np.arange(len(row_N)) - np.repeat(np.cumsum(count_B) - count_B, count_B)
    columns = [batch.labels_N.numpy(), row_N, answers_B[row_N], place_N]
    return replace(batch, labels_N=torch.from_numpy(np.stack(columns, axis=1)))


def answer_rows(indices: Indices, each: int) -> Indices:
    """Rows of examples that have `each` of them."""
    rows: Indices = (indices[:, None] * each + np.arange(each)).ravel()
    return rows
