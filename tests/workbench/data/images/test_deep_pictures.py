"""Pictures of more than 8 bits keep all of them until they are scaled, by the range of a run rather than their own."""

from __future__ import annotations

import struct
import zlib
from typing import Any

import cv2
import numpy as np
import pytest
from PIL import Image

from tests.workbench.data.images.pictures import encoded
from workbench.data.images.picture_files import ValueRanges, decode, deep_values, may_be_deep
from workbench.errors import DataError

RANGES = ValueRanges((0, 4095), (-1, 3))
VALUES = np.random.default_rng(0).integers(0, 4096, (12, 17, 4)).astype(np.uint16)
COLOUR_TYPES = {1: 0, 2: 4, 3: 2, 4: 6}


def png(values: np.ndarray[Any, Any], *, orientation: int = 1) -> bytes:
    """A file of 16 bits a channel; Pillow writes none with colours."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    height, width, channels = values.shape
    exif = Image.Exif()
    exif[0x0112] = orientation
    header = struct.pack(">IIBBBBB", width, height, 16, COLOUR_TYPES[channels], 0, 0, 0)
    lines = b"".join(b"\0" + line.astype(">u2").tobytes() for line in values)
    parts = (b"IHDR", header), (b"eXIf", exif.tobytes()[6:]), (b"IDAT", zlib.compress(lines)), (b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in parts)


def tiff(values: np.ndarray[Any, Any]) -> bytes:
    channels = values if values.shape[2] != 3 else values[:, :, ::-1]
    return bytes(cv2.imencode(".tiff", np.ascontiguousarray(channels))[1])


def decoded(data: bytes, ranges: ValueRanges = RANGES) -> np.ndarray[Any, Any]:
    return decode(data, "a.png", max_pixels=10**6, ranges=ranges)


@pytest.mark.parametrize("write", [png, tiff])
@pytest.mark.parametrize("most", [4095, 65535])
def test_colours_of_16_bits_are_scaled_from_all_of_them(write: Any, most: int) -> None:
    values = VALUES[:, :, :3] * np.uint16(most // 4095)
    np.testing.assert_array_equal(deep_values(write(values), "a.png", max_pixels=10**6), values)
    expected = np.rint(values.astype(float) * 255 / most)
    np.testing.assert_array_equal(decoded(write(values), ValueRanges((0, most))), expected)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_exif_orientation_is_undone_in_both_bytes(orientation: int) -> None:
    turned = decoded(png(VALUES[:, :, :3], orientation=orientation))
    eight = np.rint(VALUES[:, :, :3] * (255 / 4095)).astype(np.uint8)
    exif = Image.Exif()
    exif[0x0112] = orientation
    np.testing.assert_array_equal(turned, decode(encoded(eight, exif=exif), "b.png", max_pixels=10**6))


def test_transparent_parts_show_white() -> None:
    values = VALUES.copy()
    values[:6, :, 3], values[6:, :, 3] = 0, 65535
    picture = decoded(png(values))
    assert (picture[:6] == 255).all()
    np.testing.assert_array_equal(picture[6:], np.rint(values[6:, :, :3] * (255 / 4095)))
    grey = decoded(png(values[:, :, [0, 3]]))
    assert (grey[:6] == 255).all()
    np.testing.assert_allclose(grey[6:, :, 1], values[6:, :, 0] * (255 / 4095), atol=8.5)  # of its higher 8 bits


@pytest.mark.parametrize("kind", [np.uint16, np.int32, np.float32])
def test_a_dim_picture_stays_dim_beside_a_bright_one(kind: type[np.generic]) -> None:
    """Scaled by its own brightest value, it would look like the bright one."""
    bright = VALUES[:, :, 0].astype(kind)
    dim = bright // kind(4)  # type: ignore[call-arg]
    ranges = ValueRanges((0, 4095), (0, 4095))
    one, other = (decoded(encoded(Image.fromarray(each), "TIFF"), ranges).mean() for each in (bright, dim))
    assert other == pytest.approx(one / 4, rel=0.02)


def test_values_that_the_range_does_not_hold_are_refused_or_clipped() -> None:
    grey = encoded(Image.fromarray(VALUES[:, :, 0]), "TIFF")
    with pytest.raises(
        DataError, match=r"a.png: its values are from \d+ to 4,\d+, beyond the 10 bits, 0 to 1,023.*=12"
    ):
        decoded(grey, ValueRanges((0, 1023)))
    with pytest.raises(DataError, match=r"a.png: has more than 8 bits a value.*Train with image.depth=16"):
        decoded(grey, ValueRanges(floats=(0, 1)))
    scan = np.asarray([[-2000, -1000], [1000, 5000]], np.int32)
    picture = decoded(encoded(Image.fromarray(scan), "TIFF"), ValueRanges((-1000, 1000)))
    assert picture[:, :, 0].tolist() == [[0, 0], [255, 255]]
    with pytest.raises(DataError, match=r"from -2,000 to 5,000, beyond the 16 bits.*Save it with 16 bits"):
        decoded(encoded(Image.fromarray(scan), "TIFF"), ValueRanges((0, 65535)))
    with pytest.raises(DataError, match="not finite"):
        decoded(encoded(Image.fromarray(np.full((2, 2), np.nan, np.float32)), "TIFF"))


def planar(values: np.ndarray[Any, Any]) -> bytes:
    """An uncompressed TIFF with one colour after the other, as microscopes write."""
    height, width, _ = values.shape
    planes = [plane.astype("<u2").tobytes() for plane in np.moveaxis(values, 2, 0)]
    behind = 8 + 2 + 12 * 10 + 4
    starts = [behind + 30 + number * len(planes[0]) for number in range(3)]
    entries = [(256, 3, 1, width), (257, 3, 1, height), (258, 3, 3, behind), (259, 3, 1, 1), (262, 3, 1, 2),
               (273, 4, 3, behind + 6), (277, 3, 1, 3), (278, 3, 1, height), (279, 4, 3, behind + 18),
               (284, 3, 1, 2)]  # fmt: skip
    directory = struct.pack("<H", 10) + b"".join(struct.pack("<HHII", *entry) for entry in entries) + bytes(4)
    lists = struct.pack("<3H3I3I", 16, 16, 16, *starts, *map(len, planes))
    return b"II*\0" + struct.pack("<I", 8) + directory + lists + b"".join(planes)


def test_planes_that_would_be_read_as_bytes_are_refused() -> None:
    with pytest.raises(
        DataError, match=r"a\.png: a TIFF of 16 bits with its colours one after the other. Save it as PNG"
    ):
        decoded(planar(VALUES[:, :, :3]))


def test_a_cut_file_is_refused() -> None:
    with pytest.raises(DataError, match=r"a.png: the end is missing"):
        decoded(png(VALUES[:, :, :3])[:-300])


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "PPM", "JPEG2000"])
def test_no_deep_picture_is_missed_by_its_first_bytes(kind: str) -> None:
    data = encoded(Image.fromarray(VALUES[:, :, 0]), kind)
    assert may_be_deep(data[:32]) and deep_values(data, "a", max_pixels=10**6) is not None
    grey = Image.fromarray(VALUES[:, :, 0].astype(np.uint8))
    assert deep_values(encoded(grey, kind), "a", max_pixels=10**6) is None
    assert not any(may_be_deep(encoded(grey, each)[:32]) for each in ("PNG", "JPEG", "WEBP", "GIF", "BMP"))
