"""Parts of weights by what their inputs do, found in one pass over data, from which CorDA starts LoRA.

Legend: N tokens, I inputs, O outputs, R rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import torch
from peft import PeftModel
from peft.tuners.lora.layer import LoraLayer
from torch import Tensor, nn

DAMPING = 0.01
"""Added to the variance of each input, in units of their mean: directions without data stay invertible."""


@torch.no_grad()
def covariances(model: PeftModel, sample: Iterable[Mapping[str, Tensor]]) -> list[Tensor]:
    """Mean x x' over the inputs x of every LoRA layer (I, I), damped, float64, in the order of the layers.

    Args:
        sample: Model inputs; rows without padding, which would count as data.
    """
    layers: list[tuple[str, Any]] = [pair for pair in model.named_modules() if isinstance(pair[1], LoraLayer)]
    sums = {name: torch.zeros(layer.in_features, layer.in_features, dtype=torch.float64) for name, layer in layers}
    counts = dict.fromkeys(sums, 0)

    def watch(name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def see(_: nn.Module, arguments: tuple[Any, ...]) -> None:
            x_NI = arguments[0].flatten(0, -2).double()
            sums[name] += (x_NI.T @ x_NI).cpu()
            counts[name] += len(x_NI)

        return see

    handles = [layer.register_forward_pre_hook(watch(name)) for name, layer in layers]
    training = model.training
    model.eval()
    try:
        for inputs in sample:
            model(**{name: each.to(model.device) for name, each in inputs.items()})
    finally:
        model.train(training)
        for handle in handles:
            handle.remove()
    for name, sum_II in sums.items():  # in place: of a large backbone they are larger than its weights
        _damp(sum_II.div_(max(counts[name], 1)))
    return list(sums.values())


def oriented_parts(
    weight_OI: Tensor, covariance_II: Tensor, rank: int, *, mode: Literal["ipm", "kpm"]
) -> tuple[Tensor, Tensor]:
    """A0 (R, I) and B0 (O, R): components of U S V' = W C, with C taken off again (paper, equations 1 to 3).

    Args:
        mode: `ipm` takes the largest, `kpm` the smallest ones.
    """
    weight, covariance = weight_OI.double(), covariance_II.to(weight_OI.device)
    U_OK, S_K, V_KI = torch.linalg.svd(weight @ covariance, full_matrices=False)
    chosen = slice(0, rank) if mode == "ipm" else slice(len(S_K) - rank, len(S_K))
    root_R = S_K[chosen].sqrt()
    uncovered_RI = torch.linalg.solve(covariance, V_KI[chosen].T).T  # V' C^-1, as C is symmetric
    return (root_R[:, None] * uncovered_RI).to(weight_OI), (U_OK[:, chosen] * root_R).to(weight_OI)


def _damp(covariance_II: Tensor) -> None:
    """Make it invertible by the mean of its diagonal, or 1 where all inputs were zero or none came."""
    diagonal_I = covariance_II.diagonal()
    diagonal_I += DAMPING * (float(diagonal_I.mean()) or 1.0)
