"""Readers of pictures beside each other: which see the same positions, and the same pictures in another's colours."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from tests.workbench.evaluation.picture_sets import picture_reader


def test_pictures_as_another_reader_normalises_them() -> None:
    mine = picture_reader()
    theirs = replace(mine, format=replace(mine.format, mean=(0.1, 0.5, 0.9), std=(0.5, 0.2, 0.1)))
    pixels = np.random.default_rng(0).integers(0, 256, (3, 8, 8, 3), dtype=np.uint8)
    own, other = ({"pixel_values": torch.from_numpy(reader.format.normalised(pixels))} for reader in (mine, theirs))
    torch.testing.assert_close(mine.as_read_by(theirs, own), other)
    torch.testing.assert_close(theirs.as_read_by(mine, other), own)
    assert torch.equal(mine.as_read_by(picture_reader(), own)["pixel_values"], own["pixel_values"])


def test_positions_are_those_of_pictures_of_the_same_size() -> None:
    mine = picture_reader()
    assert mine.same_positions(replace(mine, patch=2)) and not mine.same_positions(picture_reader(size=64))
