"""Tiny random backbones of today's families that write text, alone or beside towers for pictures: four blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from workbench.data.starter import FOLDER

WORDS = 6144  # of the starter's tokenizer
BASE: dict[str, Any] = {
    **{"vocab_size": WORDS, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 1024},
    **{"pad_token_id": 4, "bos_token_id": 0, "eos_token_id": 0, "tie_word_embeddings": True},
}
MOE: dict[str, Any] = {
    **{"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2},
    **{"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "n_shared_experts": 1, "n_group": 1},
    **{"topk_group": 1, "first_k_dense_replace": 1},
}
MLA: dict[str, Any] = {
    **{"q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16},
    **{"head_dim": 8, "num_key_value_heads": 4},
}
LINEAR: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"] * 2,
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16},
}
INDEX: dict[str, Any] = {"index_n_heads": 2, "index_head_dim": 16, "index_topk": 64}
STATE: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_chunk_size": 16}
VISION: dict[str, Any] = {
    **{"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2},
    **{"image_size": 28, "patch_size": 14},
}
QWEN_VISION: dict[str, Any] = {
    **{"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64},
}
ROPE: dict[str, Any] = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
PER_LAYER: dict[str, Any] = {"vocab_size_per_layer_input": WORDS, "hidden_size_per_layer_input": 16}

TEXT: dict[str, dict[str, Any]] = {
    **{key: {} for key in ("llama", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3", "olmo2", "olmo3")},
    **{key: {} for key in ("smollm3", "ministral3", "seed_oss", "glm4", "cohere", "granite", "starcoder2")},
    **dict.fromkeys(("gpt_oss", "mixtral", "glm4_moe", "minimax_m2"), MOE),
    **dict.fromkeys(("qwen3_moe", "llama4_text"), MOE),
    **{key: {} for key in ("mamba", "falcon_mamba")},
    "gemma4_text": PER_LAYER,
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "deepseek_v4": MOE | {"q_lora_rank": 32, "o_lora_rank": 16, "o_groups": 2, **INDEX},
    "granitemoehybrid": {**MOE, **STATE, "layer_types": ["mamba", "attention"] * 2},
    "falcon_h1": {**STATE, "mamba_d_ssm": 128},
    "nemotron_h": {
        **{"mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 1, "chunk_size": 16},
        "num_hidden_layers": 4,
    },
    "kimi_linear": {
        **MOE,
        **{"layer_types": ["linear_attention", "full_attention"] * 2, "linear_head_dim": 16, "linear_num_heads": 4},
        **{"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16},
        "num_key_value_heads": 4,
    },
    "qwen3_next": MOE | LINEAR,
    "deepseek_v3": MOE | MLA,
    "glm_moe_dsa": MOE | MLA | INDEX,
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1},
}
"""Settings of language models, by transformers' `model_type`."""

PICTURES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "gemma3": ({}, VISION, {"mm_tokens_per_image": 4, "image_token_index": 7}),
    "gemma4": (
        {**PER_LAYER, "num_global_key_value_heads": 2, "global_head_dim": 16},
        {**VISION, "num_key_value_heads": 2, "head_dim": 16},
        {"image_token_id": 7, "audio_config": None},
    ),
    "mistral3": (
        {"model_type": "mistral"},
        {**VISION, "model_type": "pixtral", "head_dim": 16},
        {"image_token_index": 7},
    ),
    "llava": ({"model_type": "llama"}, {**VISION, "model_type": "clip_vision_model"}, {"image_token_index": 7}),
    "qwen2_5_vl": ({"rope_parameters": ROPE}, QWEN_VISION, {"image_token_id": 7}),
    "qwen3_vl": (
        {"rope_parameters": {**ROPE, "mrope_interleaved": True}},
        {**QWEN_VISION, "patch_size": 16, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
        {"image_token_id": 7},
    ),
    "qwen3_5": (LINEAR, {**QWEN_VISION, "patch_size": 16, "num_position_embeddings": 16}, {"image_token_id": 7}),
}
"""Settings of the language model, of the tower and of the whole, for families that read pictures beside text."""

FAMILIES = (*TEXT, *PICTURES)
PREPARED = "preprocessor_config.json"


def build(name: str) -> PreTrainedModel:
    """A backbone of a family, in float32."""
    torch.manual_seed(0)
    if name in TEXT:
        alone: PreTrainedModel = AutoModelForCausalLM.from_config(CONFIG_MAPPING[name](**BASE | TEXT[name]))
        return alone
    text, vision, more = PICTURES[name]
    config = CONFIG_MAPPING[name](text_config=BASE | text, vision_config=vision, **more)
    beside: PreTrainedModel = AutoModelForImageTextToText.from_config(config)
    return beside


def save(name: str, folder: Path) -> str:
    """Write a backbone of a family with the starter's tokenizer, in bfloat16; returns what model.id names."""
    build(name).to(torch.bfloat16).save_pretrained(folder)  # type: ignore[arg-type]
    AutoTokenizer.from_pretrained(FOLDER).save_pretrained(folder)
    if name in PICTURES:
        (folder / PREPARED).write_text('{"image_processor_type": "CLIPImageProcessor"}')
    return str(folder)
