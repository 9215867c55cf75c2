"""From the bytes of a picture file to pixels: right, or refused with the file's name and the cure.

Legend: H height, W width, 3 the channels red, green and blue.
"""

from __future__ import annotations

import functools
import io
import itertools
import random
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from PIL import Image, ImageChops, ImageFile, ImageOps, UnidentifiedImageError
from PIL.TiffImagePlugin import TiffImageFile

from workbench.data.images import deep_pictures
from workbench.data.images.deep_pictures import NO_RANGES, Pixels, ValueRanges, Values
from workbench.errors import DataError

__all__ = ["Pixels", "decode", "decode_image", "deep_values", "looks_like_picture", "size"]

_FORMATS = ("JPEG", "PNG", "GIF", "BMP", "DIB", "TIFF", "WEBP", "PPM", "JPEG2000", "AVIF", "TGA", "ICO")
"""Only formats of pixels, MPO among JPEG: Pillow would start other programs for PostScript."""
_ORIENTATION = 0x0112
_BITS = 258
"""Tag of a TIFF, bits of each channel."""
_ON_ITS_SIDE = (5, 6, 7, 8)
"""Orientations whose height is the width of the pixels in the file."""


def decode(data: bytes, name: str, *, max_pixels: int, ranges: ValueRanges = NO_RANGES) -> Pixels:
    """Pixels (H, W, 3), read-only, of a picture file, as `decode_image` gives them."""
    return np.asarray(decode_image(data, name, max_pixels=max_pixels, ranges=ranges))


def decode_image(data: bytes, name: str, *, max_pixels: int, ranges: ValueRanges = NO_RANGES) -> Image.Image:
    """A picture file as an image of mode RGB, upright as its EXIF orientation says.

    Transparent parts show white. Colour profiles are not applied.

    Args:
        name: The file, for messages.
        max_pixels: More are refused before anything is decoded.
        ranges: Scale the values of a deep picture. Values beyond a number of bits are refused, others are clipped.

    Raises:
        DataError: Empty, truncated, corrupt, animated, too large, no picture, or deep without a range that holds it.
    """
    image, values = _decoded(data, name, max_pixels)
    with _explained_errors(name):
        return _rgb(image) if values is None else _rgb_of_deep(values, image, ranges, name)


def deep_values(data: bytes, name: str, *, max_pixels: int) -> Values | None:
    """Numbers of a deep picture, (H, W) or (H, W, channels), as its file holds them; None of one of 8 bits.

    Raises:
        DataError: As `decode_image`.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with _opened(data, name) as image:
            if not deep_pictures.has_deep_mode(image) and not deep_pictures.packing_of_16_bits(image):
                return None
    return _decoded(data, name, max_pixels)[1]


def _decoded(data: bytes, name: str, max_pixels: int) -> tuple[Image.Image, Values | None]:
    """The picture, upright, and where it is deep its numbers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about metadata and size; what matters is an error below
        with _opened(data, name) as image:
            _require_one_of_size(image, name, max_pixels)
            if image.format == "JPEG":
                _require_end_of_jpeg(data, name)
            if isinstance(image, TiffImageFile):
                with _explained_errors(name):
                    _require_readable_planes(image, name)
            packing = deep_pictures.packing_of_16_bits(image)
            with _explained_errors(name):
                image.load()
                if image.format in ("JPEG", "MPO") and _ends_grey(image) and not _is_whole_jpeg(image, data):
                    raise DataError(f"{name}: {_CUT_OFF}")
                upright = _turned(image)
                if not packing:
                    return upright, np.asarray(upright) if deep_pictures.has_deep_mode(upright) else None
                lower = deep_pictures.lower_bytes(data, image.format, packing)
                return upright, deep_pictures.of_two_bytes(upright, _turned(lower) if lower else None)


def _turned(image: Image.Image) -> Image.Image:
    return image if image.getexif().get(_ORIENTATION, 1) == 1 else ImageOps.exif_transpose(image)


