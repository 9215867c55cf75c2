"""Steps that a picture goes through once before it is stored (`image.prepare`), and what is measured for them.

Brightness and colour of the training pictures are measured for `standardise=data`. Ranges of pictures of more than 8
bits a value are decided once over all training pictures (`image.depth`): pictures that were each scaled by their own
brightest value would lose how bright they are beside one another.

Legend: H height, W width, 3 the channels red, green and blue.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import cv2
import numpy as np
import numpy.typing as npt
import PIL
from PIL import Image

from workbench.data import ordered_processes
from workbench.data.images.picture_files import DEPTHS, NO_RANGES, PictureFile, Pixels, ValueRanges, extremes
from workbench.data.images.picture_format import PictureFormat
from workbench.errors import DataError
from workbench.runs import files as whole_files

if TYPE_CHECKING:  # decoding processes start four times as fast without the configuration
    from workbench.config.sections.image_config import PrepareConfig


class PictureStatistics(NamedTuple):
    """Mean and standard deviation of each channel, in values from 0 to 255."""

    mean: tuple[float, float, float]
    std: tuple[float, float, float]


def prepare(
    picture: Image.Image | Pixels,
    config: PrepareConfig,
    format: PictureFormat,
    statistics: PictureStatistics | None = None,
) -> Pixels:
    """The picture (H, W, 3), or an image of mode RGB, as it is stored: (format.height, format.width, 3). `statistics`:
    of the training rows; needed where `config.standardise` is `data`."""
    *_, (_, prepared) = steps(picture, config, format, statistics)
    return prepared


def steps(
    picture: Image.Image | Pixels,
    config: PrepareConfig,
    format: PictureFormat,
    statistics: PictureStatistics | None = None,
) -> Iterator[tuple[str, Pixels]]:
    """The picture after each step that is on, with the step's name, in the order in which they are done."""
    if config.median is not None:
        picture = denoised(np.asarray(picture), config)
        yield "median", picture
    if config.standardise != "none":
        picture = np.asarray(picture)
        if config.standardise == "picture":  # the same for each channel, so that colours stay
            statistics = PictureStatistics((float(picture.mean()),) * 3, (float(picture.std()),) * 3)
        picture = standardised(picture, statistics)
        yield "standardise", picture
    if config.edges != "none":
        picture = np.asarray(picture)
        edges = canny(picture) if config.edges == "canny" else sobel(picture)
        picture = np.maximum(picture, edges[:, :, None]) if config.edges_as == "overlay" else _three(edges)
        yield "edges", picture
    if config.crop_to_object is not None:
        picture = cropped_to_object(np.asarray(picture), margin=config.crop_to_object)
        yield "crop_to_object", picture
    picture = resized(picture, config, format)
    yield "resize", picture
    if config.colour == "grey":
        picture = _three(cv2.cvtColor(picture, cv2.COLOR_RGB2GRAY))
        yield "grey", picture


def denoised(picture: Pixels, config: PrepareConfig) -> Pixels:
    """The picture after the median filter, where it is on."""
    return picture if config.median is None else _pixels(cv2.medianBlur(picture, config.median))


def standardised(picture: Pixels, statistics: PictureStatistics | None) -> Pixels:
    """Values whose mean is mid-grey; three standard deviations below are black, above are white."""
    assert statistics is not None, "standardise=data is given the training rows' statistics"
    values_256 = np.arange(256)[:, None]
    scores = (values_256 - np.asarray(statistics.mean)) / np.maximum(statistics.std, 1)
    table = np.rint(127.5 + 42.5 * scores).clip(0, 255).astype(np.uint8)
    return _pixels(cv2.LUT(picture, table[:, None, :]))


def canny(picture: Pixels) -> Pixels:
    """Edges (H, W), 0 or 255; the upper threshold is Otsu's for the strength of gradients, the lower one half of it."""
    along, down = _gradients(picture)
    threshold, _ = cv2.threshold(_strength(along, down), 0, 255, cv2.THRESH_BINARY + cv2.THRESH_OTSU)
    return _pixels(cv2.Canny(along, down, 2 * threshold, 4 * threshold, L2gradient=True))


def sobel(picture: Pixels) -> Pixels:
    """Strength of the gradient (H, W); the steepest step along an axis, from black to white, is 255."""
    return _strength(*_gradients(picture))


Gradient = npt.NDArray[np.int16]


