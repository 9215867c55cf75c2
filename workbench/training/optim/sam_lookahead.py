"""Steps that look at more than one point: sharpness-aware gradients, and slow weights that follow the fast ones.

Not pytorch-optimizer's: its SAM takes the optimizer's step itself, where here the gradients are first added up over
processes, checked and clipped; its Lookahead keeps slow weights outside of the optimizer's state, where checkpoints,
sharding and frozen layers do not reach them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

LEAST_SIZE = 0.01
"""Added to the size of a weight by adaptive SAM, so that weights at zero move too, as in its experiments."""
SLOW = "slow"
"""Where the slow weights of a parameter stand in its optimizer's state."""
FAST_STEPS = "fast_steps"
"""Where an optimizer's group counts its steps since the slow weights moved."""


@contextmanager
def ascended(
    parameters: Iterable[nn.Parameter], *, rho: float, refresh: Callable[[], None], adaptive: bool = False
) -> Iterator[None]:
    """Inside the block the parameters stand `rho` uphill, where SAM takes its gradient; after it, where they were.

    They move along rho g / |g|, with the norm over all of them (Foret et al. 2021, equation 2). Their gradients are
    freed: the block begins with none. A parameter without a gradient stays. They come back to the same bits, whatever
    happens in the block.

    Where it is adaptive each weight goes further the larger it is, along rho T^2 g / |T g| with T = |w| + 0.01, so that
    scaling a layer up and the next one down changes nothing (Kwon et al. 2021, equation 9 and section 4).

    Args:
        parameters: With their gradients, in float32 or wider.
        rho: Distance in units of the weights.
        refresh: Called when the parameters have changed: copies them to where they compute. In half precision a model
            sees only as much of the way as its copy can hold.
    """
    moved = [parameter for parameter in parameters if parameter.grad is not None]
    kept = [parameter.detach().clone() for parameter in moved]
    try:
        _ascend(moved, rho, adaptive)
        refresh()
        yield
    finally:
        with torch.no_grad():
            for parameter, value in zip(moved, kept, strict=True):
                parameter.copy_(value)
        refresh()


@torch.no_grad()
def _ascend(parameters: list[nn.Parameter], rho: float, adaptive: bool) -> None:
    size = (
        [parameter.abs() + LEAST_SIZE for parameter in parameters] if adaptive else [torch.ones(())] * len(parameters)
    )
    for parameter, each in zip(parameters, size, strict=True) if adaptive else ():
        parameter.grad = _gradient(parameter) * each
    norm = nn.utils.get_total_norm([_gradient(parameter) for parameter in parameters])
    factor = torch.where(norm > 0, rho / norm, 0.0)
    for parameter, each in zip(parameters, size, strict=True):
        way = _gradient(parameter) * factor.to(parameter.device)
        parameter.add_(way * each if adaptive else way)
        parameter.grad = None


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def look_ahead(optimizer: torch.optim.Optimizer, *, every: int, alpha: float) -> None:
    """Give the parameters of an optimizer slow weights, which begin where they do (Zhang et al. 2019, algorithm 1).

    After each `every` steps of a group the slow weights go the share `alpha` of the way to the fast ones, which then
    start from there. They stand in the optimizer's state, so that they are saved, evicted and loaded with it. A
    parameter without a gradient is left alone.
    """
    starts: dict[nn.Parameter, Tensor] = {}

    def before(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and SLOW not in optimizer.state.get(parameter, {}):
                    starts[parameter] = parameter.detach().clone()

    @torch.no_grad()
    def after(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for parameter, start in starts.items():
            optimizer.state[parameter][SLOW] = start
        starts.clear()
        for group in optimizer.param_groups:
            group[FAST_STEPS] = (group.get(FAST_STEPS, 0) + 1) % every
            if group[FAST_STEPS]:
                continue
            for parameter in group["params"]:
                if parameter.grad is not None:
                    slow = optimizer.state[parameter][SLOW]
                    slow.lerp_(parameter, alpha)
                    parameter.copy_(slow)

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)
