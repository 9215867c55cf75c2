"""Files of idx: grey and in colour, alone, in folders and in archives."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.workbench.data.images.test_picture_sources import filled, refused, tarred, zipped
from workbench.data.images.picture_sources import fingerprint, read_rows


def idx(values: np.ndarray[Any, Any]) -> bytes:
    return bytes((0, 0, 8, values.ndim)) + struct.pack(f">{values.ndim}I", *values.shape) + values.tobytes()


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("separator", ["-", "."])
def test_idx_files(tmp_path: Path, suffix: str, separator: str) -> None:
    pictures = np.random.default_rng(0).integers(0, 256, (5, 4, 3), np.uint8)
    labels = np.asarray([3, 1, 4, 1, 5], np.uint8)
    pack = gzip.compress if suffix else bytes
    source = tmp_path / f"train-images{separator}idx3-ubyte{suffix}"
    beside = tmp_path / f"train-labels{separator}idx1-ubyte{suffix}"
    filled(tmp_path, {source.name: pack(idx(pictures)), beside.name: pack(idx(labels))})
    rows = list(read_rows(str(source)))
    assert [row.columns["label"] for row in rows] == list("31415")
    found = np.stack([row.columns["image"].decode(max_pixels=100) for row in rows])
    np.testing.assert_array_equal(found, np.repeat(pictures[:, :, :, None], 3, axis=3))
    assert len({row.columns["image"].digest() for row in rows}) == 5
    before = fingerprint(str(source))
    assert "labels without pictures" in refused(beside)
    beside.write_bytes(pack(idx(labels[:4])))
    assert "holds 4 labels" in refused(source) and fingerprint(str(source)) != before
    beside.unlink()
    assert [row.columns.get("label") for row in read_rows(str(source))] == [None] * 5
    source.write_bytes(source.read_bytes()[:-3])
    assert str(source) in refused(source)


@pytest.mark.parametrize("write", [filled, lambda path, files: zipped(path.with_suffix(".zip"), files),
                                   lambda path, files: tarred(path.with_suffix(".tar"), files)])  # fmt: skip
@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("axis", [1, 3])
def test_idx_files_of_colours_in_folders_and_archives(tmp_path: Path, write: Any, suffix: str, axis: int) -> None:
    pictures = np.random.default_rng(0).integers(0, 256, (5, 4, 6, 3), np.uint8)
    pack = gzip.compress if suffix else bytes
    names = [
        f"data/{part}-{kind}-ubyte{suffix}" for part in ("train", "t10k") for kind in ("images-idx4", "labels-idx1")
    ]
    contents = [idx(np.moveaxis(pictures, 3, axis)), idx(np.arange(5, dtype=np.uint8))]
    source = write(tmp_path / "all", dict(zip(names, map(pack, contents * 2), strict=True)))
    rows = list(read_rows(f"{source}/{names[0]}"))
    assert [row.columns["label"] for row in rows] == list("01234")
    found = np.stack([row.columns["image"].decode(max_pixels=100) for row in rows])
    np.testing.assert_array_equal(found, pictures)
    assert fingerprint(f"{source}/{names[0]}") == fingerprint(f"{source}/{names[2]}")
    place = f"{source}/data"
    assert f"holds idx files. Name one: {place}/t10k-images" in refused(source)
    assert f" or {place}/train-images-idx4-ubyte{suffix}." in refused(source)
    assert "Name train-images-idx4" in refused(f"{source}/{names[1]}")
    assert "no such file" in refused(f"{source}/data/other-images-idx4-ubyte")


def test_one_channel_of_an_idx_file_is_grey(tmp_path: Path) -> None:
    pictures = np.random.default_rng(0).integers(0, 256, (2, 5, 4), np.uint8)
    for values in (pictures[:, None], pictures[..., None]):
        filled(tmp_path, {"images-idx4-ubyte": idx(values)})
        found = [row.columns["image"].decode(max_pixels=100) for row in read_rows(str(tmp_path / "images-idx4-ubyte"))]
        np.testing.assert_array_equal(np.stack(found), np.repeat(pictures[..., None], 3, axis=3))


def test_idx_files_of_something_else_say_of_what(tmp_path: Path) -> None:
    source = tmp_path / "images-idx4-ubyte"
    for content, says in [
        (idx(np.zeros((2, 5, 4, 2), np.uint8)), "its pictures, 2 x 5 x 4 x 2, have other than 1 or 3 channels"),
        (idx(np.zeros((2, 5), np.uint8)), "has 2 dimension(s), and pictures have 3, or 4 in colour"),
        (b"\0\0\x0d\3" + bytes(12), "holds other numbers than unsigned bytes"),
        (b"\0\0\x08\3" + bytes(5), "not a whole idx file"),
        (b"\0\0\x08", "not a whole idx file"),
        (b"", "not a whole idx file"),
        (b"\x1f\x8b1", "cannot be read"),
    ]:
        source.write_bytes(content)
        assert says in refused(source)
