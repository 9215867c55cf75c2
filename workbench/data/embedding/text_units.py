"""Texts as a backbone reads them, each once, however many rows it is in.

Legend: B texts of a micro-batch, L padded length.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedTokenizerBase

from workbench.data.batching import Indices, MicroBatch, encoder_inputs
from workbench.data.rows import excerpt
from workbench.errors import DataError


@dataclass(frozen=True, eq=False)
class TextUnits:
    """Different texts with their tokens."""

    texts: tuple[str, ...]
    """With the instruction before each."""
    tokens: tuple[Indices, ...]
    cut: tuple[bool, ...]
    """Whether each was cut to data.max_tokens."""

    @property
    def truncated(self) -> int:
        """Number of texts that were cut."""
        return sum(self.cut)

    @cached_property
    def lengths(self) -> Indices:
        """Tokens of each text."""
        return np.asarray([len(each) for each in self.tokens], dtype=np.int64)

    def batch(self, indices: Indices, *, epoch: int = 0) -> MicroBatch:
        """The texts `indices`, padded on the right, the same in each epoch; `positions_N` are their last tokens."""
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
        """The tokens of each text."""
        return iter(self.tokens)


def units(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, *, max_tokens: int) -> TextUnits:
    """The texts with their tokens, cut on the right.

    Raises:
        DataError: A text has no token.
    """
    encoded = tokenizer(list(texts), verbose=False)["input_ids"] if texts else []
    cut = tokenizer(list(texts), truncation=True, max_length=max_tokens, verbose=False)["input_ids"] if texts else []
    for text, ids in zip(texts, cut, strict=True):
        if not ids:
            raise DataError(f"The text {excerpt(text)} has no token of this backbone. Leave it out.")
    tokens = tuple(np.asarray(ids, dtype=np.int64) for ids in cut)
    return TextUnits(tuple(texts), tokens, tuple(len(ids) > max_tokens for ids in encoded))


def raw_units(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> TextUnits:
    """The texts with their own tokens alone, whole, without those that a model puts around them.

    Raises:
        DataError: A text has no token.
    """
    encoded = tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"] if texts else []
    for text, ids in zip(texts, encoded, strict=True):
        if not ids:
            raise DataError(f"The text {excerpt(text)} has no token of this backbone. Leave it out.")
    return TextUnits(tuple(texts), tuple(np.asarray(ids, dtype=np.int64) for ids in encoded), (False,) * len(texts))


def numbered(texts: Iterable[str]) -> dict[str, int]:
    """A number for each different text, in the order in which they come first."""
    return {text: number for number, text in enumerate(dict.fromkeys(texts))}
