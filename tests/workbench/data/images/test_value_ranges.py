"""One range for all pictures of a run: of the fewest bits that hold them, as the setting says, or as far as they go."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.workbench.data.images.pictures import encoded, photograph
from workbench.data.images.picture_files import NO_RANGES, PictureFile, ValueRanges
from workbench.data.images.preparation import measure_ranges, ranges_in_words


def file(values: Any, kind: type[np.generic] = np.uint16) -> PictureFile:
    return PictureFile("a", content=encoded(Image.fromarray(np.asarray([values]).astype(kind)), "TIFF"))


def measured(files: list[PictureFile], folder: Path, depth: Any = "auto") -> ValueRanges:
    return measure_ranges(files, max_pixels=10**6, depth=depth, folder=folder)


@pytest.mark.parametrize(
    ("brightest", "bits"),
    [(255, 8), (256, 10), (1023, 10), (1024, 12), (4095, 12), (4096, 14), (16384, 16), (65535, 16)],
)
def test_the_fewest_bits_that_hold_all_pictures(tmp_path: Path, brightest: int, bits: int) -> None:
    files = [file([3, 40]), file([0, brightest]), file([7, 7])]
    assert measured(files, tmp_path) == ((0, 2**bits - 1), None) == measured(files[::-1], tmp_path)


def test_other_numbers_from_their_least_to_their_greatest(tmp_path: Path) -> None:
    scans = [file([-1000, 5], np.int32), file([7, 3000], np.int32)]
    shares = [file([0, 0.5], np.float32), file([0.25, 0.75], np.float32)]
    assert measured([*scans, *shares], tmp_path) == ((-1000, 3000), (0, 1))
    assert measured([*shares, file([-0.5, 1.5], np.float32)], tmp_path) == (None, (-0.5, 1.5))


def test_the_setting_decides_over_whole_numbers(tmp_path: Path) -> None:
    files = [file([3, 900]), file([0, 9], np.float32)]
    assert measured(files, tmp_path, depth=14) == ((0, 2**14 - 1), (0, 9))
    assert measured([], tmp_path, depth=8) == ((0, 255), None)


def test_pictures_of_8_bits_and_broken_ones_do_not_count(tmp_path: Path) -> None:
    eight = PictureFile("b", content=encoded(photograph(4, 4), "TIFF"))
    broken = PictureFile("c", content=b"II*\0"), file([np.nan, 1], np.float32)
    assert measured([eight, *broken], tmp_path) == NO_RANGES
    assert measured([eight, *broken, file([0, 300])], tmp_path) == ((0, 1023), None)


def test_a_later_run_decodes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [file([3, 300]), file([0, 900])]
    found = measured(files, tmp_path)
    decodings: list[str] = []
    monkeypatch.setattr(PictureFile, "deep_values", lambda self, **_: decodings.append(self.name))
    assert measured(files, tmp_path) == found and measured(files, tmp_path, depth=16).integers == (0, 65535)
    assert not decodings
    (kept,) = tmp_path.iterdir()
    kept.write_text('{"integers": ')
    measured(files, tmp_path)
    assert decodings == ["a", "a"]


def test_ranges_are_told_in_words() -> None:
    assert ranges_in_words(NO_RANGES, "auto") == ""
    assert (
        ranges_in_words(ValueRanges((0, 4095)), "auto")
        == "12 bits, 0 to 4,095 become 0 to 255, as the training pictures need"
    )
    both = ranges_in_words(ValueRanges((0, 1023), (0.0, 1.0)), 10)
    assert both == "10 bits, 0 to 1,023 become 0 to 255, image.depth=10; floats of 0 to 1 become 0 to 255"
    assert ranges_in_words(ValueRanges((-1000, 3000)), "auto").startswith("-1,000 to 3,000 become")
