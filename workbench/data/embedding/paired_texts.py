"""Pairs of a query and a passage as a cross-encoder reads them, in one row.

Legend: S pairs of a micro-batch, L padded length.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedTokenizerBase

from workbench.data.batching import Indices, MicroBatch, encoder_inputs, padded
from workbench.data.embedding.text_units import TextUnits
from workbench.data.rows import excerpt
from workbench.errors import DataError

TYPES = "token_type_ids"
"""Input by which BERT knows which of two texts a token is of."""
LEAST_ROOM = 8
"""Tokens of a passage that must be left beside every query."""


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
        """Tokens of pairs of texts with so many tokens each, before they are cut."""
        whole: Indices = query + passage + self.special
        return whole

    def lengths(self, query: Indices, passage: Indices) -> Indices:
        """Tokens of pairs of texts with so many tokens each."""
        return np.minimum(self.whole(query, passage), self.max_tokens)

    def require_room(self, units: TextUnits, queries: Indices) -> None:
        """Refuse a query beside which hardly anything of a passage is read.

        Raises:
            DataError: There is one.
        """
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
        """Tokens of each pair."""
        length_U = self.units.lengths
        return self.joins.lengths(length_U[self.query_P], length_U[self.passage_P])

    def batch(self, indices: Indices, *, epoch: int = 0) -> MicroBatch:
        """The pairs `indices`, padded, the same in each epoch."""
        texts = self.units.texts
        return self.joins.batch(
            [texts[unit] for unit in self.query_P[indices]], [texts[unit] for unit in self.passage_P[indices]]
        )

    def take(self, indices: Indices) -> PairedTexts:
        """The pairs `indices`."""
        return PairedTexts(self.units, self.joins, self.query_P[indices], self.passage_P[indices])

    def arrays(self) -> Iterator[npt.NDArray[Any]]:
        """The tokens of both texts of each pair."""
        tokens = self.units.tokens
        for query, passage in zip(self.query_P, self.passage_P, strict=True):
            yield np.concatenate([tokens[query], [-1], tokens[passage]])
