"""Replaced forward passes of modules, and noise in the forward pass of training.

The noise is a function of seed, step, row and place alone (see `adapters.row_dropout`): it is the same whichever rows
share a micro-batch, on every device, in a recomputed forward pass, and after a resume.

Legend: B rows, T padded tokens of a row, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from workbench.adapters.row_dropout import row_hash, row_keys, row_lengths
from workbench.config.sections.regularise_config import RegulariseConfig
from workbench.errors import ConfigError

_OWN: WeakKeyDictionary[nn.Module, Callable[..., Any] | None] = WeakKeyDictionary()
"""The original forward pass of each block that has another one now; None: that of its class."""
HIDDEN = "hidden_states"  # name of a block's first argument
_EMBEDDINGS, _BLOCKS = 1, 2  # places in the hash: the embeddings, and the first block
_INSTALLED: WeakKeyDictionary[PreTrainedModel, list[RemovableHandle]] = WeakKeyDictionary()


def hidden_of(arguments: Sequence[Any], named: Mapping[str, Any]) -> Tensor:
    """The hidden states among the arguments of a block."""
    hidden_states: Tensor = arguments[0] if arguments else named[HIDDEN]
    return hidden_states


def reroute(block: nn.Module, forward: Callable[..., Any]) -> None:
    """Replace the forward pass of a module, inside of its hooks, until `restore`."""
    restore(block)
    _OWN[block] = block.__dict__.get("forward")
    block.forward = forward


def restore(block: nn.Module) -> None:
    """Restore a module's own forward pass, if it was replaced."""
    if block not in _OWN:
        return
    own = _OWN.pop(block)
    if own is None:
        del block.forward
    else:
        block.forward = own


def install(backbone: PreTrainedModel, blocks: Sequence[nn.Module], config: RegulariseConfig) -> None:
    """Install the configured noise in a backbone, in place of earlier noise; it acts only inside `drawing`. Raises
    ConfigError: the backbone has two stacks of blocks. `blocks`: in the order in which they compute."""
    for handle in _INSTALLED.pop(backbone, []):
        handle.remove()
    handles: list[RemovableHandle] = []
    if config.neftune is not None:
        if backbone.config.is_encoder_decoder:
            raise ConfigError(
                f"regularise.neftune counts the tokens of one text, and {type(backbone).__name__} reads two. "
                "Leave it out."
            )
        handles.append(backbone.get_input_embeddings().register_forward_hook(_Neftune(config.neftune)))
    if config.stochastic_depth:
        for number, block in enumerate(blocks):
            rate = config.stochastic_depth * (number + 1) / len(blocks)
            noise = _StochasticDepth(rate, place=_BLOCKS + number)
            handles.append(block.register_forward_hook(noise, with_kwargs=True))
    _INSTALLED[backbone] = handles


class _Neftune:
    """NEFTune (Jain et al. 2024, arXiv:2310.05914, algorithm 1): x + alpha / sqrt(L D) * uniform(-1, 1)."""

    def __init__(self, alpha: float) -> None:
        self.alpha = alpha

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...], embedded_BTD: Tensor) -> Tensor | None:
        keys_B, lengths_B = row_keys(), row_lengths()
        if keys_B is None or lengths_B is None:
            return None
        assert len(embedded_BTD) == len(keys_B), "rows are not laid out one by one"
        _, tokens, width = embedded_BTD.shape
        noise_BTD = row_hash(keys_B, _EMBEDDINGS, tokens=tokens, units=width).to(torch.float32) * 2**-31
        reach_B11 = self.alpha / (lengths_B * width).float().sqrt()[:, None, None]
        return embedded_BTD + (noise_BTD * reach_B11).to(embedded_BTD.dtype)


class _StochasticDepth:
    """Stochastic depth by rows (Huang et al. 2016, arXiv:1603.09382), scaled in training instead of in evaluation."""

    def __init__(self, rate: float, *, place: int) -> None:
        self.rate, self.place = rate, place

    def __call__(self, block: nn.Module, inputs: tuple[Any, ...], more: Mapping[str, Any], output: Any) -> Any:
        keys_B = row_keys()
        if keys_B is None:
            return None
        before = inputs[0] if inputs else more["hidden_states"]
        after = output[0] if isinstance(output, tuple) else output
        if before.shape != after.shape:  # a block that changes the resolution cannot be skipped
            return None
        assert len(after) == len(keys_B), "rows are not laid out one by one"
        drawn_B = row_hash(keys_B, self.place, tokens=1, units=1).flatten()
        kept_B = (drawn_B >= int(self.rate * 2**32) - 2**31).to(after.dtype) / (1 - self.rate)
        mixed = before + (after - before) * kept_B.view(-1, *[1] * (after.ndim - 1))
        return (mixed, *output[1:]) if isinstance(output, tuple) else mixed
