"""Threads change no result, whatever their number, and raise what a picture raises."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from workbench.config.sections.image_config import AugmentConfig
from workbench.data import ordered_processes
from workbench.data.images.picture_format import PictureFormat
from workbench.data.images.picture_reader import Augmenter, PictureRows

SIDE = 144
PICTURES = np.random.default_rng(0).integers(0, 256, (11, SIDE, SIDE, 3), np.uint8)
CHANGES = {"crop_scale": (0.4, 1.0), "rotation": 20, "hue": 0.1, "contrast": 0.3, "erasing": 0.5, "randaugment": 2}


@pytest.mark.parametrize("mixes", [{}, {"mixup": 0.4, "cutmix": 1.0}])
def test_augmented_batches_are_the_same_by_any_number(monkeypatch: pytest.MonkeyPatch, mixes: dict[str, float]) -> None:
    augmenter = Augmenter(AugmentConfig.model_validate({**CHANGES, **mixes}), seed=1, epochs=3, multiple=16)
    format = PictureFormat.read({"image_processor_type": "ViTImageProcessor"}, {}, size=SIDE)
    numbers = np.arange(len(PICTURES))
    place_N2 = np.stack([np.zeros_like(numbers), numbers], axis=1)
    rows = PictureRows((PICTURES,), place_N2, numbers + 7, format, patches=81, augmenter=augmenter)
    found = []
    for count in (1, 2, 5):
        monkeypatch.setenv("WORKBENCH_PROCESSES", str(count))
        found.append(rows.batch(numbers[::-1].copy(), epoch=1))
    alone = [rows.batch(np.asarray([number]), epoch=1) for number in numbers[::-1]]
    for each in found:
        assert each.inputs["pixel_values"].equal(found[0].inputs["pixel_values"])
        for number, other in enumerate(alone):
            assert each.inputs["pixel_values"][number].equal(other.inputs["pixel_values"][0])
        assert (each.mix is None) == (not mixes)
        if each.mix is not None:
            assert (each.mix.share_B < 1).any()
            np.testing.assert_array_equal(each.mix.share_B, [one.mix.share_B[0] for one in alone if one.mix])
            np.testing.assert_array_equal(each.mix.partner_B, [one.mix.partner_B[0] for one in alone if one.mix])


@pytest.mark.parametrize(("pixels", "several"), [(ordered_processes.LARGE, True), (ordered_processes.LARGE - 1, False)])
def test_large_pictures_alone_are_shared(monkeypatch: pytest.MonkeyPatch, pixels: int, several: bool) -> None:
    monkeypatch.setenv("WORKBENCH_PROCESSES", "2")
    meeting = threading.Barrier(2)

    def seen(number: int) -> tuple[int, bool]:
        if several and number in (0, 5):  # in the first and the second half: both are at work at once
            meeting.wait(timeout=60)
        return number, threading.current_thread() is threading.main_thread()

    assert ordered_processes.by_threads(seen, range(8), size=pixels) == [(number, not several) for number in range(8)]


def test_an_error_of_a_picture_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORKBENCH_PROCESSES", "3")
    with pytest.raises(ZeroDivisionError):
        ordered_processes.by_threads(lambda number: 1 // (number - 4), range(9), size=ordered_processes.LARGE)
    assert ordered_processes.by_threads(abs, [], size=ordered_processes.LARGE) == []
