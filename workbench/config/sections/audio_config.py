"""Section `audio`: how recordings are read and changed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat

from workbench.config.sections.image_config import MediaConfig, Share
from workbench.schema import ConsistentSection, Unit


class SoundAugmentConfig(ConsistentSection):
    """Random changes of training recordings, other ones at each draw; each is off by default."""

    speed: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Largest change of speed to either side, as a share: 0.1 plays between 0.9 and 1.1 times as fast. Where the
    backbone reads waves the pitch changes as well."""
    shift: NonNegativeFloat = 0.0
    """Largest shift to either side, in seconds; what leaves the recording is lost, silence fills its place."""
    time_masks: Annotated[NonNegativeInt, Unit("masks")] = 0
    """Spans of time that are hidden in each recording: SpecAugment (Park et al. 2019). They hold the mean of the
    features, which is silence in a wave."""
    time_mask: Share = 0.1
    """Longest such span, as a share of the recording."""
    frequency_masks: Annotated[NonNegativeInt, Unit("masks")] = 0
    """Bands of frequencies that are hidden in each recording (SpecAugment); a wave is filtered."""
    frequency_mask: Share = 0.2
    """Widest such band, as a share of all frequencies that the backbone reads."""

    @property
    def is_on(self) -> bool:
        """Whether training recordings are anything else than the stored ones."""
        return bool(self.speed or self.shift or self.time_masks or self.frequency_masks)

    def _contradictions(self) -> Iterator[str]:
        for kind in ("time", "frequency"):
            if self.differs(f"{kind}_mask") and not getattr(self, f"{kind}_masks"):
                yield f"{kind}_mask does nothing without {kind}_masks. Add {kind}_masks=2, or leave {kind}_mask out."


class AudioConfig(MediaConfig):
    """Recordings: where they stand in a row, their length, what is done to them."""

    column: str = Field(default="audio", min_length=1, coerce_numbers_to_str=True)
    """Column of a table that holds the recording: a path (from the table's folder), the bytes of a file, both, or
    samples with their rate, as `datasets` do."""
    max_seconds: Annotated[PositiveFloat | None, Unit("seconds")] = None
    """Longest recording that is read, in seconds, to which shorter ones are filled with silence. null: as long as the
    backbone reads; one that reads waves of any length reads as much as the longest recording of the run's files."""
    on_long: Literal["refuse", "cut"] = "refuse"
    """What becomes of longer recordings: `refuse` them by name, or `cut` them, so that their beginning is read.
    Transcripts of `predict`, `generate` and `serve` are of the whole recording, in windows that overlap."""
    channels: Literal["mix", "refuse"] = "mix"
    """What becomes of recordings of several channels, such as stereo: `mix` takes the mean of the channels, as
    recognisers of speech do; `refuse` them by name."""
    augment: SoundAugmentConfig = SoundAugmentConfig()
    language: str | None = None
    """Language of the recordings, such as en or english, for backbones that begin a transcript with its token, as
    Whisper does. null: the one that the backbone's generation_config.json names. Recipe sft."""
    task: Literal["transcribe", "translate"] = "transcribe"
    """Whether transcripts are in the language of the recordings, or in English: the token of Whisper. Recipe sft."""
    timestamps: bool = False
    """Whether transcripts are learnt and written with Whisper's tokens of times. Rows need `segments`, of which as many
    as the backbone hears at once are a row. Recipe sft."""

    @property
    def changes(self) -> bool:
        return self.augment.is_on
