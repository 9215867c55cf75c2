"""Queries with the passages that a reranker tells apart: one row is a query with all of its candidates.

Legend: N rows, C candidates of a row (first the one that belongs to it), U texts, P pairs, Q queries, S pairs of a
micro-batch, L padded length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from workbench.config import RunConfig
from workbench.config.sections.embed_config import RERANK_LOSSES, EmbedConfig
from workbench.data import named_sets
from workbench.data.batching import Indices, MicroBatch, WholeRows, encoder_inputs, padded
from workbench.data.embedding import pair_data, pair_set
from workbench.data.embedding.pair_data import PairSources
from workbench.data.embedding.pair_records import PairSource
from workbench.data.embedding.pair_set import PairSet, TextUnits
from workbench.data.held_out_split import Splits
from workbench.data.rows import excerpt
from workbench.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TYPES = "token_type_ids"  # input by which BERT knows which of two texts a token is of
LEAST_ROOM = 8  # tokens of a passage that must be left beside every query


@dataclass(frozen=True, eq=False)
class PairTokenizer:
    """Writes a query and a passage into one row, as the tokenizer joins two texts; only the passage is cut."""

    tokenizer: PreTrainedTokenizerBase
    max_tokens: int

    @cached_property
    def special(self) -> int:
        """Tokens that stand around two texts."""
        return int(self.tokenizer.num_special_tokens_to_add(pair=True))

    def whole(self, query: Indices, passage: Indices) -> Indices:
        """Tokens of pairs of texts before they are cut, from the tokens of each text."""
        whole: Indices = query + passage + self.special
        return whole

    def lengths(self, query: Indices, passage: Indices) -> Indices:
        """Tokens of pairs of texts after cutting, from the tokens of each text."""
        return np.minimum(self.whole(query, passage), self.max_tokens)

    def require_room(self, units: TextUnits, queries: Indices) -> None:
        """Refuse a query beside which hardly anything of a passage is read. Raises DataError: there is one."""
        left = self.max_tokens - self.special - units.lengths[queries]
        if len(left) and left.min() < LEAST_ROOM:
            unit = int(queries[left.argmin()])
            need = int(units.lengths[unit]) + self.special + LEAST_ROOM
            raise DataError(
                f"The query {excerpt(units.texts[unit])} has {int(units.lengths[unit])} tokens, which data.max_tokens="
                f"{self.max_tokens} leaves no passage beside; queries are not cut. Write data.max_tokens={need} or "
                "more, or shorten it."
            )

    def batch(self, queries: list[str], passages: list[str]) -> MicroBatch:
        """Pairs, padded on the right; `positions_N` are their last tokens."""
        import torch

        encoded = self.tokenizer(
            queries, passages, truncation="only_second", max_length=self.max_tokens, padding=False, verbose=False
        )
        ids = [np.asarray(each, dtype=np.int64) for each in encoded["input_ids"]]
        inputs = encoder_inputs(ids)
        if TYPES in encoded:
            inputs[TYPES] = torch.from_numpy(padded([np.asarray(each, dtype=np.int64) for each in encoded[TYPES]]))
        lengths_S = torch.tensor([len(each) for each in ids])
        return MicroBatch(
            inputs=inputs,
            positions_N=torch.arange(len(ids)) * inputs["input_ids"].shape[1] + lengths_S - 1,
            labels_N=torch.zeros(len(ids)),
            tokens=int(lengths_S.sum()),
        )


@dataclass(frozen=True, eq=False)
class PairedTexts:
    """Pairs that are scored, each by the numbers of its texts."""

    units: TextUnits
    joins: PairTokenizer
    query_P: Indices
    passage_P: Indices

    def __len__(self) -> int:
        return len(self.query_P)

    @cached_property
    def lengths(self) -> Indices:
        length_U = self.units.lengths
        return self.joins.lengths(length_U[self.query_P], length_U[self.passage_P])

    def batch(self, indices: Indices, *, epoch: int = 0) -> MicroBatch:
        """The pairs `indices`, padded, the same in each epoch."""
        texts = self.units.texts
        return self.joins.batch(
            [texts[unit] for unit in self.query_P[indices]], [texts[unit] for unit in self.passage_P[indices]]
        )

    def take(self, indices: Indices) -> PairedTexts:
        return PairedTexts(self.units, self.joins, self.query_P[indices], self.passage_P[indices])

    def arrays(self) -> Iterator[npt.NDArray[Any]]:
        tokens = self.units.tokens
        for query, passage in zip(self.query_P, self.passage_P, strict=True):
            yield np.concatenate([tokens[query], [-1], tokens[passage]])


Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class CandidateSet(WholeRows):
    """Rows with their candidates; see `workbench.data.batching.Examples`."""

    pairs: PairSet  # rows with their texts, whose tokens are bare and whole
    joins: PairTokenizer
    negatives: int  # negatives of each row; 0 where rows are scored
    seed: int = 0
    epoch: int = 0  # pass over the rows, in which negatives are drawn anew
    drawn_NC: Indices | None = None  # candidates that are no longer drawn; None: those of the pass

    def __len__(self) -> int:
        return len(self.pairs)

    @property
    def each(self) -> int:
        """Candidates of a row."""
        return 1 + self.negatives

    @cached_property
    def passage_NC(self) -> Indices:
        """Candidates of each row, by the numbers of their texts.

        Negatives are those of the row, or so many of them, and for the rest passages of the set at random: where the
        set is the batch these are in-batch negatives, which here depend on no batch. Raises DataError: a row has too
        few.
        """
        if self.drawn_NC is not None:
            return self.drawn_NC
        generator = np.random.default_rng([self.seed, self.epoch, 2])
        candidate_NC = np.empty((len(self), self.each), dtype=np.int64)
        candidate_NC[:, 0] = self.pairs.positive_N
        for row in range(len(self) if self.negatives else 0):
            given = generator.permutation(self.pairs.negatives[row])[: self.negatives]
            more = self.others(row, self.negatives - len(given), generator, but=given)
            if len(given) + len(more) < self.negatives:
                left, anchor_N = len(given) + len(more), np.unique(self.pairs.anchor_N)
                least = min(int((~self.pairs.known(each, self.passages)).sum()) for each in anchor_N[:, None])
                cure = f"Write rerank.negatives={least}" if least else "Give rows with other passages"
                raise DataError(
                    f"{self.place(row)}: of all passages of {self.pairs.source}, {left} are not known to belong to "
                    f"its query, and rerank.negatives={self.negatives} needs more. {cure}, or give the row `negatives`."
                )
            candidate_NC[row, 1:] = np.concatenate([given, more])
        return candidate_NC

    @cached_property
    def passages(self) -> Indices:
        """Different passages of the set, ascending."""
        return np.unique(np.concatenate([self.pairs.positive_N, *self.pairs.negatives]))

    def others(self, row: int, count: int, generator: np.random.Generator, *, but: Indices) -> Indices:
        """Passages at random that are not known to belong to a row's query, at most `count`, none of `but`."""
        anchor, everything = self.pairs.anchor_N[row : row + 1], self.passages
        tries = min(len(everything), 2 * count + len(but) + 4)
        while count > 0:
            some = everything[generator.choice(len(everything), size=tries, replace=False)]
            allowed: Indices = some[~self.pairs.known(anchor, some)[0] & ~np.isin(some, but)]
            if len(allowed) >= count or tries == len(everything):
                drawn: Indices = allowed[:count]
                return drawn
            tries = min(len(everything), 4 * tries)
        return np.empty(0, dtype=np.int64)

    @cached_property
    def all_pairs(self) -> PairedTexts:
        """Each query with each of its candidates, row by row."""
        return PairedTexts(
            self.pairs.units, self.joins, np.repeat(self.pairs.anchor_N, self.each), self.passage_NC.ravel()
        )

    @cached_property
    def lengths(self) -> Indices:
        """Tokens of all pairs of each row."""
        lengths: Indices = self.sequence_lengths.sum(1)
        return lengths

    @property
    def sequence_lengths(self) -> Indices:
        """Tokens of each pair of each row, (N, C)."""
        return self.all_pairs.lengths.reshape(-1, self.each)

    @property
    def longest_sequences(self) -> Indices:
        """Tokens of the longest pair of each row."""
        longest: Indices = self.sequence_lengths.max(1)
        return longest

    @property
    def supervised(self) -> Indices:
        """Each row counts once."""
        return np.ones(len(self), dtype=np.int64)

    @property
    def truncated(self) -> int:
        """Number of pairs whose passage is cut."""
        length_U, pairs = self.pairs.units.lengths, self.all_pairs
        return int((self.joins.whole(length_U[pairs.query_P], length_U[pairs.passage_P]) > pairs.lengths).sum())

    source, fingerprint, skipped, cleaning, sources, source_N = (
        property(attrgetter(f"pairs.{name}"))
        for name in ("source", "fingerprint", "skipped", "cleaning", "sources", "source_N")
    )  # as the rows have them; see `PairSet`

    def place(self, index: int) -> str:
        return self.pairs.place(index)

    def seen(self, *, epoch: int, step: int, steps: int | None = None) -> Self:
        """The same rows with the negatives of pass `epoch`."""
        return self._in_pass(epoch) if self.negatives and self.drawn_NC is None else self

    @cached_property
    def _in_pass(self) -> Callable[[int], Self]:
        """The rows of a pass, for which each of its steps asks; a step may look ahead into the next pass."""
        return lru_cache(maxsize=2)(lambda epoch: self if epoch == self.epoch else replace(self, epoch=epoch))

    def batch(self, indices: Indices, *, epoch: int = 0) -> MicroBatch:
        """All pairs of the rows `indices`, those of a row one after another, padded."""
        places = (indices[:, None] * self.each + np.arange(self.each)).ravel()
        batch = self.all_pairs.batch(places)
        return replace(batch, rows_B=indices, sequences=self.each, row_tokens=self.all_pairs.lengths[places])

    def subset(self, keep: Indices) -> CandidateSet:
        """The rows that `keep` indexes, with the negatives that they have here."""
        numbers = np.arange(len(self))[keep]
        return replace(self, pairs=self.pairs.chosen(numbers), drawn_NC=self.passage_NC[numbers])

    def facts(self) -> dict[str, Any]:
        """Facts about this set for the manifest and the report."""
        return self.pairs.facts() | named_sets.shared_facts(self, supervised_tokens=len(self))


