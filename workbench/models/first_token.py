"""The last block of an encoder, computed for the first token alone where a classification head reads nothing else.

Attention has to see all tokens. What comes after it in the last block, about two thirds of the block's products, looks
at each token by itself, so that all but the first are computed for nobody. In the same place the first tokens of packed
rows become rows of one token, so that the head finds them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from workbench.adapters import anatomy


class _FirstTokens:
    """Hook of the last block's attention: passes the first token of each row (B, 1, D) on, and no other.

    Of packed rows (1, T, D), `row_starts` says where each begins; from here on they are rows of one token.
    """

    def __init__(self) -> None:
        self.narrows_padded = True

    def __call__(self, module: nn.Module, inputs: object, settings: Mapping[str, Any], output: Any) -> Any:
        """The hidden states, by themselves or leading a tuple."""
        if not isinstance(output, Tensor):
            return (self(module, inputs, settings, output[0]), *output[1:])
        if (starts := settings.get("row_starts")) is not None:
            return output[0, starts[:-1]][:, None]
        return output[:, :1] if self.narrows_padded else output


_narrowed: WeakKeyDictionary[PreTrainedModel, _FirstTokens | None] = WeakKeyDictionary()
"""Backbones with what narrows them; None where every token was needed before that."""


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
        handle = attention.register_forward_hook(narrowing := _FirstTokens(), with_kwargs=True)
        narrowed_logits = model(**inputs).logits
    for each in handles:
        each.remove()
    # Where the residual connection lies outside of the attention module, the block still gives every token.
    alone = len(calls) == 2 and [shape[1] for shape in shapes] == [1]
    rounding = max(1e-3, 8 * torch.finfo(wanted.dtype).eps)
    if alone and torch.allclose(narrowed_logits, wanted, rtol=rounding, atol=rounding * float(wanted.abs().max())):
        _narrowed[backbone] = narrowing
    else:
        handle.remove()


def widen(backbone: PreTrainedModel) -> None:
    """From now on the last block gives every token of padded rows: somebody reads them."""
    narrowing = _narrowed.setdefault(backbone, None)
    if narrowing is not None:
        narrowing.narrows_padded = False


def reads_packed(backbone: PreTrainedModel) -> bool:
    """Whether a classification head finds the first token of each of packed rows."""
    return _narrowed.get(backbone) is not None


def _hidden(output: Any) -> Tensor:
    hidden: Tensor = output if isinstance(output, Tensor) else output[0]
    return hidden
