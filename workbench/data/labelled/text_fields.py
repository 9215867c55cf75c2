"""Rows of several columns as one text, truncated so that every column keeps its share of the tokens.

Shapes: F columns of a template, T tokens of a row.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

from workbench.config.sections.classes_config import ClassesConfig
from workbench.data.batching import Indices
from workbench.data.labelled.encoded_texts import EncodedTexts, FieldTokens
from workbench.errors import BackboneError, DataError

ROWS = 1000
"""Rows that are tokenised together: what the tokenizer says of them takes 5 kB a row until they are copied."""


class FieldTokenizer:
    """Tokenises rows of several columns; a row that fits gets the tokens that the tokenizer gives to its whole text.

    Args:
        tokenizer: A fast tokenizer, since truncation needs the offsets of tokens in the text.
        max_tokens: Most tokens of a row, special tokens included.

    Raises:
        BackboneError: The tokenizer is not a fast one.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, config: ClassesConfig, *, max_tokens: int) -> None:
        if not tokenizer.is_fast:
            raise BackboneError(
                f"{type(tokenizer).__name__} is not a fast tokenizer, which truncating long rows needs. "
                "Use a backbone with a tokenizer.json."
            )
        self._tokenizer, self._config, self._max_tokens = tokenizer, config, max_tokens

    def text(self, fields: Sequence[str]) -> str:
        """The whole text of a row."""
        return "".join(text for text, _ in self._segments(fields))

    def encode(self, rows: Iterable[Sequence[str]], places: Iterable[str]) -> EncodedTexts:
        """Tokenise rows of columns; `places` name them in messages.

        Raises:
            DataError: The text of the template alone fills max_tokens.
        """
        return EncodedTexts.of(self._encoded(zip(rows, places, strict=True)))

    def _encoded(self, rows: Iterator[tuple[Sequence[str], str]]) -> Iterator[FieldTokens]:
        while chunk := list(itertools.islice(rows, ROWS)):
            texts = [self.text(fields) for fields, _ in chunk]
            whole = self._tokenizer(texts, return_attention_mask=False, return_token_type_ids=False, verbose=False)[
                "input_ids"
            ]
            for ids, (fields, place) in zip(whole, chunk, strict=True):
                if len(ids) <= self._max_tokens:
                    yield FieldTokens(np.asarray(ids, dtype=np.int64), False)
                else:
                    yield FieldTokens(self._truncated(fields, place), True)

    def _truncated(self, fields: Sequence[str], place: str) -> Indices:
        encoding = self._tokenizer(self.text(fields), return_offsets_mapping=True, verbose=False)
        ids_T = np.asarray(encoding["input_ids"], dtype=np.int64)
        field_T = self._field_of_tokens(fields, encoding["offset_mapping"])
        kept_T = field_T < 0  # the template and special tokens
        overhead = int(kept_T.sum())
        lengths = [int((field_T == field).sum()) for field in range(len(fields))]
        budget = self._max_tokens - overhead
        if budget < sum(map(bool, lengths)):
            raise DataError(
                f"{place}: data.max_tokens={self._max_tokens} leaves no token to some of its columns: the template and "
                f"special tokens take {overhead}. Raise it, or shorten classes.text."
            )
        for field, count in enumerate(allocate(lengths, self._config.parts, budget)):
            kept_T[self._select(np.flatnonzero(field_T == field), count)] = True
        return ids_T[kept_T]

    def _select(self, tokens: Indices, count: int) -> Indices:
        """`count` of a column's tokens: the first, the last, both ends or the middle, as `classes.keep` says."""
        if self._config.keep == "middle":
            start = (len(tokens) - count) // 2
            return tokens[start : start + count]
        head = {"start": count, "end": 0, "ends": -(-count // 2)}[self._config.keep]
        return np.concatenate([tokens[:head], tokens[len(tokens) - (count - head) :]])

    def _field_of_tokens(self, fields: Sequence[str], offsets: Sequence[tuple[int, int]]) -> npt.NDArray[np.int64]:
        """The column that holds the last character of each token; -1 for tokens of the template and special ones."""
        segments = self._segments(fields)
        field_of_character = np.repeat([field for _, field in segments], [len(text) for text, _ in segments])
        fields_T = [field_of_character[end - 1] if end > start else -1 for start, end in offsets]
        return np.asarray(fields_T, dtype=np.int64)

    def _segments(self, fields: Sequence[str]) -> list[tuple[str, int]]:
        """The text in pieces, each with the number of its column, or -1 for the template's own words."""
        segments, number = [], 0
        for literal, field in self._config.pieces:
            segments.append((literal, -1))
            if field is not None:
                segments.append((fields[number], number))
                number += 1
        return segments


def allocate(lengths: Sequence[int], shares: Sequence[float], budget: int) -> list[int]:
    """Tokens that each column keeps: all where all fit, else `budget` in total.

    Each of the n columns that are not empty keeps at least one token and its share of budget - n, or all that it has;
    what short columns leave is divided among the others by their shares.

    Args:
        lengths: Tokens of each column (F,).
        shares: Above 0, sum 1 (F,).
        budget: Tokens for all columns; at least one for each that is not empty.
    """
    kept = [min(length, 1) for length in lengths]
    budget -= sum(kept)
    unfilled = {field for field, length in enumerate(lengths) if length > 1}
    while unfilled:
        total = sum(shares[field] for field in unfilled)
        quota = {field: budget * shares[field] / total for field in unfilled}
        short = {field for field in unfilled if lengths[field] - 1 <= quota[field]}
        if not short:
            return _add_rounded(kept, quota, budget)
        for field in short:
            kept[field] = lengths[field]
            budget -= lengths[field] - 1
        unfilled -= short
    return kept


def _add_rounded(kept: list[int], quota: dict[int, float], budget: int) -> list[int]:
    """Add to `kept` whole numbers near `quota` that sum to `budget`: the largest remainders are rounded up."""
    for field, share in quota.items():
        kept[field] += int(share)
    left = budget - sum(int(share) for share in quota.values())
    for field in sorted(quota, key=lambda field: (int(quota[field]) - quota[field], field))[:left]:
        kept[field] += 1
    return kept
