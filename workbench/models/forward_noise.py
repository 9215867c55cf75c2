"""Noise in the forward pass of training, a function of seed, step, row and place alone: see `adapters.row_dropout`.

So it is the same whichever rows share a micro-batch, on every device, in a recomputed forward pass, and after a resume.

Legend: B rows, T padded tokens of a row, D hidden.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from workbench.adapters.row_dropout import row_hash, row_keys, row_lengths
from workbench.config.sections.regularise_config import RegulariseConfig
from workbench.errors import ConfigError

_EMBEDDINGS, _BLOCKS = 1, 2
"""Places of a hash: the embeddings, and the first of the blocks."""
_INSTALLED: WeakKeyDictionary[PreTrainedModel, list[RemovableHandle]] = WeakKeyDictionary()


def install(backbone: PreTrainedModel, blocks: Sequence[nn.Module], config: RegulariseConfig) -> None:
    """Give a backbone the configured noise, in place of what it had; it acts inside `drawing`, in training steps alone.

    Args:
        blocks: In the order in which they compute.

    Raises:
        ConfigError: The backbone has no embeddings of words, or two stacks of blocks.
    """
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
        if before.shape != after.shape:  # a block that changes the resolution cannot be passed by
            return None
        assert len(after) == len(keys_B), "rows are not laid out one by one"
        drawn_B = row_hash(keys_B, self.place, tokens=1, units=1).flatten()
        kept_B = (drawn_B >= int(self.rate * 2**32) - 2**31).to(after.dtype) / (1 - self.rate)
        mixed = before + (after - before) * kept_B.view(-1, *[1] * (after.ndim - 1))
        return (mixed, *output[1:]) if isinstance(output, tuple) else mixed
