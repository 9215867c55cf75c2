"""Configurations of models that see, of known sizes, for plans: a config.json, the starter's tokenizer with tokens of
pictures, and a stock processor that makes 256 tokens of each picture. No weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers
from transformers import AutoTokenizer, Gemma4AudioFeatureExtractor

from workbench.data.starter import FOLDER
from workbench.models import picture_processor

TEMPLATE = """\
{%- for message in messages %}{{- '<|' + message.role + '|>' }}{%- if message.content is string %}{{- message.content }}
{%- else %}{%- for part in message.content %}{{- MARK if part.type == 'image' else part.text }}{%- endfor %}{%- endif %}
{{- eos_token if message.role == 'assistant' }}{%- endfor %}{{- '<|assistant|>' if add_generation_prompt }}"""
PIXELS = 256 * 32 * 32
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-vl-8b": {
        "config": "Qwen3VLConfig",
        "text": {
            "vocab_size": 151936,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 262144,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20]},
        },
        "vision": {
            "depth": 27,
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_heads": 16,
            "out_hidden_size": 4096,
            "patch_size": 16,
            "num_position_embeddings": 2304,
            "deepstack_visual_indexes": [8, 16, 24],
        },
        "more": {},
        "mark": "<|vision_start|><|image_pad|><|vision_end|>",
        "tokens": {
            "image_token": "<|image_pad|>",
            "video_token": "<|video_pad|>",
            "vision_start_token": "<|vision_start|>",
            "vision_end_token": "<|vision_end|>",
        },
        "ids": {"image_token_id": "<|image_pad|>", "vision_start_token_id": "<|vision_start|>"},
        "image": (
            "Qwen2VLImageProcessorPil",
            {"size": {"shortest_edge": PIXELS, "longest_edge": PIXELS}, "patch_size": 16},
        ),
        "processor": "Qwen3VLProcessor",
        "parts": {},
    },
    "gemma-4-e4b": {
        "config": "Gemma4Config",
        "text": {
            "vocab_size": 262144,
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "num_hidden_layers": 42,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "num_kv_shared_layers": 18,
            "use_bidirectional_attention": "vision",
            "final_logit_softcapping": 30.0,
        },
        "vision": {},
        "more": {"audio_config": None},
        "mark": "<image_soft_token>",
        "tokens": {
            "boi_token": "<boi>",
            "eoi_token": "<eoi>",
            "image_token": "<image_soft_token>",
            "video_token": "<|video|>",
            "audio_token": "<audio>",
            "boa_token": "<boa>",
            "eoa_token": "<eoa>",
        },
        "ids": {"image_token_id": "<image_soft_token>", "boi_token_id": "<boi>", "eoi_token_id": "<eoi>"},
        "image": ("Gemma4ImageProcessorPil", {"max_soft_tokens": 280}),
        "processor": "Gemma4Processor",
        "parts": {"feature_extractor": Gemma4AudioFeatureExtractor()},
    },
}
"""What each is made of, by its name."""


def configuration(shape: str, folder: Path) -> None:
    """Write the configuration, tokenizer and processor of a shape."""
    facts = SHAPES[shape]
    tokenizer = AutoTokenizer.from_pretrained(FOLDER, extra_special_tokens=facts["tokens"])
    tokenizer.chat_template = TEMPLATE.replace("MARK", repr(facts["mark"]))
    ids = {key: tokenizer.convert_tokens_to_ids(token) for key, token in facts["ids"].items()}
    config = getattr(transformers, facts["config"])
    whole = config(text_config=facts["text"], vision_config=facts["vision"], **facts["more"], **ids)
    whole.dtype = "bfloat16"
    whole.architectures = [facts["config"].replace("Config", "ForConditionalGeneration")]
    whole.save_pretrained(folder)
    kind, settings = facts["image"]
    images = getattr(transformers, kind)(**settings)
    stock = picture_processor.without_videos(getattr(transformers, facts["processor"]))
    own = stock(image_processor=images, tokenizer=tokenizer, chat_template=tokenizer.chat_template, **facts["parts"])
    own.save_pretrained(folder)
