"""Labels drawn from what a model itself predicts, for estimates of curvature.

A draw is a function of seed, step, row and token alone, whichever rows share a micro-batch.

Legend: B rows, L length, N labels.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from workbench.adapters.row_dropout import row_hash, row_keys

_PLACE = 0x50F1A
"""Tells these draws from the masks of layers."""


class LabelDraws:
    """Tells a loss whether to put labels that it draws in the place of those of the rows."""

    def __init__(self) -> None:
        self._on = False

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Inside the block labels are drawn."""
        self._on = True
        try:
            yield
        finally:
            self._on = False

    def numbers(self, positions_N: Tensor, *, tokens: int) -> Tensor | None:
        """A number in [0, 1) for each label of the rows that compute now (N,), float32; None where none is drawn.

        Args:
            positions_N: Flat places of the labels in the rows (B * L).
            tokens: L.
        """
        if not self._on:
            return None
        keys_B = row_keys()
        assert keys_B is not None, "rows compute inside of `drawing`"
        hash_BL = row_hash(keys_B, _PLACE, tokens=tokens, units=1)[..., 0]
        even_N = (hash_BL.flatten()[positions_N] >> 8).float() * 2**-24 + 0.5  # the 24 bits that a float32 holds
        return even_N.clamp_(0, 1 - 2**-24)
