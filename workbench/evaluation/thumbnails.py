"""Small pictures for a report: rows worth looking at, pictures as trained on, and the gradient maps of predictions.

Legend: H, W, 3 of a picture, S noisy copies.
"""

from __future__ import annotations

import io
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import cv2
import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from PIL import Image

from workbench.data.batching import MicroBatch
from workbench.data.images.picture_files import Pixels
from workbench.data.images.picture_reader import PictureReader, PictureRows
from workbench.data.labelled.labelled_data import LabelledSet
from workbench.data.labelled.record_table import LabelledRecord
from workbench.data.labelled.records import RecordSource, RowReader
from workbench.data.sound import listening
from workbench.data.sound.sound_reader import SoundReader, SoundRows
from workbench.data.text.tokenized_set import TokenizedSet
from workbench.errors import DataError
from workbench.evaluation import training_dynamics
from workbench.evaluation.prediction_table import class_names, ranked
from workbench.models.classifier import Classifier
from workbench.runs import files

COPIES = 4
NOISE = 0.1  # standard deviation of the noise on a copy, as a share of the range of the picture's values
BLUR = 1 / 40  # standard deviation of the final smoothing, as a share of the picture's longer side
STRENGTH = 0.75  # opacity of the colour where the map is 1
Map = npt.NDArray[np.float32]
FILE = "pictures.parquet"
SIDE = 96  # longest side of a stored picture, in pixels
QUALITY = 88  # quality of JPEG, without subsampled colours
MOST_ROWS = 800
MOST_BYTES = 2_300_000  # bytes of all pictures of rows; on a page they take a third more
NOTABLE = 24  # mistakes, and rows in doubt, that are shown before all others
MOST_LEFT_OUT = 40
EXPLAINED = 8  # rows with a gradient map
TRAINED = 6  # training pictures that are shown as the model saw them
SHOWN_EPOCHS = 6
Kind = Literal["row", "map", "trained", "neighbour", "hard", "left out"]


def gradient_map(model: Classifier, rows: LabelledSet, index: int, *, output: int) -> Map:
    """Size of the gradient of one output with respect to each pixel (H, W), smoothed, from 0 to 1.

    It is the mean over noisy copies of the picture (SmoothGrad, Smilkov et al. 2017), and the maximum over the three
    channels. The model's parameters get no gradient. `output`: number of the class, or 0 for a number.
    """
    device = next(model.model.parameters()).device
    one = rows.batch(np.asarray([index]))
    clean = one.inputs["pixel_values"]
    draw = torch.Generator().manual_seed(0)
    noise = torch.randn((COPIES, *clean.shape[1:]), generator=draw) * NOISE * (clean.max() - clean.min())
    pixels_S3HW = (clean + noise).to(device).requires_grad_()
    batch = MicroBatch(
        inputs={"pixel_values": pixels_S3HW},
        positions_N=(torch.arange(1, COPIES + 1) * one.tokens - 1).to(device),
        labels_N=one.labels_N.expand(COPIES, -1).to(device),
        tokens=COPIES * one.tokens,
    )
    with torch.enable_grad():
        (gradient_S3HW,) = torch.autograd.grad(model.outputs(batch)[:, output].sum(), pixels_S3HW)
    return smoothed(gradient_S3HW.float().abs().mean(0).amax(0).cpu().numpy())


def smoothed(map_HW: Map) -> Map:
    """The map blurred and scaled by its 99th percentile, from 0 to 1; zeros where the percentile is zero."""
    known_HW = np.nan_to_num(map_HW, posinf=0.0)  # half precision may overflow
    soft_HW = cv2.GaussianBlur(known_HW, (0, 0), sigmaX=max(0.5, BLUR * max(map_HW.shape)))
    top = float(np.percentile(soft_HW, 99))
    return np.clip(soft_HW / top, 0, 1).astype(np.float32) if top > 0 else np.zeros_like(map_HW)


def overlay(picture_HW3: Pixels, map_HW: Map) -> Pixels:
    """The picture in grey under the map in colours: yellow where it is 1, transparent where it is 0."""
    grey_HW1 = picture_HW3.mean(2, keepdims=True)
    colour_HW3 = cv2.applyColorMap((255 * map_HW).astype(np.uint8), cv2.COLORMAP_INFERNO)[:, :, ::-1]
    share_HW1 = STRENGTH * map_HW[:, :, None]
    return np.asarray(np.rint((1 - share_HW1) * grey_HW1 + share_HW1 * colour_HW3), dtype=np.uint8)


