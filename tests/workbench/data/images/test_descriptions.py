"""Words about settings of pictures: every setting that is on is told, and nothing that is off."""

from __future__ import annotations

from typing import Any

import pytest
from PIL.Image import Resampling

from workbench.config.sections.image_config import PRESETS, AugmentConfig, PrepareConfig
from workbench.data.images import picture_checks
from workbench.data.images.picture_format import PictureFormat

FORMAT = PictureFormat(32, 32, "stretch", (32, 32), Resampling.BILINEAR, (0.5,) * 3, (0.5,) * 3)
CHANGES: dict[str, tuple[Any, str]] = {
    "crop_scale": ((0.3, 0.9), "crops of 30 % to 90 %"),
    "horizontal_flip": (0.5, "left and right exchanged in 50 %"),
    "vertical_flip": (0.25, "top and bottom exchanged in 25 %"),
    "rotation": (12, "up to 12 degrees"),
    "translate": (0.15, "shifts of up to 15 %"),
    "shear": (7, "shear of up to 7 degrees"),
    "randaugment": (3, "RandAugment: 3 operations"),
    "trivialaugment": (True, "TrivialAugment"),
    "brightness": (0.3, "brightness ± 30 %"),
    "contrast": (0.3, "contrast ± 30 %"),
    "gamma": (1, "gamma from 0.5 to 2"),
    "saturation": (0.3, "saturation ± 30 %"),
    "hue": (0.1, "36 degrees"),
    "blur": (2, "blur of up to 2 pixels"),
    "erasing": (0.3, "erased by noise in 30 %"),
    "mixup": (0.2, "by mixup always"),
    "cutmix": (1, "by CutMix always"),
}
STEPS: dict[str, tuple[Any, str]] = {
    "median": (3, "median of 3 x 3"),
    "standardise": ("data", "by the training pictures"),
    "edges": ("canny", "Canny in its place"),
    "crop_to_object": (0.1, "margin of 10 %"),
    "fit": ("pad", "the rest in the mean colour"),
    "colour": ("grey", "; grey"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_each_change_is_told_and_no_other(name: str) -> None:
    told = picture_checks.augmentation_in_words(AugmentConfig.model_validate({name: CHANGES[name][0]}))
    assert [each for each, (_, words) in CHANGES.items() if words in told] == [name]


@pytest.mark.parametrize("name", STEPS)
def test_each_step_is_told_and_no_other(name: str) -> None:
    told = picture_checks.preparation_in_words(PrepareConfig.model_validate({name: STEPS[name][0]}), FORMAT)
    assert [each for each, (_, words) in STEPS.items() if words in told] == [name]
    assert "32 x 32" in told


def test_all_switches_have_words() -> None:
    different = {name for preset in PRESETS.values() for name in preset}
    others = {"preset", "crop_ratio", "border", "randaugment_magnitude", "mix_probability", "curriculum"}
    others |= {"erasing_area", "erasing_ratio", "erasing_fill"}
    assert different <= CHANGES.keys() and AugmentConfig.model_fields.keys() - others == CHANGES.keys()
    assert PrepareConfig.model_fields.keys() - {"edges_as"} == STEPS.keys()


def test_nothing_changes_without_augmentation() -> None:
    assert picture_checks.augmentation_in_words(AugmentConfig()) == ""
    assert picture_checks.preparation_in_words(PrepareConfig(), FORMAT) == "stretched to 32 x 32"


def test_growth_is_told() -> None:
    growing = {"rotation": 10, "curriculum": {"strength": {"start": 0.2}, "resolution": {"start": 0.5, "until": 0.4}}}
    told = picture_checks.augmentation_in_words(AugmentConfig.model_validate(growing))
    assert "strength grows from 20 % to 100 % in the first 80 % of the run" in told
    assert "side grows from 50 % to 100 % in the first 40 % of the run" in told
