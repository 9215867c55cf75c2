"""The MLP of a block in tiles of tokens: what it computes between its inputs and its outputs exists for one tile only.

Each tile is computed again in the backward pass (ALST, Rajbhandari et al. 2025, section 3.1; Liger's tiled MLP). Where
the whole block is computed again, this costs no pass more: the block's recomputation ends in front of the MLP, as its
inputs are the last that is saved, so that the MLP is computed twice in all, as it is without tiles.

The gradients of trainable weights, such as those of LoRA, are sums over tiles, in float32 or wider. All else is what it
is without tiles, dropout by rows too.

Legend: B rows, L tokens of each, T of a tile, D hidden.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from workbench.adapters import anatomy, row_dropout
from workbench.adapters.banks.bank_layers import Routed
from workbench.adapters.row_dropout import RowDropout
from workbench.losses import few_parts
from workbench.losses.chunked import wide
from workbench.models.recomputation import is_whole

LEAST = 1024
"""Tokens of a tile that nobody asked for, at least; else as many as the hidden size: what a tile computes is then as
large as the MLP's weights."""

Mlp = Callable[[Tensor], Tensor]
"""Hidden states (B, T, D) to outputs (B, T, D)."""


@dataclass(frozen=True)
class Tiling:
    """When an MLP computes tiles, and of how many tokens."""

    tokens: int
    block: tuple[nn.Module, ...]
    """Empty: always. The block of the MLP: where the block is computed again, or nobody computes gradients."""

    @property
    def is_on(self) -> bool:
        """Whether it does now."""
        return all(_is_recomputed(each) for each in self.block) or not torch.is_grad_enabled()


class Tiled(nn.Module):
    """Beside the class of an MLP: its forward pass in tiles of each row."""

    tiling: Tiling

    def forward(self, hidden_BLD: Tensor) -> Tensor:
        whole: Mlp = super().forward
        tokens = self.tiling.tokens
        if hidden_BLD.ndim != 3 or hidden_BLD.shape[1] <= tokens or not self.tiling.is_on:
            return whole(hidden_BLD)
        trained = [each for each in self.parameters() if each.requires_grad]
        if not (torch.is_grad_enabled() and (hidden_BLD.requires_grad or trained)):
            return _computed(whole, tokens, hidden_BLD)
        promise_BLD = _Inputs.apply(whole, tokens, hidden_BLD, *trained)  # type: ignore[no-untyped-call]
        output_BLD: Tensor = _Outputs.apply(promise_BLD, whole, tokens, hidden_BLD.detach())  # type: ignore[no-untyped-call]
        return output_BLD


def tile(model: nn.Module, tokens: int | Literal["auto"] | None) -> None:
    """Let the MLPs of a model's blocks compute tiles from now on; those that cannot stay as they are.

    Args:
        tokens: Of each row in a tile; None: whole rows. `auto`: a number by the hidden size, where a block is computed
            again in the backward pass or there is none.
    """
    if tokens is None:
        return
    for block in anatomy.decoder_layers(model):
        mlp: Any = getattr(block, "mlp", None)
        if refusal(block) is None and not isinstance(mlp, Tiled):
            many = max(LEAST, _width(mlp)) if tokens == "auto" else tokens
            mlp.tiling = Tiling(many, (block,) if tokens == "auto" else ())
            mlp.__class__ = type(type(mlp).__name__, (Tiled, type(mlp)), {"__module__": type(mlp).__module__})


def refusal(block: nn.Module) -> str | None:
    """Why the MLP of a block cannot compute tiles; None where it can."""
    mlp = getattr(block, "mlp", None)
    if not isinstance(mlp, nn.Module) or not _takes_one(mlp):
        return f"{type(block).__name__} has no MLP that takes hidden states alone"
    for module in mlp.modules():
        if isinstance(module, Routed):
            return "the layers of a bank count the tokens of each member"
        if isinstance(module, nn.Dropout) and module.p and not isinstance(module, RowDropout):
            return f"{type(mlp).__name__} drops values by numbers that depend on what else is computed"
    for module in _own(mlp):
        if any(True for _ in module.parameters(recurse=False)) and not (anatomy.is_linear(module) or _is_norm(module)):
            return f"{type(mlp).__name__} has {type(module).__name__} beside its linear layers"
    return None


