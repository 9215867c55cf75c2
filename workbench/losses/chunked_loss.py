"""Loss over the vocabulary of supervised positions, in chunks: the logits of a whole batch never exist at once.

Legend: D hidden, N supervised positions, n of them, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

_FEW_PARTS = ContextVar("few", default=False)
Part = TypeVar("Part")
CHUNK_ELEMENTS = 2**24  # logits that exist at once on a CPU, and at least as many elsewhere; 64 MiB in float32
MEMORY_SHARE = 1 / 256  # share of an accelerator's memory that the float32 logits of a chunk take
PART = 4096  # rows of a head's gradient that are computed at a time where their sum has another precision
_PLANNED: ContextVar[tuple[int, bool] | None] = ContextVar("planned", default=None)
Project = Callable[[Tensor], Tensor]  # hidden states (n, D) to logits (n, V)
Follows = npt.NDArray[np.bool_] | None  # (N,)
Criterion = Callable[..., Tensor]
"""Logits (n, V) and the targets of these positions, tensors (n, ...), to their summed loss."""


def wanted_parts(parts: Sequence[Part]) -> Sequence[Part]:
    """The parts to compute: all of them; inside `few`, the first two and the last."""
    return [*parts[:2], *parts[2:][-1:]] if _FEW_PARTS.get() else parts


@contextmanager
def few_parts() -> Iterator[None]:
    """Inside, a pass computes the first two parts and the last: a plan needs no more, as the others are alike."""
    token = _FEW_PARTS.set(True)
    try:
        yield
    finally:
        _FEW_PARTS.reset(token)


@runtime_checkable
class ClosedForm(Protocol):
    """A criterion that knows its gradient, and so needs no pass of autograd over the logits."""

    def __call__(self, logits_nV: Tensor, /, *targets: Tensor) -> Tensor:
        """The summed loss."""

    def with_gradient(self, logits_nV: Tensor, /, *targets: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """The summed loss times `scale`, and its gradient (n, V), in the precision of the logits."""


def chunked(
    hidden_ND: Tensor,
    targets: Sequence[Tensor],
    criterion: Criterion,
    project: Project,
    *,
    vocabulary: int,
    weights: list[Tensor],
    scale: float,
    follows_N: Follows = None,
) -> Tensor:
    """`criterion(project(hidden_ND), *targets) * scale`, computed chunk by chunk.

    Gradients are computed in the forward pass, so that the logits of a chunk are projected once and never stored.

    Args:
        hidden_ND: Hidden states in front of the output head.
        targets: Tensors (N, ...), such as labels or a teacher's logits. They get no gradient.
        criterion: Where it is a `ClosedForm`, its own gradient is taken.
        project: The output head. Uses no trainable tensor besides `weights`.
        vocabulary: V, or the sum of all V if `criterion` computes further logits; decides how large a chunk is.
        weights: The head's trainable tensors; none where it is frozen.
        scale: 1 / supervised tokens of the global batch.
        follows_N: See `chunks`.

    Returns:
        Scalar, float32 or wider.
    """
    if any(hasattr(weight, "ds_id") for weight in weights):
        # DeepSpeed ZeRO 3 gathers them while the head runs and while its gradient is computed, and not here.
        return criterion(project(hidden_ND), *targets) * scale
    cut = (vocabulary, follows_N)
    loss: Tensor = _Chunked.apply(hidden_ND, tuple(targets), criterion, project, cut, scale, *weights)  # type: ignore[no-untyped-call]
    return loss


def chunks(vocabulary: int, *tensors: Tensor, follows_N: Follows = None) -> list[tuple[Tensor, ...]]:
    """Tensors (N, ...) cut into chunks of positions, whose logits over `vocabulary` stay small.

    Args:
        follows_N: On the host, which positions stay in one chunk with the one before them; None: each stands alone.
    """
    rows = chunk_positions(vocabulary, tensors[0].device)
    if follows_N is None:
        return list(zip(*(tensor.split(rows) for tensor in tensors), strict=True))
    free, sizes, start = np.append(np.flatnonzero(~follows_N), len(follows_N)), list[int](), 0
    while start < len(follows_N):
        ahead = free[free > start]
        stop = int(ahead[max(0, int(np.searchsorted(ahead, start + rows, side="right")) - 1)])
        sizes.append(stop - start)
        start = stop
    return list(zip(*(tensor.split(sizes) for tensor in tensors), strict=True))


def chunk_positions(vocabulary: int, device: torch.device) -> int:
    """Positions whose logits exist at once."""
    return max(1, _chunk_elements(device) // vocabulary)


def _chunk_elements(device: torch.device) -> int:
    """Logits that exist at once; by the whole memory, as what is free changes and the last bits of a sum with it."""
    memory = planned_memory()
    if memory is None and (device.type != "cuda" or not torch.cuda.is_available()):
        return CHUNK_ELEMENTS
    memory = memory or torch.cuda.get_device_properties(device).total_memory
    return max(CHUNK_ELEMENTS, int(MEMORY_SHARE * memory) // 4)


@contextmanager
def planned_for(memory: int | None, *, bfloat16: bool = True) -> Iterator[None]:
    """Inside, chunks are those of an accelerator of so many bytes, which is elsewhere; None: of what is here.

    Args:
        bfloat16: Whether it has units for products in bfloat16.
    """
    token = _PLANNED.set(None if memory is None else (memory, bfloat16))
    try:
        yield
    finally:
        _PLANNED.reset(token)


def planned_memory() -> int | None:
    """Bytes of the accelerator that a plan is for, elsewhere; None: what is here computes."""
    found = _PLANNED.get()
    return None if found is None else found[0]


def planned_bfloat16() -> bool | None:
    """Whether the accelerator that a plan is for has units for products in bfloat16; None: what is here computes."""
    found = _PLANNED.get()
    return None if found is None else found[1]


def on_cpu(device: torch.device) -> bool:
    """Whether a CPU computes, and not an accelerator that a plan is for."""
    return device.type == "cpu" and _PLANNED.get() is None


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        targets: tuple[Tensor, ...],
        criterion: Criterion,
        project: Project,
        cut: tuple[int, Follows],
        scale: float,
        *weights: Tensor,
    ) -> Tensor:
        total = torch.zeros((), dtype=wide(hidden_ND.dtype), device=hidden_ND.device)
        hidden_grad = torch.empty_like(hidden_ND)
        weight_grads = [torch.zeros_like(weight, dtype=wide(weight.dtype)) for weight in weights]
        start = 0
        for hidden, *parts in wanted_parts(chunks(cut[0], hidden_ND, *targets, follows_N=cut[1])):
            with torch.enable_grad(), _GradientsInPlace(weights, weight_grads):
                hidden = hidden.detach().requires_grad_()
                output, gradient = project(hidden), None
                if isinstance(criterion, ClosedForm):
                    loss, gradient = criterion.with_gradient(output.detach(), *parts, scale=scale)
                else:
                    loss = output = criterion(output, *parts) * scale
                # Weights of linear layers have their gradients already, and are unused in the graph.
                grads = torch.autograd.grad(output, [hidden, *weights], gradient, allow_unused=True)
                del output, gradient  # before the next chunk makes its own
            hidden_grad[start : start + len(hidden)] = grads[0]
            for sum_, grad in zip(weight_grads, grads[1:], strict=True):
                if grad is not None:
                    sum_ += grad
            total += loss.detach()
            start += len(hidden)
        ctx.save_for_backward(hidden_grad)
        # Not saved tensors, which would stay until `backward` has returned their products.
        ctx.weight_grads = [grad.to(weight.dtype) for grad, weight in zip(weight_grads, weights, strict=True)]
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (hidden_grad,) = ctx.saved_tensors
        weight_grads = ctx.__dict__.pop("weight_grads")  # a second backward pass fails
        return hidden_grad * grad, None, None, None, None, None, *(each.mul_(grad) for each in weight_grads)


class _GradientsInPlace(TorchFunctionMode):
    """Inside, linear layers add the gradients of `weights` to `sums` instead of making a new array for each.

    A head of 128,000 tokens and width 4,096 has 1 GB of them in bfloat16.
    """

    def __init__(self, weights: Sequence[Tensor], sums: Sequence[Tensor]) -> None:
        super().__init__()
        self._sums = {id(weight): sum_ for weight, sum_ in zip(weights, sums, strict=True)}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.linear:
            input_, weight, bias = _linear_arguments(*args, **(kwargs or {}))
            if id(weight) in self._sums:
                return _Linear.apply(input_, weight.detach(), bias, self._sums[id(weight)])  # type: ignore[no-untyped-call]
        return func(*args, **(kwargs or {}))


def _linear_arguments(
    input: Tensor, weight: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    return input, weight, bias


class _Linear(torch.autograd.Function):
    """`F.linear` of inputs (n, I) and a weight (O, I), whose gradient is added to `sum_OI`."""

    @staticmethod
    def forward(ctx: Any, input_nI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, sum_OI: Tensor) -> Tensor:
        ctx.save_for_backward(input_nI, weight_OI)
        ctx.sum_OI = sum_OI
        return F.linear(input_nI, weight_OI, bias_O)

    @staticmethod
    def backward(ctx: Any, grad_nO: Tensor) -> tuple[Tensor | None, ...]:
        input_nI, weight_OI = ctx.saved_tensors
        if ctx.sum_OI.dtype == grad_nO.dtype:
            ctx.sum_OI.addmm_(grad_nO.T, input_nI)
        else:  # products have the precision of their factors, so that a part of the sum needs an array of its own
            for grad_no, sum_oI in zip(grad_nO.split(PART, 1), ctx.sum_OI.split(PART), strict=True):
                sum_oI += grad_no.T @ input_nI
        bias_grad_O = grad_nO.sum(0) if ctx.needs_input_grad[2] else None
        return grad_nO @ weight_OI, None, bias_grad_O, None


def wide(dtype: torch.dtype) -> torch.dtype:
    """Precision of sums: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)
