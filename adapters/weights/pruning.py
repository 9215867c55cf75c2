"""Weights that are pruned by their size before training, and stay zero through it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn


def prune(weights: Iterable[nn.Parameter], share: float) -> None:
    """Set this share of each weight's values to zero, the smallest, and let them have no gradient from now on.

    A value that is zero has no gradient, so that nothing but the weights has to be kept: an optimizer that moves each
    value by its own gradients leaves it where it is, and so do weight decay and averages.
    """
    for weight in weights:
        with torch.no_grad():
            smallest_N = torch.topk(weight.abs().flatten(), int(share * weight.numel()), largest=False).indices
            weight.view(-1)[smallest_N] = 0.0
        weight.register_hook(_of_what_is_left(weight))


def _of_what_is_left(weight: nn.Parameter) -> Callable[[Tensor], Tensor]:
    """Hook of a weight: the gradient of its values that are not zero."""
    return lambda gradient: gradient * (weight != 0)
