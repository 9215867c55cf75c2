"""A teacher with another vocabulary (ULD, Boizard et al. 2024): used where both predict from the same point of a text.

Legend: L padded length, D teacher's hidden, N supervised positions, n of them, M those that the teacher predicts,
V student's vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from workbench.config.sections.distill_config import DistillConfig
from workbench.data.batching import Indices, MicroBatch, Row, evenly_spaced
from workbench.data.packing import PACKED, PADDED
from workbench.data.text.tokenized_set import TokenizedSet
from workbench.errors import ConfigError
from workbench.losses.chunked_loss import Project
from workbench.losses.divergences import universal

if TYPE_CHECKING:
    from workbench.distillation.teachers import TeacherModel

NOWHERE = -1  # marks a token without a partner, or without an offset

ENOUGH = 0.05  # least share of the supervised tokens that have to be aligned for a teacher to be of use

_SAMPLED_ROWS, _KEPT_ROWS = 256, 2**16
_BROKEN = "\ufffd"  # replacement character: decoded from an incomplete UTF-8 sequence


@dataclass(frozen=True)
class AlignedLogits:
    """Teacher logits at the positions where its tokens start at the same point of the text; elsewhere nothing."""

    tensors: Sequence[Tensor]
    """The teacher's hidden states (N, D), zeros where there is none, and where there is one (N,) bool."""
    project: Project
    vocabulary: int
    """The teacher's."""
    temperature: float

    def loss(self, logits_nV: Tensor, *tensors: Tensor) -> Tensor:
        """Summed distance of the sorted probabilities over the aligned ones of some positions."""
        hidden_nD, aligned_n = tensors
        if not aligned_n.any():
            return logits_nV[:0].sum()
        with torch.no_grad():
            teacher = self.project(hidden_nD[aligned_n])
        return universal(logits_nV[aligned_n], teacher, temperature=self.temperature)


class UniversalTeacher:
    """A model that reads each row in its own tokens, written by its own template. Raises ConfigError: too few of the
    student's tokens start where one of the teacher's does.

    Args:
        teacher: The teacher.
        train: The student's rows.
        teacher_train: The same sources as the teacher reads them; which row is which is known by its place.
        device: The teacher's.
    """

    def __init__(
        self,
        teacher: TeacherModel,
        train: TokenizedSet,
        teacher_train: TokenizedSet,
        student_tokenizer: PreTrainedTokenizerBase,
        teacher_tokenizer: PreTrainedTokenizerBase,
        *,
        device: torch.device,
    ) -> None:
        self.teacher, self.device = teacher, device
        self.alignment = Alignment(train, teacher_train, student_tokenizer, teacher_tokenizer)
        self.alignment.require_enough()

    @property
    def share_aligned(self) -> float:
        """Share of the supervised tokens that have a teacher's token aligned, over a sample of the rows."""
        return self.alignment.share

    def signal(self, batch: MicroBatch, config: DistillConfig, *, temperature: float) -> AlignedLogits:
        """Teacher logits at the batch's supervised positions, read with the teacher's tokenizer."""
        assert batch.rows_B is not None
        partners = [self.alignment.partner(int(row)) for row in batch.rows_B]
        counts = [0 if row is None else self.alignment.teacher_train.supervised[row] for row in partners]
        firsts = np.cumsum([0, *counts[:-1]])
        numbers_N = np.concatenate(
            [_moved(self.alignment.row(int(row)), first) for row, first in zip(batch.rows_B, firsts, strict=True)]
        )
        layout = PACKED if "row_lengths" in batch.inputs else PADDED
        head = self.teacher.head
        read_MD = torch.zeros(0, head.width, device=self.device)  # every token that the teacher predicts in its rows
        if rows := [row for row in partners if row is not None]:
            theirs = layout.batch(self.alignment.teacher_train, np.asarray(rows), epoch=0).to(self.device)
            with torch.no_grad(), self.teacher.active():
                read_MD = head.supervised(self.teacher.model, theirs.inputs, theirs.positions_N)
        at_N = torch.from_numpy(numbers_N).to(self.device)
        aligned_N = at_N != NOWHERE
        hidden_ND = read_MD.new_zeros(len(at_N), read_MD.shape[1])
        hidden_ND[aligned_N] = read_MD[at_N[aligned_N]]
        place = batch.positions_N.device
        return AlignedLogits((hidden_ND.to(place), aligned_N.to(place)), head.project, head.vocabulary, temperature)


