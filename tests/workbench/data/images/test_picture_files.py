"""References to pictures read the same in every process, and tell other contents apart."""

from __future__ import annotations

import multiprocessing
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.workbench.data.images.pictures import encoded, photograph
from workbench.data import stored_files
from workbench.data.images.picture_files import PictureFile
from workbench.errors import DataError


def archived(path: Path) -> list[PictureFile]:
    with zipfile.ZipFile(path, "w") as archive:
        for index in range(200):
            archive.writestr(f"{index}.png", os.urandom(5000))
    return [PictureFile(f"{index}.png", path, f"{index}.png") for index in range(200)]


def all_read(files: list[PictureFile]) -> None:
    for _ in range(10):
        for file in files:
            file.read()


def test_forked_processes_read_an_archive_that_is_open_here(tmp_path: Path) -> None:
    files = archived(tmp_path / "a.zip")
    files[0].read()
    forked = [multiprocessing.get_context("fork").Process(target=all_read, args=(files,)) for _ in range(2)]
    for process in forked:
        process.start()
    all_read(files)
    for process in forked:
        process.join()
    assert [process.exitcode for process in forked] == [0, 0]


def test_an_archive_that_is_replaced_is_read_anew(tmp_path: Path) -> None:
    file = archived(tmp_path / "a.zip")[7]
    before = file.read(), file.digest()
    archived(tmp_path / "b.zip")
    (tmp_path / "b.zip").replace(tmp_path / "a.zip")
    os.utime(tmp_path / "a.zip", (1, 1))
    assert file.read() != before[0] and file.digest() != before[1]


def test_digests_tell_contents_and_shapes_apart(tmp_path: Path) -> None:
    path = tmp_path / "1.png"
    path.write_bytes(b"123456")
    same = [PictureFile("a", path), PictureFile("b", content=b"123456")]
    others = [PictureFile("a", content=b"123457"), PictureFile("a", content=b"123456", shape=(2, 3)),
              PictureFile("a", content=b"123456", shape=(3, 2))]  # fmt: skip
    assert len({file.digest() for file in same}) == 1
    assert len({file.digest() for file in (*same, *others)}) == 4


def test_pixels_are_grey_with_three_equal_channels() -> None:
    picture = PictureFile("row 1", content=bytes(range(6)), shape=(2, 3)).decode(max_pixels=6)
    np.testing.assert_array_equal(picture, np.arange(6).reshape(2, 3, 1).repeat(3, axis=2))


def test_pixels_of_colours_come_back_as_they_are() -> None:
    pixels = np.arange(18, dtype=np.uint8).reshape(2, 3, 3)
    file = PictureFile("row 1", content=pixels.tobytes(), shape=(2, 3, 3))
    np.testing.assert_array_equal(file.decode(max_pixels=6), pixels)
    assert file.size() == (2, 3)


def test_the_first_bytes_say_whether_a_picture_may_be_deep(tmp_path: Path) -> None:
    data = encoded(Image.fromarray(np.zeros((3, 4), np.uint16)))
    (tmp_path / "1.png").write_bytes(data)
    (tmp_path / "a.bin").write_bytes(b"before" + data)
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("1.png", data)
    os.mkfifo(tmp_path / "pipe.png")
    deep = [PictureFile("1", tmp_path / "1.png"), PictureFile("1", tmp_path / "a.zip", "1.png"),
            PictureFile("1", tmp_path / "a.bin", "1", span=(6, len(data))), PictureFile("1", content=data)]  # fmt: skip
    others = [PictureFile("1", content=encoded(photograph(3, 4))), PictureFile("1", content=data, shape=(1, len(data))),
              PictureFile("1", tmp_path / "gone.png"), PictureFile("1", tmp_path / "pipe.png")]  # fmt: skip
    assert [file.may_be_deep() for file in (*deep, *others)] == [True] * 4 + [False] * 4


@pytest.mark.parametrize("member", [None, "a.png"])
def test_what_is_gone_is_refused_by_name(tmp_path: Path, member: str | None) -> None:
    with pytest.raises(DataError, match=r"plants/1\.png|no\.zip"):
        PictureFile("plants/1.png", tmp_path / "no.zip", member).read()


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "1.png")
    with pytest.raises(DataError, match=r"1\.png: cannot be read \(it is no file\)"):
        PictureFile("1.png", tmp_path / "1.png").read()


def test_what_unpacks_to_more_than_a_picture_takes_is_not_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_files, "MOST_BYTES", 5000)
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("1.png", bytes(5000))
        archive.writestr("2.png", bytes(5001))
    (tmp_path / "2.png").write_bytes(bytes(5001))
    assert len(PictureFile("1.png", tmp_path / "a.zip", "1.png").read()) == 5000
    bombs = [PictureFile("2.png", tmp_path / "a.zip", "2.png"), PictureFile("2.png", tmp_path / "2.png"),
             PictureFile("2.png", tmp_path / "2.png", "2.png", span=(0, 5001))]  # fmt: skip
    for bomb in bombs:
        with pytest.raises(DataError, match=r"2\.png: cannot be read \(it has 5.0 kB, more than a row may take"):
            bomb.read()
