"""Stored pictures are what decoding and preparing gives, in their order, whoever did it; a store is whole or unused."""

from __future__ import annotations

import itertools
import pickle
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL.Image import Resampling

from tests.workbench.data.images.pictures import encoded, photograph
from workbench.config.sections.image_config import PrepareConfig
from workbench.data.images import picture_store
from workbench.data.images.picture_files import PictureFile, ValueRanges
from workbench.data.images.picture_format import PictureFormat
from workbench.data.images.picture_store import StoredPictures, store
from workbench.data.images.preparation import PictureStatistics, prepare
from workbench.errors import FileError

FORMAT = PictureFormat(8, 12, "crop", (10, 14), Resampling.BICUBIC, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
PREPARE = PrepareConfig(median=3, colour="grey")
PICTURES = [photograph(10 + seed % 5, 12 + seed % 7, seed=seed) for seed in range(150)]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[PictureFile]:
    folder = tmp_path_factory.mktemp("pictures")
    found = []
    for index, picture in enumerate(PICTURES):
        path = folder / f"{index}.png"
        path.write_bytes(encoded(picture))
        found.append(PictureFile(f"pictures/{index}.png", path))
    return found


def stored(files: list[PictureFile], folder: Path, **changed: Any) -> StoredPictures:
    settings: dict[str, Any] = {"format": FORMAT, "prepare": PREPARE, "max_pixels": 10**6, "workers": 0}
    return store(files, folder=folder, **(settings | changed))


def test_holds_prepared_pictures_in_their_order(files: list[PictureFile], tmp_path: Path) -> None:
    found = stored(files, tmp_path)
    assert found.pixels.shape == (150, 8, 12, 3) and found.pixels.dtype == np.uint8 and found.mistakes == {}
    assert isinstance(found.pixels.base, np.memmap) and not found.pixels.flags.writeable
    for index, picture in enumerate(PICTURES):
        np.testing.assert_array_equal(found.pixels[index], prepare(picture, PREPARE, FORMAT))
    np.testing.assert_array_equal(stored(files[::-1], tmp_path).pixels, found.pixels[::-1])


@pytest.mark.slow  # starts processes
@pytest.mark.parametrize("workers", [1, 2])
def test_workers_change_nothing(files: list[PictureFile], tmp_path: Path, workers: int) -> None:
    broken = [*files[:70], PictureFile("broken.png", content=b"x"), *files[70:]]
    here, there = (stored(broken, tmp_path / str(count), workers=count) for count in (0, workers))
    np.testing.assert_array_equal(here.pixels, there.pixels)
    assert here.mistakes == there.mistakes and list(here.mistakes) == [70]


@pytest.mark.parametrize(
    ("reading_s", "decoding_s", "started"), [(0.02, 0, True), (0, 0.02, True), (0.0005, 0.0005, False)]
)
def test_processes_start_where_reading_or_decoding_takes_long(
    files: list[PictureFile],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    reading_s: float,
    decoding_s: float,
    started: bool,
) -> None:
    """By clocks that tell that much for each picture; a slow disk takes no processor time."""
    clock, spent = itertools.count(), itertools.count()
    clocks = {"monotonic": lambda: next(clock) * reading_s, "thread_time": lambda: next(spent) * decoding_s}
    monkeypatch.setattr(picture_store, "time", SimpleNamespace(**clocks))
    monkeypatch.setattr(picture_store, "CORES", 3)
    asked = []

    def by_several(chunks: list[range], files: list[PictureFile], work: Any, *, others: int) -> dict[int, str]:
        asked.append(others)
        return {
            place: text
            for chunk in chunks
            for place, text in real(chunk, files[chunk.start : chunk.stop], work).items()
        }

    real = picture_store.fill
    monkeypatch.setattr(picture_store, "fill_by_several", by_several)
    broken = [*files[:3], PictureFile("gone.png", tmp_path / "gone.png"), *files[3:]]
    found = stored(broken, tmp_path / "auto", workers="auto")
    plain = stored(broken, tmp_path / "here")
    np.testing.assert_array_equal(found.pixels, plain.pixels)
    assert found.mistakes == plain.mistakes and list(found.mistakes) == [3] and asked == [2] * started


def test_mistakes_are_told_by_place_and_leave_black_pictures(files: list[PictureFile], tmp_path: Path) -> None:
    wrong = [PictureFile("text.png", content=b"hello"), PictureFile("gone.png", tmp_path / "gone.png"),
             PictureFile("large.png", content=encoded(photograph(2000, 600)))]  # fmt: skip
    found = stored([wrong[0], *files[:3], *wrong[1:]], tmp_path / "store")
    assert list(found.mistakes) == [0, 4, 5]
    assert [text.split(":")[0] for text in found.mistakes.values()] == ["text.png", "gone.png", "large.png"]
    assert not found.pixels[[0, 4, 5]].any() and found.pixels[1:4].any(axis=(1, 2, 3)).all()


def test_mistakes_are_told_by_the_names_of_today(tmp_path: Path) -> None:
    for name in ("a.png", "b.png"):
        assert stored([PictureFile(name, content=b"hello")], tmp_path).mistakes[0].startswith(f"{name}: text")


def snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    paths = [path for path in sorted(folder.rglob("*")) if path.suffix != ".used"]
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_ino) for path in paths}