def _own(module: nn.Module) -> Iterator[nn.Module]:
    """The modules of a backbone, without those of adapters over them."""
    if isinstance(module, BaseTunerLayer):  # bottlenecks and copies stand inside what they change, and do not hold it
        base = dict(module.named_children()).get("base_layer")
        yield from () if base is None else _own(base)
        return
    yield module
    for child in module.children():
        yield from _own(child)


def _takes_one(mlp: nn.Module) -> bool:
    parameters = list(inspect.signature(type(mlp).forward).parameters.values())
    return len(parameters) == 2 and parameters[1].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD


def _is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower()


def _width(mlp: nn.Module) -> int:
    """Hidden size."""
    return next(anatomy.features(each)[0] for each in mlp.modules() if anatomy.is_linear(each))


def _is_recomputed(block: nn.Module) -> bool:
    return block.training and is_whole(block)


def _tiles(tokens: int, length: int) -> Iterator[tuple[int, int]]:
    """First token of each tile, and the one after its last."""
    return ((start, min(start + tokens, length)) for start in few_parts.wanted(range(0, length, tokens)))


def _computed(whole: Mlp, tokens: int, hidden_BLD: Tensor) -> Tensor:
    """The outputs (B, L, D), without a graph."""
    output_BLD = None
    with torch.no_grad():
        for start, stop in _tiles(tokens, hidden_BLD.shape[1]):
            with row_dropout.among(start, stop):
                part_BTD = whole(hidden_BLD[:, start:stop].contiguous())
            if output_BLD is None:
                output_BLD = part_BTD.new_empty(*hidden_BLD.shape[:2], part_BTD.shape[-1])
            output_BLD[:, start:stop] = part_BTD
    assert output_BLD is not None, "a row has tokens"
    return output_BLD


class _Inputs(torch.autograd.Function):
    """Saves the inputs of an MLP, and gives a promise of its outputs: their shape, without values.

    It comes before anything is computed, so that a recomputation that looks for what is saved stops here.
    """

    @staticmethod
    def forward(ctx: Any, whole: Mlp, tokens: int, hidden_BLD: Tensor, *trained: Tensor) -> Tensor:
        ctx.save_for_backward(hidden_BLD)
        ctx.whole, ctx.tokens, ctx.trained = whole, tokens, trained
        return hidden_BLD.new_empty(()).expand(hidden_BLD.shape)

    @staticmethod
    def backward(ctx: Any, grad_BLD: Tensor) -> tuple[Tensor | None, ...]:
        (hidden_BLD,), trained = ctx.saved_tensors, ctx.trained
        hidden_grad = torch.empty_like(hidden_BLD) if ctx.needs_input_grad[2] else None
        sums = [torch.zeros_like(each, dtype=wide(each.dtype)) for each in trained]
        for start, stop in _tiles(ctx.tokens, hidden_BLD.shape[1]):
            part_BTD = hidden_BLD[:, start:stop].detach().contiguous().requires_grad_(hidden_grad is not None)
            with torch.enable_grad(), row_dropout.among(start, stop):
                output_BTD = ctx.whole(part_BTD)
            wanted = [*([part_BTD] if hidden_grad is not None else []), *trained]
            grads = list(torch.autograd.grad(output_BTD, wanted, grad_BLD[:, start:stop], allow_unused=True))
            if hidden_grad is not None:
                hidden_grad[:, start:stop] = grads.pop(0)
            for sum_, grad in zip(sums, grads, strict=True):
                if grad is not None:
                    sum_ += grad
            del output_BTD, grads
        return None, None, hidden_grad, *(sum_.to(each.dtype) for sum_, each in zip(sums, trained, strict=True))


class _Outputs(torch.autograd.Function):
    """Keeps a promise: computes the outputs, whose gradient is that of the promise."""

    @staticmethod
    def forward(ctx: Any, promise_BLD: Tensor, whole: Mlp, tokens: int, hidden_BLD: Tensor) -> Tensor:
        return _computed(whole, tokens, hidden_BLD)

    @staticmethod
    def backward(ctx: Any, grad_BLD: Tensor) -> tuple[Tensor | None, ...]:
        return grad_BLD, None, None, None
