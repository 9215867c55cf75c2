"""A teacher with another vocabulary: it reads each row in its own tokens, and is heard where both stand at one point of
the text.

A span is the shortest text that begins and ends with a token of each side. Three losses: `universal` compares the
sorted probabilities where spans begin (ULD, Boizard et al. 2024); `gold` the probabilities of whole spans, token by
token where both vocabularies have it (GOLD, TRL); `alm` the likelihood of each span's text (Minixhofer et al. 2025).

Legend: L padded length, D teacher's hidden, N supervised positions, n of them, M those that the teacher predicts,
V student's vocabulary, W teacher's, S spans.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from workbench.config.sections.distill_config import DistillConfig
from workbench.data.batching import Indices, MicroBatch, Row, evenly_spaced
from workbench.data.packing import PACKED, PADDED
from workbench.data.text.tokenized_set import TokenizedSet
from workbench.errors import ConfigError
from workbench.losses import divergences
from workbench.losses.chunked_loss import Follows, chunks
from workbench.losses.divergences import SharedTokens, log_probs

if TYPE_CHECKING:
    from workbench.distillation.teachers import TeacherModel

NOWHERE = -1  # marks a token without a partner, or without an offset

ENOUGH = 0.05  # least share of the supervised tokens that have to be aligned for a teacher to be of use

_SAMPLED_ROWS, _KEPT_ROWS = 256, 2**16
_BROKEN = "\ufffd"  # replacement character: decoded from an incomplete UTF-8 sequence


@dataclass(frozen=True)
class TeacherReading:
    """What a teacher says of its own rows: of each token that it predicts there."""

    tensors: Sequence[Tensor]
    """Tensors (M, ...) that its distributions come from."""
    own_M: Tensor
    """Log-probabilities of the tokens that stand there."""
    vocabulary: int
    """Numbers that `distributions` makes of each token."""
    distributions: Callable[..., tuple[Tensor, Tensor | None]]
    """Those tensors to log-probabilities (n, W), -inf of what is not known, and the log-mass (n,) of all that; None:
    all is known."""


@dataclass(frozen=True)
class AlignedSignal:
    """What a teacher of other tokens says where it is aligned with the student."""

    tensors: Sequence[Tensor]
    """How far each position is from the first of its span (N,) int64, NOWHERE outside of spans; the student's own
    tokens (N,); the teacher's log-likelihood of the whole span and of all but its first token (N, 2), and tensors of
    its distribution (N, ...), at first positions."""
    follows: Follows
    reading: TeacherReading
    config: DistillConfig
    temperature: float
    shared: SharedTokens | None
    empty: bool
    """Whether nothing is aligned."""

    @property
    def vocabulary(self) -> int:
        """Numbers that the loss makes of each position, besides the student's logits."""
        return self.reading.vocabulary

    def loss(self, logits_nV: Tensor, *tensors: Tensor) -> Tensor:
        """Summed loss of the spans of some positions, none of which is cut."""
        if self.empty:
            return logits_nV[:0].sum()
        loss: Tensor = _LOSSES[self.config.loss](self, logits_nV, *tensors)
        return loss


def _universal(signal: AlignedSignal, logits_nV: Tensor, away_n: Tensor, _: Tensor, __: Tensor, *own: Tensor) -> Tensor:
    teacher_nW, _rest = signal.reading.distributions(*own)
    scaled_nV = log_probs(logits_nV, signal.temperature)
    each_n = divergences.universal(scaled_nV, teacher_nW, temperature=1)  # which are at the temperature already
    return (each_n * (away_n == 0)).sum() * signal.temperature


def _gold(
    signal: AlignedSignal, logits_nV: Tensor, away_n: Tensor, ids_n: Tensor, theirs_n2: Tensor, *own: Tensor
) -> Tensor:
    assert signal.shared is not None
    elsewhere_n1 = (away_n != 0)[:, None]
    student_nV = log_probs(logits_nV, signal.temperature)
    later_n = _spans(student_nV, away_n, ids_n, after=0)
    student_nV = (student_nV + later_n[:, None]).masked_fill(elsewhere_n1, divergences.lowest(student_nV))
    teacher_nW, rest_n = signal.reading.distributions(*own)
    teacher_nW = (teacher_nW + theirs_n2[:, 1:]).masked_fill(elsewhere_n1, -torch.inf)
    if rest_n is not None:
        rest_n = (rest_n + theirs_n2[:, 1]).masked_fill(elsewhere_n1[:, 0], -torch.inf)
    return divergences.gold(student_nV, teacher_nW, rest_n, signal.shared, temperature=signal.temperature)


