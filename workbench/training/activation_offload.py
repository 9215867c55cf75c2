"""Activation offload: inputs of recomputed blocks wait in the host's memory between forward and backward pass.

Copies overlap with the computation, two at a time: in the forward pass the next block waits until the input before the
last has been copied; in the backward pass the input of a block returns while the block above it is computed. The last
block's input stays, because it is needed first. Values are the same bits (as in Unsloth and torchtune's
OffloadActivations; torch's save_on_cpu, which transformers' offload=True uses, copies between two computations).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from workbench.adapters import anatomy
from workbench.errors import ConfigError
from workbench.models import activation_recomputation

PIECE = 2**26
"""Most bytes in one copy: torch allocates pinned memory in powers of two."""
_PLANNED: ContextVar[CountedCopies | None] = ContextVar("planned", default=None)


class Copies(Protocol):
    """Copies tensors to the host and back."""

    def away(self, tensor: Tensor) -> Any:
        """Start a copy to the host; returns the argument of `back`."""

    def back(self, kept: Any) -> Tensor:
        """Start a copy to the device, which may be read only after `arrived`."""

    def arrived(self) -> None:
        """Let the computation wait for copies that return."""


class PinnedCopies(Copies):
    """Copies on a separate stream, in pinned memory where there is an accelerator.

    A tensor that has left is held until the computation waits for its copy, so that its memory can be reused at once:
    memory that `record_stream` keeps is free only when the host, which is far ahead, sees that the copy is done.

    Args:
        pinned: Whether the host's memory is pinned: a device can only copy from and to pinned memory while it computes.
    """

    def __init__(self, device: torch.device, *, pinned: bool = True) -> None:
        self._device, self._pinned = device, pinned
        self._stream = torch.Stream(device)
        self._leaving: Tensor | None = None  # the last that was sent

    def away(self, tensor: Tensor) -> tuple[Tensor, list[Tensor]]:
        """A tensor without values of the same shape, and pieces on the host."""
        self._let_go()
        pieces = []
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        with self._stream:
            for part in tensor.reshape(-1).split(max(1, PIECE // tensor.element_size())):
                room = torch.empty(len(part), dtype=part.dtype, pin_memory=self._pinned)
                pieces.append(room.copy_(part, non_blocking=True))
        self._leaving = tensor.detach()
        return torch.empty_like(tensor, device="meta"), pieces

    def back(self, kept: tuple[Tensor, list[Tensor]]) -> Tensor:
        self._let_go()
        like, pieces = kept
        tensor = torch.empty_like(like, device=self._device)
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        with self._stream:
            for part, piece in zip(tensor.view(-1).split([len(each) for each in pieces]), pieces, strict=True):
                part.copy_(piece, non_blocking=True)
        return tensor

    def arrived(self) -> None:
        torch.accelerator.current_stream(self._device).wait_stream(self._stream)

    def _let_go(self) -> None:
        if self._leaving is not None:
            self.arrived()
            self._leaving = None


@dataclass(frozen=True, eq=False)
class _Kind:
    """A tensor without its values, in a plan."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


class CountedCopies(Copies):
    """Counts the bytes of copies, in a plan, without copying."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def away(self, tensor: Tensor) -> _Kind:
        kind = _Kind(tensor.shape, tensor.dtype, tensor.device)
        self.now += tensor.nbytes
        self.most = max(self.most, self.now)
        weakref.finalize(kind, self._forget, tensor.nbytes).atexit = False
        return kind

    def back(self, kept: _Kind) -> Tensor:
        return torch.empty(kept.shape, dtype=kept.dtype, device=kept.device)

    def arrived(self) -> None:
        return

    def _forget(self, size: int) -> None:
        self.now -= size


class _WaitingInput:
    """A block's input that waits on the host."""

    def __init__(self, copies: Copies, tensor: Tensor, before: _WaitingInput | None) -> None:
        self._copies, self._there = copies, copies.away(tensor)
        self._coming: Tensor | None = None
        self._before = None if before is None else weakref.ref(before)

    def come(self) -> None:
        """Start the copy to the device."""
        if self._coming is None:
            self._coming = self._copies.back(self._there)

    def here(self) -> Tensor:
        """The input on the device; starts the copy of the input of the block below."""
        self.come()
        assert self._coming is not None
        tensor, self._coming = self._coming, None
        self._copies.arrived()
        if self._before is not None and (below := self._before()) is not None:
            below.come()
        return tensor


class ActivationOffload:
    """Lets inputs of blocks wait on the host."""

    def __init__(self, copies: Copies) -> None:
        self._copies = copies
        self._last: weakref.ref[_WaitingInput] | None = None

    def around(self, checkpoint: Callable[..., Any]) -> Callable[..., Any]:
        """A function like torch's `checkpoint` whose first input waits on the host."""

        def checkpointed(function: Callable[..., Any], *inputs: Any) -> Any:
            if not inputs:
                raise ConfigError(
                    "train.offload_activations=true: this backbone hands its blocks their inputs by name, so that "
                    "none is saved where it could be copied from. Write train.offload_activations=false."
                )
            address = inputs[0].untyped_storage()._cdata

            def pack(saved: Tensor) -> Tensor | _WaitingInput:
                return self._keep(saved) if saved.untyped_storage()._cdata == address else saved

            with torch.autograd.graph.saved_tensors_hooks(pack, _unpack):
                return checkpoint(function, *inputs)

        return checkpointed

    def _keep(self, tensor: Tensor) -> _WaitingInput:
        kept = _WaitingInput(self._copies, tensor, None if self._last is None else self._last())
        self._last = weakref.ref(kept)
        return kept


def _unpack(saved: Tensor | _WaitingInput) -> Tensor:
    return saved.here() if isinstance(saved, _WaitingInput) else saved


def begin(model: nn.Module, device: torch.device) -> None:
    """From now on, offload the inputs of a model's blocks, except the last one's; the blocks must be checkpointed.

    Raises:
        ConfigError: The device is the host.
    """
    copies = _PLANNED.get()
    if copies is None and (reason := refusal(device)):
        raise ConfigError(reason)
    offload = ActivationOffload(copies or PinnedCopies(device))
    for block in anatomy.decoder_layers(model)[:-1]:
        own: Any = block
        if activation_recomputation.is_whole(block):
            own._gradient_checkpointing_func = offload.around(own._gradient_checkpointing_func)


def refusal(device: torch.device) -> str | None:
    """Why nothing can be offloaded, and what to write; None where it can, or where a plan is for such a device."""
    if device.type != "cpu" or _PLANNED.get() is not None:
        return None
    return (
        "train.offload_activations=true copies inputs of blocks to the host's memory, and this run computes on a CPU, "
        "where they are there already. Write train.offload_activations=auto."
    )


@contextmanager
def planned(accelerated: bool) -> Iterator[CountedCopies]:
    """Inside, bytes are counted and nothing is copied; where `accelerated` a CPU stands for an accelerator."""
    copies = CountedCopies()
    token = _PLANNED.set(copies if accelerated else None)
    try:
        yield copies
    finally:
        _PLANNED.reset(token)


def counted() -> CountedCopies:
    """What counts the copies of the plan around it, from now on."""
    copies = _PLANNED.get() or CountedCopies()
    copies.most = copies.now
    return copies
