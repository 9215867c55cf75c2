"""Rows of texts that are embedded: which texts each compares, and which pairs are known to belong together.

Each text is tokenised once, however many rows it is in.

Legend: N rows, B rows of a global batch or texts of a micro-batch, L padded length, M negatives of theirs, U texts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from workbench.config.sections.embed_config import EmbedConfig, Form
from workbench.data import leaks, named_sets
from workbench.data.batching import Indices, MicroBatch, WholeRows, encoder_inputs
from workbench.data.embedding.pair_records import GivenText, PairRecord, PairSource
from workbench.data.leaks import Copies
from workbench.data.rows import excerpt
from workbench.data.text.quality.cleaning import Cleaning
from workbench.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, eq=False)
class TextUnits:
    """Different texts with their tokens."""

    texts: tuple[str, ...]  # with the instruction before each
    tokens: tuple[Indices, ...]
    cut: tuple[bool, ...]  # whether each was cut to data.max_tokens

    @property
    def truncated(self) -> int:
        return sum(self.cut)

    @cached_property
    def lengths(self) -> Indices:
        return np.asarray([len(each) for each in self.tokens], dtype=np.int64)

    def batch(self, indices: Indices, *, epoch: int = 0) -> MicroBatch:
        """The texts `indices`, padded on the right, the same in each epoch; `positions_N` are their last tokens."""
        import torch

        ids = [self.tokens[index] for index in indices]
        inputs = encoder_inputs(ids)
        length = inputs["input_ids"].shape[1]
        lengths_B = torch.tensor([len(each) for each in ids])
        return MicroBatch(
            inputs=inputs,
            positions_N=torch.arange(len(ids)) * length + lengths_B - 1,
            labels_N=torch.zeros(len(ids)),
            tokens=int(lengths_B.sum()),
            rows_B=indices,
        )

    def subset(self, numbers: Indices) -> TextUnits:
        """The texts `numbers`, in this order."""
        texts, tokens, cut = ([each[number] for number in numbers] for each in (self.texts, self.tokens, self.cut))
        return TextUnits(tuple(texts), tuple(tokens), tuple(cut))

    def arrays(self) -> Iterator[npt.NDArray[Any]]:
        return iter(self.tokens)


def units(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, *, max_tokens: int) -> TextUnits:
    """The texts with their tokens, cut on the right. Raises DataError: a text has no token."""
    encoded = tokenizer(list(texts), verbose=False)["input_ids"] if texts else []
    cut = tokenizer(list(texts), truncation=True, max_length=max_tokens, verbose=False)["input_ids"] if texts else []
    for text, ids in zip(texts, cut, strict=True):
        if not ids:
            raise DataError(f"The text {excerpt(text)} has no token of this backbone. Leave it out.")
    tokens = tuple(np.asarray(ids, dtype=np.int64) for ids in cut)
    return TextUnits(tuple(texts), tokens, tuple(len(ids) > max_tokens for ids in encoded))


def raw_units(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> TextUnits:
    """The texts with their own tokens alone, whole, without those that a model puts around them. Raises DataError: a
    text has no token."""
    encoded = tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"] if texts else []
    for text, ids in zip(texts, encoded, strict=True):
        if not ids:
            raise DataError(f"The text {excerpt(text)} has no token of this backbone. Leave it out.")
    return TextUnits(tuple(texts), tuple(np.asarray(ids, dtype=np.int64) for ids in encoded), (False,) * len(texts))


def numbered(texts: Iterable[str]) -> dict[str, int]:
    """A number for each different text, in the order in which they come first."""
    return {text: number for number, text in enumerate(dict.fromkeys(texts))}


Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
NO_CLASS = -1


class BatchTexts(NamedTuple):
    """Texts of some rows, by their numbers among the units."""

    anchor_B: Indices
    positive_B: Indices
    negative_M: Indices
    owner_M: Indices  # place in the batch of the row that each negative belongs to

    @property
    def every(self) -> Indices:
        """Different texts, ascending."""
        return np.unique(np.concatenate([self.anchor_B, self.positive_B, self.negative_M]))

    @property
    def passages(self) -> Indices:
        """Texts among which an anchor looks for its positive: all positives, followed by all negatives."""
        return np.concatenate([self.positive_B, self.negative_M])


@dataclass(frozen=True, eq=False)
class PairSet(WholeRows):
    """Rows with their texts; see `workbench.data.batching.Examples`."""

    form: Form
    records: tuple[PairRecord, ...]
    units: TextUnits
    anchor_N: Indices
    """Unit of each row's first text."""
    positive_N: Indices
    """Unit of its second text; of labelled rows, that of another row of their class, drawn anew in each epoch."""
    negatives: tuple[Indices, ...]
    """Units of the negatives of each row."""
    class_N: Indices
    """Number of each row's class; NO_CLASS where rows have none."""
    score_N: Floats
    source: str
    fingerprint: str
    seed: int = 0
    skipped: tuple[str, ...] = field(default=())
    sources: tuple[str, ...] = ()
    """Names of the sets that rows are from; empty where there is one."""
    source_N: Indices = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """Number of the set of each row, where there are several."""
    cleaning: Cleaning | None = None
    """Rows that `data.clean` left out."""
    copies: Copies = ()
    """Rows that are copies of training rows."""

    def __len__(self) -> int:
        return len(self.records)

    def place(self, index: int) -> str:
        return self.records[index].place

    @cached_property
    def lengths(self) -> Indices:
        """Tokens of all texts of each row."""
        length_U = self.units.lengths
        more_N = np.asarray([int(length_U[each].sum()) for each in self.negatives], dtype=np.int64)
        length_N: Indices = length_U[self.anchor_N] + length_U[self.positive_N] + more_N
        return length_N

    @property
    def longest_sequences(self) -> Indices:
        """Tokens of each row's longest text."""
        length_U = self.units.lengths
        negative_N = [int(length_U[each].max(initial=0)) for each in self.negatives]
        texts_N = [length_U[self.anchor_N], length_U[self.positive_N], np.asarray(negative_N, dtype=np.int64)]
        longest: Indices = np.max(np.stack(texts_N), axis=0)
        return longest

    @property
    def supervised(self) -> Indices:
        """Each row counts once."""
        return np.ones(len(self), dtype=np.int64)

    @property
    def truncated(self) -> int:
        """Number of texts that were cut."""
        return self.units.truncated

    def seen(self, *, epoch: int, step: int, steps: int | None = None) -> PairSet:
        """The same rows; labelled ones with the positives of pass `epoch`."""
        return self._in_pass(epoch=epoch) if self.form == "labelled" else self

    @cached_property
    def _in_pass(self) -> Callable[..., PairSet]:
        """`with_partners`, which each step of a pass asks for; a step may look ahead into the next pass."""
        return lru_cache(maxsize=2)(self.with_partners)

    def with_partners(self, *, epoch: int) -> PairSet:
        """Labelled rows, each with another text of its class, evenly drawn; its own where there is no other."""
        generator = np.random.default_rng([self.seed, epoch, 1])
        positive_N = self.anchor_N.copy()
        for number in np.unique(self.class_N[self.class_N != NO_CLASS]):
            rows = np.flatnonzero(self.class_N == number)
            texts, own = np.unique(self.anchor_N[rows], return_inverse=True)
            if len(texts) > 1:
                positive_N[rows] = texts[(own + generator.integers(1, len(texts), size=len(rows))) % len(texts)]
        return replace(self, positive_N=positive_N)

    def batch(self, indices: Indices, *, epoch: int = 0) -> MicroBatch:
        """The texts of the rows `indices`, each text once."""
        return self.units.batch(self.texts(indices).every)

    def texts(self, rows: Indices) -> BatchTexts:
        """Texts of the rows of a batch."""
        negatives = [self.negatives[row] for row in rows]
        owner_M = np.repeat(np.arange(len(rows)), [len(each) for each in negatives])
        negative_M = np.concatenate([np.empty(0, np.int64), *negatives])
        return BatchTexts(self.anchor_N[rows], self.positive_N[rows], negative_M, owner_M)

    def known(self, one_A: Indices, other_B: Indices) -> Mask:
        """Whether texts (A, B) are known to belong together, so that neither is a negative of the other.

        They do where they are one text, where a row says so, or where they are of one class.

        Args:
            one_A: Units.
            other_B: Units.
        """
        count = 2 * len(self.units.texts)
        raw_A, raw_B = self._raw_U[one_A], self._raw_U[other_B]
        same_AB: Mask = raw_A[:, None] == raw_B
        if self.form == "labelled":
            alike_AB: Mask = self._class_U[one_A][:, None] == self._class_U[other_B]
        else:
            wanted_AB = raw_A[:, None] * count + raw_B
            # Not np.isin, which sorts all known pairs each time.
            place_AB = np.searchsorted(self._known_keys[:-1], wanted_AB)
            alike_AB = self._known_keys[place_AB] == wanted_AB
        return np.logical_or(same_AB, alike_AB)

    @cached_property
    def _raw_U(self) -> Indices:
        """A number for each different text without its instruction, by unit."""
        numbers: dict[str, int] = {}
        raw_U = np.arange(len(self.units.texts)) + len(self.units.texts)  # of texts that no row has as its own
        for row, record in enumerate(self.records):
            own = [self.anchor_N[row], *([] if self.form == "labelled" else [self.positive_N[row]])]
            given = list(self.negatives[row])[: max(0, len(record.texts) - 2)]
            for unit, text in zip([*own, *given], record.texts, strict=True):
                raw_U[unit] = numbers.setdefault(text, len(numbers))
        return raw_U

    @cached_property
    def _class_U(self) -> Indices:
        class_U = np.full(len(self.units.texts), NO_CLASS)
        class_U[self.anchor_N] = self.class_N
        return class_U

    @cached_property
    def _known_keys(self) -> Indices:
        """Pairs that a row says belong together, in both directions, ascending."""
        count = 2 * len(self.units.texts)
        one, other = self._raw_U[self.anchor_N], self._raw_U[self.positive_N]
        return np.unique(np.concatenate([one * count + other, other * count + one]))

    def units_of(self, rows: Indices) -> Indices:
        """Different texts of rows, ascending."""
        negatives = [self.negatives[row] for row in rows]
        return np.unique(np.concatenate([self.anchor_N[rows], self.positive_N[rows], *negatives]))

    def subset(self, keep: Indices) -> PairSet:
        """The rows that `keep` indexes, with their texts alone."""
        numbers = np.arange(len(self))[keep]
        part, used = self.chosen(numbers), self.units_of(numbers)
        return replace(
            part,
            units=self.units.subset(used),
            anchor_N=np.searchsorted(used, part.anchor_N),
            positive_N=np.searchsorted(used, part.positive_N),
            negatives=tuple(np.searchsorted(used, each) for each in part.negatives),
        )

    def chosen(self, numbers: Indices) -> PairSet:
        """The rows `numbers`, with all texts of the set."""
        return replace(
            self,
            records=tuple(self.records[number] for number in numbers),
            anchor_N=self.anchor_N[numbers],
            positive_N=self.positive_N[numbers],
            negatives=tuple(self.negatives[number] for number in numbers),
            class_N=self.class_N[numbers],
            score_N=self.score_N[numbers],
            source_N=self.source_N[numbers] if self.sources else self.source_N,
            copies=leaks.taken(self.copies, numbers),
        )

    @property
    def rows_by_source(self) -> dict[str, int]:
        """Number of rows of each set; empty where there is one."""
        return named_sets.sizes(self)

    def with_texts(
        self, texts: Sequence[GivenText], prefix: str, tokenizer: PreTrainedTokenizerBase, *, max_tokens: int
    ) -> PairSet:
        """The same rows, followed by one for each further text, of which nothing but itself is known. `prefix`: the
        instruction before each."""
        numbers = numbered([*self.units.texts, *(prefix + each.text for each in texts)])
        more = units(list(numbers)[len(self.units.texts) :], tokenizer, max_tokens=max_tokens)
        anchor_M = np.asarray([numbers[prefix + each.text] for each in texts], dtype=np.int64)
        sides = 1 if self.form == "labelled" else 2
        none_M = (np.empty(0, np.int64),) * len(texts)
        return replace(
            self,
            records=(*self.records, *(PairRecord(each.place, (each.text,) * sides) for each in texts)),
            units=TextUnits(
                (*self.units.texts, *more.texts), (*self.units.tokens, *more.tokens), (*self.units.cut, *more.cut)
            ),
            anchor_N=np.concatenate([self.anchor_N, anchor_M]),
            positive_N=np.concatenate([self.positive_N, anchor_M]),
            negatives=(*self.negatives, *none_M),
            class_N=np.concatenate([self.class_N, np.full(len(texts), NO_CLASS)]),
            score_N=np.concatenate([self.score_N, np.zeros(len(texts))]),
        )

    def with_negatives(self, more: list[Indices]) -> PairSet:
        """The same rows with further negatives of each, after those that were given."""
        return replace(self, negatives=tuple(np.concatenate(pair) for pair in zip(self.negatives, more, strict=True)))

    def facts(self) -> dict[str, Any]:
        """Facts about this set for the manifest and the report."""
        pair_facts: dict[str, Any] = {"form": self.form, "texts": len(self.units.texts)}
        pair_facts |= {"classes": len(np.unique(self.class_N))} if self.form == "labelled" else {}
        pair_facts |= {"sources": self.rows_by_source} if self.sources else {}
        pair_facts |= {} if self.cleaning is None else {"cleaning": self.cleaning.facts()}
        return {**named_sets.shared_facts(self, supervised_tokens=len(self)), **pair_facts, **leaks.facts(self.copies)}


