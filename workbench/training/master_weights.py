"""Float32 masters of the trainable parameters: gradients add up in float32 whatever precision computes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from workbench.models.weight_formats import HALVES

AUXILIARY = "auxiliary"
"""Prefix of the names of parameters that train with the model but are no part of it."""


class MasterWeights:
    """Every trainable parameter in float32, and its copy in `compute` with which the model computes.

    Where `compute` is not a half precision the parameter is its own master. Otherwise each gradient is added to the
    master's as soon as it is complete, and freed. Masters of frozen parameters are in memory-mapped files, which are
    unlinked at once, so that a killed process leaves none behind.

    Args:
        auxiliary: A module that trains with the model and is no part of it, such as the projections of a loss.
        frozen: Names of parameters that start frozen.
        folder: For the files of frozen masters; created with the first.
    """

    def __init__(
        self,
        model: nn.Module,
        compute: torch.dtype,
        *,
        auxiliary: nn.Module | None = None,
        frozen: Collection[str] = (),
        folder: Path | None = None,
    ) -> None:
        self._pairs: dict[str, tuple[nn.Parameter, nn.Parameter]] = {}
        self._stored: dict[str, torch.dtype] = {}
        """Precision in which each parameter came, and is saved."""
        self._folder = folder
        self._in_files: dict[str, int] = {}
        """Names of masters in files, with the tensor version at the last copy into the computing parameter."""
        named = [
            *model.named_parameters(),
            *(auxiliary.named_parameters(prefix=AUXILIARY) if auxiliary is not None else ()),
        ]
        for name, parameter in named:
            if parameter.requires_grad:
                self.add({name: parameter}, compute)
                if name in frozen:
                    self._move_to_file(name)

    def add(self, parameters: Mapping[str, nn.Parameter], compute: torch.dtype) -> None:
        """Add further trainable parameters, by their names in the model."""
        self._stored |= {name: parameter.dtype for name, parameter in parameters.items()}
        self._pairs |= {name: (parameter, _master(parameter, compute)) for name, parameter in parameters.items()}

    def forget(self, names: Collection[str]) -> None:
        """Forget parameters that leave the model."""
        self._pairs = {name: pair for name, pair in self._pairs.items() if name not in names}

    def __iter__(self) -> Iterator[nn.Parameter]:
        return (master for _, master in self._pairs.values())

    def named(self) -> dict[str, nn.Parameter]:
        """Master of each trainable parameter, by the parameter's name in the model."""
        return {name: master for name, (_, master) in self._pairs.items()}

    def computing(self) -> dict[str, nn.Parameter]:
        """Each trainable parameter with which the model computes, by the same names."""
        return {name: parameter for name, (parameter, _) in self._pairs.items()}

    def backward(self, loss: Tensor) -> None:
        """Add to the gradients."""
        loss.backward()

    def follow(self, frozen: Collection[str]) -> None:
        """Freeze these parameters: their masters move to files, and return to memory when they train again."""
        for name, (parameter, master) in self._pairs.items():
            if parameter is not master:
                master.requires_grad_(name not in frozen)
            if name in frozen and name not in self._in_files:
                self._move_to_file(name)
            elif name in self._in_files and name not in frozen:
                del self._in_files[name]
                master.data = master.data.to(parameter.device, copy=True)

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the masters into the parameters that compute."""
        changed = {
            name: pair
            for name, pair in self._pairs.items()
            if pair[0] is not pair[1] and self._in_files.get(name) != pair[1]._version
        }
        if changed:
            parameters, masters = zip(*changed.values(), strict=True)
            torch._foreach_copy_(list(parameters), list(masters))
        self._in_files |= {name: changed[name][1]._version for name in self._in_files.keys() & changed.keys()}

    @contextmanager
    def exposed(self) -> Iterator[None]:
        """Inside the block the model's parameters hold the masters, each in the precision in which it came, to save."""
        computed = {name: parameter.data for name, (parameter, _) in self._pairs.items()}
        for name, (parameter, master) in self._pairs.items():
            parameter.data = master.data.to(parameter.device, self._stored[name])
        try:
            yield
        finally:
            for name, (parameter, _) in self._pairs.items():
                parameter.data = computed[name]

    @torch.no_grad()
    def _move_to_file(self, name: str) -> None:
        parameter, master = self._pairs[name]
        # Fake tensors, in a dry run, take no memory.
        if parameter is master or self._folder is None or isinstance(master.data, FakeTensor) or not master.numel():
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{len(self._in_files)}.master"
        mapped = torch.from_file(str(path), shared=True, size=master.numel(), dtype=master.dtype)
        path.unlink()  # the mapping keeps the data; a killed process leaves no file
        master.data = mapped.view(master.shape).copy_(master.data)
        self._in_files[name] = master._version


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
