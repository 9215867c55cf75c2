"""The noise scale: unbiased where the truth is known, however the rows are cut."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from workbench.training.optim.noise_scale import (
    MEMORY,
    GradientPart,
    GradientParts,
    NoiseEstimate,
    NoiseScale,
    cut,
    estimate,
)


class Model(NamedTuple):
    """Gradients of single rows: G + noise of standard deviation `spread` in each of D directions."""

    truth_D: np.ndarray
    spread: float

    def parts(self, rows: list[int], generator: np.random.Generator) -> tuple[list[GradientPart], float]:
        """Parts of so many rows each, and the squared norm of the step's gradient; every row has one token."""
        total, found, together = sum(rows), [], np.zeros_like(self.truth_D)
        for count in rows:
            noise_D = generator.normal(scale=self.spread / count**0.5, size=self.truth_D.shape)
            added_D = (self.truth_D + noise_D) * count / total
            found.append(GradientPart(float(added_D @ added_D), count, count / total))
            together += added_D
        return found, float(together @ together)


MODEL = Model(np.linspace(-0.3, 0.5, 12), 1.5)
SIGNAL, NOISE = float(MODEL.truth_D @ MODEL.truth_D), 12 * 1.5**2


@pytest.mark.parametrize("rows", [[8, 8], [4, 4, 4, 4], [1, 15], [1, 2, 3, 10], [1] * 16])
def test_both_estimates_are_unbiased_however_the_rows_are_cut(rows: list[int]) -> None:
    generator = np.random.default_rng(0)
    found = np.array([estimate(*MODEL.parts(rows, generator)) for _ in range(4000)])
    mean, error = found.mean(axis=0), found.std(axis=0) / len(found) ** 0.5
    assert np.all(np.abs(mean - [SIGNAL, NOISE]) < 4 * error)
    assert np.all(error < [0.15 * SIGNAL, 0.05 * NOISE])


def test_tokens_weigh_the_parts_and_rows_their_noise() -> None:
    """Unbiased too where the share of the tokens is not that of the rows."""
    generator, rows, shares = np.random.default_rng(1), (2, 6, 8), (0.5, 0.2, 0.3)
    found = []
    for _ in range(4000):
        means = [MODEL.truth_D + generator.normal(scale=1.5 / b**0.5, size=12) for b in rows]
        added = [w * mean for w, mean in zip(shares, means, strict=True)]
        parts = [GradientPart(float(g @ g), b, w) for g, b, w in zip(added, rows, shares, strict=True)]
        found.append(estimate(parts, float(sum(added) @ sum(added))))
    mean, error = np.mean(found, axis=0), np.std(found, axis=0) / len(found) ** 0.5
    assert np.all(np.abs(mean - [SIGNAL, NOISE]) < 4 * error)


def test_equal_parts_are_those_of_the_paper() -> None:
    """McCandlish et al. 2018, appendix A.1, from the mean squared norm of the small batches and the big one's."""
    parts, big = MODEL.parts([5, 5, 5], np.random.default_rng(2))
    small = sum(part.squared * 9 for part in parts) / 3
    found = estimate(parts, big)
    assert found is not None
    assert found.signal == pytest.approx((15 * big - 5 * small) / (15 - 5))
    assert found.noise == pytest.approx((small - big) / (1 / 5 - 1 / 15))


def test_too_little_says_nothing() -> None:
    assert estimate([GradientPart(1.0, 4, 1.0)], 1.0) is None
    assert estimate([GradientPart(1.0, 4, 1.0), GradientPart(0.0, 2, 0.0)], 1.0) is None


@given(count=st.integers(1, 40), parts=st.integers(2, 9))
def test_a_cut_loses_no_row_and_leaves_no_part_empty(count: int, parts: int) -> None:
    rows = np.arange(count)[::-1]
    found = cut(rows, parts=parts)
    assert np.array_equal(np.concatenate(found), rows) and len(found) == min(parts, count)
    assert {len(part) for part in found} <= {count // len(found), count // len(found) + 1}


def test_parts_of_a_real_gradient() -> None:
    """The same rows cut twice: what parts say follows from the gradients of single rows."""
    torch.manual_seed(0)
    model, unused = nn.Linear(4, 3), nn.Parameter(torch.zeros(2))
    rows_BL, tokens = torch.randn(12, 4), np.arange(1, 13)

    def loss(row: int) -> torch.Tensor:
        return tokens[row] * model(rows_BL[row]).square().sum() / tokens.sum()

    for sizes in ([6, 6], [1, 4, 7]):
        watch = GradientParts([*model.parameters(), unused])
        model.zero_grad()
        found, start = [], 0
        for size in sizes:
            part = range(start, start + size)
            for row in part:
                loss(row).backward()
            added = torch.autograd.grad(sum((loss(row) for row in part), torch.zeros(())), list(model.parameters()))
            share = float(tokens[start : start + size].sum() / tokens.sum())
            found.append(GradientPart(float(sum(each.square().sum() for each in added)), size, share))
            watch.add(size, share=share)
            start += size
        total = sum(float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None)
        assert watch.estimate() == pytest.approx(estimate(found, total), rel=1e-4)


def test_the_ratio_comes_last() -> None:
    """The quotient of the moving averages, not the average of the quotients."""
    scale, signal, noise = NoiseScale(), 0.0, 0.0
    assert scale.value is None
    for found in (NoiseEstimate(-1.0, 5.0), None, NoiseEstimate(4.0, 6.0), NoiseEstimate(2.0, 1.0)):
        scale.add(found)
        if found is not None:
            signal = MEMORY * signal + found.signal
            noise = MEMORY * noise + found.noise
            assert scale.value == (pytest.approx(noise / signal) if signal > 0 else None)
    assert scale.value is not None


def test_goes_on_from_its_state() -> None:
    one, other = NoiseScale(), NoiseScale()
    one.add(NoiseEstimate(0.1, 3.0))
    other.load(one.state())
    for scale in (one, other):
        scale.add(NoiseEstimate(1 / 3, 1 / 7))
    assert one.value == other.value is not None
