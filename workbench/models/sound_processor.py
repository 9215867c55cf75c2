"""Recordings as a backbone hears them: its feature extractor, and the tokens of language and task.

Features of each recording are kept in a file of their own, named by its content: rows, sets and runs that share it
read that file.
"""

from __future__ import annotations

import hashlib
import json
import math
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save
from transformers import FeatureExtractionMixin, GenerationConfig, LogitsProcessor, WhisperTimeStampLogitsProcessor
from transformers.models.whisper.tokenization_whisper import LANGUAGES, TO_LANGUAGE_CODE

from workbench.config import DataConfig, RunConfig
from workbench.config.model_heads import SPEECH
from workbench.config.sections.audio_config import AudioConfig
from workbench.data.batching import Row
from workbench.data.images.picture_store import use
from workbench.data.ordered_processes import by_threads
from workbench.data.rows import RawRow
from workbench.data.sound import listening, sound_augmentation, sound_reader, transcribed_rows
from workbench.data.sound.sound_files import SoundFile, Wave, require_libraries
from workbench.data.sound.sound_format import MASK, Features, SoundFormat
from workbench.data.stored_files import stamp
from workbench.data.text.media import KeptPictures, Media
from workbench.errors import BackboneError, ConfigError, DataError
from workbench.models.backbone_source import source_arguments, source_path
from workbench.runs import files

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PretrainedConfig

VERSION = "3"  # raise it when what is kept changes
SEGMENTED = (
    " Or say what is said when, which makes a row of each part: a column `segments` with "
    '[{"start": 0, "end": 2.5, "text": "..."}, ...], in seconds.'
)
NO_TIMES = "has no tokens of times, as the checkpoints of Whisper have"


def sound_format(config: RunConfig, hub: PretrainedConfig) -> SoundFormat:
    """The features that the backbone hears, of the length that `audio` says, or its files need."""
    try:
        processor, _ = FeatureExtractionMixin.get_feature_extractor_dict(
            source_path(config.model), **source_arguments(config.model)
        )
    except OSError:
        processor = {}
    try:
        found = SoundFormat.read(processor, hub.to_dict(), type(hub), most=config.audio.max_seconds)
    except BackboneError as error:
        raise BackboneError(f"model.id={config.model.id}: {error}") from None
    if found.seconds is not None:
        return found
    trained = [own.train for own in config.data.training_files.values()]
    others = [*config.data.held_out_files.values(), *config.data.test_files.values()]
    return replace(found, seconds=sound_reader.longest([*trained, *others], config.data, config.audio))


def of(config: RunConfig, hub: PretrainedConfig) -> FeatureProcessor:
    """What reads the recordings of rows with transcripts. Raises BackboneError: the backbone does not write what it
    hears, or hears waves; ConfigError: a library is missing, or `audio` names a language or task that it has not."""
    require_libraries()
    try:
        SPEECH.auto_class(hub)
    except BackboneError as error:
        raise BackboneError(f"model.id={config.model.id}: {error}") from None
    if not hub.is_encoder_decoder:
        raise BackboneError(
            f"model.id={config.model.id}: {type(hub).__name__} hears recordings within a conversation, and "
            "data.format=audio teaches models of recordings alone. Take a Whisper or a Moonshine, such as "
            "openai/whisper-small."
        )
    kept = sound_format(config, hub)
    if kept.own_seconds is None and config.audio.max_seconds is None:
        assert kept.seconds is not None, "the longest of the run's files"
        raise ConfigError(
            f"model.id={config.model.id}: {type(hub).__name__} hears recordings of any length, and a run brings all to "
            f"one. Write audio.max_seconds={math.ceil(kept.seconds)}, the longest of the run's files, or less with "
            "audio.on_long=cut."
        )
    kept = replace(kept, heard=_positions(hub, kept.frames))
    most: Any = getattr(hub, "max_target_positions", None) or getattr(hub, "max_position_embeddings", 0)
    end: Any = hub.eos_token_id
    end = int(end[0] if isinstance(end, list) else end)
    prompt, language = _prompt(config, hub)
    times = _times(config, hub)
    if config.audio.timestamps and times is None:
        raise ConfigError(f"audio.timestamps: model.id={config.model.id} {NO_TIMES}. Leave it out.")
    return FeatureProcessor(kept, config.audio, config.seed, prompt, int(most), end, language, times)


def _positions(hub: PretrainedConfig, frames: int) -> int | None:
    """Positions that the encoder computes for features of so many positions in time, by the model's own count."""
    model: Any = SPEECH.auto_class(hub)._model_mapping[type(hub)]
    count: Any = getattr(model, "_get_feat_extract_output_lengths", None)
    return None if count is None else int(count(model, frames))


