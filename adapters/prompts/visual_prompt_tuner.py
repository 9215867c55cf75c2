"""The PEFT tuner of visual prompts: trainable tokens beside the patches (Jia et al. 2022, arXiv:2203.12119).

They are appended to the input of the first block and removed from the output of the last one, so that every head pools
over the patches alone. Attention does not depend on the place of tokens without positions.

Legend: B rows, N tokens of a row, P virtual tokens, D hidden.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from peft import PeftConfig
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from transformers import PreTrainedModel

from workbench.adapters import anatomy
from workbench.adapters.peft_tuners import TunerConfig, UnmergeableTuner, register_tuner

CHILD = "visual_prompt"
"""The name of the layer inside its block."""


@dataclass
class VisualPromptConfig(TunerConfig):
    """Number and width of the virtual tokens, and the blocks that they pass."""

    virtual_tokens: int = 20
    width: int = 0
    """Size of a token, which is that of the hidden states."""
    patch: int = 16
    """Side of a patch in pixels; the range of the initial values depends on it."""
    deep: bool = False
    """Whether every block reads its own tokens, in place of the previous block's outputs for its tokens."""
    blocks: list[str] = field(default_factory=list)
    """Paths of all blocks, in order."""

    @property
    def target_modules(self) -> tuple[str, ...]:
        """The blocks where tokens enter or leave. A tuple: PEFT shortens the names in a long list or set."""
        return tuple(self.blocks if self.deep else dict.fromkeys((self.blocks[0], self.blocks[-1])))