@dataclass(frozen=True, eq=False)
class Ranking:
    """Queries, and the candidates that are ranked for each."""

    row_Q: Indices  # a row that each is the query of
    passages: list[Indices]  # candidates of each query, ascending
    relevant: list[Mask]  # which of them belong to it


def ranking(rows: CandidateSet, *, candidates: int) -> Ranking:
    """The passages of each query of a set: those of its rows, their candidates, and others at random up to so many."""
    pairs, generator = rows.pairs, np.random.default_rng([rows.seed, 3])
    query_Q, first_Q, number_N = np.unique(pairs.anchor_N, return_index=True, return_inverse=True)
    members: list[list[int]] = [[] for _ in query_Q]
    for row, number in enumerate(number_N.tolist()):
        members[number].append(row)
    passages, relevant = [], []
    for row, own in zip(first_Q.tolist(), members, strict=True):
        belong = np.unique(pairs.positive_N[own])
        given = np.concatenate([rows.passage_NC[own].ravel(), *(pairs.negatives[each] for each in own)])
        known = np.union1d(belong, given)
        passages.append(np.union1d(known, rows.others(row, candidates - len(known), generator, but=known)))
        relevant.append(np.isin(passages[-1], belong))
    return Ranking(first_Q, passages, relevant)


def load(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> Splits[CandidateSet]:
    """Read and split; refuses rows with nothing to learn or to measure. Raises ConfigError: the loss is not for rows of
    this form; DataError: rows are malformed, on both sides, or have no negatives; a query leaves no passage beside it.
    """
    section = config.rerank
    sources = split(config)
    joins = PairTokenizer(tokenizer, config.data.max_tokens)
    prefixes = EmbedConfig(query_prefix=section.query_prefix, passage_prefix=section.passage_prefix)

    def encoded(source: PairSource) -> PairSet:
        pairs = pair_set.encode(source, tokenizer, prefixes, max_tokens=config.data.max_tokens, seed=config.rows_seed)
        pairs = replace(pairs, units=pair_set.raw_units(pairs.units.texts, tokenizer))
        joins.require_room(pairs.units, pairs.anchor_N)
        return pairs

    def candidates(pairs: PairSet) -> CandidateSet:
        negatives = 0 if pairs.form == "scored" else section.negatives
        rows = CandidateSet(pairs, joins, negatives, seed=config.rows_seed)
        assert len(rows.passage_NC), "refused where a row has too few"
        return rows

    splits = sources.encoded(encoded)
    # That of the fewest passages first: what it has room for, the others have.
    made = {id(pairs): candidates(pairs) for pairs in sorted(filter(None, splits), key=len)}
    return splits.map(lambda pairs: made[id(pairs)])


def split(config: RunConfig) -> PairSources:
    """The rows of all splits before they are encoded."""
    return pair_data.split(config, lambda train: _require_loss(config, train))


def _require_loss(config: RunConfig, train: PairSource) -> None:
    section, form = config.rerank, train.form
    if form == "labelled":
        raise DataError(
            f"{train.name}: has texts with classes, and recipe rerank reads anchor and positive (with `negatives`), or "
            "sentence1, sentence2 and score. Recipes embed and classify learn classes."
        )
    if section.loss not in ("auto", *RERANK_LOSSES[form]):
        raise ConfigError(
            f"rerank.loss={section.loss} is not for {form} rows, as {train.name} has. "
            f"Write rerank.loss={'|'.join(RERANK_LOSSES[form])}, or leave it out."
        )
    if form != "scored":
        return
    if given := [f"rerank.{key}" for key in ("mine", "negatives", "temperature", "candidates") if section.differs(key)]:
        raise ConfigError(
            f"{' and '.join(given)}: for rows with a positive, and {train.name} has scored rows. Leave it out."
        )
    if section.loss_of(form) == "bce" and (
        far := next((each for each in train.records if not 0 <= each.score <= 1), None)
    ):
        raise DataError(
            f"{far.place}: `score` is {far.score:g}, and rerank.loss=bce takes scores for probabilities. Scale scores "
            "to 0 to 1, or write rerank.loss=mse."
        )
    if len({each.score for each in train.records}) == 1:
        raise DataError(f"{train.name}: every score is {train.records[0].score:g}, so there is nothing to learn.")