@dataclass(frozen=True)
class Thumbnail:
    """One picture of a report."""

    row: str
    """Place of its row."""
    image: str
    """Name of its file."""
    kind: Kind
    """A row of the predictions, its gradient map, one state of a training picture, or a training row: a near neighbour
    of a prediction, one whose label stayed improbable, or one left out because a near-duplicate has another label."""
    label: str
    caption: str
    """The state of a training picture, or the class that a map explains."""
    jpeg: bytes
    sound: bytes = b""
    """The recording whose spectrum it is, as MP3; empty for a picture."""


def jpeg(picture_HW3: Pixels) -> bytes:
    """A JPEG file of the picture, made smaller where a side is longer than SIDE."""
    image = Image.fromarray(picture_HW3)
    image.thumbnail((SIDE, SIDE), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=QUALITY, subsampling=0, optimize=True)
    return buffer.getvalue()


def write(
    folder: Path,
    reader: RowReader,
    rows: LabelledSet,
    table: pd.DataFrame,
    *,
    train: LabelledSet,
    model: Classifier | None = None,
    explain: Sequence[int] | None = None,
    first: Sequence[int] = (),
    near: LabelledSet | None = None,
    left_out: RecordSource | None = None,
) -> None:
    """Write FILE into a run directory, where the rows are pictures, or sound, which is shown by its spectrum; call it
    after dynamics.parquet is written.

    Args:
        table: Predictions of `rows`, in their order.
        train: Rows as one adapter trained on them.
        model: Its gradient maps explain some predictions; None: no maps.
        explain: Rows from which the explained ones are chosen; None: all.
        first: Rows that are shown before all others.
        near: Training rows that are near neighbours of others.
        left_out: Rows that were left out of training, since near-duplicates have another label.
    """
    if isinstance(reader, SoundReader):
        thumbnails = _spectra(reader, rows, table, first=first, train=train, near=near)
        files.write_bytes(folder / FILE, _table(thumbnails))
        return
    if not isinstance(reader, PictureReader):
        return
    thumbnails = [*of_rows(rows, reader, table, first=first), *as_trained(train, reader)]
    if near is not None:
        shown = {each.row for each in thumbnails if each.kind == "row"}
        thumbnails += [each for each in as_prepared(near.records, _pictures(near), reader) if each.row not in shown]
    thumbnails += _hard(folder, (train, rows), reader)
    if left_out is not None:
        first_ones = left_out.subset(np.arange(len(left_out.records)) < MOST_LEFT_OUT)
        thumbnails += as_prepared(first_ones.records, reader.inputs(first_ones), reader, kind="left out")
    if model is not None:
        numbers = np.arange(len(rows)) if explain is None else np.asarray(explain)
        thumbnails += explained(model, rows.subset(numbers), reader, table.iloc[numbers])
    files.write_bytes(folder / FILE, _table(thumbnails))


def write_beside_text(folder: Path, rows: TokenizedSet, places: Collection[str]) -> None:
    """Write FILE into a run directory, of the rows at `places`, where these have pictures or recordings."""
    thumbnails, left = list[Thumbnail](), MOST_BYTES
    for number, place in enumerate(rows.places() if rows.processor is not None and rows.pictured else ()):
        if place in places and rows.processor is not None and (key := rows[number].pictures):
            found = [(each, b"") for each in rows.processor.small(key)]
            found += [(jpeg(listening.drawn(each)), listening.played(each)) for each in rows.processor.sounds(key)]
            left -= sum(len(picture) + len(sound) for picture, sound in found)
            if left < 0:
                break
            thumbnails += [Thumbnail(place, "", "row", "", "", *each) for each in found]
    if thumbnails:
        files.write_bytes(folder / FILE, _table(thumbnails))


def _table(thumbnails: Sequence[Thumbnail]) -> bytes:
    columns = list(Thumbnail.__dataclass_fields__)
    written: bytes = pd.DataFrame([vars(each) for each in thumbnails], columns=columns).to_parquet()
    return written


