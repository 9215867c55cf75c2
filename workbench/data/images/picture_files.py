"""From the bytes of a picture file to pixels: right, or refused with the file's name and the cure.

References to pictures are light enough to be sent to the processes that decode them. Pictures may have more than 8 bits
a value: grey and colours of 16 bits, whole numbers of 32 bits, floats.

Legend: H height, W width, 3 the channels red, green and blue.
"""

from __future__ import annotations

import io
import itertools
import random
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageChops, ImageFile, ImageOps, UnidentifiedImageError
from PIL.TiffImagePlugin import TiffImageFile

from workbench.data.stored_files import UNREADABLE, StoredFile
from workbench.errors import DataError

Pixels = npt.NDArray[np.uint8]
Values = npt.NDArray[np.generic]
DEPTHS = (8, 10, 12, 14, 16)  # bits a value that cameras and microscopes write into 16
_MOST = {float(2**bits - 1): bits for bits in DEPTHS}  # number of bits by the greatest value that they hold


class ValueRanges(NamedTuple):
    """Values of deep pictures that become 0 and 255: the same for all pictures of a run."""

    integers: tuple[float, float] | None = None
    floats: tuple[float, float] | None = None


NO_RANGES = ValueRanges()


def may_be_deep(start: bytes) -> bool:
    """Whether a file that starts so (32 bytes) can have more than 8 bits a value."""
    if start.startswith(b"\x89PNG"):
        return start[24:25] == b"\x10"  # bits of a channel
    return start.startswith((b"II", b"MM", b"P5", b"Pf", b"\0\0\0\x0cjP", b"\xff\x4f\xff\x51"))


def has_deep_mode(image: Image.Image) -> bool:
    """Whether Pillow keeps all bits of a picture, as it does of grey ones."""
    return image.mode.startswith("I") or image.mode == "F"


def packing_of_16_bits(image: ImageFile.ImageFile) -> str:
    """How a file that is not loaded yet packs 16 bits a value, if Pillow would drop the lower 8; else empty.

    It does so with colours, and with grey that has transparency.
    """
    arguments = image.tile[0].args if image.tile else ""
    packing = arguments[0] if isinstance(arguments, tuple) and arguments else arguments
    return packing if isinstance(packing, str) and ";16" in packing and not has_deep_mode(image) else ""


_OTHER_BYTE = {"B": "L", "L": "B", "N": "B" if sys.byteorder == "little" else "L"}
"""The end of a packing, by the byte that comes first (big-endian, little-endian, native), to that of the other byte."""


def lower_bytes(data: bytes, kind: str | None, packing: str) -> Image.Image | None:
    """The picture that the lower 8 bits of each value are; None where Pillow cannot unpack them."""
    other = packing[:-1] + _OTHER_BYTE[packing[-1]]
    image = Image.open(io.BytesIO(data), formats=[str(kind)])
    image.tile = [
        tile._replace(args=(other, *tile.args[1:]) if isinstance(tile.args, tuple) else other) for tile in image.tile
    ]
    try:
        image.load()
    except ValueError:  # grey with transparency
        return None
    return image


def scaled(values: Values, ranges: ValueRanges, name: str) -> Pixels:
    """Values of more than 8 bits as 8 bits. Raises DataError: there is no range for such numbers, or they are beyond
    it; ValueError: some are not finite. `ranges`: what is beyond a number of bits is refused; what is beyond other
    ranges is clipped. `name`: the file, for messages."""
    low, high = extremes(values)
    is_real = values.dtype.kind == "f"
    known = ranges.floats if is_real else ranges.integers
    if known is None:
        cure = "Save" if is_real else "Train with image.depth=16, or fewer bits, or save"
        raise DataError(
            f"{name}: has more than 8 bits a value, as no training picture, so that their range is not known. "
            f"{cure} it with 8 bits."
        )
    first, last = known
    if not is_real and first == 0 and last in _MOST and not first <= low <= high <= last:
        fitting = next((bits for bits in DEPTHS if low >= 0 and high < 2**bits), None)
        cure = "Save it with 16 bits" if fitting is None else f"Train with image.depth={fitting}"
        raise DataError(
            f"{name}: its values are from {low:,.0f} to {high:,.0f}, beyond the {_MOST[last]} bits, 0 to {last:,.0f}, "
            f"that pictures of this run have. {cure}, or remove it."
        )
    factor = 255 / ((last - first) or 1)
    pixels: Pixels = np.rint((values.astype(np.float64) - first) * factor).clip(0, 255).astype(np.uint8)
    return pixels