def test_a_second_run_decodes_nothing(files: list[PictureFile], tmp_path: Path) -> None:
    first = stored(files, tmp_path)
    before = snapshot(tmp_path)
    again = stored(files, tmp_path, workers="auto")
    assert (first.decoded, again.decoded) == (150, 0) and snapshot(tmp_path) == before
    np.testing.assert_array_equal(first.pixels, again.pixels)
    elsewhere = [PictureFile("other name", content=file.read()) for file in files]
    assert stored(elsewhere, tmp_path).decoded == 0


@pytest.mark.parametrize(
    "changed",
    [
        {"prepare": PrepareConfig(median=5)},
        {"format": FORMAT.of_size(16)},
        {"max_pixels": 100},
        {"ranges": ValueRanges((0, 4095))},
        {"prepare": PrepareConfig(standardise="data"), "statistics": PictureStatistics((9, 9, 9), (9, 9, 9))},
    ],
)
def test_other_settings_have_a_store_of_their_own(
    files: list[PictureFile], tmp_path: Path, changed: dict[str, Any]
) -> None:
    stored(files, tmp_path)
    assert stored(files, tmp_path, **changed).decoded == 150
    assert stored(files, tmp_path).decoded == 0


def test_other_contents_have_a_store_of_their_own(files: list[PictureFile], tmp_path: Path) -> None:
    stored(files, tmp_path)
    assert stored([*files[:-1], files[0]], tmp_path).decoded == 150
    assert stored(files[:-1], tmp_path).decoded == 149


def test_normalisation_changes_no_stored_pixel(files: list[PictureFile], tmp_path: Path) -> None:
    stored(files, tmp_path)
    assert stored(files, tmp_path, format=replace(FORMAT, mean=(0.0, 0.0, 0.0))).decoded == 0


@pytest.mark.parametrize("damage", ["flip", "cut", "index", "lost"])
def test_a_damaged_store_is_made_again(files: list[PictureFile], tmp_path: Path, damage: str) -> None:
    whole = np.array(stored(files, tmp_path).pixels)
    (pixels,), (index,) = tmp_path.glob("*/pixels.npy"), tmp_path.glob("*/index.json")
    content = bytearray(pixels.read_bytes())
    if damage == "flip":
        content[-5] ^= 1
        pixels.write_bytes(content)
    elif damage == "cut":
        pixels.write_bytes(content[:-1])
    elif damage == "index":
        index.write_text('{"mistakes": {}')
    else:
        pixels.unlink()
    mended = stored(files, tmp_path)
    assert mended.decoded == 150
    np.testing.assert_array_equal(mended.pixels, whole)
    assert stored(files, tmp_path).decoded == 0


def test_what_a_killed_run_leaves_is_not_trusted(files: list[PictureFile], tmp_path: Path) -> None:
    whole = stored(files, tmp_path / "whole")
    made = whole.folder
    half = tmp_path / "half" / f".{made.name}.1.unfinished"
    half.mkdir(parents=True)
    (half / "pixels.npy").write_bytes((made / "pixels.npy").read_bytes()[:3000])
    found = stored(files, tmp_path / "half")
    assert found.decoded == 150
    np.testing.assert_array_equal(found.pixels, whole.pixels)
    assert not half.exists()


STORING = """
import pickle, sys
files, settings = pickle.load(sys.stdin.buffer)
from workbench.data.images.picture_store import store
print("began", flush=True)
store(files * 40, **settings)
"""


@pytest.mark.slow  # starts processes
def test_a_run_that_is_killed_is_done_again(files: list[PictureFile], tmp_path: Path) -> None:
    settings = {"format": FORMAT, "prepare": PREPARE, "max_pixels": 10**6, "workers": 1, "folder": tmp_path}
    with subprocess.Popen([sys.executable, "-c", STORING], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        pickle.dump((files, settings), process.stdin)
        process.stdin.close()
        process.stdout.readline()
        while not list(tmp_path.glob(".*.unfinished/pixels.npy")):
            time.sleep(0.001)
        process.kill()
    assert list(tmp_path.glob(".*.unfinished")) and not list(tmp_path.glob("*/index.json"))
    found = stored(files * 40, tmp_path)
    assert found.decoded == 6000 and not list(tmp_path.glob(".*"))
    np.testing.assert_array_equal(found.pixels[:150], stored(files, tmp_path).pixels)


def test_pixels_stay_readable_while_another_run_replaces_the_store(files: list[PictureFile], tmp_path: Path) -> None:
    first = stored(files, tmp_path)
    before = np.array(first.pixels)
    (index,) = tmp_path.glob("*/index.json")
    index.unlink()
    stored(files, tmp_path)
    np.testing.assert_array_equal(first.pixels, before)


def test_no_pictures_are_an_empty_store(tmp_path: Path) -> None:
    assert stored([], tmp_path).pixels.shape == (0, 8, 12, 3)


def test_a_folder_that_cannot_be_written_is_told(files: list[PictureFile], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match="cannot be written"):
        stored(files, tmp_path / "file" / "store")


def test_more_pixels_than_the_disk_has_room_for_are_told_before_decoding(
    files: list[PictureFile], tmp_path: Path
) -> None:
    with pytest.raises(FileError, match=r"pictures of 12 x 1000000000000000 pixels take .* WORKBENCH_CACHE"):
        stored(files, tmp_path, format=replace(FORMAT, height=10**15))
    assert not [path for path in tmp_path.iterdir() if path.suffix != ".lock"]