def encode(
    source: PairSource, tokenizer: PreTrainedTokenizerBase, config: EmbedConfig, *, max_tokens: int, seed: int = 0
) -> PairSet:
    """Convert rows to texts with instructions, and those to tokens."""
    records = source.records
    first = [config.query_prefix + record.texts[0] for record in records]
    others = [[config.passage_prefix + text for text in record.texts[1:]] for record in records]
    numbers = numbered([*first, *(text for texts in others for text in texts)])
    anchor_N = np.asarray([numbers[text] for text in first], dtype=np.int64)
    units_of = [np.asarray([numbers[text] for text in texts], dtype=np.int64) for texts in others]
    labelled = source.form == "labelled"
    classes = numbered(sorted({record.label for record in records}))
    pair_set = PairSet(
        form=source.form,
        records=records,
        units=units(list(numbers), tokenizer, max_tokens=max_tokens),
        anchor_N=anchor_N,
        positive_N=anchor_N if labelled else np.asarray([each[0] for each in units_of], dtype=np.int64),
        negatives=tuple(each[1:] for each in units_of),
        class_N=np.asarray([classes[record.label] for record in records] if labelled else [NO_CLASS] * len(records)),
        score_N=np.asarray([record.score for record in records], dtype=np.float64),
        source=source.name,
        fingerprint=source.fingerprint,
        seed=seed,
        skipped=source.skipped,
        sources=source.sources,
        source_N=source.source_N,
    )
    return pair_set.with_partners(epoch=0) if labelled else pair_set


def first_units(rows: PairSet, count: int) -> TextUnits:
    """The first `count` texts of a set."""
    return rows.units.subset(np.arange(min(count, len(rows.units.texts))))
