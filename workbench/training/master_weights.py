"""Float32 masters of the trainable parameters: gradients add up in float32 whatever precision computes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from workbench.models.weight_storage import HALVES

BESIDE = "beside"
"""Before the names of parameters that are no part of the model."""


class MasterWeights:
    """Every trainable parameter in float32, and its copy in `compute` that the model multiplies with.

    Where `compute` is no half precision the parameter is its own master. Otherwise the gradient of each backward pass
    is added to the master's as soon as it is complete, and freed.
    """

    def __init__(self, model: nn.Module, compute: torch.dtype, *, beside: nn.Module | None = None) -> None:
        self._pairs: dict[str, tuple[nn.Parameter, nn.Parameter]] = {}
        named = [*model.named_parameters(), *(beside.named_parameters(prefix=BESIDE) if beside is not None else ())]
        for name, parameter in named:
            if parameter.requires_grad:
                self._pairs[name] = (parameter, _master(parameter, compute))

    def __iter__(self) -> Iterator[nn.Parameter]:
        return (master for _, master in self._pairs.values())

    def named(self) -> dict[str, nn.Parameter]:
        """Master of each trainable parameter, by the parameter's name in the model."""
        return {name: master for name, (_, master) in self._pairs.items()}

    def computing(self) -> dict[str, nn.Parameter]:
        """Each trainable parameter that the model multiplies with, by the same names."""
        return {name: parameter for name, (parameter, _) in self._pairs.items()}

    def backward(self, loss: Tensor) -> None:
        """Add to the gradients."""
        loss.backward()

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the masters into the parameters that compute."""
        for parameter, master in self._pairs.values():
            if parameter is not master:
                parameter.copy_(master)

    @contextmanager
    def exposed(self) -> Iterator[None]:
        """The model's parameters hold the float32 masters inside the block, so that these are what is saved."""
        computed = {name: parameter.data for name, (parameter, _) in self._pairs.items()}
        for parameter, master in self._pairs.values():
            parameter.data = master.data
        try:
            yield
        finally:
            for name, (parameter, _) in self._pairs.items():
                parameter.data = computed[name]


def _master(parameter: nn.Parameter, compute: torch.dtype) -> nn.Parameter:
    if parameter.dtype == compute and compute not in HALVES:
        return parameter
    master = nn.Parameter(parameter.detach().float().clone())
    parameter.data = parameter.data.to(compute)

    def add_to_master(computed: Tensor) -> None:
        assert computed.grad is not None
        if master.grad is None:
            master.grad = computed.grad.float()
        else:
            master.grad += computed.grad
        computed.grad = None

    parameter.register_post_accumulate_grad_hook(add_to_master)
    return master
