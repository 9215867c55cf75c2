"""Processes that decode: one that is killed, or meets an error of its own, is told rather than waited for."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from PIL.Image import Resampling

from tests.workbench.data.images.pictures import photograph
from workbench.config.sections.image_config import PrepareConfig
from workbench.data.images.picture_files import NO_RANGES, PictureFile, Pixels, ValueRanges
from workbench.data.images.picture_format import PictureFormat
from workbench.data.images.picture_store import Work, fill_by_several
from workbench.errors import DataError

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("importable")]  # starts processes


FORMAT = PictureFormat(8, 8, "stretch", (8, 8), Resampling.BILINEAR, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


@dataclass(frozen=True)
class Disaster(PictureFile):
    """A picture that ends other processes than the test's, or fails there as nothing should."""

    test: int = field(default_factory=os.getpid)
    kill: bool = False

    def image(self, *, max_pixels: int, ranges: ValueRanges = NO_RANGES) -> Image.Image:
        if os.getpid() == self.test:
            time.sleep(0.1)  # so that others take their share
            return Image.fromarray(photograph(8, 8))
        if self.kill:
            os.kill(os.getpid(), 9)
        raise ZeroDivisionError("a mistake in the program")


@dataclass(frozen=True)
class Numbered(PictureFile):
    """A picture of its number, and of the process that decoded it."""

    number: int = 0
    test: int = field(default_factory=os.getpid)

    def image(self, *, max_pixels: int, ranges: ValueRanges = NO_RANGES) -> Image.Image:
        time.sleep(0.1 if os.getpid() == self.test else 0.005)
        return Image.new("RGB", (8, 8), (self.number, 255 * (os.getpid() != self.test), 0))


def fill(folder: Path, files: list[PictureFile]) -> Pixels:
    path = folder / "pixels.npy"
    pixels = np.lib.format.open_memmap(path, mode="w+", dtype=np.uint8, shape=(len(files), 8, 8, 3))
    work = Work(path, pixels.offset, FORMAT, PrepareConfig(), 10**6, None)
    chunks = [range(start, min(start + 3, len(files))) for start in range(0, len(files), 3)]
    assert fill_by_several(chunks, files, work, others=2) == {}
    return pixels


def test_each_picture_has_its_place_whoever_decoded_it(tmp_path: Path) -> None:
    pixels = fill(tmp_path, [Numbered("", number=number) for number in range(100)])
    np.testing.assert_array_equal(pixels[:, 0, 0, 0], np.arange(100))
    assert len(np.unique(pixels[:, 0, 0, 1])) > 1, "other processes took a share"


def test_a_killed_process_is_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="killed: for lack of memory"):
        fill(tmp_path, [Disaster("bomb.png", kill=True)] * 300)


def test_an_error_of_the_program_is_raised_here(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError, match="a mistake in the program"):
        fill(tmp_path, [Disaster("bug.png")] * 300)


def test_decoding_processes_import_neither_models_nor_the_configuration() -> None:
    code = "import sys, workbench.data.images.picture_store; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "transformers", "pydantic", "workbench.config"} & set(loaded)