def spoken(processor: FeatureProcessor, config: RunConfig, hub: PretrainedConfig, language: str) -> FeatureProcessor:
    """The same for recordings in another language. Raises ConfigError: the backbone has no token for it."""
    own = config.model_copy(update={"audio": config.audio.model_copy(update={"language": language})})
    prompt, name = _prompt(own, hub)
    return replace(processor, prompt=prompt, language=name)


def _generation(config: RunConfig) -> Any:
    try:
        return GenerationConfig.from_pretrained(source_path(config.model), **source_arguments(config.model))
    except OSError:
        return GenerationConfig()


def _times(config: RunConfig, hub: PretrainedConfig) -> int | None:
    """The id of time 0.00, behind that of no times; None where the backbone has no tokens of times."""
    silent = getattr(_generation(config), "no_timestamps_token_id", None)
    if silent is None or hub.vocab_size < silent + 2 + getattr(hub, "max_source_positions", 0):
        return None
    return int(silent) + 1


def _prompt(config: RunConfig, hub: PretrainedConfig) -> tuple[tuple[int, ...], str | None]:
    """Ids that the decoder begins with: start, language, task, and where it is to write none that of no times; and the
    language."""
    own = _generation(config)
    first = getattr(own, "decoder_start_token_id", None)
    begin = [hub.decoder_start_token_id if first is None else first]
    languages: dict[str, int] = getattr(own, "lang_to_id", None) or {}
    tasks: dict[str, int] = getattr(own, "task_to_id", None) or {}
    asked, task, name, code = config.audio.language, config.audio.task, config.model.id, ""
    if not languages and (asked is not None or task != "transcribe"):
        key = "language" if asked is not None else "task"
        raise ConfigError(f"audio.{key}: model.id={name} has no tokens of languages and tasks. Leave it out.")
    if languages:
        said = asked or getattr(own, "language", None)
        if said is None:
            raise ConfigError(
                f"model.id={name} writes {len(languages)} languages, and begins a transcript with the token of one. "
                "Write that of the recordings, such as audio.language=en."
            )
        code = TO_LANGUAGE_CODE.get(said.lower(), said.lower().strip("<|>"))
        token = f"<|{code}|>"
        for key, value, known in (("language", token, languages), ("task", task, tasks)):
            if value not in known:
                some = ", ".join(each.strip("<|>") for each in list(known)[:8])
                raise ConfigError(f"audio.{key}: model.id={name} has no token for {value}. It has: {some}.")
        begin += [languages[token], tasks[task]]
    silent = None if config.audio.timestamps else getattr(own, "no_timestamps_token_id", None)
    return (*begin, *([] if silent is None else [silent])), LANGUAGES.get(code, code) or None


