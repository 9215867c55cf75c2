"""Copies on the host of what an accelerator is still computing, for which nobody waits before they are needed."""

from __future__ import annotations

import torch
from torch import Tensor


class HostCopies:
    """Tensors on their way to the host; on a CPU they are there already."""

    def __init__(self) -> None:
        self._sent: torch.Event | None = None

    def send(self, tensor: Tensor) -> Tensor:
        """The tensor on the host, to be read after `arrive` alone."""
        if tensor.device.type == "cpu":
            return tensor
        copy = tensor.to("cpu", non_blocking=True)
        self._sent = torch.Event(tensor.device)
        self._sent.record()
        return copy

    def arrive(self) -> None:
        """Wait until all that was sent is there; nothing to wait for where the host has read something later."""
        if self._sent is not None:
            self._sent.synchronize()
            self._sent = None