def _gradients(picture: Pixels) -> tuple[Gradient, Gradient]:
    grey = cv2.cvtColor(picture, cv2.COLOR_RGB2GRAY)
    along, down = (np.asarray(cv2.Sobel(grey, cv2.CV_16S, *axis), np.int16) for axis in ((1, 0), (0, 1)))
    return along, down


def _strength(along: Gradient, down: Gradient) -> Pixels:
    # Whole numbers, and numpy's exact root: that of OpenCV depends on where an array lies in memory.
    lengths = np.sqrt(along.astype(np.float32) ** 2 + down.astype(np.float32) ** 2)
    return _pixels(np.rint(lengths / 4).clip(0, 255).astype(np.uint8))


SMALLEST_OBJECT = 0.005  # share of the picture's area below which a contour is noise
LEAST_CONTRAST = 24  # levels by which an object and its background differ at least, of 255


def cropped_to_object(picture: Pixels, *, margin: float) -> Pixels:
    """The part around the largest contour that stands out from what the picture's border shows; the whole picture where
    there is no clear object. `margin`: added on each side where there is room, as a share of the object's longer
    side."""
    grey = cv2.GaussianBlur(cv2.cvtColor(picture, cv2.COLOR_RGB2GRAY), (5, 5), 0)
    _, mask = cv2.threshold(grey, 0, 255, cv2.THRESH_BINARY + cv2.THRESH_OTSU)
    if not 0 < mask.mean() < 255 or grey[mask > 0].mean() - grey[mask == 0].mean() < LEAST_CONTRAST:
        return picture
    if np.concatenate([mask[0], mask[-1], mask[:, 0], mask[:, -1]]).mean() > 127.5:  # the border shows the background
        mask = 255 - mask
    contours, _ = cv2.findContours(mask, cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_SIMPLE)
    largest = max(contours, key=cv2.contourArea)
    if cv2.contourArea(largest) < SMALLEST_OBJECT * mask.size:
        return picture
    left, top, width, height = cv2.boundingRect(largest)
    border = round(margin * max(width, height))
    return picture[max(0, top - border) : top + height + border, max(0, left - border) : left + width + border]


