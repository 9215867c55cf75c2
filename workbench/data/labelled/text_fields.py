"""Rows of several columns as one text, cut so that every column keeps its share of the tokens.

Shapes: F columns of a template, T tokens of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

from workbench.config.classes_config import ClassesConfig
from workbench.data.batching import Indices
from workbench.errors import BackboneError, DataError


class FieldTokens(NamedTuple):
    """Tokens of a row (T,), and whether it had more."""

    input_ids: Indices
    cut: bool


class FieldTokenizer:
    """Columns to tokens; a row that fits is written as the tokenizer itself writes the text.

    Args:
        tokenizer: A fast tokenizer.
        max_tokens: Of a row, special tokens included.

    Raises:
        BackboneError: the tokenizer cannot tell which token came from where.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, config: ClassesConfig, *, max_tokens: int) -> None:
        if not tokenizer.is_fast:
            raise BackboneError(
                f"{type(tokenizer).__name__} is not a fast tokenizer, which cutting long rows needs. "
                "Take a backbone with a tokenizer.json."
            )
        self._tokenizer, self._config, self._max_tokens = tokenizer, config, max_tokens

    def text(self, fields: Sequence[str]) -> str:
        """The whole text of a row."""
        return "".join(text for text, _ in self._runs(fields))

    def write(self, rows: Sequence[Sequence[str]], places: Sequence[str]) -> list[FieldTokens]:
        """Tokens of rows of fields.

        Raises:
            DataError: what stands between the columns alone leaves them no token; names the place.
        """
        if not rows:
            return []
        whole = self._tokenizer([self.text(fields) for fields in rows], verbose=False)["input_ids"]
        return [
            FieldTokens(np.asarray(ids, dtype=np.int64), False)
            if len(ids) <= self._max_tokens
            else FieldTokens(self._cut(fields, place), True)
            for ids, fields, place in zip(whole, rows, places, strict=True)
        ]

    def _cut(self, fields: Sequence[str], place: str) -> Indices:
        found = self._tokenizer(self.text(fields), return_offsets_mapping=True, verbose=False)
        ids_T = np.asarray(found["input_ids"], dtype=np.int64)
        owner_T = self._owners(fields, found["offset_mapping"])
        lengths = [int((owner_T == field).sum()) for field in range(len(fields))]
        room = self._max_tokens - int((owner_T < 0).sum())
        if room < sum(map(bool, lengths)):
            raise DataError(
                f"{place}: data.max_tokens={self._max_tokens} leaves no token to some of its columns, beside "
                f"{int((owner_T < 0).sum())} of the template and special ones. Raise it, or shorten classes.text."
            )
        kept_T = owner_T < 0
        for field, count in enumerate(allot(lengths, self._config.parts, room)):
            kept_T[self._chosen(np.flatnonzero(owner_T == field), count)] = True
        return ids_T[kept_T]

    def _chosen(self, tokens: Indices, count: int) -> Indices:
        """`count` of a field's tokens."""
        if self._config.keep == "middle":
            start = (len(tokens) - count) // 2
            return tokens[start : start + count]
        head = {"start": count, "end": 0, "ends": -(-count // 2)}[self._config.keep]
        return np.concatenate([tokens[:head], tokens[len(tokens) - (count - head) :]])

    def _owners(self, fields: Sequence[str], offsets: Sequence[tuple[int, int]]) -> npt.NDArray[np.int64]:
        """The field that holds the last character of each token; -1 for those of the template and special ones."""
        runs = self._runs(fields)
        owner_of = np.repeat([owner for _, owner in runs], [len(text) for text, _ in runs])
        return np.asarray([owner_of[end - 1] if end > start else -1 for start, end in offsets], dtype=np.int64)

    def _runs(self, fields: Sequence[str]) -> list[tuple[str, int]]:
        """Text in order, and the number of the field that it comes from, or -1."""
        runs, number = [], 0
        for literal, field in self._config.pieces:
            runs.append((literal, -1))
            if field is not None:
                runs.append((fields[number], number))
                number += 1
        return runs


def allot(lengths: Sequence[int], parts: Sequence[float], room: int) -> list[int]:
    """Tokens that each field keeps: all where all fit, else `room` in total.

    Each of the n fields that hold anything keeps at least one token and its part of room - n, or all that it has; what
    short fields leave goes to the others, by their parts.

    Args:
        lengths: Tokens of each field (F,).
        parts: Above 0, sum 1 (F,).
        room: Tokens for all; at least one for each field that holds any.
    """
    kept = [min(length, 1) for length in lengths]
    room -= sum(kept)
    waiting = {field for field, length in enumerate(lengths) if length > 1}
    while waiting:
        total = sum(parts[field] for field in waiting)
        quota = {field: room * parts[field] / total for field in waiting}
        short = {field for field in waiting if lengths[field] - 1 <= quota[field]}
        if not short:
            return _rounded(kept, quota, room)
        for field in short:
            kept[field] = lengths[field]
            room -= lengths[field] - 1
        waiting -= short
    return kept


def _rounded(kept: list[int], quota: dict[int, float], room: int) -> list[int]:
    """`kept` plus whole numbers near `quota` that sum to `room`: the largest remainders are rounded up."""
    for field, share in quota.items():
        kept[field] += int(share)
    left = room - sum(int(share) for share in quota.values())
    for field in sorted(quota, key=lambda field: (int(quota[field]) - quota[field], field))[:left]:
        kept[field] += 1
    return kept
