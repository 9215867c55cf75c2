"""Tensors with shape, precision and device but without numbers: what computes with them takes no memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.utils import import_utils


@contextmanager
def imagining() -> Iterator[None]:
    """Inside the block, what is computed from imagined tensors is imagined.

    What is computed from real ones alone, such as the masks and positions of a real batch, is real, so that decisions
    that depend on it are those of a run. A number that is read from an imagined tensor is 1.
    """
    told = import_utils.is_fake_tensor
    # transformers takes a tensor without numbers for a sign that a graph is traced, and computes otherwise then.
    import_utils.is_fake_tensor = lambda x: False
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), _Apart():  # type: ignore[no-untyped-call]
            yield
    finally:
        import_utils.is_fake_tensor = told


@contextmanager
def unimagined() -> Iterator[None]:
    """Inside the block, in `imagining`, everything is as outside of it."""
    with unset_fake_temporarily():
        yield


def imagine(model: nn.Module, device: torch.device) -> None:
    """Replace every tensor of a model on the meta device by an imagined one; what is shared stays shared."""
    known: dict[int, Tensor] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                like = known.get(id(parameter))
                if like is None:
                    like = nn.Parameter(_like(parameter, device), requires_grad=parameter.requires_grad)
                    known[id(parameter)] = like
                module._parameters[name] = like  # type: ignore[assignment]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = known.setdefault(id(buffer), _like(buffer, device))
        for beside in vars(module).values():  # the numbers of PEFT's virtual tokens
            for key, tensor in beside.items() if isinstance(beside, dict) else ():
                if isinstance(tensor, Tensor) and tensor.is_meta:
                    beside[key] = _like(tensor, device)


def _like(tensor: Tensor, device: torch.device) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


class _Apart(TorchDispatchMode):
    """Keeps what is real apart from what is imagined."""

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:
            return func(*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        imagined = [tensor for tensor in tensors if isinstance(tensor, FakeTensor)]
        if func in _READ and imagined:
            return True if func is not _SCALAR else _ONE.get(imagined[0].dtype, 1.0)
        if imagined and (instead := INSTEAD.get(str(func))) is not None:
            return instead(*args, **kwargs)
        if tensors and not imagined:
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        return func(*args, **kwargs)


def _grouped(*args: Any, **kwargs: Any) -> Any:
    """A product of groups, which torch imagines in bfloat16 alone."""
    halves = [each.bfloat16() if isinstance(each, Tensor) and each.is_floating_point() else each for each in args]
    return torch.ops.aten._grouped_mm.default(*halves, **kwargs).to(args[0].dtype)


INSTEAD: dict[str, Callable[..., Any]] = {"aten._grouped_mm.default": _grouped}
"""What is computed instead of operations that cannot be imagined as they are, by their names."""
_SCALAR = torch.ops.aten._local_scalar_dense.default
_READ = (_SCALAR, torch.ops.aten.equal.default, torch.ops.aten.allclose.default)
"""What reads numbers."""
_ONE: dict[torch.dtype, bool | int] = {torch.bool: True, torch.int64: 1, torch.int32: 1, torch.uint8: 1}
