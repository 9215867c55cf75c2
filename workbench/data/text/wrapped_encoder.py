"""Encoders of rows that are conversations with something done to them: the rest is left to the encoder inside."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from workbench.data.batching import MicroBatch, Row
from workbench.data.text.chat import ChatEncoder, Encoded, LossOn
from workbench.data.text.formats import Example
from workbench.errors import WorkbenchError


@dataclass(frozen=True)
class WrappedEncoder:
    """Writes rows as `base` does, where a subclass says nothing else."""

    base: ChatEncoder

    def encode(self, example: Example, *, loss_on: LossOn) -> Encoded:
        """The example's ids, and which of them carry loss."""
        return self.base.encode(example, loss_on=loss_on)

    def encode_many(self, examples: Sequence[Example], *, loss_on: LossOn) -> list[Encoded | WorkbenchError]:
        """`encode` of each example, as `chat.outcomes`."""
        return self.base.encode_many(examples, loss_on=loss_on)

    def targets(self, encoded: Encoded) -> int:
        """How many tokens are predicted."""
        return self.base.targets(encoded)

    def seen(self, row: Row, *, epoch: int) -> Row:
        """The row as the model sees it."""
        return self.base.seen(row, epoch=epoch)

    def collate(self, rows: Sequence[Row], *, epoch: int) -> MicroBatch:
        """Rows as the model sees them."""
        return self.base.collate(rows, epoch=epoch)
