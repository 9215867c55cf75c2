"""Reads labelled rows of pictures, and gives them as the model reads them: prepared, augmented in training, normalised.

Legend: N rows, B rows of a micro-batch, H height, W width, 3 colours; h and w of an augmented picture.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from workbench.config import DataConfig
from workbench.config.sections.classes_config import ClassesConfig
from workbench.config.sections.folds_config import DuplicatesConfig
from workbench.config.sections.image_config import AugmentConfig, Depth, ImageConfig, PrepareConfig
from workbench.data import ordered_processes
from workbench.data.batching import Indices
from workbench.data.folds.duplicates import DuplicateClusters
from workbench.data.images import augmentation, picture_duplicates, picture_sources, picture_store, preparation
from workbench.data.images.picture_files import NO_RANGES, PictureFile, Pixels, ValueRanges
from workbench.data.images.picture_format import PictureFormat
from workbench.data.images.picture_sources import PICTURE, MediaKind
from workbench.data.images.preparation import PictureStatistics
from workbench.data.images.stored_media import StoredReader, StoredRows, digests, kept, places
from workbench.data.labelled.record_table import LabelledRecord
from workbench.data.labelled.records import Mix, ModelInputs, RecordSource, RowInputs, RowReader
from workbench.data.source_files import AS_NAMED
from workbench.errors import FileError
from workbench.runs import files
from workbench.runs.files import cache_folder

Change: TypeAlias = Callable[[Pixels, int], Pixels]
"""From a picture (H, W, 3) and the number of its row to the picture that is read instead."""


@dataclass(frozen=True)
class Augmenter:
    """How training pictures change: in other ways at each draw, whatever the micro-batches and restarts."""

    config: AugmentConfig
    seed: int
    epochs: float  # passes over the training rows that the run will make
    multiple: int  # the side of a smaller picture is a multiple of it, such as the side of a patch

    def progress(self, epoch: int) -> float:
        """Share of the run that is done at some step of a pass, to show its pictures: 0 in the first, 1 in the last."""
        last = math.ceil(self.epochs) - 1
        return min(1.0, epoch / last) if last > 0 else 1.0


@dataclass(frozen=True, eq=False)
class PictureRows(StoredRows):
    """Pictures of one size, prepared (., H, W, 3)."""

    format: PictureFormat
    patches: int
    """Patches that the model cuts a picture into: its tokens."""
    augmenter: Augmenter | None = None
    change: Change | None = None
    """Another look at each picture."""
    progress: float = 1.0
    """Share of the run that is done when they are read, by which augmentation may have grown."""

    @property
    def redrawn(self) -> bool:
        """Whether pictures are augmented, each draw in another way."""
        return self.augmenter is not None

    @property
    def lengths(self) -> Indices:
        return np.full(len(self.place_N2), self.patches, dtype=np.int64)

    @property
    def truncated(self) -> int:
        """None loses a part: preparing has brought all to one size."""
        return 0

    def rewritten(self, *, epoch: int, progress: float) -> PictureRows:
        """The rows after a share of the run, as large as a curriculum has them by then."""
        if self.augmenter is None or not self.augmenter.config.grows:
            return self
        full, multiple = (self.format.height, self.format.width), self.augmenter.multiple
        size = augmentation.output_size(full, self.augmenter.config, progress=progress, multiple=multiple)
        return replace(self, progress=progress, patches=math.prod(-(-side // multiple) for side in size))

    def picture(self, index: int) -> Pixels:
        """The prepared picture of a row (H, W, 3), changed where there is a `change`."""
        store, number = self.place_N2[index]
        pixels: Pixels = self.stores[store][number]
        return pixels if self.change is None else self.change(pixels, int(self.key_N[index]))

    def batch(self, indices: Indices, *, epoch: int | None, repeats: Indices | None = None) -> ModelInputs:
        """The rows `indices`; augmented where there are an `augmenter` and an epoch."""
        if self.augmenter is None or epoch is None:
            pictures, mix = [self.picture(index) for index in indices], None
        else:
            repeats = np.zeros_like(indices) if repeats is None else repeats
            pictures, mix = self._augmented(self.augmenter, indices, epoch, repeats)
        pixels_B3hw = torch.from_numpy(self.format.normalised(pictures))
        last_B = torch.arange(1, len(indices) + 1) * self.patches - 1
        return ModelInputs({"pixel_values": pixels_B3hw}, last_B, len(indices) * self.patches, mix)

    def augmented(self, index: int, *, epoch: int) -> tuple[Pixels, int, float]:
        """The picture of a row as it is trained on in an epoch, the row that is mixed into it, and its own share."""
        assert self.augmenter is not None
        pictures, mix = self._augmented(self.augmenter, np.asarray([index]), epoch, np.zeros(1, dtype=np.int64))
        return pictures[0], *((index, 1.0) if mix is None else (int(mix.partner_B[0]), float(mix.share_B[0])))

    def _augmented(
        self, augmenter: Augmenter, indices: Indices, epoch: int, repeats: Indices
    ) -> tuple[list[Pixels], Mix | None]:
        given: dict[str, Any] = {"seed": augmenter.seed, "epoch": epoch, "progress": self.progress}

        def changed(draw: tuple[int, int]) -> Pixels:
            picture, (index, repeat) = self.picture(draw[0]), draw
            place = {"row": int(self.key_N[index]), "repeat": repeat, "multiple": augmenter.multiple}
            return augmentation.augment(picture, augmenter.config, **place, **given)

        def mixed(draw: tuple[int, int]) -> tuple[Pixels, int, float]:
            picture, (index, repeat) = changed(draw), draw
            partner = int(_partners(len(self.key_N), augmenter.seed, epoch)[index])
            place = {"row": int(self.key_N[index]), "repeat": repeat, "partner": partner}
            size = (picture.shape[0], picture.shape[1])
            how = augmentation.mix_plan(augmenter.config, size=size, **place, **given)
            if how is None:
                return picture, index, 1.0
            return augmentation.mix(picture, changed((how.partner, repeat)), how), how.partner, how.weight

        pixels = self.format.height * self.format.width
        draws = list(zip(indices.tolist(), repeats.tolist(), strict=True))  # rows, and how often each was drawn before
        if not augmenter.config.mixes:
            return ordered_processes.by_threads(changed, draws, size=pixels), None
        pictures, partner_B, share_B = zip(*ordered_processes.by_threads(mixed, draws, size=pixels), strict=True)
        return list(pictures), Mix(np.asarray(partner_B), np.asarray(share_B))

    def arrays(self) -> Iterator[npt.NDArray[Any]]:
        return (self.picture(index) for index in range(len(self.place_N2)))

    def seen(self, change: Change) -> PictureRows:
        """The same rows, each changed before it is read."""
        return replace(self, change=change)


@lru_cache(maxsize=4)
def _partners(rows: int, seed: int, epoch: int) -> Indices:
    return augmentation.mix_partners(rows, seed=seed, epoch=epoch)


FILE, PROCESSOR = "picture_format.json", "preprocessor_config.json"


@dataclass(frozen=True)
class PictureReader(StoredReader[PictureFile]):
    """Reads pictures as `image` prepares them for one backbone."""

    format: PictureFormat
    data: DataConfig
    classes: ClassesConfig
    image: ImageConfig
    near: DuplicatesConfig
    """When two pictures are near-duplicates."""
    patch: int
    """Side of the patches that the backbone cuts a picture into, in pixels."""
    seed: int
    epochs: Callable[[int], float]
    """From a number of training rows to the passes that the run makes over them."""
    statistics: PictureStatistics | None = None
    """Colours of the training pictures, as a run saved them."""
    training: Callable[[PictureReader], Sequence[LabelledRecord]] | None = None
    """From a reader that standardises nothing to the rows that train, whose colours `standardise=data` measures; None:
    all rows of data.train within data.limit."""
    ranges: ValueRanges | None = None
    """Ranges of the training pictures' values, as a run saved them."""
    title: str = "image"
    file: str = FILE
    kind: MediaKind[PictureFile] = PICTURE

    @property
    def section(self) -> ImageConfig:
        return self.image

    def inputs(self, source: RecordSource) -> PictureRows:
        assert isinstance(source.inputs, PictureRows)
        return source.inputs

    def rendered(self, inputs: RowInputs, index: int) -> str:
        """Size and brightness of a picture as the model reads it."""
        assert isinstance(inputs, PictureRows)
        picture_HW3 = inputs.picture(index)
        red, green, blue = picture_HW3.reshape(-1, 3).mean(0)
        height, width = picture_HW3.shape[:2]
        return f"{width} x {height} pixels, mean colour ({red:.0f}, {green:.0f}, {blue:.0f})"

    def states(self, record: LabelledRecord) -> Iterator[tuple[str, Pixels]]:
        """A picture as it comes, and after each step of preparation, each with its name."""
        picture = self.decoded(record)
        yield "as it comes", picture
        yield from preparation.steps(picture, self.image.prepare, self.format, self._measured)

    def decoded(self, record: LabelledRecord) -> Pixels:
        """A picture as it comes."""
        return self._file(record).decode(max_pixels=self.image.max_pixels, ranges=self.value_ranges())

    def value_ranges(self) -> ValueRanges:
        """Values that become 0 and 255 in pictures of more than 8 bits, decided over the training rows."""
        if self.ranges is not None:
            return self.ranges
        sources = tuple(own.train for own in self.data.training_files.values())
        folders = tuple(map(self.image.folder_of, sources))
        image, tables = self.image, (self.data.header, self.data.encoding)
        return _training_ranges(sources, folders, tables, image.column, image.max_pixels, image.depth)

    def size(self, record: LabelledRecord) -> tuple[int, int]:
        """Height and width of a picture as it comes."""
        return self._file(record).size()

    def duplicates(self, sources: Sequence[RecordSource], part_N: Indices | None = None) -> DuplicateClusters:
        """Near-duplicates among the pictures of all sources together, as they are stored."""
        pictures = (picture for source in sources for picture in self.inputs(source).arrays())
        return picture_duplicates.find(pictures, threshold=self.near.cutoff(pictures=True), part_N=part_N)

    def same_positions(self, other: RowReader) -> bool:
        """Whether `other` brings pictures to the same size."""
        if not isinstance(other, PictureReader):
            return False
        return (self.format.height, self.format.width) == (other.format.height, other.format.width)

    def as_read_by(self, other: RowReader, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """The same pictures, normalised as `other` does it."""
        assert isinstance(other, PictureReader)
        (scale_3, shift_3), (their_scale_3, their_shift_3) = self.format.affine, other.format.affine
        factor_3 = their_scale_3 / scale_3
        pixels_B3HW = inputs["pixel_values"]
        factor_311, shift_311 = (
            torch.from_numpy(values_3).to(pixels_B3HW)[:, None, None]
            for values_3 in (factor_3, their_shift_3 - factor_3 * shift_3)
        )
        return {**inputs, "pixel_values": pixels_B3HW * factor_311 + shift_311}

    def save(self, folder: Path) -> None:
        """Write how pictures are prepared into `folder`, also for a stock processor where it can do the same."""
        ranges = self.value_ranges()
        files.write_json(folder / FILE, {"format": self.format.facts, "statistics": self._measured, "ranges": ranges})
        if self.format.processor is not None and self.image.prepare == PrepareConfig() and ranges == NO_RANGES:
            files.write_json(folder / PROCESSOR, self.format.processor)

    @cached_property
    def _measured(self) -> PictureStatistics | None:
        """Colours of the training pictures, where `image.prepare` standardises by them."""
        if self.image.prepare.standardise != "data":
            return None
        if self.statistics is not None:
            return self.statistics
        if self.training is None:
            rows: Sequence[LabelledRecord] = [
                record
                for own in self.data.training_files.values()
                for record in self._plain.read(own.train, limit=own.limit, columns=own.columns).records
            ]
        else:
            rows = self.training(self._plain)
        return preparation.measure_statistics(
            list(map(self._file, rows)),
            self.image.prepare,
            max_pixels=self.image.max_pixels,
            ranges=self.value_ranges(),
        )

    @property
    def _plain(self) -> PictureReader:
        """The same reader, which brings no brightness and contrast together."""
        prepare = self.image.prepare.model_copy(update={"standardise": "none"})
        return replace(self, image=self.image.model_copy(update={"prepare": prepare}), statistics=None, training=None)

    def _stored(self, source: RecordSource, *, refuse: bool, labelled: bool) -> RecordSource:
        """The rows whose pictures can be decoded, with their prepared pixels.

        Which rows train decides how all are standardised: labelled rows are told apart, and split, by what they are
        without it.
        """
        stored = picture_store.store(
            [self._file(record) for record in source.records],
            format=self.format,
            prepare=self.image.prepare,
            max_pixels=self.image.max_pixels,
            workers=self.image.workers,
            folder=cache_folder() / "pictures",
            statistics=self._measured,
            ranges=self.value_ranges(),
        )
        numbers = self._readable(source, stored, refuse=refuse)
        if labelled and self.image.prepare.standardise == "data":
            same = self._plain._stored(source, refuse=False, labelled=True)
            digest_N = [record.digest for record in same.records]
        else:
            digest_N = digests(stored, numbers)
        height, width = -(-self.format.height // self.patch), -(-self.format.width // self.patch)
        where, augmenter = places(digest_N, numbers), self.augmenter(len(numbers))
        rows = PictureRows((stored.pixels,), *where, self.format, height * width, augmenter)
        return kept(source, stored, digest_N, numbers, rows)

    def augmenter(self, rows: int) -> Augmenter | None:
        """How training rows are augmented, given the rows of an epoch; None where they are not."""
        if not self.image.augment.is_on:
            return None
        return Augmenter(self.image.augment, self.seed, self.epochs(rows), self.patch)


class SavedFormat(NamedTuple):
    """Format, statistics and ranges that `PictureReader.save` wrote."""

    format: PictureFormat
    statistics: PictureStatistics | None = None
    ranges: ValueRanges | None = None


def saved_format(folder: Path) -> SavedFormat:
    """Read back what `PictureReader.save` wrote into `folder`; raises FileError where it is damaged."""
    facts = files.read_json(folder / FILE)
    try:
        known = facts["statistics"]
        statistics = None if known is None else PictureStatistics(*map(tuple, known))
        # A run of before there were ranges knows none.
        ranges = ValueRanges(*(each and tuple(each) for each in facts.get("ranges", ())))
        return SavedFormat(PictureFormat.from_facts(facts["format"]), statistics, ranges)
    except (KeyError, TypeError, ValueError) as error:
        raise FileError(f"{folder}/{FILE}: damaged ({error}). Restore it, or train again.") from None


@lru_cache(maxsize=1)
def _training_ranges(
    sources: tuple[str, ...],
    folders: tuple[str | None, ...],
    tables: tuple[bool | None, str],
    column: str,
    max_pixels: int,
    depth: Depth,
) -> ValueRanges:
    """Ranges of the deep pictures of data.train, or of all of data.sources."""
    places = zip(sources, folders, strict=True)
    config = AS_NAMED.model_copy(update=dict(zip(("header", "encoding"), tables, strict=True)))
    rows = (row for source, folder in places for row in picture_sources.read_rows(source, column, folder, config))
    candidates = (row.columns[column] for row in rows if not row.mistake)
    deep = [file for file in candidates if file.may_be_deep()]
    return preparation.measure_ranges(deep, max_pixels=max_pixels, depth=depth, folder=cache_folder() / "value_ranges")
