"""Rows of text as the model reads them: tokens.

Legend: B rows of a micro-batch, L padded length.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from workbench.data.batching import Indices, encoder_inputs
from workbench.data.labelled.augmented_texts import AugmentedTexts
from workbench.data.labelled.encoded_texts import EncodedTexts
from workbench.data.labelled.row_inputs import ModelInputs


@dataclass(frozen=True, eq=False)
class TokenRows:
    """Tokenised rows; see `RowInputs`."""

    encoded: EncodedTexts
    augmented: AugmentedTexts | None = None
    """The same rows as training rewrites them; None: it reads them as they are."""

    @property
    def lengths(self) -> Indices:
        """Tokens of each row."""
        return self.encoded.length_N

    @property
    def truncated(self) -> int:
        """Number of rows that were truncated to data.max_tokens."""
        return int(self.encoded.truncated_N.sum())

    @property
    def redrawn(self) -> bool:
        """No: a pass reads a text in one way."""
        return False

    def batch(self, indices: Indices, *, epoch: int | None, repeats: Indices | None = None) -> ModelInputs:
        """The rows `indices`, padded; the same in each epoch."""
        ids = [self.encoded[index].input_ids for index in indices]
        inputs = encoder_inputs(ids)
        length = inputs["input_ids"].shape[1]
        last_B = [row * length + len(each) - 1 for row, each in enumerate(ids)]
        return ModelInputs(inputs, torch.tensor(last_B), sum(map(len, ids)))

    def rewritten(self, *, epoch: int, progress: float) -> TokenRows:
        """The rows as pass `epoch` has rewritten them."""
        return self if self.augmented is None else TokenRows(self.augmented.tokens(epoch))

    def take(self, indices: Indices) -> TokenRows:
        """The rows `indices`."""
        augmented = None if self.augmented is None else self.augmented.take(indices)
        return TokenRows(self.encoded.take(indices), augmented)

    def concatenated(self, other: TokenRows) -> TokenRows:
        """These rows, followed by those of `other`, both of which are rewritten or neither."""
        assert (self.augmented is None) == (other.augmented is None)
        both = self.augmented and other.augmented and self.augmented.concatenated(other.augmented)
        return TokenRows(self.encoded.concatenated(other.encoded), both)

    def arrays(self) -> Iterator[npt.NDArray[Any]]:
        """The tokens of each row."""
        return (each.input_ids for each in self.encoded)

    def differ(self, other: TokenRows) -> npt.NDArray[np.bool_]:
        """Which rows have other tokens in `other`."""
        pairs = zip(self.encoded, other.encoded, strict=True)
        return np.asarray([not np.array_equal(one.input_ids, two.input_ids) for one, two in pairs], dtype=bool)
