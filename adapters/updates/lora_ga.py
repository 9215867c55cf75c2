"""Gradients of whole frozen weights, found from inputs and outputs of their layers, from which LoRA-GA starts LoRA.

Legend: N tokens, I inputs, O outputs, R rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from peft.tuners.lora.layer import LoraLayer
from torch import Tensor, nn

from workbench.adapters.updates.shifted_lora import start_at
from workbench.adapters.updates.svd import singular_parts
from workbench.errors import TrainingError

if TYPE_CHECKING:
    from workbench.adapters.updates.lora import Decomposition

Call = tuple[str, Tensor, Tensor]
"""Path of a layer, its input (N, I) and its output (..., O), which has a graph."""


def start_along_gradients(
    model: nn.Module, losses: Iterable[Tensor], *, gamma: float, decomposition: Decomposition
) -> None:
    """Let every shifted LoRA layer start along the gradient of its weight (paper, algorithm 1).

    With the gradient's singular vectors U and V, A0 is a multiple of V[:, :R]' and B0 of U[:, R:2R], so that a step
    along -B0 B0' G - G A0' A0 changes the weight by the nearest matrix of rank 2R to G, but for a factor (theorem 3.1).
    A layer through which no gradient came keeps its start.

    Args:
        losses: Of one row after another, each with a graph that is computed when it is asked for.

    Raises:
        TrainingError: a gradient is not finite.
    """
    gradients = summed_gradients(model, losses)
    while gradients:
        path, gradient_OI = gradients.popitem()
        layer: Any = model.get_submodule(path)
        rank = layer.r["default"]
        try:
            U_OK, _, V_KI = singular_parts(gradient_OI, 2 * rank, decomposition=decomposition)
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
            raise TrainingError(
                f"adapter.method=lora-ga: the gradient of {path.removeprefix('base_model.model.')} on the first "
                "training rows is not finite. Write model.compute=float32, or adapter.method=lora."
            ) from None
        length = (len(gradient_OI) / gamma**2) ** 0.25
        learns = gradient_OI.any()  # asked of the device alone, so that a plan can follow
        A_RI = torch.where(learns, length * V_KI[:rank], layer.start_A_RI)
        B_OR = torch.where(learns, length * U_OK[:, rank:], layer.start_B_OR)
        start_at(layer, A_RI, B_OR)


def summed_gradients(model: nn.Module, losses: Iterable[Tensor]) -> dict[str, Tensor]:
    """Gradient (O, I) of each LoRA layer's weight, summed over the rows, float32, by the layer's path.

    It is the sum over tokens of the outer product of the output's gradient and the input, so that the weight itself
    needs none and may be quantised; nothing is added to the gradients of parameters.
    """
    layers: list[tuple[str, Any]] = [pair for pair in model.named_modules() if isinstance(pair[1], LoraLayer)]
    totals = {
        path: torch.zeros(layer.out_features, layer.in_features, device=layer.lora_A["default"].weight.device)
        for path, layer in layers
    }
    with _watched(layers) as calls:
        for loss in losses:
            seen = tuple(calls)  # blocks that are computed again in the backward pass would add to it
            _add_gradients(totals, loss, seen)
            calls.clear()
            del loss, seen  # so that nothing of a row is there beside the next one
    return totals


def _add_gradients(totals: Mapping[str, Tensor], loss: Tensor, calls: Sequence[Call]) -> None:
    """Add the gradients of one loss, of the layers that it depends on."""
    grads = torch.autograd.grad(loss, [output for _, _, output in calls], allow_unused=True) if calls else ()
    for (path, x_NI, _), gradient in zip(calls, grads, strict=True):
        if gradient is not None:
            totals[path].addmm_(gradient.flatten(0, -2).float().T, x_NI.float())


@contextmanager
def _watched(layers: Iterable[tuple[str, nn.Module]]) -> Iterator[list[Call]]:
    """Inside the block every call of these layers that has a graph is listed."""
    calls: list[Call] = []

    def watch(path: str) -> Callable[[nn.Module, tuple[Any, ...], Tensor], None]:
        def see(_: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> None:
            if output.requires_grad:
                calls.append((path, arguments[0].detach().flatten(0, -2), output))

        return see

    handles = [layer.register_forward_hook(watch(path)) for path, layer in layers]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()
