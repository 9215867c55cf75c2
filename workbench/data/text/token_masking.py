"""Masked language modelling: an encoder predicts masked tokens.

The masks of a row depend only on seed, epoch and the row's content: they are the same in any micro-batch, after a
restart, and in any file, set or order, and change from epoch to epoch. Held-out rows always have the masks of epoch 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from workbench.data.batching import Indices, MicroBatch, Row, encoder_inputs, padded
from workbench.data.text.chat import Encoded, LossOn, outcomes
from workbench.data.text.formats import Conversion, Example, Reader
from workbench.data.text.media import MediaProcessor
from workbench.errors import BackboneError, DataError, WorkbenchError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MASKED, RANDOM = 0.8, 0.1
"""Shares of the predicted tokens that become the mask token or a random one; others stay (Devlin et al. 2019)."""


class MlmEncoder:
    """Tokenises text for an encoder and masks its tokens. Raises BackboneError: the tokenizer has no mask token.

    Args:
        tokenizer: A tokenizer with a mask token.
        share: Share of a row's tokens that are predicted, at least one; special tokens never are.
        seed: Seed of the masks.
    """

    conversion: Conversion | None = None  # rows are read as their format says
    reader: Reader | None = None  # they are those of the file
    processor: MediaProcessor | None = None  # encoders read no pictures

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, share: float, seed: int) -> None:
        if tokenizer.mask_token_id is None:
            raise BackboneError(
                f"{type(tokenizer).__name__} has no mask token. Use an encoder that was pretrained with one, "
                "such as google-bert/bert-base-uncased, or start from the recipe "
                "sft/quickstart, which learns to write texts."
            )
        self._tokenizer, self._share, self._seed = tokenizer, share, seed
        self._special = set(tokenizer.all_special_ids)
        self._ordinary = np.asarray(sorted(set(tokenizer.get_vocab().values()) - self._special))

    @property
    def identity(self) -> list[object]:
        return ["masking", self._share]

    def expanded(self, example: Example, *, loss_on: LossOn) -> list[Example]:
        """The example alone."""
        return [example]

    def encode(self, example: Example, *, loss_on: LossOn) -> Encoded:
        """Encode text with the tokenizer's special tokens; every other token may be predicted. Raises DataError: the
        row is a conversation."""
        return self._encoded(self._tokenizer(_text(example), verbose=False)["input_ids"])

    def encode_many(self, examples: Sequence[Example], *, loss_on: LossOn) -> list[Encoded | WorkbenchError]:
        """`encode` of each example, as `outcomes`, tokenised in one call."""
        text_outcomes = outcomes(_text, examples)
        texts = [each for each in text_outcomes if isinstance(each, str)]
        tokenised = iter(self._tokenizer(texts, verbose=False)["input_ids"] if texts else [])
        return [self._encoded(next(tokenised)) if isinstance(each, str) else each for each in text_outcomes]

    def _encoded(self, ids: list[int]) -> Encoded:
        has_bos, has_eos = (ids[end] in self._special for end in (0, -1))
        return Encoded(ids, [token not in self._special for token in ids], bos=has_bos, kept=int(has_eos))

    def targets(self, encoded: Encoded) -> int:
        return self._count(sum(encoded.supervised))

    def seen(self, row: Row, *, epoch: int) -> Row:
        """The row with its masks in pass `epoch`; only the predicted tokens are supervised."""
        rng = np.random.default_rng([self._seed, 2, epoch, row.digest])
        candidates = np.flatnonzero(row.supervised)
        positions = rng.choice(candidates, size=self._count(len(candidates)), replace=False)
        draw, ids, predicted = rng.random(len(positions)), row.input_ids.copy(), np.zeros_like(row.supervised)
        random = (draw >= MASKED) & (draw < MASKED + RANDOM)
        ids[positions[draw < MASKED]] = self._tokenizer.mask_token_id
        ids[positions[random]] = rng.choice(self._ordinary, size=int(random.sum()))
        predicted[positions] = True
        return row._replace(input_ids=ids, supervised=predicted)

    def collate(self, rows: Sequence[Row], *, epoch: int) -> MicroBatch:
        """Mask and pad rows; the original tokens are the labels."""
        import torch

        masked = [self.seen(row, epoch=epoch) for row in rows]
        positions_N: Indices = np.flatnonzero(padded([row.supervised for row in masked]))
        return MicroBatch(
            inputs=encoder_inputs([row.input_ids for row in masked]),
            positions_N=torch.from_numpy(positions_N),
            labels_N=torch.from_numpy(padded([row.input_ids for row in rows]).reshape(-1)[positions_N]),
            tokens=sum(len(row.input_ids) for row in rows),
        )

    def _count(self, candidates: int) -> int:
        return max(1, round(self._share * candidates))


def _text(example: Example) -> str:
    if not example.text:
        raise DataError(
            f"{example.place}: is a conversation, but an encoder reads text. "
            "Write data.format=text data.columns='{text: NAME}' with the name of a column."
        )
    return example.whole_text
