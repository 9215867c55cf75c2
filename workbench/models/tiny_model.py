"""A tiny random model of a backbone's architecture: the kinds of layers of its config.json, few of them and narrow."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from workbench.config.model_heads import TEXT
from workbench.errors import BackboneError

BLOCKS, EXPERTS, HEADS, WORDS, INNER = 4, 4, 4, 2048, 256
MOST = 700_000_000
"""Parameters of the largest model that is tried: 2.8 GB in float32."""
_DEPTHS = ("num_hidden_layers", "n_layer", "num_layers", "depth", "n_layers")
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts")
_Values = dict[str, Any]


def build(config: PretrainedConfig, *, words: int = WORDS) -> PreTrainedModel:
    """A tiny model, in float32 with random weights, that computes finite logits.

    Widths of heads stay as they are, and the number of heads shrinks; where the family computes nothing with that, its
    widths stay and only its depth, vocabulary and number of experts shrink.

    Args:
        words: Most entries of its vocabulary; special tokens beyond it get other numbers.

    Raises:
        BackboneError: The architecture has no causal language model, or could not be made small.
    """
    if config.is_encoder_decoder:
        raise BackboneError(
            f"{type(config).__name__} is an encoder-decoder, and families of causal language models are tried here. "
            "Take one of these; `workbench check` tries the rows of a run over this one."
        )
    auto, why = TEXT.auto_class(config), ""
    for narrow in (True, False):
        try:
            small = _small(config, narrow=narrow, words=words)
            with torch.device("meta"):
                size = sum(each.numel() for each in auto.from_config(small).parameters())
            if size > MOST:
                why = why or f"still {size:,} parameters"
                continue
            torch.manual_seed(0)
            model: PreTrainedModel = auto.from_config(small, dtype=torch.float32).eval()
            with torch.no_grad():
                for each in model.parameters():  # Gemma 3's projector starts at zero, which no picture passes
                    if each.ndim > 1 and not each.any():
                        each.normal_(std=0.02)
                logits_BLV = model(input_ids=torch.arange(9)[None], use_cache=False).logits
        except Exception as error:
            why = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            continue
        if logits_BLV.isfinite().all():
            return model
        why = "its logits are not finite"
    raise BackboneError(
        f"No tiny model of {type(config).__name__} could be made ({why[:200]}). `workbench check` and `workbench plan` "
        "say what a run over the whole one does."
    )


def _small(config: PretrainedConfig, *, narrow: bool, words: int) -> PretrainedConfig:
    values = config.to_dict()
    values.pop("quantization_config", None)
    text = config.get_text_config(decoder=True)
    section = next((key for key in config.sub_configs if getattr(config, key, None) is text), None)
    inside: _Values = values if section is None else values[section]
    width = text.attribute_map.get("hidden_size", "hidden_size")
    old = inside.get(width)
    vocabulary = min(text.vocab_size, words)
    _shallow(inside, BLOCKS)
    if narrow:
        _narrow(inside, text)
    new = inside.get(width)
    for key, part in values.items():
        if key.endswith("_config") and key != section and isinstance(part, dict):
            _shallow(part, 2)
            part.update({name: new for name in ("out_hidden_size", "text_hidden_size") if part.get(name) == old})
            if "deepstack_visual_indexes" in part:
                part["deepstack_visual_indexes"] = [0]
    for part in (values, inside):
        for key in part:
            if key.startswith("vocab_size"):
                part[key] = vocabulary
        _rename_tokens(part, vocabulary)
    return type(config).from_dict(values)


def _shallow(part: _Values, least: int) -> None:
    """Cut a part of a configuration to its first blocks, of which there is one of each kind, and to few experts."""
    depth = next((key for key in _DEPTHS if isinstance(part.get(key), int)), None)
    if depth is not None:
        blocks = part[depth]
        by_block = {
            key: value
            for key, value in part.items()
            if isinstance(value, (list, tuple, str)) and len(value) == blocks and blocks > 3
        }
        kept = min(blocks, max([least, *(_every_kind(value) for value in by_block.values())]))
        part |= {depth: kept, **{key: value[:kept] for key, value in by_block.items()}}
        if isinstance(own := part.get("per_layer_config"), dict):
            part["per_layer_config"] = {key: value for key, value in own.items() if int(key) < kept}
        for key in ("first_k_dense_replace", "num_kv_shared_layers", "max_window_layers"):
            if isinstance(part.get(key), int):
                part[key] = min(part[key], 1 if key == "first_k_dense_replace" else kept // 2)
    for key, value in part.items():
        if type(value) is not int:
            continue
        if key in _CHOSEN:
            part[key] = min(value, 2)
        elif key.endswith("experts") and "shared" not in key:
            part[key] = min(value, EXPERTS)
        elif key in ("n_group", "topk_group"):
            part[key] = min(value, 1)


def _every_kind(by_block: Any) -> int:
    """Number of first blocks among which is one of each kind; 0 where blocks have values rather than kinds."""
    kinds = {each for each in by_block if isinstance(each, (str, bool))}
    return max((list(by_block).index(each) + 1 for each in kinds), default=0)


def _narrow(part: _Values, text: PretrainedConfig) -> None:
    """Cut a language model's part of a configuration to few heads of their own width."""
    named = {key: text.attribute_map.get(key, key) for key in ("hidden_size", "num_attention_heads")}
    heads = part.get(named["num_attention_heads"])
    if isinstance(heads, int) and heads > HEADS:
        width = part.get("head_dim") or part[named["hidden_size"]] // heads
        part |= {named["num_attention_heads"]: HEADS, named["hidden_size"]: HEADS * width}
        for key in ("num_key_value_heads", "num_global_key_value_heads"):
            if isinstance(part.get(key), int):
                part[key] = math.gcd(HEADS, max(1, part[key] * HEADS // heads))
    for key, value in part.items():
        if type(value) is int and ("intermediate_size" in key or key in ("ffn_dim", "n_inner")):
            part[key] = min(value, INNER)
    hidden = part.get(named["hidden_size"], 0)
    for count, width, grows in (
        ("num_heads", "head_dim", "expand"),
        ("mamba_n_heads", "mamba_d_head", "mamba_expand"),
    ):
        if all(isinstance(part.get(key), int) for key in (count, width, grows)):
            part[count] = part[grows] * hidden // part[width]


def _rename_tokens(part: _Values, vocabulary: int) -> None:
    """Give special tokens that the smaller vocabulary lacks other numbers in it, from its end."""
    free: Iterator[int] = iter(range(vocabulary - 1, 0, -1))

    def inside(token: Any) -> Any:
        return next(free) if type(token) is int and token >= vocabulary else token

    for key, value in part.items():
        if key.endswith(("_token_id", "_token_index")):
            part[key] = [inside(each) for each in value] if isinstance(value, list) else inside(value)
