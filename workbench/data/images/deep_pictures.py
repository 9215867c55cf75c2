"""Pictures of more than 8 bits a value: grey and colours of 16 bits, whole numbers of 32 bits, floats.

Legend: H height, W width.
"""

from __future__ import annotations

import io
import sys
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageFile

from workbench.errors import DataError

Pixels = npt.NDArray[np.uint8]
Values = npt.NDArray[np.generic]
DEPTHS = (8, 10, 12, 14, 16)
"""Bits a value that cameras and microscopes write into 16."""
_MOST = {float(2**bits - 1): bits for bits in DEPTHS}
"""Number of bits by the greatest value that they hold."""


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
    """How a file that is not loaded yet packs 16 bits a value, of which Pillow would drop the lower 8; else empty.

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

    def repacked(arguments: Any) -> Any:
        return (other, *arguments[1:]) if isinstance(arguments, tuple) else other

    image = Image.open(io.BytesIO(data), formats=[str(kind)])
    image.tile = [tile._replace(args=repacked(tile.args)) for tile in image.tile]
    try:
        image.load()
    except ValueError:  # grey with transparency
        return None
    return image


def of_two_bytes(higher: Image.Image, lower: Image.Image | None) -> Values:
    """Values (H, W, channels) of 16 bits; of the higher 8 alone, the middle of what they can be."""
    high = np.asarray(higher).astype(np.uint16)
    return high << 8 | (128 if lower is None else np.asarray(lower))


def scaled(values: Values, ranges: ValueRanges, name: str) -> Pixels:
    """Values of more than 8 bits as 8 bits.

    Args:
        ranges: What is beyond a number of bits is refused; what is beyond other ranges is clipped.
        name: The file, for messages.

    Raises:
        DataError: There is no range for such numbers, or they are beyond it.
        ValueError: Some are not finite.
    """
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