def _alm(signal: AlignedSignal, logits_nV: Tensor, away_n: Tensor, ids_n: Tensor, theirs_n2: Tensor) -> Tensor:
    whole_n = _spans(log_probs(logits_nV, 1), away_n, ids_n, after=NOWHERE)
    each_n = divergences.binary_kl(whole_n, theirs_n2[:, 0], temperature=signal.temperature)
    return (each_n * (away_n == 0)).sum()


_LOSSES: dict[str, Callable[..., Tensor]] = {"universal": _universal, "gold": _gold, "alm": _alm}


def _spans(logp_nV: Tensor, away_n: Tensor, ids_n: Tensor, *, after: int) -> Tensor:
    """At the first position of each span, the summed log-probability of its tokens further from there than `after`."""
    own_n = logp_nV.gather(1, ids_n[:, None])[:, 0] * (away_n > after)
    first_n = torch.arange(len(away_n), device=away_n.device) - away_n.clamp(min=0)
    return torch.zeros_like(own_n).index_add(0, first_n, own_n)


class AskedRows(Protocol):
    """A teacher that is asked about rows in its own tokens."""

    def read(
        self, rows: Sequence[tuple[int, Row]], config: DistillConfig, *, temperature: float, packed: bool
    ) -> TeacherReading:
        """What it says of rows; each with its number among the teacher's."""


@dataclass(frozen=True)
class LiveRows:
    """A model that reads them now."""

    teacher: TeacherModel
    rows: TokenizedSet
    device: torch.device

    def read(
        self, rows: Sequence[tuple[int, Row]], config: DistillConfig, *, temperature: float, packed: bool
    ) -> TeacherReading:
        """Hidden states, and log-likelihoods where the loss asks for them."""
        head = self.teacher.head
        read_MD, own_M = torch.zeros(0, head.width, device=self.device), torch.zeros(0, device=self.device)
        if rows:
            layout = PACKED if packed else PADDED
            theirs = layout.lay(self.rows.collate([row for _, row in rows], epoch=0)).to(self.device)
            with torch.no_grad(), self.teacher.active():
                read_MD = head.supervised(self.teacher.model, theirs.inputs, theirs.positions_N)
            own_M = read_MD.new_zeros(len(read_MD), dtype=torch.float32)
            if config.loss != "universal":
                at = 1.0 if config.loss == "alm" else temperature
                with torch.no_grad():
                    parts = chunks(head.vocabulary, read_MD, theirs.labels_N)
                    own_M = torch.cat([_own(log_probs(head.project(hidden), at), ids) for hidden, ids in parts])

        @torch.no_grad()
        def distributions(hidden: Tensor) -> tuple[Tensor, None]:
            return log_probs(head.project(hidden), temperature), None

        alone = config.loss == "alm"
        return TeacherReading([] if alone else [read_MD], own_M, 0 if alone else head.vocabulary, distributions)


def _own(logp_nV: Tensor, ids_n: Tensor) -> Tensor:
    return logp_nV.gather(1, ids_n[:, None])[:, 0]