class Alignment:
    """Which predicted token of the teacher's starts where a predicted token of the student's does, row by row."""

    def __init__(
        self,
        train: TokenizedSet,
        teacher_train: TokenizedSet,
        student_tokenizer: PreTrainedTokenizerBase,
        teacher_tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        self.train, self.teacher_train = train, teacher_train
        self._mine, self._theirs = Reader(student_tokenizer), Reader(teacher_tokenizer)
        self._rows: dict[int, Indices] = {}
        # By source and place: files of several sources may have one name.
        mine, theirs = (zip(each.source_N.tolist(), each.places(), strict=True) for each in (train, teacher_train))
        known = {place: index for index, place in enumerate(theirs)}
        self._partners = [known.get(place) for place in mine]

    def row(self, index: int) -> Indices:
        """For each predicted token of the student's row, the number of the teacher's among those it predicts there."""
        alignment = self._rows.get(index)
        if alignment is None:
            theirs = self.partner(index)
            if theirs is None:
                alignment = np.full(int(self.train.supervised[index]), NOWHERE)
            else:
                alignment = aligned(self._mine.turns(self.train[index]), self._theirs.turns(self.teacher_train[theirs]))
            if len(self._rows) < _KEPT_ROWS:
                self._rows[index] = alignment
        return alignment

    def partner(self, index: int) -> int | None:
        """The teacher's row that is the student's row `index`; None where the teacher has none."""
        return self._partners[index]

    @cached_property
    def share(self) -> float:
        """Share of the student's predicted tokens that have a partner, of rows spread evenly over the set."""
        numbers = np.concatenate([self.row(int(index)) for index in evenly_spaced(len(self.train), _SAMPLED_ROWS)])
        return float((numbers != NOWHERE).mean())

    def require_enough(self) -> None:
        """Raise ConfigError where too few tokens are aligned."""
        if self.share < ENOUGH:
            raise ConfigError(
                f"distill.loss=universal: only {self.share:.1%} of the student's tokens start where one of the "
                f"teacher's does in {self.train.source}. The two write these rows too differently: give a "
                "model.chat_template whose answers are text as the teacher's are, leave data.loss_on=all out, or take "
                "another teacher."
            )


@dataclass(frozen=True)
class Turn:
    """Consecutive supervised tokens as text, without white space before it."""

    text: str
    starts: Indices
    """How many characters stand before each token that is predicted; NOWHERE inside of one, or before the text."""


class Reader:
    """Finds the text before each token of a tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._backend: Any = tokenizer.backend_tokenizer
        # Many decoders drop the space that a text begins with: so each piece is read after a letter.
        self._letter: int = tokenizer("a", add_special_tokens=False)["input_ids"][-1]
        self._bos = tokenizer.bos_token_id
        before = len(self._backend.decode([self._letter], skip_special_tokens=False))
        self._text: Callable[[tuple[int, ...]], str] = cache(
            lambda ids: self._backend.decode([self._letter, *ids], skip_special_tokens=False)[before:]
        )

    def turns(self, row: Row) -> list[Turn]:
        """The runs of supervised tokens of a row, with those of them that something is predicted from."""
        marked = np.flatnonzero(row.supervised)
        if row.input_ids[marked[0]] == self._bos and marked[0] == row.source:
            marked = marked[1:]  # a sign that not every tokenizer writes, and no part of the text
        runs = np.split(marked, np.flatnonzero(np.diff(marked) > 1) + 1)
        turns = [self.turn(row.input_ids[run].tolist()) for run in runs]
        if marked[0] == row.source:
            turns[0] = replace(turns[0], starts=turns[0].starts[1:])
        return turns

    def turn(self, ids: Sequence[int]) -> Turn:
        """`ids` as text, each of them predicted."""
        pieces, edges = list[str](), [0]
        begin = reached = 0
        for stop in range(1, len(ids) + 1):
            piece = self._text(tuple(ids[begin:stop]))
            if piece.endswith(_BROKEN):  # some bytes of a character: what follows has the others
                edges.append(NOWHERE)
                continue
            pieces.append(piece)
            begin, reached = stop, reached + len(piece)
            edges.append(reached)
        # Without white space before the text.
        text, edges_E = "".join(pieces), np.asarray(edges)
        margin = len(text) - len(text.lstrip())
        starts, stops = edges_E[:-1], edges_E[1:]
        blank = (stops != NOWHERE) & (stops <= margin) & (margin > 0)
        starts = np.where((starts == NOWHERE) | blank, NOWHERE, np.maximum(starts - margin, 0))
        return Turn(text[margin:], starts)


def aligned(mine: Sequence[Turn], theirs: Sequence[Turn]) -> Indices:
    """For each token of `mine`, turn after turn, the number of the one of `theirs` with the same text before it.

    Where one side was cut and has fewer turns, they are counted from the end at which more fits.
    """
    firsts = np.cumsum([0, *(len(turn.starts) for turn in theirs)])

    def turn_by_turn(offset: int) -> Indices:
        """Turn n of `mine` beside turn n + `offset` of `theirs`."""
        numbers = []
        for number, turn in enumerate(mine, start=offset):
            if not 0 <= number < len(theirs):
                numbers.append(np.full(len(turn.starts), NOWHERE))
                continue
            other = theirs[number]
            pairs = enumerate(zip(turn.text, other.text, strict=False))
            shorter = min(len(turn.text), len(other.text))
            common = next((at for at, (one, two) in pairs if one != two), shorter)
            # Of several tokens that start together, the last is the one that has a character to tell.
            known = {int(start): number for number, start in enumerate(other.starts) if 0 <= start <= common}
            same = np.asarray([known.get(int(start), NOWHERE) for start in turn.starts], dtype=np.int64)
            numbers.append(_moved(same, firsts[number]))
        return np.concatenate(numbers)

    alignments = [turn_by_turn(offset) for offset in sorted({0, len(theirs) - len(mine)}, key=abs)]
    return max(alignments, key=lambda numbers: int((numbers != NOWHERE).sum()))


def _moved(numbers: Indices, by: int) -> Indices:
    return np.where(numbers == NOWHERE, NOWHERE, numbers + by)
