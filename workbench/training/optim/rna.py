"""Regularised nonlinear acceleration: the sum of samples of a run whose steps would come nearest to none.

Legend: K samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


def coefficients(samples: Sequence[Mapping[str, Tensor]], *, ridge: float) -> list[float]:
    """Weights of the samples x_1 to x_K, the oldest first, that add up to 1; the last alone where nothing moved.

    Scieur, d'Aspremont and Bach 2016 (arXiv:1606.04133, algorithm 2) solve, for the steps r_i = x_(i+1) - x_i,
    (R'R / |R'R| + ridge I) z = 1, and take c = z / sum z: of all weights with sum 1 those of the smallest step R c, and
    with `ridge` of small weights too. What c weighs here is where the steps lead, x_2 to x_K. Weights may be negative;
    for a large `ridge` all are alike, and it is LAWA over K - 1 samples.

    Args:
        samples: Values by name, on one device.
    """
    steps = len(samples) - 1
    products = torch.empty(steps, steps, dtype=torch.float64)
    for row in range(steps):
        for column in range(row + 1):
            product = sum(
                float(_step(samples, row, name).mul_(_step(samples, column, name)).sum()) for name in samples[0]
            )
            products[row, column] = products[column, row] = product
    size = torch.linalg.matrix_norm(products, ord=2) if steps else torch.zeros(())
    if not size > 0:
        return [0.0] * steps + [1.0]
    z = torch.linalg.solve(products / size + ridge * torch.eye(steps, dtype=torch.float64), torch.ones(steps).double())
    return [0.0, *(z / z.sum()).tolist()]


def extrapolated(samples: Sequence[Mapping[str, Tensor]], *, ridge: float) -> dict[str, Tensor]:
    """The weighted sum of the samples."""
    weights = coefficients(samples, ridge=ridge)
    return {
        name: sum(
            (weight * sample[name].double() for weight, sample in zip(weights, samples, strict=True) if weight),
            torch.zeros_like(value, dtype=torch.float64),
        ).to(value.dtype)
        for name, value in samples[-1].items()
    }


def _step(samples: Sequence[Mapping[str, Tensor]], number: int, name: str) -> Tensor:
    return samples[number + 1][name].double() - samples[number][name]
