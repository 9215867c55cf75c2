"""Which kernels an average step of a run calls, in their order: found out on tensors without numbers."""

from __future__ import annotations

import math
import os
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten
from torch.utils.flop_counter import flop_registry

import workbench.planning.operations  # noqa: F401  tells torch's table what kernels of CPUs take
from workbench.data.batching import Indices, global_batch, micro_batches, steps_per_epoch
from workbench.dispatching import Mode
from workbench.engine import Fit
from workbench.objectives.next_token import POSITIONS

STRATA = 4
"""Kinds of micro-batches, from small to large, of each of which one is looked at."""
BLOCKS = 48
"""Blocks of a model to look at in all: the deeper it is, the fewer kinds, as each takes time and is more like the rest.
"""
STEPS = 500
"""Steps of which the micro-batches are known; those after them are alike."""


class Like(NamedTuple):
    """What a tensor is, without its numbers."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> Like:
        """What this one is."""
        return cls(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.device)

    @property
    def bytes(self) -> int:
        """Of its storage."""
        if 0 in self.shape:
            return 0
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True))
        return (last + 1) * self.dtype.itemsize


@dataclass(frozen=True)
class Kernel:
    """An operation, and all of its arguments that decide how long it takes."""

    operation: OpOverload[..., Any]
    leaves: tuple[Hashable, ...]
    """Its arguments: `Like` for a tensor, the type of a number with a fraction, anything else itself."""
    given: tuple[Any, ...] = field(compare=False)
    """The same once, with what they were: real numbers of indices, fractions."""
    form: TreeSpec = field(compare=False)
    flops: int = field(compare=False)
    written: int = field(compare=False)
    """Bytes of the results."""

    @cached_property
    def bytes(self) -> int:
        """Read and written; of a table at most as many are read as are written."""
        read = sum(leaf.bytes for leaf in self.leaves if isinstance(leaf, Like))
        return self.written + (min(read, self.written) if self.operation in _LOOKUPS else read)

    @property
    def is_view(self) -> bool:
        """Whether nothing is computed."""
        return bool(self.operation.is_view)

    def arguments(self, made: Callable[[Like, int], Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What to call the operation with.

        Args:
            made: Gives a tensor like this, the n-th (from 0) of its kind among the arguments.
        """
        seen: dict[Like, int] = {}
        leaves = []
        for leaf in self.given:
            if isinstance(leaf, Like):
                number = seen[leaf] = seen.get(leaf, -1) + 1
                leaf = made(leaf, number)
            leaves.append(leaf)
        arguments, named = tree_unflatten(leaves, self.form)
        return arguments, named