def extremes(values: Values) -> tuple[float, float]:
    """Least and greatest value of a picture; raises ValueError where it holds any that is not finite."""
    low, high = float(values.min()), float(values.max())
    if not np.isfinite(low + high):
        raise ValueError("it holds numbers that are not finite")
    return low, high


_FORMATS = ("JPEG", "PNG", "GIF", "BMP", "DIB", "TIFF", "WEBP", "PPM", "JPEG2000", "AVIF", "TGA", "ICO")
"""Only formats of pixels, MPO among JPEG: Pillow would start other programs for PostScript."""
_ORIENTATION = 0x0112
_BITS = 258  # tag of a TIFF, bits of each channel
_ON_ITS_SIDE = (5, 6, 7, 8)  # orientations whose height is the width of the pixels in the file


def decode(data: bytes, name: str, *, max_pixels: int, ranges: ValueRanges = NO_RANGES) -> Pixels:
    """Pixels (H, W, 3), read-only, of a picture file, as `decode_image` gives them."""
    return np.asarray(decode_image(data, name, max_pixels=max_pixels, ranges=ranges))


def decode_image(data: bytes, name: str, *, max_pixels: int, ranges: ValueRanges = NO_RANGES) -> Image.Image:
    """A picture file as an image of mode RGB, upright as its EXIF orientation says.

    Transparent parts show white. Colour profiles are not applied. Raises DataError: empty, truncated, corrupt,
    animated, too large, no picture, or deep without a range that holds it.

    Args:
        name: The file, for messages.
        max_pixels: More are refused before anything is decoded.
        ranges: Scale the values of a deep picture. Values beyond a number of bits are refused, others are clipped.
    """
    image, values = _decoded(data, name, max_pixels)
    with _explained_errors(name):
        if values is not None and (values.ndim == 2 or not image.has_transparency_data):
            return Image.fromarray(scaled(values, ranges, name)).convert("RGB")
        if values is not None:
            colours = scaled(values[:, :, :-1], ranges, name)
            rgba = Image.fromarray(colours if colours.shape[2] == 3 else colours[:, :, 0]).convert("RGBA")
            rgba.putalpha(image.getchannel("A"))
        elif image.mode == "RGB" and "transparency" not in image.info:
            return image
        elif not image.has_transparency_data:
            return image.convert("RGB")
        else:
            rgba = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), rgba).convert("RGB")


def deep_values(data: bytes, name: str, *, max_pixels: int) -> Values | None:
    """Numbers of a deep picture, (H, W) or (H, W, channels), as its file holds them; None of one of 8 bits. Raises
    DataError: as `decode_image`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with _opened(data, name) as image:
            if not has_deep_mode(image) and not packing_of_16_bits(image):
                return None
    return _decoded(data, name, max_pixels)[1]


def _decoded(data: bytes, name: str, max_pixels: int) -> tuple[Image.Image, Values | None]:
    """The picture, upright, and where it is deep its numbers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about metadata and size; what matters is an error below
        with _opened(data, name) as image:
            _require_one_of_size(image, name, max_pixels)
            # An end of zeros, as a broken download leaves it, would be filled with grey.
            if image.format == "JPEG" and _JPEG_END not in data[data.rfind(_JPEG_SCAN) :]:
                raise DataError(f"{name}: {_CUT_OFF}")
            if isinstance(image, TiffImageFile):
                with _explained_errors(name):
                    tile = image.tile[0]
                    is_plane = len(image.tile) > 1 and tile.codec_name == "raw" and (tile.args or ("",))[0] == "R"
                    # Colours of 16 bits that lie uncompressed one after the other: Pillow reads them as bytes.
                    if is_plane and max(image.tag_v2.get(_BITS, (8,))) > 8:
                        raise DataError(
                            f"{name}: a TIFF of 16 bits with its colours one after the other. Save it as PNG."
                        )
            packing = packing_of_16_bits(image)
            with _explained_errors(name):
                image.load()
                if (
                    image.format in ("JPEG", "MPO")
                    and (image.getpixel((image.width - 1, image.height - 1)) in _FILLED)
                    and not _is_whole_jpeg(image, data)
                ):
                    raise DataError(f"{name}: {_CUT_OFF}")
                upright = _turned(image)
                if not packing:
                    return upright, np.asarray(upright) if has_deep_mode(upright) else None
                lower = lower_bytes(data, image.format, packing)
                # Values (H, W, channels) of 16 bits; of the higher 8 alone, the middle of what they can be.
                lower = _turned(lower) if lower else None
                high = np.asarray(upright).astype(np.uint16)
                return upright, (high << 8 | (128 if lower is None else np.asarray(lower)))