class AlignedTeacher:
    """A teacher that reads each row in its own tokens, written by its own template. Raises ConfigError: too few of the
    student's tokens start where one of the teacher's does.

    Args:
        asked: The teacher.
        alignment: The student's rows, and the same sources as the teacher reads them.
        written: Of an answer that the student wrote in place of a row's own, the row; None where it is as it was.
    """

    def __init__(
        self, asked: AskedRows, alignment: Alignment, written: Callable[[int], Row | None] | None = None
    ) -> None:
        self.asked, self.alignment, self.written = asked, alignment, written
        self.alignment.require_enough()

    @property
    def share_aligned(self) -> float:
        """Share of the supervised tokens that have a teacher's token aligned, over a sample of the rows."""
        return self.alignment.share

    def signal(self, batch: MicroBatch, config: DistillConfig, *, temperature: float) -> AlignedSignal:
        """What the teacher says at the batch's supervised positions, read with the teacher's tokenizer."""
        assert batch.rows_B is not None
        rows: list[tuple[int, Row]] = []
        parts: list[tuple[Indices, ...]] = []
        reached = 0  # predicted tokens of the teacher's rows before
        for index in map(int, batch.rows_B):
            row, theirs, spans_S4 = self.alignment.pair(index, self.written and self.written(index))
            ids = predicted(row)
            away, begin, end = (np.full(len(ids), NOWHERE) for _ in range(3))
            for start, stop, their_start, their_stop in spans_S4.tolist():
                if config.loss == "universal":  # the next token alone
                    stop, their_stop = start + 1, their_start + 1
                away[start:stop] = np.arange(stop - start)
                if stop > start:
                    begin[start], end[start] = reached + their_start, reached + their_stop
            if theirs is not None:
                rows.append(theirs)
                reached += len(predicted(theirs[1]))
            parts.append((away, ids, begin, end))
        away_N, ids_N, begin_N, end_N = (np.concatenate(part) for part in zip(*parts, strict=True))
        packed, place = "row_lengths" in batch.inputs, batch.positions_N.device
        reading = self.asked.read(rows, config, temperature=temperature, packed=packed)
        # Where there is nothing, the last row, which is zero.
        at_N = torch.from_numpy(begin_N).to(reading.own_M.device)
        tensors = [torch.cat([each, each.new_zeros(1, *each.shape[1:])])[at_N] for each in reading.tensors]
        sums = torch.cat([reading.own_M.new_zeros(1), reading.own_M]).double().cumsum(0)
        first_N, last_N = at_N.clamp(min=0), torch.from_numpy(end_N).to(at_N.device).clamp(min=0)
        starts_N2 = torch.stack([first_N, (first_N + 1).minimum(last_N)], 1)
        theirs_N2 = (sums[last_N][:, None] - sums[starts_N2]).float()
        own = [torch.from_numpy(away_N), torch.from_numpy(ids_N)]
        return AlignedSignal(
            [each.to(place) for each in (*own, theirs_N2, *tensors)],
            away_N > 0,
            reading,
            config,
            temperature,
            self.alignment.shared(place) if config.loss == "gold" else None,
            empty=not (away_N == 0).any(),
        )


def predicted(row: Row) -> Indices:
    """The tokens of a row that are predicted."""
    ids: Indices = row.input_ids[row.source + 1 :][row.supervised[row.source + 1 :]]
    return ids


