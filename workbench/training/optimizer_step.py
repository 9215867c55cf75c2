"""Optimizer steps: on one device, or where every device holds all trainable parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from workbench.training.optim import optimizer_states


class OptimizerStep(Protocol):
    """Takes optimizer steps, and reads and loads trainable values and optimizer states."""

    def clip(self, max_norm: float) -> Tensor:
        """Clip the gradients; returns their norm before that, a scalar which may be on an accelerator."""

    def take(self) -> None:
        """Take the step."""

    def clear(self) -> None:
        """Free the gradients."""

    def values(self) -> Mapping[str, Tensor]:
        """Trainable parameters by name, in float32 or wider."""

    def states(self) -> Mapping[str, Tensor]:
        """Optimizer states by name."""

    def load(self, values: Mapping[str, Tensor], states: Mapping[str, Tensor] | None = None) -> None:
        """Load values, and optimizer states, that `values` and `states` gave."""


class LocalStep:
    """Optimizer step for unsharded parameters."""

    def __init__(self, optimizer: torch.optim.Optimizer, trainable: Mapping[str, nn.Parameter]) -> None:
        self._optimizer, self._trainable = optimizer, trainable

    def clip(self, max_norm: float) -> Tensor:
        """Clip the gradients."""
        return nn.utils.clip_grad_norm_(list(self._trainable.values()), max_norm)

    def take(self) -> None:
        """Take the step."""
        self._optimizer.step()

    def clear(self) -> None:
        """Free the gradients."""
        self._optimizer.zero_grad(set_to_none=True)

    def values(self) -> Mapping[str, Tensor]:
        """The trainable parameters."""
        return self._trainable

    def states(self) -> Mapping[str, Tensor]:
        """Tensors of the optimizer's states."""
        return optimizer_states.state_tensors(self._optimizer, self._trainable)

    @torch.no_grad()
    def load(self, values: Mapping[str, Tensor], states: Mapping[str, Tensor] | None = None) -> None:
        """Copy values and states in."""
        for name, parameter in self._trainable.items():
            parameter.copy_(values[name])
        if states is not None:
            optimizer_states.load_state(self._optimizer, self._trainable, states)


def read(scalars: Sequence[Tensor]) -> list[float]:
    """The values of scalars, for which the host waits for an accelerator once."""
    if len({each.device for each in scalars}) > 1:  # such as norms of gradients that a host holds
        return [float(each) for each in scalars]
    values: list[float] = torch.stack([each.detach().double() for each in scalars]).cpu().tolist()
    return values