def _turned(image: Image.Image) -> Image.Image:
    return image if image.getexif().get(_ORIENTATION, 1) == 1 else ImageOps.exif_transpose(image)


def picture_size(data: bytes, name: str) -> tuple[int, int]:
    """Height and width of an upright picture, from the header of its file. Raises DataError: empty, or no picture."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with _opened(data, name) as image, _explained_errors(name):
            turned = image.getexif().get(_ORIENTATION, 1) in _ON_ITS_SIDE
            return (image.width, image.height) if turned else (image.height, image.width)


def _opened(data: bytes, name: str) -> ImageFile.ImageFile:
    if not data:
        raise DataError(f"{name}: the file is empty (0 bytes). Write it again, or remove it.")
    Image.init()
    try:
        return Image.open(io.BytesIO(data), formats=_FORMATS)
    except UnidentifiedImageError:
        raise DataError(f"{name}: {_reason(data)}") from None
    except Image.DecompressionBombError:
        raise DataError(f"{name}: has more pixels than Pillow opens. {_SMALLER}.") from None
    except Exception as error:  # a broken header may raise anything
        raise DataError(f"{name}: {_corrupt(error)}") from None


_SMALLER = "Make the picture smaller"
_AGAIN = "Copy or download it again, or remove it."
_CUT_OFF = f"the end is missing: the file was cut off. {_AGAIN}"
_JPEG_SCAN, _JPEG_END = b"\xff\xda", b"\xff\xd9"  # markers before the pixels and after them


_SIGNATURES = (b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"RIFF", b"II*\0", b"MM\0*", b"BM")


def looks_like_picture(data: bytes) -> bool:
    """Whether bytes begin as a picture file of a usual kind does."""
    return data.startswith(_SIGNATURES) or data[4:8] in (b"ftyp", b"jP  ")


def _require_one_of_size(image: Image.Image, name: str, max_pixels: int) -> None:
    pixels = image.width * image.height
    if pixels > max_pixels:
        raise DataError(
            f"{name}: {image.width} x {image.height} are {pixels:,} pixels, more than image.max_pixels={max_pixels}. "
            f"{_SMALLER}, or raise image.max_pixels."
        )
    with _explained_errors(name):
        # Stereo cameras write MPO: its first picture is the photograph.
        frames = 1 if image.format == "MPO" else getattr(image, "n_frames", 1)
    if frames != 1:
        raise DataError(
            f"{name}: holds {frames} pictures (an animation or pages), and which one is meant is not known. "
            "Save the one that the label is about as a PNG."
        )


_MARKER = re.compile(rb"\xff+[^\x00\xd0-\xd7\xff]")
"""A marker that ends the data of pixels, in which 0 and numbers of restarts follow upon 255."""
_FILLED = {127, 128, *itertools.product((127, 128), repeat=3), *itertools.product((127, 128), repeat=4)}
"""Pixels, grey or of three or four channels, that a decoder makes up."""
_NOISE = bytes(random.Random(0).randrange(255) for _ in range(256))  # data of pixels, for some blocks of any picture


def _is_whole_jpeg(image: Image.Image, data: bytes) -> bool:
    """Whether a file holds the data of all blocks: further data before its end marker then changes nothing."""
    place = 2
    while (marker_match := _MARKER.search(data, place)) and marker_match[0][-1:] != _JPEG_END[1:]:
        place = marker_match.end() + int.from_bytes(data[marker_match.end() : marker_match.end() + 2], "big")
    if marker_match is None:
        return False
    with Image.open(
        io.BytesIO(data[: marker_match.start()] + _NOISE + data[marker_match.start() :]), formats=["JPEG"]
    ) as other:
        return ImageChops.difference(other, image).getbbox() is None


@contextmanager
def _explained_errors(name: str) -> Iterator[None]:
    try:
        yield
    except DataError:
        raise
    except MemoryError:
        raise DataError(f"{name}: does not fit in memory. {_SMALLER}, or lower image.max_pixels.") from None
    except Exception as error:  # decoders raise anything: OSError, SyntaxError, ValueError, struct.error, EOFError
        raise DataError(f"{name}: {_corrupt(error)}") from None


def _corrupt(error: Exception) -> str:
    if "truncated" in str(error).lower() or isinstance(error, EOFError):
        return _CUT_OFF
    return f"the file is damaged and cannot be decoded ({str(error) or type(error).__name__}). {_AGAIN}"


def _reason(data: bytes) -> str:
    """The reason why Pillow recognises nothing, and the cure."""
    start = data[:512].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if data[4:8] == b"ftyp" and data[8:12] in (b"heic", b"heix", b"hevc", b"heim", b"heis", b"mif1", b"msf1"):
        return "a HEIC photograph, which cannot be read. Export it as JPEG."
    if start.startswith((b"<svg", b"<?xml")) and b"<svg" in data[:4096].lower():
        return "an SVG drawing, which has no pixels. Export it as PNG."
    if start.startswith((b"<!doctype html", b"<html")):
        return "a web page, not a picture: a download that failed? Download it again, or remove it."
    if start.startswith(b"version https://git-lfs"):
        return "a pointer of Git LFS, not the picture itself. Fetch it: git lfs pull"
    if start.startswith(b"%pdf"):
        return "a PDF document, not a picture. Export the page as PNG."
    if data.startswith(_SIGNATURES):
        return f"the file is damaged: its kind is known, but its header cannot be read. {_AGAIN}"
    try:
        text = data[:512].decode("utf-8", errors="strict" if len(data) < 512 else "ignore")
        if all(sign.isprintable() or sign.isspace() for sign in text):
            return "text, not a picture, whatever its name says. Remove it, or give the picture."
    except UnicodeDecodeError:
        pass
    return (
        f"no kind of picture that can be read (it begins with {data[:8].hex(' ')}). Save it as PNG or JPEG, or remove "
        "it."
    )


@dataclass(frozen=True, slots=True)
class PictureFile(StoredFile):
    """A picture: a file, a member of an archive, the bytes of a file, or pixels."""

    @classmethod
    def from_cell(cls, value: Any, place: str) -> Self | None:
        """A picture of Pillow; None of another cell."""
        if not isinstance(value, Image.Image):
            return None
        pixels = np.asarray(value.convert("RGB"))
        return cls(place, content=pixels.tobytes(), shape=pixels.shape)

    def decode(self, *, max_pixels: int, ranges: ValueRanges = NO_RANGES) -> Pixels:
        """Pixels (H, W, 3), read-only, as `decoding.decode` gives them."""
        return np.asarray(self.image(max_pixels=max_pixels, ranges=ranges))

    def image(self, *, max_pixels: int, ranges: ValueRanges = NO_RANGES) -> Image.Image:
        """An image of mode RGB, as `decoding.decode_image` gives it."""
        if self.shape is None:
            return decode_image(self.read(), self.name, max_pixels=max_pixels, ranges=ranges)
        return Image.fromarray(np.frombuffer(self.content, np.uint8).reshape(self.shape)).convert("RGB")

    def may_be_deep(self) -> bool:
        """Whether it can have more than 8 bits a value, by name and first bytes; False where it cannot be read."""
        if self.name.lower().endswith(_OF_8_BITS):
            return False
        try:
            return self.shape is None and may_be_deep(self.start(_START))
        except (DataError, *UNREADABLE):
            return False

    def deep_values(self, *, max_pixels: int) -> Values | None:
        """Numbers of a picture of more than 8 bits, as `decoding.deep_values` gives them."""
        return None if self.shape is not None else deep_values(self.read(), self.name, max_pixels=max_pixels)

    def size(self) -> tuple[int, int]:
        """Height and width, without decoding the pixels."""
        return picture_size(self.read(), self.name) if self.shape is None else (self.shape[0], self.shape[1])


_OF_8_BITS = (".jpg", ".jpeg", ".jfif", ".gif", ".webp", ".bmp")
"""Ends of names of files that are not opened to see whether they are deep: thousands would hold a first epoch up."""
_START = 32  # bytes that tell the kind of a file
