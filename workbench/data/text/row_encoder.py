"""How examples are written for a model as token ids: what a row encoder does, and which one a run has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast

from workbench.config import RunConfig
from workbench.data.batching import MicroBatch, Row
from workbench.data.text.chat import ChatEncoder, Encoded, LossOn
from workbench.data.text.encoder_decoder import Seq2SeqEncoder
from workbench.data.text.formats import Conversion, Example, Reader
from workbench.data.text.media import MediaProcessor
from workbench.data.text.token_masking import MlmEncoder
from workbench.data.text.transcripts import TranscriptEncoder
from workbench.errors import BackboneError, ConfigError, WorkbenchError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from workbench.data.text.transcripts import SoundProcessor


OwnEncoder = ChatEncoder | MlmEncoder | TranscriptEncoder
"""How the rows of a run are written."""


@dataclass(frozen=True)
class WrappedEncoder:
    """Writes rows as `base` does, where a subclass says nothing else."""

    base: ChatEncoder

    @property
    def processor(self) -> MediaProcessor | None:
        return self.base.processor

    def expanded(self, example: Example, *, loss_on: LossOn) -> list[Example]:
        """The example alone."""
        return [example]

    def encode(self, example: Example, *, loss_on: LossOn) -> Encoded:
        return self.base.encode(example, loss_on=loss_on)

    def encode_many(self, examples: Sequence[Example], *, loss_on: LossOn) -> list[Encoded | WorkbenchError]:
        return self.base.encode_many(examples, loss_on=loss_on)

    def targets(self, encoded: Encoded) -> int:
        return self.base.targets(encoded)

    def seen(self, row: Row, *, epoch: int) -> Row:
        return self.base.seen(row, epoch=epoch)

    def collate(self, rows: Sequence[Row], *, epoch: int) -> MicroBatch:
        return self.base.collate(rows, epoch=epoch)


class RowEncoder(Protocol):
    """How examples are written for a model, and what it sees of them. It can be pickled."""

    @property
    def conversion(self) -> Conversion | None:
        """How rows are read where they are not read as their format says."""

    @property
    def reader(self) -> Reader | None:
        """How a file is read where its rows are not taken as they are."""

    @property
    def processor(self) -> MediaProcessor | None:
        """Reads the pictures of rows; None: rows with pictures are refused."""

    @property
    def identity(self) -> list[Any]:
        """All that the written tokens depend on, besides the tokenizer; JSON."""

    def expanded(self, example: Example, *, loss_on: LossOn) -> Sequence[Example]:
        """The examples that the model learns from this one: itself, or several where one does not hold all answers."""

    def encode(self, example: Example, *, loss_on: LossOn) -> Encoded:
        """The example's ids, and which of them carry loss."""

    def encode_many(self, examples: Sequence[Example], *, loss_on: LossOn) -> list[Encoded | WorkbenchError]:
        """`encode` of each example, as `outcomes`: the same for the same examples, whatever came before."""

    def targets(self, encoded: Encoded) -> int:
        """How many tokens of the example are predicted."""

    def seen(self, row: Row, *, epoch: int) -> Row:
        """One row as the model sees it in pass `epoch` over the data, with what is predicted marked."""

    def collate(self, rows: Sequence[Row], *, epoch: int) -> MicroBatch:
        """Rows as the model sees them in pass `epoch` over the data."""


def row_encoder(
    config: RunConfig,
    hub: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    template: str | None = None,
    processor: MediaProcessor | str | None = None,
) -> ChatEncoder | MlmEncoder:
    """Choose the row encoder for the recipe of `config` and the architecture `hub`. Raises BackboneError: the tokenizer
    or the template does not allow it.

    Args:
        template: Jinja source that replaces the tokenizer's chat template.
        processor: Reads the pictures of rows; or why none are read; None: only other recipes read any.
    """
    if config.reads_sound:
        raise ConfigError(
            "this verb reads texts, and rows with data.format=audio are recordings. They are read by `workbench "
            "check`, `plan`, `run`, `evaluate`, `predict`, `merge` and `lr`."
        )
    if config.task.head == "masked":
        return MlmEncoder(tokenizer, share=config.masking.share, seed=config.rows_seed)
    return conversation_encoder(hub, tokenizer, template=template, processor=processor)


def encoder_of_run(
    config: RunConfig,
    hub: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    template: str | None = None,
    processor: MediaProcessor | str | None = None,
) -> OwnEncoder:
    """The row encoder of a run, also over recordings; see `row_encoder`."""
    if config.reads_sound:
        return TranscriptEncoder(tokenizer, cast("SoundProcessor", processor))
    return row_encoder(config, hub, tokenizer, template=template, processor=processor)


def conversation_encoder(
    hub: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    template: str | None = None,
    processor: MediaProcessor | str | None = None,
) -> ChatEncoder:
    """How the architecture `hub` reads prompts and answers; see `row_encoder`. `processor`: reads pictures, or why none
    are read; None: its recipe reads text alone."""
    if not hub.is_encoder_decoder:
        return ChatEncoder(tokenizer, template, **({} if processor is None else {"processor": processor}))
    start = getattr(hub, "decoder_start_token_id", None)
    if start is None:
        raise BackboneError(
            f"{type(hub).__name__}: its config.json has no decoder_start_token_id, from which the decoder starts. "
            "Write the id that it was pretrained with into config.json (for T5 its pad_token_id)."
        )
    return Seq2SeqEncoder(tokenizer, template, start=int(start))
