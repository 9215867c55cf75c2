"""Partners are a permutation without fixed points; pictures and labels are mixed by the same share."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from workbench.config.sections.image_config import AugmentConfig
from workbench.data.images.augmentation import MixPlan, PixelBox, mix, mix_partners, mix_plan

SIZE = (20, 30)
BLACK, WHITE = np.zeros((*SIZE, 3), dtype=np.uint8), np.full((*SIZE, 3), 255, dtype=np.uint8)


def plans(settings: dict[str, Any], rows: int = 400, **place: Any) -> list[MixPlan | None]:
    config = AugmentConfig.model_validate(settings)
    where = {"seed": 1, "epoch": 2, "size": SIZE, **place}
    return [mix_plan(config, row=row, partner=row + 1, **where) for row in range(rows)]


@given(st.integers(0, 40), st.integers(0, 2**63), st.integers(0, 1000))
def test_partners_are_other_rows_and_each_row_is_one(rows: int, seed: int, epoch: int) -> None:
    partner_N = mix_partners(rows, seed=seed, epoch=epoch)
    assert sorted(partner_N) == list(range(rows))
    assert rows == 1 or (partner_N != np.arange(rows)).all()


def test_partners_change_with_seed_and_epoch_alone() -> None:
    first = mix_partners(100, seed=1, epoch=0)
    np.testing.assert_array_equal(first, mix_partners(100, seed=1, epoch=0))
    assert (first != mix_partners(100, seed=1, epoch=1)).any() and (first != mix_partners(100, seed=2, epoch=0)).any()


def test_nothing_is_mixed_by_default_or_with_itself() -> None:
    assert plans({}) == [None] * 400
    config = AugmentConfig(mixup=1.0)
    assert mix_plan(config, seed=0, epoch=0, row=3, partner=3, size=SIZE) is None


def test_a_plan_depends_on_its_place_alone() -> None:
    settings = {"mixup": 0.4, "cutmix": 1}
    assert plans(settings) == plans(settings)
    assert plans(settings) != plans(settings, epoch=3) and plans(settings) != plans(settings, seed=2)
    assert plans(settings) != plans(settings, repeat=1)


@pytest.mark.parametrize("alpha", [0.2, 1.0, 4.0])
def test_shares_of_mixup_have_the_distribution_of_the_paper(alpha: float) -> None:
    weights = [each.weight for each in plans({"mixup": alpha}, 1000) if each is not None]
    assert len(weights) == 1000
    assert stats.kstest(weights, stats.beta(alpha, alpha).cdf).pvalue > 1e-3


def test_both_on_draws_each_half_the_time_and_probability_is_kept() -> None:
    both = plans({"mixup": 1, "cutmix": 1}, 1000)
    assert 440 < sum(each is not None and each.box is not None for each in both) < 560
    some = plans({"mixup": 1, "mix_probability": 0.3}, 1000)
    assert 240 < sum(each is not None for each in some) < 360


def test_the_share_of_the_partner_in_the_label_is_its_share_of_the_pixels() -> None:
    found = [each for each in plans({"cutmix": 1}) if each is not None]
    for each in found:
        assert each.box is not None
        white = float((mix(BLACK, WHITE, each) == 255).mean())
        assert white == pytest.approx(1 - each.weight, abs=1e-12)
        assert white == pytest.approx(each.box.area / (SIZE[0] * SIZE[1]))
    assert min(each.weight for each in found) < 0.2 and max(each.weight for each in found) > 0.99


@given(st.floats(0, 1))
def test_mixup_blends_pixels_by_its_weight(weight: float) -> None:
    how = MixPlan(1, weight)
    own, other = (np.random.default_rng(seed).integers(0, 256, (4, 5, 3), dtype=np.uint8) for seed in (0, 1))
    expected = weight * own.astype(float) + (1 - weight) * other
    assert np.abs(mix(own, other, how) - expected).max() <= 0.5 + 1e-4


def test_pixels_outside_the_box_stay_and_the_stored_ones_are_not_written() -> None:
    own, other = BLACK.copy(), WHITE.copy()
    result = mix(own, other, MixPlan(1, 0.5, PixelBox(2, 3, 5, 9)))
    expected = BLACK.copy()
    expected[2:5, 3:9] = 255
    np.testing.assert_array_equal(result, expected)
    np.testing.assert_array_equal(own, BLACK)


def test_strength_that_grows_mixes_fewer_rows_at_first() -> None:
    settings = {"mixup": 1, "curriculum": {"strength": {"start": 0.1, "until": 0.5}}}
    early, late = (
        sum(each is not None for each in plans(settings, 1000, progress=progress)) for progress in (0.0, 0.6)
    )
    assert early < 160 and late == 1000
