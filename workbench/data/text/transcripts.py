"""Rows of recordings and their transcripts, for a model that writes what it hears.

The encoder reads the features of a recording, whose positions stand at the front of a row's tokens; the decoder reads
the tokens of language and task, and learns the transcript and its end.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from workbench.config import DataConfig
from workbench.config.sections.audio_config import AudioConfig
from workbench.data.batching import MicroBatch, Row, collate
from workbench.data.rows import RawRow, string_of
from workbench.data.text import media
from workbench.data.text.chat import Encoded, LossOn, outcomes
from workbench.data.text.formats import Conversion, Example, Reader
from workbench.data.text.media import MediaProcessor
from workbench.data.text.messages import Message
from workbench.errors import DataError, WorkbenchError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

AUDIO, TEXT = "audio", "text"
"""Columns of a row: the recording and its transcript."""
STEP = 0.02
"""Seconds from one token of Whisper's times to the next."""
_TIME = re.compile(r"<\|(\d+\.\d\d)\|>")


def time_token(seconds: float) -> str:
    """A time as Whisper's tokenizer writes its token."""
    return f"<|{round(seconds / STEP) * STEP:.2f}|>"


class SoundProcessor(MediaProcessor, Protocol):
    """Reads the recordings of rows as a backbone's feature extractor does."""

    @property
    def audio(self) -> AudioConfig:
        """How recordings are read and changed."""

    @property
    def positions(self) -> int:
        """Positions that the encoder computes for a recording."""

    @property
    def most(self) -> int:
        """Most tokens that the decoder reads, those of language and task included."""

    @property
    def end(self) -> int:
        """The id that ends a transcript."""

    @property
    def timed(self) -> bool:
        """Whether transcripts have times."""

    @property
    def times(self) -> int | None:
        """The id of time 0.00; None where the backbone has no tokens of times."""

    def rows(self, source: str, config: DataConfig) -> Iterator[RawRow]:
        """Yield recordings with their transcripts, in columns AUDIO and the one that `data.columns` names for TEXT."""

    def fingerprint(self, source: str, config: DataConfig) -> str:
        """Identifies the content of a source, its recordings included."""

    def heard(self, rows: Sequence[Row], *, epoch: int | None) -> dict[str, Tensor]:
        """Features of the recordings of rows as arguments of the model; augmented where there is an epoch."""


@dataclass(frozen=True)
class TranscriptEncoder:
    """Tokenises transcripts for the decoder of a model that hears; see `RowEncoder`."""

    tokenizer: PreTrainedTokenizerBase
    processor: SoundProcessor

    @property
    def conversion(self) -> Conversion:
        return example_of

    @property
    def reader(self) -> Reader:
        return self.processor.rows

    @property
    def identity(self) -> list[Any]:
        audio = self.processor.audio
        return ["transcripts", list(self.processor.prompt), self.processor.positions, audio.column, audio.folder]

    def expanded(self, example: Example, *, loss_on: LossOn) -> list[Example]:
        """The example alone."""
        return [example]

    def encode(self, example: Example, *, loss_on: LossOn) -> Encoded:
        """Positions of the recording, tokens of language and task, transcript and end; the last two carry loss. Raises
        DataError: the recording cannot be read, or the transcript is longer than the decoder reads."""
        sound, said = example.messages
        start, positions = self.processor.prompt, self.processor.positions
        ids = self._ids(said["content"])
        if len(start) + len(ids) + 1 > self.processor.most:
            raise DataError(
                f"{example.place}: its transcript has {len(ids)} tokens, and the backbone writes "
                f"{self.processor.most - len(start) - 1} at most. Split the recording, or write data.on_bad_row=skip."
            )
        kept = self.processor.kept(sound[media.KEY], example.place)
        before = positions + len(start)
        return Encoded(
            input_ids=[start[0]] * positions + [*start, *ids, self.processor.end],
            supervised=[False] * before + [True] * (len(ids) + 1),
            end_positions=(before + len(ids),),
            source=positions,
            pictures=kept,
            last_picture=positions,
        )

    def _ids(self, text: str) -> list[int]:
        ids = list[int]()
        # Times by number: the tokenizers of some checkpoints do not know their tokens.
        for number, piece in enumerate(_TIME.split(text) if self.processor.timed else [text]):
            if number % 2:
                assert self.processor.times is not None
                ids.append(self.processor.times + round(float(piece) / STEP))
            elif piece:
                ids += map(int, self.tokenizer(piece, add_special_tokens=False)["input_ids"])
        return ids

    def encode_many(self, examples: Sequence[Example], *, loss_on: LossOn) -> list[Encoded | WorkbenchError]:
        return outcomes(partial(self.encode, loss_on=loss_on), examples)

    def targets(self, encoded: Encoded) -> int:
        return sum(encoded.supervised)

    def seen(self, row: Row, *, epoch: int) -> Row:
        return row

    def collate(self, rows: Sequence[Row], *, epoch: int) -> MicroBatch:
        """Recordings as they are, and the decoder's tokens, padded."""
        return self._batch(rows, None)

    def augmented(self, rows: Sequence[Row], *, epoch: int) -> MicroBatch:
        """The same with recordings as `audio.augment` changes them in pass `epoch`."""
        return self._batch(rows, epoch)

    def _batch(self, rows: Sequence[Row], epoch: int | None) -> MicroBatch:
        batch = collate(
            [
                row._replace(input_ids=row.input_ids[row.source :], supervised=row.supervised[row.source :], source=0)
                for row in rows
            ]
        )
        inputs = {**self.processor.heard(rows, epoch=epoch), "decoder_input_ids": batch.inputs["input_ids"]}
        return replace(batch, inputs=inputs, tokens=sum(len(row.input_ids) for row in rows))


def example_of(name: str, place: str, columns: Mapping[str, Any]) -> Example:
    """A recording as a question whose answer is its transcript."""
    heard: Message = {"role": "user", "content": media.MARK, media.KEY: [media.Media(AUDIO, None)]}  # in its column
    return Example(place, messages=(heard, {"role": "assistant", "content": string_of(columns, TEXT).strip()}))
