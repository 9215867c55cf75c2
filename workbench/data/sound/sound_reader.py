"""Reads labelled rows of recordings, and gives them as the model hears them: features of one length, augmented.

Legend: N rows, B rows of a micro-batch, F positions of the features in time, P positions of the transformer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from workbench.config import DataConfig
from workbench.config.sections.audio_config import AudioConfig, SoundAugmentConfig
from workbench.config.sections.classes_config import ClassesConfig
from workbench.data import ordered_processes
from workbench.data.batching import Indices
from workbench.data.folds.duplicates import DuplicateClusters
from workbench.data.images import picture_sources, picture_store
from workbench.data.images.picture_files import Pixels
from workbench.data.images.picture_sources import MediaKind
from workbench.data.images.stored_media import StoredReader, StoredRows, digests, kept, places
from workbench.data.labelled.record_table import LabelledRecord
from workbench.data.labelled.records import ModelInputs, RecordSource, RowInputs, RowReader
from workbench.data.sound import listening, sound_augmentation
from workbench.data.sound.sound_files import SOUND, SoundFile, require_libraries
from workbench.data.sound.sound_format import MASK, Features, SoundFormat
from workbench.errors import DataError, FileError
from workbench.runs import files
from workbench.runs.files import cache_folder

FILE, PROCESSOR = "sound_format.json", "preprocessor_config.json"
VERSION = "1"  # raise it when what is stored changes
CHUNK = 32  # recordings whose features are computed before they are written
Change: TypeAlias = Callable[[Features, int], tuple[Features, int]]
"""From features, and how many of their positions in time are the recording's own, to those that are read instead."""


@dataclass(frozen=True, eq=False)
class SoundRows(StoredRows):
    """Recordings of one length: features of each, flattened, and behind them how many positions in time are its own."""

    format: SoundFormat
    cut: int = 0
    """Recordings that lost their end."""
    augment: SoundAugmentConfig | None = None
    """How training rows change; None: they do not."""
    seed: int = 0
    change: Change | None = None
    """Another look at each recording."""

    @property
    def redrawn(self) -> bool:
        """Whether recordings are augmented, each draw in another way."""
        return self.augment is not None

    @property
    def lengths(self) -> Indices:
        return np.full(len(self.place_N2), self.format.positions, dtype=np.int64)

    @property
    def truncated(self) -> int:
        return self.cut

    def rewritten(self, *, epoch: int, progress: float) -> SoundRows:
        """The same: augmentation changes no lengths."""
        return self

    def features(self, index: int) -> tuple[Features, int]:
        """Features of a row, changed where there is a `change`, and how many positions in time are its own."""
        store, number = self.place_N2[index]
        row = self.stores[store][number]
        found = np.asarray(row[:-1], np.float32).reshape(self.format.shape), int(row[-1])
        return found if self.change is None else self.change(*found)

    def heard(self, index: int, *, epoch: int | None, repeat: int = 0) -> tuple[Features, int]:
        """Features of a row as a pass over the training rows reads them; None: as they are."""
        features, own = self.features(index)
        if self.augment is None or epoch is None:
            return features, own
        given: dict[str, int] = {"seed": self.seed, "epoch": epoch, "row": int(self.key_N[index]), "repeat": repeat}
        return sound_augmentation.augment(features, own, self.augment, self.format, **given)

    def batch(self, indices: Indices, *, epoch: int | None, repeats: Indices | None = None) -> ModelInputs:
        """The rows `indices`; augmented where there is an epoch."""
        draws = list(zip(indices.tolist(), ([0] * len(indices) if repeats is None else repeats.tolist()), strict=True))
        heard = ordered_processes.by_threads(
            lambda draw: self.heard(draw[0], epoch=epoch, repeat=draw[1]), draws, size=int(np.prod(self.format.shape))
        )
        inputs = {self.format.name: torch.from_numpy(np.stack([features for features, _ in heard]))}
        if self.format.is_masked:
            own_B1 = np.asarray([own for _, own in heard])[:, None]
            inputs[MASK] = torch.from_numpy((np.arange(self.format.frames) < own_B1).astype(np.int64))
        positions = self.format.positions
        return ModelInputs(inputs, torch.arange(1, len(indices) + 1) * positions - 1, len(indices) * positions)

    def picture(self, index: int, *, epoch: int | None = None) -> Pixels:
        """The spectrum of a row, without silence behind it: time from left to right, low frequencies at the bottom."""
        features, own = self.heard(index, epoch=epoch)
        spectrum_FM = np.moveaxis(features, self.format.time_axis, 0)[:own]
        return listening.coloured(
            spectrum_FM if spectrum_FM.ndim > 1 else listening.spectrum(spectrum_FM, self.format.rate)
        )

    def concatenated(self, other: SoundRows) -> SoundRows:
        return replace(super().concatenated(other), cut=self.cut + other.cut)

    def arrays(self) -> Iterator[npt.NDArray[Any]]:
        for index in range(len(self.place_N2)):
            features, own = self.features(index)
            yield np.append(features.ravel(), np.float32(own))

    def seen(self, change: Change) -> SoundRows:
        """The same rows, each changed before it is read."""
        return replace(self, change=change)


