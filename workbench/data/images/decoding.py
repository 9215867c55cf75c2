"""From the bytes of a picture file to pixels: right, or refused with the file's name and the cure.

Legend: H height, W width, 3 the channels red, green and blue.
"""

from __future__ import annotations

import functools
import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps, UnidentifiedImageError

from workbench.errors import DataError

Pixels = npt.NDArray[np.uint8]

_FORMATS = ("JPEG", "PNG", "GIF", "BMP", "DIB", "TIFF", "WEBP", "PPM", "JPEG2000", "AVIF", "TGA", "ICO")
"""Only formats of pixels, MPO among JPEG: Pillow would start other programs for PostScript."""
_ORIENTATION = 0x0112
_TURNED = (5, 6, 7, 8)
"""Orientations whose height is the width of the pixels in the file."""
_DEPTHS = (8, 10, 12, 14, 16)
"""Bits a pixel that cameras and microscopes write into 16."""


def decode(data: bytes, name: str, *, max_pixels: int) -> Pixels:
    """Pixels (H, W, 3), read-only, of a picture file, as `decode_image` gives them."""
    return np.asarray(decode_image(data, name, max_pixels=max_pixels))


def decode_image(data: bytes, name: str, *, max_pixels: int) -> Image.Image:
    """A picture file as an image of mode RGB, upright as its EXIF orientation says.

    Transparent parts show white. Grey of 16 bits is scaled from the smallest of 8, 10, 12, 14 and 16 bits that holds
    its brightest pixel; other numbers from their least and greatest value. Colour profiles are not applied.

    Args:
        name: The file, for messages.
        max_pixels: More are refused before anything is decoded.

    Raises:
        DataError: Empty, truncated, corrupt, animated, too large, or no picture.
    """
    if not data:
        raise DataError(f"{name}: the file is empty (0 bytes). Write it again, or remove it.")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about metadata and size; what matters is an error below
        image = _opened(data, name)
        with image:
            _require_one_of_size(image, name, max_pixels)
            if image.format == "JPEG":
                _require_end_of_jpeg(data, name)
            with _explained_errors(name):
                image.load()
                if image.getexif().get(_ORIENTATION, 1) != 1:
                    image = ImageOps.exif_transpose(image)
                return _rgb(image)


def size(data: bytes, name: str) -> tuple[int, int]:
    """Height and width of an upright picture, from the header of its file.

    Raises:
        DataError: Empty, or no picture.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with _opened(data, name) as image, _explained_errors(name):
            turned = image.getexif().get(_ORIENTATION, 1) in _TURNED
            return (image.width, image.height) if turned else (image.height, image.width)


def _opened(data: bytes, name: str) -> Image.Image:
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


def _require_end_of_jpeg(data: bytes, name: str) -> None:
    """Refuse one whose end is zeros, as a broken download leaves it: the decoder would fill it with grey."""
    if _JPEG_END not in data[data.rfind(_JPEG_SCAN) :]:
        raise DataError(f"{name}: {_CUT_OFF}")


@contextmanager
def _explained_errors(name: str) -> Iterator[None]:
    try:
        yield
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
    if data.startswith((b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"RIFF", b"II*\0", b"MM\0*", b"BM")):
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
    if image.mode.startswith("I") or image.mode == "F":
        return Image.fromarray(_scaled(np.asarray(image))).convert("RGB")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return image.convert("RGB")


def _scaled(values: npt.NDArray[np.generic]) -> Pixels:
    """Grey of more than 8 bits, (H, W), as 8 bits."""
    numbers = values.astype(np.float64)
    low, high = float(numbers.min()), float(numbers.max())
    if not np.isfinite(low + high):
        raise ValueError("it holds numbers that are not finite")
    if values.dtype.kind in "iu" and low >= 0 and high < 2**16:
        low, high = 0.0, float(2 ** next(bits for bits in _DEPTHS if high < 2**bits) - 1)
    elif values.dtype.kind == "f" and low >= 0 and high <= 1:
        low, high = 0.0, 1.0
    scaled: Pixels = np.rint((numbers - low) * (255 / ((high - low) or 1))).astype(np.uint8)
    return scaled
