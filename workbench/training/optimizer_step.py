"""Optimizer steps: on one device, or where every device holds all trainable parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from workbench.errors import TrainingError
from workbench.training.optim import optimizer_states

Refuse = Callable[[float], TrainingError | None]
"""From the norm of the gradients to an error, or None where the step may be taken."""


class OptimizerStep(Protocol):
    """Takes optimizer steps, and reads and loads trainable values and optimizer states."""

    def step(self, max_norm: float, refuse: Refuse) -> tuple[float, TrainingError | None]:
        """Clip the gradients and take the step; returns their norm before clipping, and the error of a refusal."""

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

    def step(self, max_norm: float, refuse: Refuse) -> tuple[float, TrainingError | None]:
        """Clip the gradients and take the step, unless `refuse` gives an error."""
        norm = float(nn.utils.clip_grad_norm_(list(self._trainable.values()), max_norm))
        error = refuse(norm)
        if error is None:
            self._optimizer.step()
        return norm, error

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
