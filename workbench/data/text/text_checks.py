"""Refusals of data that would train without teaching: seen before the first step, not after the last."""

from __future__ import annotations

from workbench.data.splits import Splits
from workbench.data.text.tokenized_set import TokenizedSet
from workbench.errors import DataError


def require_teaching(data: Splits[TokenizedSet]) -> None:
    """Raise DataError where training would learn nothing, or nothing would be measured."""
    if int(data.train.supervised.sum()) == 0:
        raise DataError(f"{data.train.source}: no token carries loss. Look at `workbench check`, and at data.loss_on.")
    if int(data.held_out.supervised.sum()) == 0:
        raise DataError(f"{data.held_out.source}: no held-out token carries loss, so nothing would be measured.")


def require_ends(data: Splits[TokenizedSet]) -> None:
    """Raise DataError where a model that writes text would never learn to stop."""
    if int(data.train.ends.sum()) == 0:
        raise DataError(
            f"{data.train.source}: no supervised token ends a turn, so the model would never learn to stop. "
            "Write data.truncate=left or a larger data.max_tokens, so that answers keep their end."
        )
