"""Sharpness-aware minimisation: SAM in the steps where it is due, LookSAM in the others.

Not pytorch-optimizer's, whose SAM takes the optimizer's step itself: here gradients are first summed over processes,
checked and clipped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor, nn

from workbench.adapters.method import TrainHook
from workbench.config.sections.optimizer_config import OptimizerConfig
from workbench.training.checkpoints import Checkpointed

LEAST_SIZE = 0.01
"""Added to the size of a weight by adaptive SAM, so that weights at zero move too, as in its experiments."""


class Values(Protocol):
    """The values that train, with their gradients."""

    def __iter__(self) -> Iterator[nn.Parameter]: ...

    def named(self) -> dict[str, nn.Parameter]:
        """Each by its name."""

    def refresh(self) -> None:
        """Copy them to where they compute."""


class Sharpness(Checkpointed):
    """Turns the gradients of a step into sharpness-aware ones, as `optimizer.sam` says.

    LookSAM (Liu et al. 2022, arXiv:2203.02714, algorithm 1) keeps the part of SAM's gradient s that is orthogonal to
    the plain one g, v = s - g (s g) / |g|^2, and in the steps between takes g + alpha v |g| / |v|. Without alpha it is
    SAM in every n-th step. Norms and products are over all values that have a gradient.
    """

    def __init__(self, settings: OptimizerConfig, values: Values) -> None:
        self._settings, self._values = settings, values
        self._orthogonal: dict[str, Tensor] = {}

    @property
    def hooks(self) -> dict[str, TrainHook]:
        """Itself where it keeps a state, by the name of its file in a checkpoint."""
        return {} if self._settings.sam_reuse is None else {"sharpness": self}

    def sharpen(self, step: int, again: Callable[[], object]) -> None:
        """Replace the plain gradients of step `step` (from 0), which are there.

        Args:
            again: Computes the gradients of the same rows anew.
        """
        settings = self._settings
        if settings.sam is None:
            return
        if step % settings.sam_every:
            self._reuse()
            return
        remembers = settings.sam_reuse is not None
        plain = {name: each.clone() for name, each in self._gradients().items() if remembers}
        with ascended(self._values, rho=settings.sam, adaptive=settings.sam_adaptive, refresh=self._values.refresh):
            again()
        if remembers:
            self._orthogonal = orthogonal(self._gradients(), plain)

    def _gradients(self) -> dict[str, Tensor]:
        return {name: each.grad for name, each in self._values.named().items() if each.grad is not None}

    def _reuse(self) -> None:
        gradients = self._gradients()
        kept = {name: each for name, each in self._orthogonal.items() if name in gradients}
        if not kept or self._settings.sam_reuse is None:
            return
        size = _norm(kept.values())
        factor = torch.where(size > 0, self._settings.sam_reuse * _norm(gradients.values()) / size, 0.0)
        for name, each in kept.items():
            gradients[name].add_(each * factor.to(each.device))

    def state(self) -> dict[str, Tensor]:
        """The kept part of SAM's last gradient, by name, for a checkpoint."""
        return dict(self._orthogonal)

    def load(self, state: dict[str, Tensor]) -> None:
        """Go on from a checkpoint."""
        named = self._values.named()
        self._orthogonal = {name: each.to(named[name].device, copy=True) for name, each in state.items()}


@torch.no_grad()
def orthogonal(gradients: Mapping[str, Tensor], plain: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The part of gradients that is orthogonal to the plain ones, each set taken as one vector."""
    both = [name for name in gradients if name in plain]
    if not both:
        return {}
    product = sum((gradients[name] * plain[name]).sum(dtype=torch.float64) for name in both)
    size = _norm(plain[name] for name in both)
    share = torch.where(size > 0, product / size.square(), 0.0)
    return {name: gradients[name] - share.to(gradients[name]) * plain[name] for name in both}


def _norm(tensors: Iterable[Tensor]) -> Tensor:
    """Norm of all values together, in float64."""
    norms = [torch.linalg.vector_norm(each, dtype=torch.float64) for each in tensors]
    together: Tensor = torch.linalg.vector_norm(torch.stack([each.to(norms[0].device) for each in norms]))
    return together


@contextmanager
def ascended(
    parameters: Iterable[nn.Parameter], *, rho: float, refresh: Callable[[], None], adaptive: bool = False
) -> Iterator[None]:
    """Inside the block the parameters stand `rho` uphill, where SAM takes its gradient; afterwards where they were.

    They move along rho g / |g|, with the norm over all of them (Foret et al. 2021, equation 2). Their gradients are
    freed: the block starts with none. A parameter without a gradient stays. They return to the same bits, whatever
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
    sizes = [parameter.abs() + LEAST_SIZE for parameter in parameters] if adaptive else []
    for parameter, size in zip(parameters, sizes, strict=False):
        parameter.grad = _gradient(parameter) * size
    norm = nn.utils.get_total_norm([_gradient(parameter) for parameter in parameters])
    factor = torch.where(norm > 0, rho / norm, 0.0)
    for number, parameter in enumerate(parameters):
        way = _gradient(parameter) * factor.to(parameter.device)
        parameter.add_(way * sizes[number] if adaptive else way)
        parameter.grad = None


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad
