"""Base of modes that see every operation on tensors, and cost little."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode, _pop_mode, _push_mode
from typing_extensions import Self

_DEVICE = torch.ops.prim.device.default


class DispatchMode(TorchDispatchMode, ABC):
    """Inside of it, each operation is handed to `called`.

    One that is entered right inside another takes its place, and asks it for results: torch would take as long to go
    from one to the next as either takes.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._outer: DispatchMode | None = None

    def __enter__(self) -> Self:
        outer = _get_current_dispatch_mode()
        if isinstance(outer, DispatchMode):
            self._outer = outer
            _pop_mode()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        if self._outer is not None:
            _push_mode(self._outer)
            self._outer = None

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

    def computed(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Result of the operation, with all that is known of it around this mode."""
        return func(*args, **kwargs) if self._outer is None else self._outer.called(func, args, kwargs)