@dataclass(frozen=True)
class SoundReader(StoredReader[SoundFile]):
    """Reads recordings as one backbone hears them."""

    format: SoundFormat
    data: DataConfig
    classes: ClassesConfig
    audio: AudioConfig
    seed: int
    title: str = "audio"
    file: str = FILE
    kind: MediaKind[SoundFile] = SOUND

    @property
    def section(self) -> AudioConfig:
        return self.audio

    def inputs(self, source: RecordSource) -> SoundRows:
        assert isinstance(source.inputs, SoundRows)
        return source.inputs

    def rendered(self, inputs: RowInputs, index: int) -> str:
        """Length of a recording as the model hears it."""
        assert isinstance(inputs, SoundRows)
        _, own = inputs.features(index)
        seconds, shape = own / inputs.format.frames_a_second, " x ".join(map(str, inputs.format.shape))
        return f"{seconds:.2f} s of {inputs.format.seconds:g} s at {inputs.format.rate:,} hertz, features {shape}"

    def duplicates(self, sources: Sequence[RecordSource], part_N: Indices | None = None) -> DuplicateClusters:
        """Recordings that are equal as they are stored."""
        number: dict[str, int] = {}
        distinct = [number.setdefault(record.digest, len(number)) for source in sources for record in source.records]
        each_U = np.arange(len(number))
        return DuplicateClusters(
            distinct_N=np.asarray(distinct, dtype=np.int64),
            pairs_P2=np.zeros((0, 2), dtype=np.int64),
            cluster_U=each_U,
            similarity_U=np.ones(len(number)),
            name_U=tuple(number),
        )

    def played(self, record: LabelledRecord) -> bytes:
        """A recording as the file of a player, as it is heard and no longer. Raises DataError: it is gone."""
        given: dict[str, Any] = {"several": self.audio.channels, "most": self.format.seconds, "on_long": "cut"}
        return listening.played(listening.kept(self._file(record).wave(self.format.rate, **given), self.format.rate))

    def same_positions(self, other: RowReader) -> bool:
        """Whether `other` computes the same features of recordings of the same length."""
        return isinstance(other, SoundReader) and self.format.saved() == other.format.saved()

    def as_read_by(self, other: RowReader, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The same features: `other` hears as this one does."""
        return inputs

    def save(self, folder: Path) -> None:
        """Write how recordings are heard into `folder`, also for a stock feature extractor."""
        files.write_json(folder / FILE, self.format.saved())
        files.write_json(folder / PROCESSOR, dict(self.format.facts))

    def _stored(self, source: RecordSource, *, refuse: bool, labelled: bool) -> RecordSource:
        sound_files = [self._file(record) for record in source.records]
        stored = store(sound_files, self.format, self.audio)
        numbers = self._readable(source, stored, refuse=refuse)
        digest_N = digests(stored, numbers)
        cut = 0
        if self.audio.on_long == "cut":
            most = (self.format.seconds or 0) + 1 / self.format.rate
            cut = sum(sound_files[number].seconds() > most for number in numbers.tolist())
        augment = self.audio.augment if self.audio.augment.is_on else None
        where = places(digest_N, numbers)
        rows = SoundRows((stored.pixels,), *where, self.format, cut, augment, self.seed)
        return kept(source, stored, digest_N, numbers, rows)


def store(sound_files: Sequence[SoundFile], format: SoundFormat, audio: AudioConfig) -> picture_store.StoredPictures:
    """Decode recordings and compute their features, or find them as an earlier run stored them."""
    require_libraries()
    count = int(np.prod(format.shape)) + 1
    given: dict[str, Any] = {"several": audio.channels, "most": format.seconds, "on_long": audio.on_long}

    def heard(file: SoundFile) -> npt.NDArray[np.float32] | str:
        try:
            features, own = format.features(file.wave(format.rate, **given))
        except DataError as error:
            return str(error).removeprefix(f"{file.name}: ")
        return np.append(features.ravel(), np.float32(own))

    def fill(path: Path, offset: int) -> dict[int, str]:
        mistakes = {}
        with path.open("r+b", buffering=0) as numbers:
            for start in range(0, len(sound_files), CHUNK):
                part = ordered_processes.by_threads(
                    heard, sound_files[start : start + CHUNK], size=ordered_processes.LARGE
                )
                for number, row in enumerate(part, start):
                    if isinstance(row, str):
                        mistakes[number] = row
                    else:
                        numbers.seek(offset + 4 * number * count)
                        numbers.write(row.astype("<f4").data)
        return mistakes

    libraries = [version(name) for name in ("transformers", "soundfile", "soxr")]
    return picture_store.keep(
        sound_files,
        settings=[VERSION, libraries, format.saved(), given],
        shape=(count,),
        descr="<f4",
        fill=fill,
        folder=cache_folder() / "recordings",
        what=f"recordings of {format.seconds:g} seconds",
        cure="write a smaller audio.max_seconds",
    )


def longest(sources: Sequence[str], data: DataConfig, audio: AudioConfig) -> float:
    """Seconds of the longest recording of some sources, rounded up to tenths; what cannot be read does not count.
    Raises DataError: none can be read."""
    most = 0.0
    for source in sources:
        folder = audio.folder_of(source)
        for row in picture_sources.read_rows(source, audio.column, folder, data.unweighted, SOUND):
            file = row.columns.get(audio.column)
            most = max(most, file.seconds() if isinstance(file, SoundFile) and not row.mistake else 0.0)
    if most == 0:
        raise DataError(f"{', '.join(sources)}: none of its recordings can be read, so that no length is known.")
    return -(-round(most * 1000) // 100) / 10


def saved_format(folder: Path, hub: Mapping[str, Any]) -> SoundFormat:
    """Read back what `SoundReader.save` wrote into `folder`; raises FileError where it is damaged."""
    facts = files.read_json(folder / FILE)
    try:
        return SoundFormat.restored(facts, hub)
    except (KeyError, TypeError, ValueError) as error:
        raise FileError(f"{folder}/{FILE}: damaged ({error}). Restore it, or train again.") from None
