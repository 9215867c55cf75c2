"""The features that a backbone hears: its own feature extractor, and the length of its input.

Legend: T samples, F frames, M mel bands.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from transformers.models.auto.feature_extraction_auto import FEATURE_EXTRACTOR_MAPPING
from transformers.models.auto.feature_extraction_auto import feature_extractor_class_from_name as class_of_name

from workbench.data.sound.sound_files import Wave
from workbench.errors import BackboneError

Features = npt.NDArray[np.float32]
MASK = "attention_mask"


@dataclass(frozen=True)
class SoundFormat:
    """How a recording becomes what a backbone hears: all have one length, so that no row depends on others."""

    facts: Mapping[str, Any]
    """The backbone's preprocessor_config.json."""
    kind: str
    """Name of the class of transformers that computes features."""
    seconds: float | None
    """Longest recording that is read; None: not decided yet, by a backbone that reads waves of any length."""
    hub: Mapping[str, Any]
    """The backbone's config.json."""
    heard: int | None = None
    """Positions that the transformer computes for a recording, as its class counts them; None: by `hub`."""

    @classmethod
    def read(
        cls, processor: Mapping[str, Any], hub: Mapping[str, Any], config_class: type, *, most: float | None
    ) -> SoundFormat:
        """The format that a backbone's files describe. Raises BackboneError: it has no feature extractor for sound, or
        reads less than `most` seconds."""
        kind = str(processor.get("feature_extractor_type") or "")
        if not kind:
            known = FEATURE_EXTRACTOR_MAPPING.get(config_class, None)
            kind = str(getattr(known, "__name__", ""))
        if not processor or not kind:
            raise BackboneError(
                "it has no preprocessor_config.json with a feature extractor, so that it is not known how it hears. "
                "Save the backbone together with its feature extractor (AutoFeatureExtractor ... save_pretrained)."
            )
        found = cls(dict(processor), kind, most, dict(hub))
        own = found.own_seconds
        if own is not None and most is not None and most > own:
            raise BackboneError(
                f"audio.max_seconds={most:g} is more than its {own:g} seconds. Write audio.max_seconds={own:g}, and "
                "audio.on_long=cut where recordings are longer."
            )
        return replace(found, seconds=most if most is not None else own)

    @cached_property
    def extractor(self) -> Any:
        """The feature extractor."""
        made = class_of_name(self.kind)
        if made is None:
            raise BackboneError(f"{self.kind} is no feature extractor of this version of transformers.")
        return made.from_dict(dict(self.facts))

    @property
    def rate(self) -> int:
        """Samples a second."""
        return int(self.extractor.sampling_rate)

    @property
    def own_seconds(self) -> float | None:
        """Length that the backbone reads whatever the recording, in seconds; None: any length."""
        extractor = self.extractor
        if (chunk := getattr(extractor, "chunk_length", None)) is not None:  # Whisper
            return float(chunk)
        if isinstance(frames := getattr(extractor, "max_length", None), int):  # AST: frames of 10 ms
            return frames / 100
        return None

    @property
    def hears_waves(self) -> bool:
        """Whether features are samples rather than bands of frequencies."""
        return int(getattr(self.extractor, "feature_size", 1)) == 1

    @property
    def name(self) -> str:
        """The argument of the model that takes the features."""
        return str(self.extractor.model_input_names[0])

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Shape of the features of a recording."""
        return self._extracted(np.zeros(self.samples // 2, np.float32))[0].shape

    @cached_property
    def is_masked(self) -> bool:
        """Whether the backbone is told which frames are the recording's own."""
        return MASK in self._called(np.zeros(self.samples // 2, np.float32))

    @property
    def samples(self) -> int:
        """Samples of the longest recording that is read."""
        assert self.seconds is not None, "the reader decides it first"
        return max(1, round(self.seconds * self.rate))

    @property
    def time_axis(self) -> int:
        """The dimension of the features that is time."""
        return int(np.argmax(self.shape)) if len(self.shape) > 1 else 0

    @property
    def frames(self) -> int:
        """Positions of the features in time."""
        return self.shape[self.time_axis]

    @property
    def frames_a_second(self) -> float:
        """Positions of the features in a second."""
        return self.frames / (self._filled / self.rate)

    @property
    def positions(self) -> int:
        """Positions that the transformer computes for a recording: its tokens."""
        if self.heard is not None:
            return self.heard
        hub, frames = self.hub, self.frames
        if "conv_kernel" in hub and "conv_stride" in hub:  # wav2vec2 and its kin
            for kernel, stride in zip(hub["conv_kernel"], hub["conv_stride"], strict=True):
                frames = (frames - kernel) // stride + 1
            return max(1, frames)
        if isinstance(hub.get("max_source_positions"), int) and "num_mel_bins" in hub:  # Whisper
            return int(hub["max_source_positions"])
        if "time_stride" in hub and "frequency_stride" in hub:  # AST: patches, and two tokens before them
            patch, bands = int(hub["patch_size"]), self.shape[1 - self.time_axis]
            across = (bands - patch) // int(hub["frequency_stride"]) + 1
            return across * ((frames - patch) // int(hub["time_stride"]) + 1) + 2
        return frames

    def features(self, wave_T: Wave) -> tuple[Features, int]:
        """Features of a recording, and how many of their positions in time are its own; the rest is silence."""
        features, own = self._extracted(wave_T)
        if own is None:
            # The window of one more frame reaches into the recording's end.
            own = -(-len(wave_T) * self.frames // self._filled) + (not self.hears_waves)
        return features, max(1, min(int(own), self.frames))

    @property
    def _filled(self) -> int:
        """Samples of a recording that fills the features."""
        own = self.own_seconds
        return self.samples if own is None else round(own * self.rate)

    def _extracted(self, wave_T: Wave) -> tuple[Features, int | None]:
        called = self._called(wave_T)
        mask = called.get(MASK)
        return np.asarray(called[self.name][0], np.float32), None if mask is None else int(np.sum(mask[0]))

    def _called(self, wave_T: Wave) -> Mapping[str, Any]:
        filled: dict[str, Any] = {}
        if self.own_seconds is None:
            filled = {"padding": "max_length", "max_length": self._padded, "truncation": True}
        from torch._subclasses.fake_tensor import unset_fake_temporarily

        with unset_fake_temporarily():  # a plan asks on tensors without values
            called: Mapping[str, Any] = self.extractor(wave_T, sampling_rate=self.rate, return_tensors="np", **filled)
        return called

    @property
    def _padded(self) -> int:
        """The length in the extractor's own unit: samples, or frames of 10 ms."""
        return self.samples if self.hears_waves else max(1, -(-self.samples * 100 // self.rate))

    def saved(self) -> dict[str, Any]:
        """What `restored` reads."""
        return {"facts": dict(self.facts), "kind": self.kind, "seconds": self.seconds}

    @classmethod
    def restored(cls, saved: Mapping[str, Any], hub: Mapping[str, Any]) -> SoundFormat:
        """The format that `saved` wrote."""
        return cls(dict(saved["facts"]), str(saved["kind"]), float(saved["seconds"]), dict(hub))
