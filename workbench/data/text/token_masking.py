"""Masked language modelling: tokens are hidden from an encoder, which predicts them from both sides.

The masks of a row are a function of (seed, epoch, row) alone: the same in any micro-batch and after a restart, and
others in the next epoch. Held-out rows are always seen as in epoch 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from workbench.data.batching import Indices, MicroBatch, Row, encoder_inputs, padded
from workbench.data.text.chat import Encoded, LossOn
from workbench.data.text.formats import Example
from workbench.errors import BackboneError, DataError

MASKED, RANDOM = 0.8, 0.1
"""Shares of the predicted tokens that become the mask token, and another token; the rest stay (Devlin et al. 2019)."""


class Masking:
    """How a tokenizer writes text for an encoder, and which of its tokens are predicted.

    Args:
        tokenizer: Has a mask token.
        share: Share of a row's tokens that are predicted, at least one; special tokens never are.
        seed: Decides the masks.

    Raises:
        BackboneError: the tokenizer has no mask token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, share: float, seed: int) -> None:
        if tokenizer.mask_token_id is None:
            raise BackboneError(
                f"{type(tokenizer).__name__} has no mask token, so nothing can be hidden. Take an encoder that was "
                "pretrained with one, such as google-bert/bert-base-uncased, or write recipe=sft."
            )
        self._tokenizer, self._share, self._seed = tokenizer, share, seed
        self._special = set(tokenizer.all_special_ids)
        self._words = np.asarray(sorted(set(tokenizer.get_vocab().values()) - self._special))

    @property
    def identity(self) -> list[object]:
        """All that the written tokens depend on, besides the tokenizer."""
        return ["masking", self._share]

    def expanded(self, example: Example, *, loss_on: LossOn) -> list[Example]:
        """The example alone."""
        return [example]

    def encode(self, example: Example, *, loss_on: LossOn) -> Encoded:
        """The text between the tokenizer's special tokens; every other token may be predicted.

        Raises:
            DataError: The row is a conversation; names the place.
        """
        if not example.text:
            raise DataError(
                f"{example.place}: is a conversation, but an encoder reads text. "
                "Write data.format=text data.columns='{text: NAME}' with the name of a column."
            )
        ids = list(self._tokenizer("".join(text for text, _ in example.text), verbose=False)["input_ids"])
        opened, closed = (ids[end] in self._special for end in (0, -1))
        return Encoded(ids, [token not in self._special for token in ids], bos=opened, kept=int(closed))

    def targets(self, encoded: Encoded) -> int:
        """How many tokens are predicted."""
        return self._count(sum(encoded.supervised))

    def seen(self, row: Row, *, epoch: int) -> Row:
        """The row with its masks, and only what is predicted marked."""
        chance = np.random.default_rng([self._seed, 2, epoch, row.number])
        words = np.flatnonzero(row.supervised)
        chosen = chance.choice(words, size=self._count(len(words)), replace=False)
        kind, ids, predicted = chance.random(len(chosen)), row.input_ids.copy(), np.zeros_like(row.supervised)
        other = (kind >= MASKED) & (kind < MASKED + RANDOM)
        ids[chosen[kind < MASKED]] = self._tokenizer.mask_token_id
        ids[chosen[other]] = chance.choice(self._words, size=int(other.sum()))
        predicted[chosen] = True
        return row._replace(input_ids=ids, supervised=predicted)

    def collate(self, rows: Sequence[Row], *, epoch: int) -> MicroBatch:
        """Rows with their masks, padded; the tokens that were there are the labels."""
        seen = [self.seen(row, epoch=epoch) for row in rows]
        places_N: Indices = np.flatnonzero(padded([row.supervised for row in seen]))
        return MicroBatch(
            inputs=encoder_inputs([row.input_ids for row in seen]),
            positions_N=torch.from_numpy(places_N),
            labels_N=torch.from_numpy(padded([row.input_ids for row in rows]).reshape(-1)[places_N]),
            tokens=sum(len(row.input_ids) for row in rows),
        )

    def _count(self, words: int) -> int:
        return max(1, round(self._share * words))