def size(data: bytes, name: str) -> tuple[int, int]:
    """Height and width of an upright picture, from the header of its file.

    Raises:
        DataError: Empty, or no picture.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with _opened(data, name) as image, _explained_errors(name):
            turned = image.getexif().get(_ORIENTATION, 1) in _ON_ITS_SIDE
            return (image.width, image.height) if turned else (image.height, image.width)


def _opened(data: bytes, name: str) -> ImageFile.ImageFile:
    if not data:
        raise DataError(f"{name}: the file is empty (0 bytes). Write it again, or remove it.")
    _formats_known()
    try:
        return Image.open(io.BytesIO(data), formats=_FORMATS)
    except UnidentifiedImageError:
        raise DataError(f"{name}: {_reason(data)}") from None
    except Image.DecompressionBombError:
        raise DataError(f"{name}: has more pixels than Pillow opens. {_SMALLER}.") from None
    except Exception as error:  # a broken header may raise anything
        raise DataError(f"{name}: {_corrupt(error)}") from None


@functools.cache
def _formats_known() -> None:
    Image.init()


_SMALLER = "Make the picture smaller"
_AGAIN = "Copy or download it again, or remove it."
_CUT_OFF = f"the end is missing: the file was cut off. {_AGAIN}"
_JPEG_SCAN, _JPEG_END = b"\xff\xda", b"\xff\xd9"
"""Markers before the pixels and after them."""


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


def _require_readable_planes(image: TiffImageFile, name: str) -> None:
    """Refuse colours of 16 bits that lie uncompressed one after the other, which Pillow reads as bytes."""
    tile = image.tile[0]
    is_plane = len(image.tile) > 1 and tile.codec_name == "raw" and (tile.args or ("",))[0] == "R"
    if is_plane and max(image.tag_v2.get(_BITS, (8,))) > 8:
        raise DataError(f"{name}: a TIFF of 16 bits with its colours one after the other. Save it as PNG.")


def _require_end_of_jpeg(data: bytes, name: str) -> None:
    """Refuse one whose end is zeros, as a broken download leaves it: the decoder would fill it with grey."""
    if _JPEG_END not in data[data.rfind(_JPEG_SCAN) :]:
        raise DataError(f"{name}: {_CUT_OFF}")


_MARKER = re.compile(rb"\xff+[^\x00\xd0-\xd7\xff]")
"""A marker that ends the data of pixels, in which 0 and numbers of restarts follow upon 255."""
_FILLED = {127, 128, *itertools.product((127, 128), repeat=3), *itertools.product((127, 128), repeat=4)}
"""Pixels, grey or of three or four channels, that a decoder makes up."""
_NOISE = bytes(random.Random(0).randrange(255) for _ in range(256))
"""Data of pixels, for some blocks of any picture."""


def _ends_grey(image: Image.Image) -> bool:
    """Whether the last pixel is as the decoder fills in blocks that are missing."""
    return image.getpixel((image.width - 1, image.height - 1)) in _FILLED


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
    if _is_text(data[:512]):
        return "text, not a picture, whatever its name says. Remove it, or give the picture."
    return (
        f"no kind of picture that can be read (it begins with {data[:8].hex(' ')}). Save it as PNG or JPEG, or remove "
        "it."
    )


def _is_text(start: bytes) -> bool:
    try:
        text = start.decode("utf-8", errors="strict" if len(start) < 512 else "ignore")
    except UnicodeDecodeError:
        return False
    return all(sign.isprintable() or sign.isspace() for sign in text)


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    return _over_white(image.convert("RGBA")) if image.has_transparency_data else image.convert("RGB")


def _over_white(image: Image.Image) -> Image.Image:
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")


def _rgb_of_deep(values: Values, image: Image.Image, ranges: ValueRanges, name: str) -> Image.Image:
    if values.ndim == 2 or not image.has_transparency_data:
        return Image.fromarray(deep_pictures.scaled(values, ranges, name)).convert("RGB")
    colours = deep_pictures.scaled(values[:, :, :-1], ranges, name)
    rgba = Image.fromarray(colours if colours.shape[2] == 3 else colours[:, :, 0]).convert("RGBA")
    rgba.putalpha(image.getchannel("A"))
    return _over_white(rgba)
