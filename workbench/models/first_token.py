"""The last block of an encoder, computed for the first token alone where a classification head reads nothing else.

Attention has to see all tokens. What comes after it in the last block, about two thirds of the block's products, looks
at each token by itself, so that all but the first are computed for nobody.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from workbench.adapters import anatomy

_narrowed: WeakKeyDictionary[PreTrainedModel, RemovableHandle | None] = WeakKeyDictionary()
"""Backbones with what takes the narrowing back; None where every token is needed."""


def narrow(model: nn.Module, backbone: PreTrainedModel, inputs: Mapping[str, Tensor]) -> None:
    """Let what follows the attention of the last block see the first token only, where that changes no output.

    Args:
        model: The backbone with what is around it, in evaluation mode.
        inputs: Two rows of different lengths to try it on.
    """
    stacks = anatomy.blocks(backbone)
    if backbone in _narrowed or len(stacks) != 1:
        return
    block = backbone.get_submodule(stacks[0][-1])
    attention = next((child for name, child in block.named_children() if "attention" in name), None)
    if attention is None:
        return
    with torch.no_grad():
        wanted = model(**inputs).logits
        calls, shapes = [0], list[tuple[int, ...]]()
        handles = [
            attention.register_forward_hook(lambda *_: calls.append(0)),
            block.register_forward_hook(lambda *given: shapes.append(_hidden(given[-1]).shape)),
        ]
        handle = attention.register_forward_hook(_first)
        found = model(**inputs).logits
    for each in handles:
        each.remove()
    # Where the residual connection lies outside of the attention module, the block still gives every token.
    alone = len(calls) == 2 and [shape[1] for shape in shapes] == [1]
    rounding = max(1e-3, 8 * torch.finfo(wanted.dtype).eps)
    if alone and torch.allclose(found, wanted, rtol=rounding, atol=rounding * float(wanted.abs().max())):
        _narrowed[backbone] = handle
    else:
        handle.remove()


def widen(backbone: PreTrainedModel) -> None:
    """From now on the last block gives every token: somebody reads them."""
    handle = _narrowed.get(backbone)
    if handle is not None:
        handle.remove()
    _narrowed[backbone] = None


def _first(_: nn.Module, __: object, output: Any) -> Any:
    """The first token of hidden states (B, L, D), by themselves or leading a tuple."""
    return output[:, :1] if isinstance(output, Tensor) else (output[0][:, :1], *output[1:])


def _hidden(output: Any) -> Tensor:
    hidden: Tensor = output if isinstance(output, Tensor) else output[0]
    return hidden