class VisualPromptLayer(nn.Module, BaseTunerLayer):
    """The virtual tokens of all adapters at one block, whose child this is.

    Args:
        block: Reads and returns hidden states (B, N, D).
        first: Whether tokens are appended to the block's input; otherwise they replace those that are there.
        last: Whether tokens are removed from the block's output.
    """

    adapter_layer_names = ("visual_prompt_tokens",)

    def __init__(self, block: nn.Module, *, first: bool, last: bool) -> None:
        super().__init__()
        self.visual_prompt_tokens = nn.ParameterDict()
        self.counts: dict[str, int] = {}
        self.merged_adapters = []
        self.first, self.last = first, last
        self.handles = [
            block.register_forward_pre_hook(self._enter, with_kwargs=True),
            block.register_forward_hook(self._leave),
        ]

    def add(self, name: str, tokens_PD: Tensor | None, *, count: int) -> None:
        """Add an adapter; without tokens where those of an earlier block pass through."""
        self.counts[name] = count
        if tokens_PD is not None:
            self.visual_prompt_tokens[name] = nn.Parameter(tokens_PD)

    def set_adapter(self, adapter_names: str | list[str], inference_mode: bool = False) -> None:
        """Make one adapter active; with several it would be unclear which tokens replace which."""
        names = [adapter_names] if isinstance(adapter_names, str) else list(adapter_names)
        if len([name for name in names if name in self.counts]) > 1:
            raise ValueError(f"{', '.join(names)} are visual prompts. Activate one of them at a time.")
        super().set_adapter(names, inference_mode=inference_mode)

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self.handles:
            handle.remove()

    def _active(self) -> str | None:
        names = [] if self.disable_adapters else [name for name in self.active_adapters if name in self.counts]
        return names[0] if names else None

    def _enter(
        self, _: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        name = self._active()
        if name is None or name not in self.visual_prompt_tokens:
            return None
        hidden_BND: Tensor = arguments[0] if arguments else named["hidden_states"]
        tokens_PD = self.visual_prompt_tokens[name].to(hidden_BND.dtype)
        kept_BND = hidden_BND if self.first else hidden_BND[:, : -len(tokens_PD)]
        joined_BND = torch.cat((kept_BND, tokens_PD.expand(len(hidden_BND), -1, -1)), dim=1)
        return ((joined_BND, *arguments[1:]), named) if arguments else ((), {**named, "hidden_states": joined_BND})

    def _leave(self, _: nn.Module, __: tuple[Any, ...], output: Any) -> Any:
        name = self._active()
        if name is None or not self.last:
            return output
        if isinstance(output, tuple):
            return (output[0][:, : -self.counts[name]], *output[1:])
        return output[:, : -self.counts[name]]


class VisualPromptModel(UnmergeableTuner):
    """Tuner of visual prompts."""

    prefix = "visual_prompt_"
    tuner_layer_cls = VisualPromptLayer
    why = "a prompt cannot be merged: virtual tokens are no update of weights. Keep them apart."

    def _prepare_model(self, peft_config: PeftConfig, model: nn.Module) -> None:
        assert isinstance(peft_config, VisualPromptConfig)
        assert isinstance(model, PreTrainedModel)
        block_paths = (anatomy.blocks(model) or [[]])[0]
        if block_paths != peft_config.blocks or token_width(model) != peft_config.width:
            raise ValueError(
                f"Its virtual tokens were made for {len(peft_config.blocks)} blocks {peft_config.width} wide, which "
                f"{type(model).__name__} does not have."
            )

    def put(self, config: PeftConfig, name: str, target: nn.Module, path: str) -> None:
        assert isinstance(config, VisualPromptConfig)
        blocks = config.blocks
        first, last = path == blocks[0], path == blocks[-1]
        layer = target._modules.get(CHILD)
        if not isinstance(layer, VisualPromptLayer):
            layer = VisualPromptLayer(target, first=first, last=last)
            target.add_module(CHILD, layer)
        tokens = initial(config) if first or config.deep else None
        held = next(target.parameters()).device
        if tokens is not None and tokens.device.type != "meta":
            tokens = tokens.to(held)
        layer.add(name, tokens, count=config.virtual_tokens)
        layer.set_adapter(self.active_adapters, inference_mode=config.inference_mode)


def initial(config: VisualPromptConfig) -> Tensor:
    """Tokens (P, D) as in the authors' code: uniform, with the range of Xavier's start of the patch projection."""
    bound = math.sqrt(6 / (3 * config.patch**2 + config.width))
    return torch.empty(config.virtual_tokens, config.width).uniform_(-bound, bound)


def virtual_tokens(model: nn.Module) -> int:
    """Number of virtual tokens between the first and the last block; 0 where none are active."""
    layers = [module for module in model.modules() if isinstance(module, VisualPromptLayer)]
    return max((layer.counts[name] for layer in layers if (name := layer._active()) is not None), default=0)


def token_width(model: PreTrainedModel) -> int | None:
    """Width of the hidden states between the blocks, if these accept one more token; None where they do not.

    Calls the backbone once; works on the meta device, too.
    """
    stacks = anatomy.blocks(model)
    if len(stacks) != 1 or len({block.rpartition(".")[0] for block in stacks[0]}) != 1:
        return None  # stages, whose blocks read different resolutions
    with _one_more(model.get_submodule(stacks[0][0]), model.get_submodule(stacks[0][-1])) as widths:
        return widths[0] if anatomy.reads_size(model) and widths else None


@contextmanager
def _one_more(first: nn.Module, last: nn.Module) -> Iterator[list[int]]:
    """Append a token of zeros to the input of the blocks inside the block; its width is added to the list."""
    widths: list[int] = []

    def enter(_: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        hidden_BND: Tensor = arguments[0] if arguments else named["hidden_states"]
        if hidden_BND.ndim != 3:
            raise ValueError("no tokens")
        widths.append(hidden_BND.shape[-1])
        joined_BND = torch.cat((hidden_BND, torch.zeros_like(hidden_BND[:, :1])), dim=1)
        return ((joined_BND, *arguments[1:]), named) if arguments else ((), {**named, "hidden_states": joined_BND})

    def leave(_: nn.Module, __: tuple[Any, ...], output: Any) -> Any:
        return (output[0][:, :-1], *output[1:]) if isinstance(output, tuple) else output[:, :-1]

    handles = [first.register_forward_pre_hook(enter, with_kwargs=True), last.register_forward_hook(leave)]
    try:
        yield widths
    finally:
        for handle in handles:
            handle.remove()


register_tuner("visual_prompt", VisualPromptConfig, VisualPromptModel)
