"""Base of modes that see every operation on tensors, and cost little."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_DEVICE = torch.ops.prim.device.default


class DispatchMode(TorchDispatchMode, ABC):
    """Inside of it, each operation is handed to `called`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled in here, and keeping torch's compiler out takes as long as all else

    def __torch_dispatch__(self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if func is _DEVICE:  # what autograd asks of fake tensors, more often than all else
            return args[0].device
        return self.called(func, args, kwargs or {})

    @abstractmethod
    def called(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Result of the operation; operations that run in here are not handed over again."""
