"""Reads labelled rows of recordings, and gives them as the model hears them: features of one length, augmented.

Legend: N rows, B rows of a micro-batch, F positions of the features in time, P positions of the transformer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeAlias

import cv2
import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedTokenizerBase

from workbench.config import DataConfig
from workbench.config.sections.audio_config import AudioConfig, SoundAugmentConfig
from workbench.config.sections.basic_sections import ID, WEIGHT
from workbench.config.sections.classes_config import ClassesConfig
from workbench.data import ordered_processes
from workbench.data.batching import Indices
from workbench.data.folds.duplicates import DuplicateClusters
from workbench.data.images import picture_sources, picture_store
from workbench.data.images.picture_files import Pixels
from workbench.data.labelled import records
from workbench.data.labelled.record_table import LabelledRecord
from workbench.data.labelled.records import ModelInputs, NamedColumns, RecordSource, RowInputs, RowReader
from workbench.data.rows import MAX_MISTAKES, RawRow, convert_rows
from workbench.data.sound import sound_augmentation
from workbench.data.sound.sound_files import SOUND, SoundFile, require_libraries
from workbench.data.sound.sound_format import MASK, Features, SoundFormat
from workbench.data.unread_columns import columns_in_file
from workbench.errors import DataError, FileError
from workbench.runs import files
from workbench.runs.files import cache_folder

FILE, PROCESSOR = "sound_format.json", "preprocessor_config.json"
VERSION = "1"  # raise it when what is stored changes
CHUNK = 32  # recordings whose features are computed before they are written
PICTURE = (192, 128)  # width and height of a drawn spectrum, in pixels
Change: TypeAlias = Callable[[Features, int], tuple[Features, int]]
"""From features, and how many of their positions in time are the recording's own, to those that are read instead."""


@dataclass(frozen=True, eq=False)
class SoundRows:
    """Recordings of one length in memory-mapped stores; see `RowInputs`."""

    stores: tuple[npt.NDArray[np.float32], ...]
    """Features of each recording, flattened, and behind them how many positions in time are its own."""
    place_N2: Indices
    """Store and number of each row."""
    key_N: Indices
    """A number from the features of each row, which decides how it is augmented: the same wherever the row stands."""
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
        if spectrum_FM.ndim == 1:
            spectrum_FM = _spectrum(spectrum_FM, self.format.rate)
        low, high = np.percentile(spectrum_FM, (2, 99.8))
        shares_MF = np.clip((spectrum_FM.T[::-1] - low) / max(1e-6, high - low), 0, 1)
        colours = cv2.applyColorMap((255 * shares_MF).astype(np.uint8), cv2.COLORMAP_MAGMA)
        return np.asarray(cv2.resize(colours, PICTURE, interpolation=cv2.INTER_NEAREST)[:, :, ::-1], dtype=np.uint8)

    def take(self, indices: Indices) -> SoundRows:
        return replace(self, place_N2=self.place_N2[indices], key_N=self.key_N[indices])

    def concatenated(self, other: SoundRows) -> SoundRows:
        """These rows, followed by those of `other`, which are augmented as these are."""
        moved_N2 = other.place_N2 + np.asarray([len(self.stores), 0])
        return replace(
            self,
            stores=(*self.stores, *other.stores),
            place_N2=np.concatenate([self.place_N2, moved_N2]),
            key_N=np.concatenate([self.key_N, other.key_N]),
            cut=self.cut + other.cut,
        )

    def arrays(self) -> Iterator[npt.NDArray[Any]]:
        for index in range(len(self.place_N2)):
            features, own = self.features(index)
            yield np.append(features.ravel(), np.float32(own))

    def differ(self, other: SoundRows) -> npt.NDArray[np.bool_]:
        pairs = zip(self.arrays(), other.arrays(), strict=True)
        return np.asarray([not np.array_equal(one, two) for one, two in pairs], dtype=bool)

    def seen(self, change: Change) -> SoundRows:
        """The same rows, each changed before it is read."""
        return replace(self, change=change)