def _spectra(
    reader: SoundReader,
    rows: LabelledSet,
    table: pd.DataFrame,
    *,
    first: Sequence[int],
    train: LabelledSet,
    near: LabelledSet | None,
) -> list[Thumbnail]:
    """Spectra of the rows that are worth looking at, of some training rows as they are heard in some epochs, and of
    near neighbours."""

    left = MOST_BYTES

    def drawn(of: LabelledSet, row: int, kind: Kind, caption: str = "", epoch: int | None = None) -> Thumbnail:
        nonlocal left
        assert isinstance(of.inputs, SoundRows)
        record, sound = of.records[row], b""
        if epoch is None and left > 0:  # features that were augmented cannot be played
            with suppress(DataError):  # where the file is gone, only its spectrum is shown
                sound = reader.played(record)
                left -= len(sound)
        spectrum = jpeg(of.inputs.picture(row, epoch=epoch))
        about = (record.place, reader.describe(record), kind, label_in_words(record.label), caption)
        return Thumbnail(*about, spectrum, sound)

    thumbnails = [drawn(rows, row, "row") for row in chosen(table, first=first)]
    for row in np.unique(np.linspace(0, len(train) - 1, TRAINED).round().astype(int)).tolist():
        thumbnails.append(drawn(train, row, "trained", "prepared"))
        if train.inputs.redrawn:
            thumbnails += [drawn(train, row, "trained", f"epoch {epoch + 1}", epoch) for epoch in range(SHOWN_EPOCHS)]
    shown = {each.row for each in thumbnails if each.kind == "row"}
    others = range(0 if near is None else len(near))
    return thumbnails + [drawn(near, row, "neighbour") for row in others if near and near.place(row) not in shown]


