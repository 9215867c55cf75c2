"""Float32 masters of the trainable parameters: gradients add up in float32 whatever precision computes."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from workbench.models.weight_storage import HALVES

BESIDE = "beside"
"""Before the names of parameters that are no part of the model."""


class MasterWeights:
    """Every trainable parameter in float32, and its copy in `compute` that the model multiplies with.

    Where `compute` is no half precision the parameter is its own master. Otherwise the gradient of each backward pass
    is added to the master's as soon as it is complete, and freed. Masters of what is frozen for now lie in files, which
    are mapped into memory and have no name that could outlive the process.

    Args:
        beside: What trains with the model and is no part of it.
        frozen: Names of parameters that begin frozen.
        folder: For those files; made when it is needed.
    """

    def __init__(
        self,
        model: nn.Module,
        compute: torch.dtype,
        *,
        beside: nn.Module | None = None,
        frozen: Collection[str] = (),
        folder: Path | None = None,
    ) -> None:
        self._pairs: dict[str, tuple[nn.Parameter, nn.Parameter]] = {}
        self._folder = folder
        self._away: dict[str, int] = {}
        """Names of masters that are in files, with the version of the value that computes."""
        named = [*model.named_parameters(), *(beside.named_parameters(prefix=BESIDE) if beside is not None else ())]
        for name, parameter in named:
            if parameter.requires_grad:
                self._pairs[name] = (parameter, _master(parameter, compute))
                if name in frozen:
                    self._put_away(name)

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

    def follow(self, frozen: Collection[str]) -> None:
        """From now on these parameters do not train: their masters leave the memory, and come back when they do."""
        for name, (parameter, master) in self._pairs.items():
            if parameter is not master:
                master.requires_grad_(name not in frozen)
            if name in frozen and name not in self._away:
                self._put_away(name)
            elif name in self._away and name not in frozen:
                del self._away[name]
                master.data = master.data.to(parameter.device, copy=True)

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the masters into the parameters that compute."""
        changed = {
            name: pair
            for name, pair in self._pairs.items()
            if pair[0] is not pair[1] and self._away.get(name) != pair[1]._version
        }
        if changed:
            parameters, masters = zip(*changed.values(), strict=True)
            torch._foreach_copy_(list(parameters), list(masters))
        self._away |= {name: changed[name][1]._version for name in self._away.keys() & changed.keys()}

    @contextmanager
    def exposed(self) -> Iterator[None]:
        """The model's parameters hold the float32 masters inside the block, so that these are what is saved."""
        computed = {name: parameter.data for name, (parameter, _) in self._pairs.items()}
        for parameter, master in self._pairs.values():
            parameter.data = master.data.to(parameter.device)
        try:
            yield
        finally:
            for name, (parameter, _) in self._pairs.items():
                parameter.data = computed[name]

    @torch.no_grad()
    def _put_away(self, name: str) -> None:
        parameter, master = self._pairs[name]
        # What is only imagined, in a plan, takes no memory anyway.
        if parameter is master or self._folder is None or isinstance(master.data, FakeTensor) or not master.numel():
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{len(self._away)}.master"
        mapped = torch.from_file(str(path), shared=True, size=master.numel(), dtype=master.dtype)
        path.unlink()  # the mapping keeps it, and a killed process leaves nothing behind
        master.data = mapped.view(master.shape).copy_(master.data)
        self._away[name] = master._version


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