def resized(picture: Image.Image | Pixels, config: PrepareConfig, format: PictureFormat) -> Pixels:
    """The picture (format.height, format.width, 3), antialiased."""
    image = picture if isinstance(picture, Image.Image) else Image.fromarray(picture)
    width, height = image.size
    fit, target = format.fit, format.resized
    if config.fit != "backbone":
        fit = config.fit
        target = target if fit == "crop" else (format.height, format.width)
    scales = (target[0] / height, target[1] / width)
    if fit == "stretch":
        size = target
    elif target[0] == target[1]:  # as the libraries round: the exact side, and the other one cut to whole pixels
        side = min(height, width) if fit == "crop" else max(height, width)
        size = (max(1, target[0] * height // side), max(1, target[0] * width // side))
    else:
        scale = max(scales) if fit == "crop" else min(scales)
        size = (max(1, round(height * scale)), max(1, round(width * scale)))
    if size != (height, width):
        image = image.resize(size[::-1], resample=format.resample)
    whole = np.asarray(image)
    top, left = (size[0] - format.height) // 2, (size[1] - format.width) // 2
    middle = whole[max(0, top) : max(0, top) + format.height, max(0, left) : max(0, left) + format.width]
    if top >= 0 and left >= 0:
        return middle
    # The border is black, or has the mean colour of normalisation.
    colour = np.rint(np.asarray(format.mean) * 255).clip(0, 255) if fit == "pad" else 0
    canvas = np.full((format.height, format.width, 3), colour, np.uint8)
    canvas[max(0, -top) :, max(0, -left) :][: middle.shape[0], : middle.shape[1]] = middle
    return canvas


def _three(grey: npt.NDArray[np.generic]) -> Pixels:
    return _pixels(cv2.cvtColor(_pixels(grey), cv2.COLOR_GRAY2RGB))


def _pixels(values: npt.NDArray[np.generic]) -> Pixels:
    assert values.dtype == np.uint8
    return np.asarray(values, np.uint8)


MOST = 1000  # pictures that are looked at, evenly spread; more would change a mean by less than a level


def measure_statistics(
    files: Sequence[PictureFile], prepare: PrepareConfig, *, max_pixels: int, ranges: ValueRanges = NO_RANGES
) -> PictureStatistics:
    """Mean and standard deviation of each channel over pictures, which weigh the same whatever their size. Raises
    DataError: none of them can be read. `files`: of training rows only: held-out rows would leak into what is trained
    on. Unreadable ones do not count. `prepare`: its median filter comes first, as when pictures are prepared."""
    moments, last = [], ""
    for index in np.unique(np.linspace(0, len(files) - 1, min(MOST, len(files))).round().astype(int)):
        try:
            picture = files[index].decode(max_pixels=max_pixels, ranges=ranges)
        except DataError as error:
            last = str(error)
            continue
        values = denoised(picture, prepare).reshape(-1, 3).astype(np.float64)
        moments.append((values.mean(axis=0), (values**2).mean(axis=0)))
    if not moments:
        raise DataError(f"image.prepare.standardise=data: none of the training pictures can be read. The last: {last}")
    mean_3, square_3 = np.mean(moments, axis=0)
    std_3 = np.sqrt(np.maximum(square_3 - mean_3**2, 0))
    return PictureStatistics(tuple(mean_3.tolist()), tuple(std_3.tolist()))


_VERSION = "1"  # raise it when what is kept changes
_Span = tuple[float, float]
_KINDS = ("integers", "floats")


def measure_ranges(
    files: Sequence[PictureFile], *, max_pixels: int, depth: int | Literal["auto"], folder: Path
) -> ValueRanges:
    """The values that become 0 and 255 in all pictures of a run.

    Args:
        files: Of data.train, held-out rows too: how far values go says nothing of a label. Unreadable ones, and those
            of 8 bits, do not count.
        depth: As `image.depth`.
        folder: Where what was found is kept, so that later runs decode nothing.
    """
    least_and_greatest = _kept(files, max_pixels, folder) if files else {}
    whole, real = (least_and_greatest.get(kind) for kind in _KINDS)
    if depth != "auto":
        whole = (0.0, 2.0**depth - 1)
    elif whole is not None and whole[0] >= 0 and whole[1] < 2 ** DEPTHS[-1]:
        whole = (0.0, 2.0 ** next(bits for bits in DEPTHS if whole[1] < 2**bits) - 1)
    return ValueRanges(whole, (0.0, 1.0) if real is not None and real[0] >= 0 and real[1] <= 1 else real)


def ranges_in_words(ranges: ValueRanges, depth: int | Literal["auto"]) -> str:
    """The ranges, for a person who checks a recipe; empty where no picture has more than 8 bits."""
    decided = "as the training pictures need" if depth == "auto" else f"image.depth={depth}"
    phrases = []
    if ranges.integers is not None:
        low, high = ranges.integers
        bits = {2.0**bits - 1: f"{bits} bits, " for bits in DEPTHS}.get(high, "") if low == 0 else ""
        phrases.append(f"{bits}{low:,.0f} to {high:,.0f} become 0 to 255, {decided}")
    if ranges.floats is not None:
        phrases.append("floats of {:.4g} to {:.4g} become 0 to 255".format(*ranges.floats))
    return "; ".join(phrases)


def _kept(files: Sequence[PictureFile], max_pixels: int, folder: Path) -> dict[str, _Span]:
    """Least and greatest value of each kind of numbers over all files."""
    name = hashlib.sha256(json.dumps([_VERSION, PIL.__version__, max_pixels]).encode())
    for file in files:
        name.update(file.digest_or_fault())
    path = folder / f"{name.hexdigest()[:32]}.json"
    with suppress(OSError, ValueError, TypeError, AttributeError):  # none yet, or a damaged one
        return {kind: (float(low), float(high)) for kind, (low, high) in json.loads(path.read_text()).items()}

    def span(file: PictureFile) -> tuple[str, _Span] | None:
        try:
            values = file.deep_values(max_pixels=max_pixels)
            return None if values is None else (_KINDS[values.dtype.kind == "f"], extremes(values))
        except (DataError, ValueError):
            return None

    spans: dict[str, _Span] = {}
    for each in ordered_processes.by_threads(span, files, size=ordered_processes.LARGE):
        if each is not None:
            kind, (low, high) = each
            known = spans.get(kind, (low, high))
            spans[kind] = (min(low, known[0]), max(high, known[1]))
    whole_files.write_json(path, spans)
    return spans