def chosen(table: pd.DataFrame, *, first: Sequence[int] = (), most: int = MOST_ROWS) -> list[int]:
    """Rows of a table of predictions that are worth looking at, the most important first.

    The surest mistakes and the rows in doubt come first, then the surest rows of each cell of the confusion matrix, one
    per cell in turn. `first`: rows that come before all others, at most a quarter of `most`.
    """
    ranking = ranked(table)
    notable = [*first[: most // 4], *ranking.mistakes[:NOTABLE], *ranking.uncertain[:NOTABLE]]
    of_table = zip(map(_key, table["label"]), map(_key, table["predicted"]), strict=True)
    cell_N: list[object] = list(of_table) if class_names(table) else ranking.right_N.tolist()
    cells: dict[object, list[int]] = {}
    for row in np.argsort(-ranking.example_N, kind="stable").tolist():
        cells.setdefault(cell_N[row], []).append(row)
    turns = [(turn, order, row) for order, rows in enumerate(cells.values()) for turn, row in enumerate(rows)]
    return list(dict.fromkeys([*notable, *(row for _, _, row in sorted(turns))]))[:most]


def of_rows(
    rows: LabelledSet,
    reader: PictureReader,
    table: pd.DataFrame,
    *,
    first: Sequence[int] = (),
    most_bytes: int = MOST_BYTES,
) -> list[Thumbnail]:
    """Pictures of the rows that are worth looking at, as many as MOST_ROWS and `most_bytes` allow."""
    pictures, thumbnails, taken = _pictures(rows), [], 0
    for row in chosen(table, first=first):
        thumbnail = _thumbnail(rows.records[row], reader, "row", "", pictures.picture(row))
        taken += len(thumbnail.jpeg)
        if taken > most_bytes:
            break
        thumbnails.append(thumbnail)
    return thumbnails


def explained(model: Classifier, rows: LabelledSet, reader: PictureReader, table: pd.DataFrame) -> list[Thumbnail]:
    """Gradient maps of the surest mistakes and of rows that are right, over their pictures. `table`: predictions of
    `rows` by `model` or another one; a map explains the predicted class."""
    names, pictures, thumbnails = class_names(table), _pictures(rows), []
    # Half surest mistakes, half right rows, of different classes if possible; more of one where the other lacks.
    ranking, first_of, half = ranked(table), dict[object, int](), EXPLAINED // 2
    for row in ranking.right if names else ():
        first_of.setdefault(_key(table["label"].iat[row]), row)
    different = [*first_of.values(), *ranking.right]
    wanted = [*ranking.mistakes[:half], *different[:half], *different, *ranking.mistakes]
    for row in list(dict.fromkeys(wanted))[:EXPLAINED]:
        output = int(table[[f"p_{name}" for name in names]].iloc[row].to_numpy().argmax()) if names else 0
        try:
            map_HW = gradient_map(model, rows, row, output=output)
        except torch.OutOfMemoryError:
            break  # the run is done and must not fail here
        picture = overlay(pictures.picture(row), map_HW)
        thumbnails.append(
            _thumbnail(rows.records[row], reader, "map", names[output] if names else "the number", picture)
        )
    return thumbnails


def as_trained(rows: LabelledSet, reader: PictureReader) -> list[Thumbnail]:
    """Some training pictures: as in the file, prepared, and as the model sees them in some epochs, mixing included."""
    pictures, thumbnails = _pictures(rows), []
    shown: list[int] = np.unique(np.linspace(0, len(rows) - 1, TRAINED).round().astype(int)).tolist()
    if len(shown) == TRAINED:  # random rows, one per class while there are classes left
        order = np.random.default_rng(0).permutation(len(rows)).tolist()
        first_of = {str(rows.records[row].label): row for row in reversed(order)}
        shown = list(dict.fromkeys([*first_of.values(), *order]))[:TRAINED]
    for row in shown:
        states: list[tuple[str, Pixels]] = []
        with suppress(DataError):  # where the file is gone, only the prepared picture is shown
            states.append(("file", reader.decoded(rows.records[row])))
        states.append(("prepared", pictures.picture(row)))
        # Some epochs, including the first and the last; none where nothing is augmented.
        last = -1 if pictures.augmenter is None else max(0, int(np.ceil(pictures.augmenter.epochs)) - 1)
        epochs = np.unique(np.linspace(0, last, SHOWN_EPOCHS).round().astype(int)).tolist() if last >= 0 else []
        for epoch in epochs:
            picture, share = read_in_epoch(pictures, row, epoch)
            mixed = f", mixed: {100 * share:.0f} % its label" if share < 1 else ""
            states.append((f"epoch {epoch + 1}{mixed}", picture))
        thumbnails += [_thumbnail(rows.records[row], reader, "trained", state, picture) for state, picture in states]
    return thumbnails


def as_prepared(
    records: Sequence[LabelledRecord], pictures: PictureRows, reader: PictureReader, *, kind: Kind = "neighbour"
) -> list[Thumbnail]:
    """Training rows as they were prepared."""
    return [_thumbnail(record, reader, kind, "", pictures.picture(row)) for row, record in enumerate(records)]


def _hard(folder: Path, sets: Sequence[LabelledSet], reader: PictureReader) -> list[Thumbnail]:
    """Training rows whose labels stayed least probable, where the run recorded training dynamics."""
    if not (folder / training_dynamics.FILE).exists():
        return []
    dynamics = pd.read_parquet(folder / training_dynamics.FILE, columns=["row", "confidence"])
    wanted = set(training_dynamics.hardest(dynamics)["row"])
    thumbnail_by_place: dict[str, Thumbnail] = {}
    for rows in sets:
        for row, record in enumerate(rows.records):
            if record.place in wanted - thumbnail_by_place.keys():
                thumbnail_by_place[record.place] = _thumbnail(record, reader, "hard", "", _pictures(rows).picture(row))
    return list(thumbnail_by_place.values())


def read_in_epoch(pictures: PictureRows, row: int, epoch: int) -> tuple[Pixels, float]:
    """The picture (h, w, 3) that the model reads of a row in an epoch, and the share of the row's own label.

    It is that of the row's first visit in the epoch; where augmentation grows, that of one step of the epoch.
    """
    if pictures.augmenter is not None:
        pictures = pictures.rewritten(epoch=epoch, progress=pictures.augmenter.progress(epoch))
    read = pictures.batch(np.asarray([row]), epoch=epoch)
    scale_3, shift_3 = pictures.format.affine
    values_hw3 = (read.inputs["pixel_values"][0].numpy().transpose(1, 2, 0) - shift_3) / scale_3
    picture_hw3 = np.asarray(np.rint(values_hw3).clip(0, 255), dtype=np.uint8)
    return picture_hw3, 1.0 if read.mix is None else float(read.mix.share_B[0])


def _thumbnail(
    record: LabelledRecord, reader: PictureReader, kind: Kind, caption: str, picture_HW3: Pixels
) -> Thumbnail:
    label = label_in_words(record.label)
    return Thumbnail(record.place, reader.describe(record), kind, label, caption, jpeg(picture_HW3))


def _pictures(rows: LabelledSet) -> PictureRows:
    assert isinstance(rows.inputs, PictureRows)
    return rows.inputs


def label_in_words(label: object) -> str:
    """A label as pages show it; empty where there is none."""
    return ", ".join(label) if isinstance(label, tuple) else "" if label is None else str(label)


def _key(cell: object) -> object:
    return tuple(cell) if isinstance(cell, (list, np.ndarray)) else cell
