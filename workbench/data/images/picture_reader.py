"""Reads labelled rows of pictures.

Legend: N rows, H height, W width, 3 colours.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from workbench.config import DataConfig
from workbench.config.sections.classes_config import ClassesConfig
from workbench.config.sections.folds_config import DuplicatesConfig
from workbench.config.sections.image_config import Depth, ImageConfig
from workbench.config.sections.picture_prepare_config import PrepareConfig
from workbench.data.folds.duplicates import DuplicateClusters
from workbench.data.images import (
    picture_duplicates,
    picture_sources,
    picture_statistics,
    picture_store,
    preparation,
    value_ranges,
)
from workbench.data.images.deep_pictures import NO_RANGES, Pixels, ValueRanges
from workbench.data.images.picture_files import PictureFile
from workbench.data.images.picture_format import PictureFormat
from workbench.data.images.picture_rows import Augmenter, PictureRows
from workbench.data.images.preparation import PictureStatistics
from workbench.data.labelled import records
from workbench.data.labelled.record_table import LabelledRecord
from workbench.data.labelled.records import NamedColumns, RecordSource, RowInputs, RowReader
from workbench.data.rows import MAX_MISTAKES, RawRow, convert_rows
from workbench.data.text.tokenized import cache_folder
from workbench.errors import DataError, FileError
from workbench.runs import files

FILE, PROCESSOR = "picture_format.json", "preprocessor_config.json"


@dataclass(frozen=True)
class PictureReader:
    """Reads pictures as `image` prepares them for one backbone; see `RowReader`."""

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
    """Passes over so many training rows that the run will make."""
    statistics: PictureStatistics | None = None
    """Colours of the training pictures, as a run saved them."""
    training: Callable[[PictureReader], Sequence[LabelledRecord]] | None = None
    """From a reader that standardises nothing to the rows that train, whose colours `standardise=data` measures; None:
    all rows of data.train within data.limit."""
    ranges: ValueRanges | None = None
    """Ranges of the training pictures' values, as a run saved them."""
    title: str = "image"
    file: str = FILE

    @property
    def columns(self) -> tuple[str, ...]:
        """The column with the picture."""
        return (self.image.column,)

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
        """Read, decode and prepare the pictures of a folder, an archive, a table or a hub data set.

        Raises:
            DataError: Rows are malformed, or a column is missing.
        """
        named = self.data.with_columns(columns)
        data = named if weighted else named.unweighted

        def converter(first: RawRow) -> Callable[[RawRow], LabelledRecord]:
            if labelled:
                picture_sources.require_classes(source, first)
            records.require_label_columns(source, first, data, self.classes, labelled=labelled)
            return partial(records.labelled_record, config=data, classes=self.classes, labelled=labelled)

        skipped: list[str] = []
        refuse = self.data.on_bad_row == "refuse"
        rows = partial(picture_sources.read_rows, column=self.image.column)
        converted = list(convert_rows(source, converter, refuse=refuse, skipped=skipped, limit=limit, reader=rows))
        fingerprint = picture_sources.fingerprint(source, self.image.column)
        return self._stored(
            RecordSource(source, fingerprint, tuple(converted), tuple(skipped)), refuse=refuse, labelled=labelled
        )

    def reread(self, source: str, fingerprint: str, rows: Sequence[NamedColumns]) -> RecordSource:
        """The pictures that another reader read, prepared as this one does, without labels."""
        name = self.image.column
        mine = [RawRow(row.place, {**row.columns, name: columns[name]}) for row, columns in rows]
        records = tuple(LabelledRecord(row, ()) for row in mine)
        return self._stored(RecordSource(source, fingerprint, records), labelled=False)

    def inputs(self, source: RecordSource) -> PictureRows:
        """The pictures of each row."""
        assert isinstance(source.inputs, PictureRows)
        return source.inputs

    def describe(self, record: LabelledRecord) -> str:
        """The name of a picture's file."""
        return self._file(record).name

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
        return _training_ranges(sources, self.image.column, self.image.max_pixels, self.image.depth)

    def size(self, record: LabelledRecord) -> tuple[int, int]:
        """Height and width of a picture as it comes."""
        return self._file(record).size()

    def duplicates(self, sources: Sequence[RecordSource]) -> DuplicateClusters:
        """Near-duplicates among the pictures of all sources together, as they are stored."""
        pictures = (picture for source in sources for picture in self.inputs(source).arrays())
        return picture_duplicates.find(pictures, threshold=self.near.cutoff(pictures=True))

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
        facts = {"format": self.format.facts, "statistics": self._measured, "ranges": ranges}
        files.write_json(folder / FILE, facts)
        stock = self.image.prepare == PrepareConfig() and ranges == NO_RANGES
        if self.format.processor is not None and stock:
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
        return picture_statistics.measure(
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

    def _file(self, record: LabelledRecord) -> PictureFile:
        picture_file = record.row.columns[self.image.column]
        assert isinstance(picture_file, PictureFile)
        return picture_file

    def _stored(self, source: RecordSource, *, refuse: bool = True, labelled: bool) -> RecordSource:
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
        if stored.mistakes and refuse:
            raise DataError(_refusal(source, stored.mistakes))
        good = np.asarray([number not in stored.mistakes for number in range(len(source.records))])
        if not good.any():
            last = stored.mistakes[len(source.records) - 1]
            raise DataError(f"{source.name}: none of its pictures can be read. The last one: {last}")
        numbers = np.flatnonzero(good)
        if labelled and self.image.prepare.standardise == "data":
            digests = [record.digest for record in self._plain._stored(source, refuse=False, labelled=True).records]
        else:
            digests = [_digest(stored.pixels[number]) for number in numbers]
        kept = tuple(
            source.records[number]._replace(digest=digest)
            for number, digest in zip(numbers.tolist(), digests, strict=True)
        )
        height, width = -(-self.format.height // self.patch), -(-self.format.width // self.patch)
        rows = PictureRows(
            stores=(stored.pixels,),
            place_N2=np.stack([np.zeros_like(numbers), numbers], axis=1),
            key_N=np.asarray([int(digest[:14], 16) for digest in digests], dtype=np.int64),
            format=self.format,
            patches=height * width,
            augmenter=self.augmenter(len(numbers)),
        )
        return RecordSource(source.name, source.fingerprint, kept, (*source.skipped, *stored.mistakes.values()), rows)

    def augmenter(self, rows: int) -> Augmenter | None:
        """How so many training rows, as an epoch draws them, are augmented; None where they are not."""
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
def _training_ranges(sources: tuple[str, ...], column: str, max_pixels: int, depth: Depth) -> ValueRanges:
    """Ranges of the deep pictures of data.train, or of all of data.sources."""
    rows = (row for source in sources for row in picture_sources.read_rows(source, column))
    candidates = (row.columns[column] for row in rows if not row.mistake)
    deep = [file for file in candidates if file.may_be_deep()]
    return value_ranges.measure(deep, max_pixels=max_pixels, depth=depth, folder=cache_folder() / "value_ranges")


def _digest(picture_HW3: Pixels) -> str:
    return hashlib.blake2b(picture_HW3.tobytes(), digest_size=16).hexdigest()


def _refusal(source: RecordSource, mistakes: Mapping[int, str]) -> str:
    shown = [mistakes[number] for number in sorted(mistakes)[:MAX_MISTAKES]]
    count = "1 picture" if len(mistakes) == 1 else f"{len(mistakes)} pictures"
    more = [f"  and {len(mistakes) - len(shown)} more"] if len(mistakes) > len(shown) else []
    remedy = "Replace or delete them, or write data.on_bad_row=skip to leave them out and count them."
    title = f"{source.name}: {count} of {len(source.records)} cannot be read:"
    return "\n".join([title, *(f"  {text}" for text in shown), *more, remedy])
