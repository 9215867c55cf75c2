"""Sharpness-aware gradients of a training: SAM in the steps where it is due, and LookSAM in the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from workbench.config.sections.optimizer_config import OptimizerConfig
from workbench.training.optim.sam_lookahead import ascended


class Values(Protocol):
    """The values that train, with their gradients."""

    def __iter__(self) -> Iterator[nn.Parameter]: ...

    def named(self) -> dict[str, nn.Parameter]:
        """Each by its name."""

    def refresh(self) -> None:
        """Copy them to where they compute."""


class Sharpness:
    """Turns the gradients of a step into sharpness-aware ones, as the settings of an optimizer say.

    LookSAM (Liu et al. 2022, arXiv:2203.02714, algorithm 1) keeps of SAM's gradient s what is orthogonal to the plain
    one g, v = s - g (s g) / |g|^2, and in the steps between takes g + alpha v |g| / |v|. Without alpha it is SAM in
    every n-th step. Norms and products are over all values that have a gradient.
    """

    def __init__(self, settings: OptimizerConfig, values: Values) -> None:
        self._settings, self._values = settings, values
        self._orthogonal: dict[str, Tensor] = {}

    @property
    def hooks(self) -> dict[str, Sharpness]:
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
        size = _norm(kept)
        factor = torch.where(size > 0, self._settings.sam_reuse * _norm(gradients) / size, 0.0)
        for name, each in kept.items():
            gradients[name].add_(each * factor.to(each.device))

    def on_gradients(self) -> None:
        """Do nothing: `sharpen` was called before."""

    def after_step(self, step: int) -> None:
        """Do nothing."""

    def state(self) -> dict[str, Tensor]:
        """The kept part of SAM's last gradient, by name, for a checkpoint."""
        return dict(self._orthogonal)

    def load(self, state: dict[str, Tensor]) -> None:
        """Go on from a checkpoint."""
        named = self._values.named()
        self._orthogonal = {name: each.to(named[name].device, copy=True) for name, each in state.items()}


@torch.no_grad()
def orthogonal(gradients: Mapping[str, Tensor], plain: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The part of gradients that is orthogonal to the plain ones, both as one vector."""
    both = [name for name in gradients if name in plain]
    if not both:
        return {}
    product = sum((gradients[name] * plain[name]).sum(dtype=torch.float64) for name in both)
    size = _norm({name: plain[name] for name in both})
    share = torch.where(size > 0, product / size.square(), 0.0)
    return {name: gradients[name] - share.to(gradients[name]) * plain[name] for name in both}


def _norm(tensors: Mapping[str, Tensor]) -> Tensor:
    """Norm of all values together, in float64."""
    norms = [torch.linalg.vector_norm(each, dtype=torch.float64) for each in tensors.values()]
    together: Tensor = torch.linalg.vector_norm(torch.stack([each.to(norms[0].device) for each in norms]))
    return together