@dataclass(frozen=True)
class FeatureProcessor:
    """Reads recordings as one backbone hears them; see `SoundProcessor`.

    Args:
        format: The features of a recording.
        audio: How recordings are read and changed.
        seed: Decides how they are changed.
        prompt: Ids of start, language and task.
        most: Most tokens that the decoder reads.
        end: The id that ends a transcript.
        language: Its name, such as english, where the prompt has the token of one.
        times: The id of time 0.00; None where the backbone has no tokens of times.
    """

    format: SoundFormat
    audio: AudioConfig
    seed: int
    prompt: tuple[int, ...]
    most: int
    end: int
    language: str | None = None
    times: int | None = None
    loaded: bool = True
    numbered: bool = False
    packs: bool = False
    token: str = ""
    kind: str = "audio"

    def __getstate__(self) -> dict[str, Any]:
        """The fields alone: other processes open the store for themselves."""
        return {name: value for name, value in self.__dict__.items() if name in self.__dataclass_fields__}

    @property
    def timed(self) -> bool:
        return self.audio.timestamps

    def rules(self, own: GenerationConfig) -> LogitsProcessor | None:
        """Times come in pairs, and never fall, as stock Whisper writes them."""
        return WhisperTimeStampLogitsProcessor(own, begin_index=len(self.prompt)) if self.timed else None

    @property
    def positions(self) -> int:
        return self.format.positions

    @property
    def token_ids(self) -> npt.NDArray[np.int64]:
        """None: a recording has positions of the encoder."""
        return np.zeros(0, dtype=np.int64)

    @cached_property
    def identity(self) -> str:
        """All that what is kept depends on besides the recordings."""
        libraries = [version(name) for name in ("transformers", "soundfile", "soxr")]
        settings = [VERSION, libraries, self.format.saved(), self.audio.channels, self.audio.on_long]
        return hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:32]

    @cached_property
    def folder(self) -> Path:
        """Where features are kept, in use from now on."""
        folder = files.cache_folder() / "recordings" / f"text-{self.identity}"
        folder.mkdir(parents=True, exist_ok=True)
        weakref.finalize(self, use(folder))
        return folder

    @property
    def settings(self) -> list[Any]:
        return [self.identity, self.audio.folder]

    def rows(self, source: str, config: DataConfig) -> Iterator[RawRow]:
        window = self.format.seconds if self.timed else None
        return transcribed_rows.read_rows(self.audio, source, config, window=window)

    def fingerprint(self, source: str, config: DataConfig) -> str:
        return transcribed_rows.fingerprint(self.audio, source, config)

    def kept(self, media: Sequence[Media], where: str) -> KeptPictures:
        """The features of a row's recording, from their file where they were computed before. Raises DataError: the
        recording cannot be read, or is too long."""
        (medium,) = media
        file: SoundFile = medium.value
        try:
            # Rows whose keys begin alike, the segments of a recording, stand on one side of a split.
            whole = hashlib.sha256(file.digest() + str(file.rate).encode())
            key = whole.hexdigest()[:16] + hashlib.sha256(whole.digest() + str(file.part).encode()).hexdigest()[:16]
            if not (self.folder / key).exists():
                wave_T = file.wave(
                    self.format.rate,
                    several=self.audio.channels,
                    most=self.format.seconds,
                    on_long=self.audio.on_long,
                    cure=SEGMENTED,
                )
                features, own = self.format.features(wave_T)
                sound = np.frombuffer(listening.kept(wave_T, self.format.rate), np.uint8)
                kept = {"features": features, "own": np.asarray(own), "sound": sound}
                files.write_bytes(self.folder / key, save(kept))
        except DataError as error:
            raise DataError(f"{where}: {error}") from None
        return KeptPictures(key, (medium.kind,), () if file.path is None else (stamp(str(file.path)),))

    def small(self, key: str) -> list[bytes]:
        return []

    def sounds(self, key: str) -> list[bytes]:
        with safe_open(self.folder / key, framework="np") as opened:
            return [opened.get_tensor("sound").tobytes()]

    def knows(self, keys: Iterable[str], stamps: Iterable[str]) -> bool:
        same = all(stamp(state.split("\0")[0]) == state for state in set(stamps))
        return same and all((self.folder / key).exists() for key in set(keys) - {""})

    def read(self, key: str) -> tuple[Features, int]:
        """Features of a recording, and how many of their positions in time are its own."""
        try:
            with safe_open(self.folder / key, framework="np") as opened:
                return opened.get_tensor("features"), int(opened.get_tensor("own"))
        except (OSError, SafetensorError) as error:
            raise DataError(
                f"{self.folder / key}: features of a recording cannot be read ({error}). Delete the folder, and start "
                "again."
            ) from None

    def inputs(self, ids_BL: Tensor, keys: Sequence[str]) -> dict[str, Tensor]:
        return self._stacked([self.read(key) for key in keys])

    def heard(self, rows: Sequence[Row], *, epoch: int | None) -> dict[str, Tensor]:
        def features(row: Row) -> tuple[Features, int]:
            found, own = self.read(row.pictures)
            if epoch is None or not self.audio.augment.is_on:
                return found, own
            number = row.digest % 2**63
            return sound_augmentation.augment(
                found, own, self.audio.augment, self.format, seed=self.seed, epoch=epoch, row=number
            )

        return self._stacked(by_threads(features, rows, size=int(np.prod(self.format.shape))))

    def wave(self, file: SoundFile, *, longest: float | None = None) -> Wave:
        """All samples (T,) of a recording at the backbone's rate, however long. Raises DataError: it cannot be read, or
        has more than `longest` seconds."""
        several = self.audio.channels
        return file.wave(self.format.rate, several=several, most=None, on_long="refuse", longest=longest)

    def of_waves(self, waves: Sequence[Wave]) -> dict[str, Tensor]:
        """Arguments of the model for samples, of which nothing is kept."""
        return self._stacked([self.format.features(wave_T) for wave_T in waves])

    def whole(self, wave_T: Wave) -> Tensor:
        """Features (1, M, F) of all of a recording, filled up to what the backbone hears at once."""
        long = {} if len(wave_T) <= self.format.samples else {"truncation": False, "padding": "longest"}
        called = self.format.extractor(wave_T, sampling_rate=self.format.rate, return_tensors="pt", **long)
        features_1MF: Tensor = called[self.format.name]
        return features_1MF

    def _stacked(self, features: Sequence[tuple[Features, int]]) -> dict[str, Tensor]:
        import torch

        inputs = {self.format.name: torch.from_numpy(np.stack([each for each, _ in features]))}
        if self.format.is_masked:
            own_B1 = np.asarray([own for _, own in features])[:, None]
            inputs[MASK] = torch.from_numpy((np.arange(self.format.frames) < own_B1).astype(np.int64))
        return inputs

    def save(self, folder: Path) -> None:
        """Write the stock feature extractor's file into `folder`."""
        files.write_json(folder / sound_reader.PROCESSOR, dict(self.format.facts))
