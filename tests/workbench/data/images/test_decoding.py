"""Every kind of picture file that Pillow can write is decoded right, or refused with its name and the cure."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.workbench.data.images.pictures import encoded, photograph
from workbench.data.images.picture_files import NO_RANGES, Pixels, ValueRanges, decode
from workbench.errors import DataError

PICTURE = photograph(24, 36)
RGB = Image.fromarray(PICTURE)
GREY = np.asarray(RGB.convert("L"))


def decoded(data: bytes, ranges: ValueRanges = NO_RANGES) -> Pixels:
    picture = decode(data, "a.png", max_pixels=10**6, ranges=ranges)
    assert picture.dtype == np.uint8 and picture.ndim == 3 and picture.shape[2] == 3
    return picture


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF", "PPM", "TGA"])
def test_lossless_kinds_come_back_as_they_were(kind: str) -> None:
    np.testing.assert_array_equal(decoded(encoded(RGB, kind)), PICTURE)


@pytest.mark.parametrize("kind", ["JPEG", "WEBP", "AVIF", "JPEG2000"])
def test_lossy_kinds_come_back_nearly(kind: str) -> None:
    assert np.abs(decoded(encoded(RGB, kind, quality=95)).astype(int) - PICTURE).mean() < 12


@pytest.mark.parametrize("shape", [(1, 1), (1, 5000), (5000, 1), (3, 2)])
def test_any_shape_is_kept(shape: tuple[int, int]) -> None:
    picture = photograph(*shape)
    np.testing.assert_array_equal(decoded(encoded(picture)), picture)


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_exif_orientation_is_undone(kind: str, orientation: int) -> None:
    # What a camera stores when it is held so that the upright picture is PICTURE.
    stored = {
        1: PICTURE,
        2: PICTURE[:, ::-1],
        3: PICTURE[::-1, ::-1],
        4: PICTURE[::-1],
        5: PICTURE.transpose(1, 0, 2),
        6: np.rot90(PICTURE),
        7: PICTURE[::-1, ::-1].transpose(1, 0, 2),
        8: np.rot90(PICTURE, -1),
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"lossless": True} if kind == "WEBP" else {}
    data = encoded(np.ascontiguousarray(stored), kind, exif=exif, **options)
    np.testing.assert_array_equal(decoded(data), PICTURE)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "PA", "P"])
def test_transparent_parts_show_white(mode: str) -> None:
    rgba = np.dstack([PICTURE, np.full(PICTURE.shape[:2], 255, np.uint8)])
    rgba[:12, :, 3] = 0
    image = Image.fromarray(rgba)
    image = image.quantize() if mode == "P" else image.convert(mode)
    picture = decoded(encoded(image, "TIFF" if mode == "PA" else "PNG"))
    assert (picture[:12] == 255).all() and not (picture[12:] == 255).all()


def test_half_transparent_parts_are_half_white() -> None:
    rgba = np.zeros((4, 4, 4), np.uint8)
    rgba[:, :, 3] = 127
    np.testing.assert_array_equal(decoded(encoded(Image.fromarray(rgba))), 128)


def test_a_colour_that_stands_for_transparent_shows_white() -> None:
    picture = np.zeros((4, 4, 3), np.uint8)
    picture[0] = (10, 20, 30)
    found = decoded(encoded(picture, transparency=(10, 20, 30)))
    assert (found[0] == 255).all() and (found[1:] == 0).all()


def test_palettes_and_grey_have_three_channels() -> None:
    paletted = RGB.quantize(16)
    np.testing.assert_array_equal(decoded(encoded(paletted)), np.asarray(paletted.convert("RGB")))
    np.testing.assert_array_equal(decoded(encoded(Image.fromarray(GREY))), np.dstack([GREY] * 3))
    np.testing.assert_array_equal(decoded(encoded(Image.fromarray(GREY > 127)))[:, :, 0], (GREY > 127) * 255)


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
@pytest.mark.parametrize("bits", [8, 10, 12, 14, 16])
def test_grey_of_16_bits_is_scaled_and_not_clipped(kind: str, bits: int) -> None:
    most = 2**bits - 1
    values = (np.arange(64 * 64) % (most + 1)).reshape(64, 64)
    values[0, 0] = most
    picture = decoded(encoded(Image.fromarray(values.astype(np.uint16)), kind), ValueRanges((0, most)))
    np.testing.assert_array_equal(picture[:, :, 1], np.rint(values * 255 / most))


@pytest.mark.parametrize("scale", [1.0, 1000.0])
def test_floats_are_scaled_by_their_range(scale: float) -> None:
    values = np.linspace(0, scale, 64 * 64, dtype=np.float32).reshape(64, 64)
    picture = decoded(encoded(Image.fromarray(values), "TIFF"), ValueRanges(floats=(0, scale)))
    np.testing.assert_array_equal(picture[:, :, 0], np.rint(values.astype(float) * 255 / scale))


@pytest.mark.parametrize("kind", ["JPEG", "TIFF"])
def test_cmyk_is_not_inverted(kind: str) -> None:
    # Pillow writes JPEG as Adobe does, inverted and with its marker.
    flat = Image.new("RGB", (16, 16), (200, 40, 90)).convert("CMYK")
    np.testing.assert_allclose(decoded(encoded(flat, kind)).reshape(-1, 3).mean(0), (200, 40, 90), atol=4)


def test_the_photograph_of_a_stereo_camera_is_its_first_picture() -> None:
    data = encoded(RGB, "MPO", save_all=True, append_images=[Image.new("RGB", RGB.size)], quality=95)
    assert np.abs(decoded(data).astype(int) - PICTURE).mean() < 12


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP", "TIFF"])
def test_animations_and_pages_are_refused(kind: str) -> None:
    data = encoded(RGB, kind, save_all=True, append_images=[Image.new("RGB", RGB.size), RGB.rotate(90)])
    with pytest.raises(DataError, match=r"a.png: holds 3 pictures"):
        decoded(data)


def test_one_frame_of_a_gif_is_a_picture() -> None:
    paletted = RGB.quantize(64)
    np.testing.assert_array_equal(decoded(encoded(paletted, "GIF")), np.asarray(paletted.convert("RGB")))


NO_PICTURES = {
    "0 bytes": b"",
    "text, not a picture": "Größe: 12\n".encode(),
    "SVG drawing": b'<?xml version="1.0"?>\n<!-- x --><svg width="1"/>',
    "HEIC photograph": b"\x00\x00\x00\x18ftypheic" + bytes(40),
    "web page": b"\n<!DOCTYPE html><html>404</html>",
    "git lfs pull": b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 12\n",
    "PDF": b"%PDF-1.7\n%\xe2\xe3",
    "begins with 00 01 02": bytes(range(200)),
    "the end is missing": encoded(photograph(200, 200), "JPEG")[:2000],
    "the end is missing:": encoded(photograph(200, 200), "PNG")[:2000],
    "the end is missing: the": encoded(photograph(200, 200), "JPEG")[:2000] + bytes(40_000),  # as broken downloads are
    "damaged": encoded(PICTURE).replace(b"IDAT", b"IDAX"),
}


@pytest.mark.parametrize("says", NO_PICTURES)
def test_what_is_no_picture_is_refused_by_name(says: str) -> None:
    with pytest.raises(DataError, match=f"^a.png: .*{says}"):
        decoded(NO_PICTURES[says])


GREY_CORNER = np.vstack([photograph(104, 136), np.full((40, 136, 3), 128, np.uint8)])
JPEGS = {
    "4:4:4": encoded(photograph(200, 200), "JPEG", subsampling=0, quality=95),
    "4:2:0": encoded(photograph(203, 197), "JPEG", subsampling=2),
    "grey": encoded(Image.fromarray(photograph(200, 200)).convert("L"), "JPEG"),
    "CMYK": encoded(Image.fromarray(photograph(200, 200)).convert("CMYK"), "JPEG"),
    "optimised": encoded(photograph(200, 200), "JPEG", optimize=True),
    "restarts": encoded(photograph(200, 200), "JPEG", restart_marker_blocks=3),
    "stereo": encoded(photograph(200, 200), "MPO", save_all=True, append_images=[RGB]),
    "thumbnail": encoded(photograph(200, 200), "JPEG", exif=b"Exif\0\0" + encoded(RGB, "JPEG")),
    "grey corner": encoded(GREY_CORNER, "JPEG", quality=100),
    "progressive grey corner": encoded(GREY_CORNER, "JPEG", progressive=True),
}


@pytest.mark.parametrize("kind", JPEGS)
def test_the_end_marker_does_not_hide_that_a_jpeg_was_cut(kind: str) -> None:
    """The decoder fills missing blocks with grey and tells nobody."""
    data = JPEGS[kind]
    with Image.open(io.BytesIO(data)) as image:
        np.testing.assert_array_equal(decoded(data), np.asarray(image.convert("RGB")))
    if kind.startswith("progressive"):
        return  # a picture without its later scans is whole, and less sharp
    end = data.find(b"\xff\xd9", len(data) // 4) if kind == "stereo" else data.rfind(b"\xff\xd9")
    scan = data.rfind(b"\xff\xda", 0, end) + 20
    for share in (0.1, 0.5, 0.9):
        cut = scan + int(share * (end - scan))
        cut -= data[cut - 1] == 255
        with pytest.raises(DataError, match=r"^a.png: the end is missing: the file was cut off"):
            decoded(data[:cut] + data[end:])


def png_header(width: int, height: int) -> bytes:
    """A picture file of a few bytes that says it is large."""
    body = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunk = struct.pack(">I", 13) + body + struct.pack(">I", zlib.crc32(body))
    return b"\x89PNG\r\n\x1a\n" + chunk + struct.pack(">I", 0) + b"IDAT" + struct.pack(">I", zlib.crc32(b"IDAT"))


@pytest.mark.parametrize("side", [1001, 10_000, 12_000, 60_000])
def test_decompression_bombs_are_refused_before_they_are_decoded(side: int) -> None:
    with pytest.raises(DataError, match=r"a.png: .*pixels.*Make the picture smaller"):
        decoded(png_header(side, side))


def test_the_limit_itself_is_allowed() -> None:
    data = encoded(PICTURE)
    np.testing.assert_array_equal(decode(data, "a", max_pixels=24 * 36), PICTURE)
    with pytest.raises(DataError, match=r"image.max_pixels=863"):
        decode(data, "a", max_pixels=24 * 36 - 1)


WHOLE = {kind: encoded(RGB, kind) for kind in ("PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP", "TGA", "PPM")}


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(sorted(WHOLE)),
    st.integers(0, 3000),
    st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 255)), max_size=4),
)
def test_damaged_files_are_pictures_or_refused(kind: str, cut: int, changes: list[tuple[int, int]]) -> None:
    data = bytearray(WHOLE[kind][: max(cut, 1)])
    for place, value in changes:
        data[place % len(data)] = value
    try:
        decoded(bytes(data))
    except DataError as error:
        assert str(error).startswith("a.png: ") and str(error).endswith((".", "pull"))