class Kernels(Mode):
    """Inside of it, every call of a kernel is noted."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Kernel] = []

    def called(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        result = func(*args, **kwargs)
        if func.namespace != "prim":
            leaves, form = tree_flatten((tuple(args), dict(kwargs)))
            formula = flop_registry.get(func.overloadpacket)
            self.calls.append(
                Kernel(
                    operation=func,
                    leaves=tuple(map(_key, leaves)),
                    given=tuple(map(_given, leaves)),
                    form=form,
                    flops=0 if formula is None else formula(*args, **kwargs, out_val=result),
                    written=sum(Like.of(leaf).bytes for leaf in tree_leaves(result) if isinstance(leaf, Tensor)),
                )
            )
        return result


@dataclass(frozen=True)
class Part:
    """A micro-batch that stands for others."""

    calls: Sequence[Kernel]
    share: float
    """How many like it a step has on average."""
    new: float
    """Share of them whose shapes did not come shortly before, so that a kernel may have to be made ready for them."""
    collate: Callable[[], object]
    """Makes its tensors of its rows."""


@dataclass(frozen=True)
class StepWork:
    """What an average step computes."""

    parts: Sequence[Part]
    update: Sequence[Kernel]
    """Calls of clipping and of the optimizer."""
    recomputes: bool
    """Whether activations are computed again in the backward pass."""


def record(fit: Fit) -> StepWork:
    """What an average step of `fit` computes, where tensors are imagined; `fit` is prepared and was rehearsed."""
    fit.model.train()  # it was evaluated last
    cut = _micro_batches(fit)
    steps, every = len(cut), list(chain.from_iterable(cut))
    weights = np.array([_weight(fit, rows) for rows in every])
    new = new_share(_tokens(fit, rows) for rows in every)
    moments = (0.0,) if fit.config.freeze.fixed else (0.0, 0.999)
    passes = 1 + (1 / fit.config.optimizer.sam_every if fit.config.optimizer.sam is not None else 0)
    parts = []
    for share in moments:
        fit.freezer.follow(step=0, share=share)
        for members in strata(weights, max(1, min(STRATA, BLOCKS // len(fit.freezer.blocks)))):
            chosen = members[np.abs(weights[members] - weights[members].mean()).argmin()]
            rows = every[chosen]
            with Kernels() as kernels:
                fit.backward(rows)
            parts.append(
                Part(
                    calls=kernels.calls,
                    share=float(passes * weights[members].sum() / weights[chosen] / steps / len(moments)),
                    new=new,
                    collate=lambda rows=rows: fit.train.batch(rows, epoch=0),  # type: ignore[misc]
                )
            )
    with Kernels() as update:
        fit.member.update(1.0, every[0])
        fit.masters.refresh()
    return StepWork(parts, update.calls, recomputes=fit.config.train.checkpointing is True)


def _micro_batches(fit: Fit) -> list[list[Indices]]:
    """Those of each step, from the first on."""
    train, size = fit.train, fit.config.batch.size
    per_epoch = steps_per_epoch(len(train), size)
    found = []
    for step in range(min(STEPS, fit.member.total)):
        draws = global_batch(step, rows=len(train), size=size, seed=fit.config.seed)
        rows = train.drawn(draws, epoch=step // per_epoch)
        found.append(list(micro_batches(rows, train.lengths, tokens=fit.tokens)))
    return found


def _tokens(fit: Fit, rows: Indices) -> int:
    """With padding."""
    return len(rows) * int(fit.train.lengths[rows].max())


def _weight(fit: Fit, rows: Indices) -> float:
    """Multiplications of a usual transformer, by its width: each layer's matrices hold 12 width^2 numbers."""
    longest, backbone = float(fit.train.lengths[rows].max()), fit.freezer.backbone
    layers = len(fit.freezer.blocks) * _tokens(fit, rows) * (12 * fit.width + 2 * longest)
    words: int = backbone.config.get_text_config().vocab_size if backbone.get_output_embeddings() is not None else 0
    return layers + words * POSITIONS * math.ceil(float(fit.train.supervised[rows].sum()) / POSITIONS)


def strata(weights: Any, count: int) -> list[Any]:
    """Numbers of micro-batches in groups of about the same total weight, from small to large."""
    order = np.argsort(weights, kind="stable")
    before = np.cumsum(weights[order]) - weights[order] / 2
    group = np.minimum(before / weights.sum() * count, count - 1).astype(int)
    return [order[group == number] for number in np.unique(group)]


def new_share(sizes: Any) -> float:
    """Share of micro-batches whose size is not among the last `REMEMBERED` sizes."""
    kept: OrderedDict[int, None] = OrderedDict()
    missed = count = 0
    for size in sizes:
        count += 1
        missed += size not in kept
        kept[size] = None
        kept.move_to_end(size)
        if len(kept) > REMEMBERED:
            kept.popitem(last=False)
    return missed / count


REMEMBERED = max(1, int(os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"]) // 25)
"""Sizes of micro-batches that oneDNN remembers its kernels for: some 25 products each (workbench/__init__.py)."""

_LOOKUPS = (
    torch.ops.aten.embedding.default,
    torch.ops.aten.index.Tensor,
    torch.ops.aten.index_select.default,
    torch.ops.aten.gather.default,
)


def _key(leaf: Any) -> Hashable:
    if isinstance(leaf, Tensor):
        return Like.of(leaf)
    return float if isinstance(leaf, float) else leaf


def _given(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    # Which rows of a table are read matters; other numbers do not.
    known = not isinstance(leaf, FakeTensor) and not leaf.is_floating_point()
    return leaf if known else Like.of(leaf)
