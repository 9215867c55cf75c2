"""The parts of a backbone that methods name: its repeated blocks, their linear layers, its fresh head."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from peft import PeftConfig
    from torch import Tensor, nn
    from transformers import PreTrainedModel


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks of a transformer, whatever is around it, as its family names them."""
    names = {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}
    return [module for module in model.modules() if type(module).__name__ in names]


def blocks(model: nn.Module) -> list[list[str]]:
    """Paths of the transformer blocks, one list for each stack; T5 has two, encoder and decoder.

    A stack is an outermost list of modules that hold linear layers: a block's own lists (experts) are inside it.
    """
    from torch import nn

    stacks: list[list[str]] = []
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList):
            continue
        inside = name.startswith(tuple(f"{block}." for stack in stacks for block in stack))
        if not inside and any(is_linear(part) for part in module.modules()):
            stacks.append([f"{name}.{number}" for number in range(len(module))])
    return stacks


def leave_out(config: PeftConfig, model: nn.Module, *, below: int) -> None:
    """Let a method of PEFT pass over the first `below` blocks of the only stack, where it can pass over modules.

    Where it cannot, what it puts there has to be frozen.
    """
    if below and "exclude_modules" in {field.name for field in dataclasses.fields(config)}:
        (stack,) = blocks(model)
        config.exclude_modules = rf"({'|'.join(map(re.escape, stack[:below]))})\..*"  # type: ignore[attr-defined]


def linear_modules(model: nn.Module) -> list[str]:
    """Paths of the linear layers inside the blocks, quantised ones too."""
    inside = tuple(f"{block}." for stack in blocks(model) for block in stack)
    return [name for name, module in model.named_modules() if name.startswith(inside) and is_linear(module)]


def fused_experts(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters inside the blocks that hold the matrices of all experts at once (E, ., .), by path."""
    inside = tuple(f"{block}." for stack in blocks(model) for block in stack)
    return {name: each for name, each in model.named_parameters() if name.startswith(inside) and each.ndim == 3}


def is_linear(module: nn.Module) -> bool:
    """Whether a module is a matrix product with its own weight; GPT-2's Conv1D is one."""
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    return isinstance(module, (nn.Linear, Conv1D))


def features(layer: Any) -> tuple[int, int]:
    """Inputs and outputs of a linear layer, quantised ones too."""
    from torch import nn

    return (layer.in_features, layer.out_features) if isinstance(layer, nn.Linear) else (layer.nx, layer.nf)


def dense_weight(layer: Any) -> Tensor:
    """The weight of a linear layer as numbers, (outputs, inputs), whatever it is stored in."""
    import torch
    from transformers.pytorch_utils import Conv1D

    stored = layer.weight
    if getattr(stored, "quant_state", None) is not None:
        from bitsandbytes.functional import dequantize_4bit  # a second to import, and most runs need none of it

        four: Tensor = dequantize_4bit(stored.data, stored.quant_state)
        return four
    if stored.dtype == torch.int8:
        from bitsandbytes.functional import int8_vectorwise_dequant

        scales = layer.state.SCB if stored.SCB is None else stored.SCB  # the first forward pass moves them
        eight: Tensor = int8_vectorwise_dequant(stored.data, scales)
        return eight
    weight: Tensor = stored.detach()
    return weight.T if isinstance(layer, Conv1D) else weight


def is_attention(path: str) -> bool:
    """Whether a module inside a block belongs to its attention."""
    return any("attn" in part or "attention" in part for part in path.lower().split("."))


def task(model: PreTrainedModel) -> str | None:
    """PEFT's name of what the model's head does; None where PEFT has none."""
    name = type(model).__name__
    if name.endswith("ForSequenceClassification"):
        return "SEQ_CLS"
    if model.config.is_encoder_decoder:
        return "SEQ_2_SEQ_LM"
    return "CAUSAL_LM" if name.endswith(("ForCausalLM", "LMHeadModel")) else None


def fresh_heads(model: PreTrainedModel) -> list[str]:
    """Names of the modules of a classification head: it starts at random, so it trains and ships with any adapter."""
    if not type(model).__name__.endswith("Classification"):
        return []
    outside = [(name, module) for name, module in model.named_children() if name != model.base_model_prefix]
    return [name for name, module in outside if any(True for _ in module.parameters())]
