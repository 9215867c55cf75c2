"""Brightness and colour of the training pictures, for `image.prepare.standardise=data`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from workbench.config.sections.picture_prepare_config import PrepareConfig
from workbench.data.images import preparation
from workbench.data.images.deep_pictures import NO_RANGES, ValueRanges
from workbench.data.images.picture_files import PictureFile
from workbench.data.images.preparation import PictureStatistics
from workbench.errors import DataError

MOST = 1000
"""Pictures that are looked at, evenly spread; more would change a mean by less than a level."""


def measure(
    files: Sequence[PictureFile], prepare: PrepareConfig, *, max_pixels: int, ranges: ValueRanges = NO_RANGES
) -> PictureStatistics:
    """Mean and standard deviation of each channel over pictures, all of which weigh the same whatever their size.

    Args:
        files: Of training rows only: held-out rows would leak into what is trained on. Unreadable ones do not count.
        prepare: Its median filter comes first, as when pictures are prepared.

    Raises:
        DataError: None of them can be read.
    """
    moments, last = [], ""
    for index in np.unique(np.linspace(0, len(files) - 1, min(MOST, len(files))).round().astype(int)):
        try:
            picture = files[index].decode(max_pixels=max_pixels, ranges=ranges)
        except DataError as error:
            last = str(error)
            continue
        values = preparation.denoised(picture, prepare).reshape(-1, 3).astype(np.float64)
        moments.append((values.mean(axis=0), (values**2).mean(axis=0)))
    if not moments:
        raise DataError(f"image.prepare.standardise=data: none of the training pictures can be read. The last: {last}")
    mean_3, square_3 = np.mean(moments, axis=0)
    std_3 = np.sqrt(np.maximum(square_3 - mean_3**2, 0))
    return PictureStatistics(tuple(mean_3.tolist()), tuple(std_3.tolist()))