class Alignment:
    """Which predicted token of the teacher's starts where a predicted token of the student's does, row by row."""

    def __init__(
        self,
        train: TokenizedSet,
        teacher_train: TokenizedSet,
        student_tokenizer: PreTrainedTokenizerBase,
        teacher_tokenizer: PreTrainedTokenizerBase,
        *,
        loss: str = "universal",
    ) -> None:
        self.train, self.teacher_train, self.loss = train, teacher_train, loss
        self._tokenizers = student_tokenizer, teacher_tokenizer
        self._mine, self._theirs = Reader(student_tokenizer), Reader(teacher_tokenizer)
        self._rows: dict[int, Indices] = {}
        # By source and place: files of several sources may have one name.
        mine, theirs = (zip(each.source_N.tolist(), each.places(), strict=True) for each in (train, teacher_train))
        known = {place: index for index, place in enumerate(theirs)}
        self._partners = [known.get(place) for place in mine]

    def spans(self, index: int) -> Indices:
        """The spans (S, 4) of the student's row: its first token and the one after its last, and the teacher's, counted
        among those that are predicted. A span without an end on both sides has none of the student's tokens."""
        found = self._rows.get(index)
        if found is None:
            theirs = self.partner(index)
            if theirs is None:
                found = np.zeros((0, 4), dtype=np.int64)
            else:
                found = spans(self._mine.turns(self.train[index]), self._theirs.turns(self.teacher_train[theirs]))
            if len(self._rows) < _KEPT_ROWS:
                self._rows[index] = found
        return found

    def row(self, index: int) -> Indices:
        """For each predicted token of the student's row, the number of the teacher's among those it predicts there."""
        numbers = np.full(int(self.train.supervised[index]), NOWHERE)
        found = self.spans(index)
        numbers[found[:, 0]] = found[:, 2]
        return numbers

    def pair(self, index: int, written: Row | None) -> tuple[Row, tuple[int, Row] | None, Indices]:
        """The student's row, the teacher's and its number, and their spans. `written`: with the student's own answer in
        place of the last, which the teacher is then given in its tokens."""
        theirs = self.partner(index)
        mine = self.train[index] if written is None else written
        if theirs is None:
            return mine, None, np.zeros((0, 4), dtype=np.int64)
        other = self.teacher_train[theirs]
        if written is None:
            return mine, (theirs, other), self.spans(index)
        other = self._theirs.with_answer(other, self._mine.answer(written))
        if not len(predicted(other)):
            return mine, None, np.zeros((0, 4), dtype=np.int64)
        return mine, (theirs, other), spans(self._mine.turns(mine), self._theirs.turns(other))

    def partner(self, index: int) -> int | None:
        """The teacher's row that is the student's row `index`; None where the teacher has none."""
        return self._partners[index]

    def shared(self, device: torch.device) -> SharedTokens:
        """Tokens of one text, on a device."""
        return SharedTokens(*(torch.from_numpy(each).to(device) for each in self._shared))

    @cached_property
    def _shared(self) -> tuple[Indices, Indices, Indices, Indices]:
        return shared_tokens(self._mine, self._theirs)

    @cached_property
    def share(self) -> float:
        """Share of the student's predicted tokens that have a partner, of rows spread evenly over the set."""
        numbers = np.concatenate([self.row(int(index)) for index in evenly_spaced(len(self.train), _SAMPLED_ROWS)])
        return float((numbers != NOWHERE).mean())

    def require_enough(self) -> None:
        """Raise ConfigError where too few tokens are aligned."""
        if self.share < ENOUGH:
            raise ConfigError(
                f"distill.loss={self.loss}: only {self.share:.1%} of the student's tokens start where one of the "
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
    closed: bool = False
    """Whether its last token is a special one, which ends it in the tokenizer's own way."""


class Reader:
    """Finds the text before each token of a tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._backend: Any = tokenizer.backend_tokenizer
        # Many decoders drop the space that a text begins with: so each piece is read after a letter.
        self._letter: int = tokenizer("a", add_special_tokens=False)["input_ids"][-1]
        self._tokenizer, self._bos = tokenizer, tokenizer.bos_token_id
        self._special = frozenset(tokenizer.all_special_ids)
        self._before = before = len(self._backend.decode([self._letter], skip_special_tokens=False))
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
        return Turn(text[margin:], starts, closed=len(ids) > 0 and ids[-1] in self._special)

    def answer(self, row: Row) -> tuple[str, bool]:
        """The text of a row's last turn, and whether a special token ends it."""
        ids = row.input_ids[_last_run(row)].tolist()
        closed = len(ids) > 0 and ids[-1] in self._special
        text: str = self._backend.decode([self._letter, *(ids[:-1] if closed else ids)], skip_special_tokens=False)
        return text[self._before :], closed

    def with_answer(self, row: Row, answer: tuple[str, bool]) -> Row:
        """The row with another text in its last turn, which alone is predicted, and ends as the row's own where it is
        closed."""
        run, (text, closed) = _last_run(row), answer
        own, ended = self.answer(row)
        own_ids = row.input_ids[run][: len(run) - ended].tolist()
        # White space in front is the template's, or the tokenizer's own; after it as in the row.
        body = own.lstrip()
        margin = "" if self._ids(body) == own_ids else own[: len(own) - len(body)]
        end = row.input_ids[run[-1:]] if closed and ended else run[:0]
        ids = np.concatenate([np.asarray(self._ids(margin + text.lstrip()), dtype=np.int64), end])
        supervised = np.arange(run[0] + len(ids)) >= run[0]
        return row._replace(input_ids=np.concatenate([row.input_ids[: run[0]], ids]), supervised=supervised)

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def texts(self) -> list[tuple[int, str, str]]:
        """Each token's number, its text after a letter, and its name; the text is empty where there is none."""
        tokens = sorted((number, name) for name, number in self._tokenizer.get_vocab().items())
        found = ((number, self._text((number,)), name) for number, name in tokens)
        return [(number, "" if _BROKEN in text else text, name) for number, text, name in found]

    @property
    def end(self) -> int | None:
        """The token that ends a text."""
        end: int | None = self._tokenizer.eos_token_id
        return end


def _last_run(row: Row) -> Indices:
    """Places of the last supervised tokens of a row."""
    marked = np.flatnonzero(row.supervised)
    return np.split(marked, np.flatnonzero(np.diff(marked) > 1) + 1)[-1]


def shared_tokens(mine: Reader, theirs: Reader) -> tuple[Indices, Indices, Indices, Indices]:
    """Numbers of the tokens that both have, in one order, and of those that only one has.

    The same are two that end a text, then those of one name and text, then those of one text, such as "▁the" and
    "Ġthe"; the first of several.
    """
    own, others = mine.texts(), theirs.texts()
    pairs: dict[int, int] = {}
    if mine.end is not None and theirs.end is not None:
        pairs[mine.end] = theirs.end
    for by_name in (True, False):
        used = set(pairs.values())
        known = {
            (text, name if by_name else ""): number
            for number, text, name in reversed(others)
            if number not in used and (text or by_name)
        }
        for number, text, name in own:
            partner = None if number in pairs else known.pop((text, name if by_name else ""), None)
            if partner is not None:
                pairs[number] = partner
    both = np.asarray(list(pairs.items()), dtype=np.int64).reshape(-1, 2)
    mine_only, theirs_only = (
        np.setdiff1d(np.asarray([token[0] for token in each], dtype=np.int64), both[:, column])
        for column, each in enumerate((own, others))
    )
    return both[:, 0], both[:, 1], mine_only, theirs_only


def spans(mine: Sequence[Turn], theirs: Sequence[Turn]) -> Indices:
    """The spans (S, 4) of turns, one after another, as `Alignment.spans` counts them.

    Where one side was cut and has fewer turns, they are counted from the end at which more fits.
    """
    firsts, their_firsts = (np.cumsum([0, *(len(turn.starts) for turn in turns)]) for turns in (mine, theirs))

    def turn_by_turn(offset: int) -> Indices:
        """Turn n of `mine` beside turn n + `offset` of `theirs`."""
        found = [np.zeros((0, 4), dtype=np.int64)]
        for number, turn in enumerate(mine):
            if 0 <= (other := number + offset) < len(theirs):
                moved = np.asarray([firsts[number]] * 2 + [their_firsts[other]] * 2)
                found.append(_spans_of(turn, theirs[other]) + moved)
        return np.concatenate(found)

    return max((turn_by_turn(offset) for offset in sorted({0, len(theirs) - len(mine)}, key=abs)), key=len)


def _spans_of(turn: Turn, other: Turn) -> Indices:
    """The spans (S, 4) of a turn, counted from its first token."""
    pairs = enumerate(zip(turn.text, other.text, strict=False))
    shorter = min(len(turn.text), len(other.text))
    common = next((at for at, (one, two) in pairs if one != two), shorter)
    # Of several tokens that start together, the last is the one that has a character to tell.
    known, their_known = (
        {int(start): number for number, start in enumerate(each.starts) if 0 <= start <= common}
        for each in (turn, other)
    )
    starts = np.asarray([[n, their_known[at]] for at, n in known.items() if at in their_known], dtype=np.int64)
    if not len(starts):
        return np.zeros((0, 4), dtype=np.int64)
    ends = np.asarray([len(turn.starts), len(other.starts)])
    same = turn.text == other.text or (turn.closed and other.closed and (starts[-1] == ends - 1).all())
    return np.concatenate([starts, np.concatenate([starts[1:], [ends if same else starts[-1]]])], 1)[:, [0, 2, 1, 3]]
