"""Stores of prepared pictures go in the order of their last use, as few as the limit asks, and none that is in use."""

from __future__ import annotations

import gc
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL.Image import Resampling

from tests.workbench.data.images.pictures import encoded, photograph
from workbench.config.sections.image_config import PrepareConfig
from workbench.data.images import picture_store
from workbench.data.images.picture_files import PictureFile
from workbench.data.images.picture_format import PictureFormat
from workbench.data.images.picture_store import StoredPictures, store
from workbench.errors import ConfigError

SIZE = 100_000
"""Bytes of a store."""


def made(folder: Path, *names: str) -> list[Path]:
    """Stores that were used in this order."""
    paths = [folder / name for name in names]
    for age, path in enumerate(paths):
        path.mkdir()
        (path / "pixels.npy").write_bytes(bytes(SIZE))
        path.with_suffix(".used").touch()
        os.utime(path.with_suffix(".used"), (age, age))
    return paths


@pytest.fixture
def three(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Path]]:
    monkeypatch.setenv(picture_store.VARIABLE, str(3 * SIZE / 1e9))
    yield made(tmp_path, "c", "a", "b")


def left(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.is_dir()}


@pytest.mark.parametrize(("needed", "expected"), [(0, "abc"), (1, "ab"), (SIZE, "ab"), (SIZE + 1, "b"), (9 * SIZE, "")])
def test_as_few_go_as_make_room_and_the_oldest_first(
    three: list[Path], needed: int, expected: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        picture_store.make_room(three[0].parent, needed)
    assert left(three[0].parent) == set(expected)
    assert len(caplog.records) == 3 - len(expected)
    assert all(
        "were deleted" in record.message and picture_store.VARIABLE in record.message for record in caplog.records
    )


def test_a_store_that_is_used_again_is_the_youngest(three: list[Path]) -> None:
    picture_store.use(three[0])()
    picture_store.make_room(three[0].parent, SIZE)
    assert left(three[0].parent) == {"b", "c"}


def test_a_store_in_use_stays_until_it_is_released(three: list[Path]) -> None:
    releases = [picture_store.use(three[0]) for _ in range(2)]
    picture_store.make_room(three[0].parent, 9 * SIZE)
    assert left(three[0].parent) == {"c"}
    releases[0]()
    picture_store.make_room(three[0].parent, 9 * SIZE)
    assert left(three[0].parent) == {"c"}
    releases[1]()
    picture_store.make_room(three[0].parent, 9 * SIZE)
    assert left(three[0].parent) == set()


@pytest.mark.slow  # starts a process
def test_another_process_keeps_its_store_until_it_is_killed(three: list[Path]) -> None:
    code = "import sys, pathlib; from workbench.data.images import picture_store\n"
    code += "held = picture_store.use(pathlib.Path(sys.argv[1])); print(flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", code, str(three[0])]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        picture_store.make_room(three[0].parent, 9 * SIZE)
        assert left(three[0].parent) == {"c"}
        process.kill()
    picture_store.make_room(three[0].parent, 9 * SIZE)
    assert left(three[0].parent) == set()


def test_what_is_being_written_is_not_a_store(three: list[Path]) -> None:
    unfinished = three[0].parent / ".d.1.unfinished"
    unfinished.mkdir()
    picture_store.make_room(three[0].parent, 9 * SIZE)
    assert unfinished.exists()


@pytest.mark.parametrize("given", ["many", "-1", "nan", "inf"])
def test_a_limit_that_is_no_size_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    monkeypatch.setenv(picture_store.VARIABLE, given)
    with pytest.raises(ConfigError, match=rf"{picture_store.VARIABLE}={given}: expected a number of gigabytes"):
        picture_store.make_room(tmp_path, 0)


def prepared(seed: int, folder: Path) -> StoredPictures:
    format = PictureFormat(8, 8, "stretch", (8, 8), Resampling.BILINEAR, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    file = PictureFile(f"{seed}.png", content=encoded(photograph(8, 8, seed=seed)))
    return store([file], format=format, prepare=PrepareConfig(), max_pixels=100, workers=0, folder=folder)


def test_pictures_that_are_read_stay_and_others_make_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(picture_store.VARIABLE, "0")
    first = prepared(1, tmp_path)
    second = prepared(2, tmp_path)
    assert left(tmp_path) == {first.folder.name, second.folder.name}
    kept = first.folder.name
    del second
    gc.collect()
    third = prepared(3, tmp_path)
    assert left(tmp_path) == {kept, third.folder.name}
    assert prepared(2, tmp_path).decoded == 1 and prepared(1, tmp_path).decoded == 0