def _spectrum(wave_T: npt.NDArray[np.float32], rate: int) -> npt.NDArray[np.float32]:
    """Logarithm of the power of a wave in windows of 25 ms, each 10 ms after the one before."""
    window, hop = max(16, rate // 40), max(1, rate // 100)
    padded = np.pad(wave_T, (0, max(0, window - len(wave_T))))
    windows = np.lib.stride_tricks.sliding_window_view(padded, window)[::hop] * np.hanning(window)
    return np.log10(np.abs(np.fft.rfft(windows)) ** 2 + 1e-8).astype(np.float32)


@dataclass(frozen=True)
class SoundReader:
    """Reads recordings as one backbone hears them; see `RowReader`."""

    format: SoundFormat
    data: DataConfig
    classes: ClassesConfig
    audio: AudioConfig
    seed: int
    title: str = "audio"
    file: str = FILE

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.audio.column,)

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """None: no text is read."""
        return None

    def read(
        self,
        source: str,
        *,
        limit: int | None = None,
        labelled: bool = True,
        weighted: bool = False,
        columns: Mapping[str, str] | None = None,
    ) -> RecordSource:
        """Read and decode the recordings of a folder, an archive, a table or a hub data set. Raises DataError: rows
        are malformed, or a column is missing."""
        named = self.data.with_columns(columns)
        data = named if weighted else named.unweighted

        def converter(first: RawRow) -> Callable[[RawRow], LabelledRecord]:
            if labelled:
                picture_sources.require_classes(source, first, SOUND)
            known = (*self.classes.labels, WEIGHT, ID)
            records.require_named(source, first, data, known, self.classes, labelled=labelled)
            records.require_label_columns(source, first, data, self.classes, labelled=labelled)
            return partial(records.labelled_record, config=data, classes=self.classes, labelled=labelled)

        skipped: list[str] = []
        folder = self.audio.folder_of(source)
        where: dict[str, Any] = {"column": self.audio.column, "folder": folder, "config": data, "kind": SOUND}
        rows = partial(picture_sources.read_rows, **where)
        reads = {self.audio.column, *columns_in_file(data, (*self.classes.labels, WEIGHT, ID))}
        converted = list(
            convert_rows(source, converter, data, skipped=skipped, limit=limit, reader=rows, reads=lambda _: reads)
        )
        fingerprint = picture_sources.fingerprint(source, **where)
        found = RecordSource(source, fingerprint, tuple(converted), tuple(skipped))
        return self._stored(found, refuse=data.on_bad_row == "refuse")

    def reread(self, source: str, fingerprint: str, rows: Sequence[NamedColumns]) -> RecordSource:
        name = self.audio.column
        mine = [RawRow(row.place, {**row.columns, name: columns[name]}) for row, columns in rows]
        return self._stored(RecordSource(source, fingerprint, tuple(LabelledRecord(row, ()) for row in mine)))

    def inputs(self, source: RecordSource) -> SoundRows:
        assert isinstance(source.inputs, SoundRows)
        return source.inputs

    def describe(self, record: LabelledRecord) -> str:
        return self._file(record).name

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

    def _file(self, record: LabelledRecord) -> SoundFile:
        sound_file = record.row.columns[self.audio.column]
        assert isinstance(sound_file, SoundFile)
        return sound_file

    def _stored(self, source: RecordSource, *, refuse: bool = True) -> RecordSource:
        """The rows whose recordings can be decoded, with their features."""
        sound_files = [self._file(record) for record in source.records]
        stored = store(sound_files, self.format, self.audio)
        if stored.mistakes and refuse:
            mistakes = stored.mistakes
            shown = [mistakes[number] for number in sorted(mistakes)[:MAX_MISTAKES]]
            count = "1 recording" if len(mistakes) == 1 else f"{len(mistakes)} recordings"
            more = [f"  and {len(mistakes) - len(shown)} more"] if len(mistakes) > len(shown) else []
            remedy = "Replace or delete them, or write data.on_bad_row=skip to leave them out and count them."
            title = f"{source.name}: {count} of {len(sound_files)} cannot be read:"
            raise DataError("\n".join([title, *(f"  {text}" for text in shown), *more, remedy]))
        numbers = np.asarray([number for number in range(len(sound_files)) if number not in stored.mistakes])
        if not len(numbers):
            last = stored.mistakes[len(sound_files) - 1]
            raise DataError(f"{source.name}: none of its recordings can be read. The last one: {last}")
        digests = [hashlib.blake2b(stored.pixels[number].tobytes(), digest_size=16).hexdigest() for number in numbers]
        kept = tuple(
            source.records[number]._replace(digest=digest)
            for number, digest in zip(numbers.tolist(), digests, strict=True)
        )
        cut = 0
        if self.audio.on_long == "cut":
            most = (self.format.seconds or 0) + 1 / self.format.rate
            cut = sum(sound_files[number].seconds() > most for number in numbers.tolist())
        rows = SoundRows(
            stores=(stored.pixels,),
            place_N2=np.stack([np.zeros_like(numbers), numbers], axis=1),
            key_N=np.asarray([int(digest[:14], 16) for digest in digests], dtype=np.int64),
            format=self.format,
            cut=cut,
            augment=self.audio.augment if self.audio.augment.is_on else None,
            seed=self.seed,
        )
        return RecordSource(source.name, source.fingerprint, kept, (*source.skipped, *stored.mistakes.values()), rows)


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
