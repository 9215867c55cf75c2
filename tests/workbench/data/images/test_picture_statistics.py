"""Statistics of training pictures are the moments over their pixels."""

from __future__ import annotations

import numpy as np
import pytest

from tests.workbench.data.images.pictures import encoded, photograph
from workbench.config.sections.image_config import PrepareConfig
from workbench.data.images.picture_files import PictureFile
from workbench.data.images.preparation import MOST, measure_statistics
from workbench.errors import DataError


def test_equal_the_moments_over_all_pixels() -> None:
    pictures = [photograph(20, 30, seed=seed) for seed in range(7)]
    files = [PictureFile(str(index), content=encoded(picture)) for index, picture in enumerate(pictures)]
    found = measure_statistics([*files, PictureFile("broken", content=b"x")], PrepareConfig(), max_pixels=10**6)
    pixels = np.stack(pictures).reshape(-1, 3)
    np.testing.assert_allclose(found.mean, pixels.mean(axis=0))
    np.testing.assert_allclose(found.std, pixels.std(axis=0))


def test_pictures_of_any_size_weigh_the_same() -> None:
    files = [
        PictureFile("", content=encoded(np.full((side, side, 3), level, np.uint8)))
        for side, level in ((9, 0), (90, 200))
    ]
    assert measure_statistics(files, PrepareConfig(), max_pixels=10**6).mean == (100, 100, 100)


def test_a_sample_of_many_is_spread_evenly() -> None:
    files = [PictureFile("", content=bytes([index % 251]), shape=(1, 1)) for index in range(5 * MOST)]
    assert measure_statistics(files, PrepareConfig(), max_pixels=9).mean[0] == pytest.approx(125, abs=5)


def test_nothing_to_read_is_refused() -> None:
    with pytest.raises(DataError, match="none of the training pictures"):
        measure_statistics([PictureFile("a.png", content=b"")], PrepareConfig(), max_pixels=9)
