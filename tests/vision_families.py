"""Tiny random backbones that read pictures beside text, each with a processor of its own family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import (
    AutoModelForImageTextToText,
    AutoTokenizer,
    Gemma4AudioFeatureExtractor,
    PreTrainedModel,
    ProcessorMixin,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.text_families import BASE, LINEAR, PICTURES, QWEN_VISION, ROPE, VISION
from workbench.data.starter import FOLDER
from workbench.models import picture_processor

TEMPLATE = """\
{%- for message in messages %}
    {{- '<|' + message.role + '|>' }}
    {%- for part in message.content %}
        {{- MARK if part.type == 'image' else part.text }}
    {%- endfor %}
    {{- eos_token if message.role == 'assistant' }}
{%- endfor %}
{{- '<|assistant|>' if add_generation_prompt }}"""
"""Knows contents as lists of parts alone, as LLaVA's own template does."""
TEXTS = "{%- if message.content is string %}{{- message.content }}{%- else %}"
MIXED = TEMPLATE.replace("{%- for part", f"{TEXTS}{{%- for part").replace(
    "endfor %}\n    {{- eos", "endfor %}{%- endif %}\n    {{- eos"
)
"""Knows texts too, as most templates do."""
QWEN: dict[str, Any] = {
    "more": {},
    "mark": "<|vision_start|><|image_pad|><|vision_end|>",
    "tokens": {
        "image_token": "<|image_pad|>",
        "video_token": "<|video_pad|>",
        "vision_start_token": "<|vision_start|>",
        "vision_end_token": "<|vision_end|>",
    },
    "processor": {},
}
"""What all Qwen families share: the tokens."""
QWEN3: dict[str, Any] = {
    **QWEN,
    "image": (
        "Qwen2VLImageProcessorPil",
        {"size": {"shortest_edge": 1024, "longest_edge": 1024 * 16}, "patch_size": 16},
    ),
}
"""What Qwen3-VL and Qwen3.5 share: the processor of pictures, too."""
FAMILIES: dict[str, dict[str, Any]] = {
    "llava": {
        "text": {"model_type": "llama"},
        "vision": {**VISION, "model_type": "clip_vision_model"},
        "more": {"vision_feature_layer": -1},
        "mark": "<image>",
        "tokens": {"image_token": "<image>"},
        "image": ("CLIPImageProcessorPil", {"size": {"height": 28, "width": 28}, "do_center_crop": False}),
        "processor": {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
    },
    "llava_onevision": {
        "text": {"model_type": "qwen2"},
        "vision": {**VISION, "model_type": "siglip_vision_model"},
        "more": {"vision_feature_layer": -1, "image_grid_pinpoints": [[28, 28], [28, 56], [56, 28]]},
        "mark": "<image>",
        "tokens": {"image_token": "<image>", "video_token": "<video>"},
        "image": (
            "LlavaOnevisionImageProcessorPil",
            {"size": {"height": 28, "width": 28}, "image_grid_pinpoints": [[28, 28], [28, 56], [56, 28]]},
        ),
        "processor": {"num_image_tokens": 4, "vision_feature_select_strategy": "full"},
    },
    "mistral3": {
        "text": {"model_type": "mistral"},
        "vision": {**VISION, "model_type": "pixtral", "head_dim": 16},
        "more": {"spatial_merge_size": 2, "vision_feature_layer": -1},
        "mark": "[IMG]",
        "tokens": {"image_token": "[IMG]", "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"},
        "image": (
            "PixtralImageProcessorPil",
            {"size": {"longest_edge": 84}, "patch_size": {"height": 28, "width": 28}},
        ),
        "processor": {"patch_size": 14, "spatial_merge_size": 2},
        "class": "PixtralProcessor",
    },
    "qwen2_5_vl": {
        **QWEN,
        "text": {"rope_parameters": ROPE},
        "vision": QWEN_VISION,
        "image": (
            "Qwen2VLImageProcessorPil",
            {"size": {"shortest_edge": 784, "longest_edge": 784 * 16}, "patch_size": 14},
        ),
    },
    "qwen3_vl": {
        **QWEN3,
        "text": {"rope_parameters": {**ROPE, "mrope_interleaved": True}},
        "vision": {**QWEN_VISION, "patch_size": 16, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
    },
    "qwen3_5": {
        **QWEN3,
        "text": LINEAR,
        "vision": {**QWEN_VISION, "patch_size": 16, "num_position_embeddings": 16},
        "class": "Qwen3VLProcessor",
    },
    "gemma3": {
        "text": {},
        "vision": {**VISION, "image_size": 56},
        "more": {"mm_tokens_per_image": 4},
        "mark": "<start_of_image>",
        "tokens": {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"},
        "image": ("Gemma3ImageProcessorPil", {"size": {"height": 56, "width": 56}}),
        "processor": {"image_seq_length": 4},
    },
    "gemma4": {
        "text": {**PICTURES["gemma4"][0], "vocab_size_per_layer_input": 8192},
        "vision": {**VISION, "num_key_value_heads": 2, "head_dim": 16, "patch_size": 14, "pooling_kernel_size": 2},
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
        "image": (
            "Gemma4ImageProcessorPil",
            {"max_soft_tokens": 70, "patch_size": 14, "pooling_kernel_size": 2},
        ),
        "processor": {"feature_extractor": Gemma4AudioFeatureExtractor()},
    },
    "internvl": {
        "text": {"model_type": "qwen2"},
        "vision": {**VISION, "image_size": [56, 56], "patch_size": [14, 14]},
        "more": {"image_seq_length": 4, "downsample_ratio": 0.5},
        "mark": "<IMG_CONTEXT>",
        "tokens": {
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
        "image": (
            "GotOcr2ImageProcessorPil",
            {"size": {"height": 56, "width": 56}, "crop_to_patches": True, "max_patches": 3},
        ),
        "processor": {"image_seq_length": 4},
    },
    "smolvlm": {
        "text": {"model_type": "llama"},
        "vision": {**VISION, "image_size": 56},
        "more": {"scale_factor": 2},
        "mark": "<image>",
        "tokens": {
            "image_token": "<image>",
            "fake_image_token": "<fake_token_around_image>",
            "global_image_token": "<global-img>",
        },
        "image": ("SmolVLMImageProcessorPil", {"size": {"longest_edge": 112}, "max_image_size": {"longest_edge": 56}}),
        "processor": {"image_seq_len": 4},
    },
}
"""Settings of the language model, the tower and the whole; what a template writes for a picture; the tokenizer's own
tokens; the image processor, and the processor of the whole."""
NEEDED = {"mistral3": "torchvision", "smolvlm": "num2words"}
"""Packages without which the processor of a family does not load, and its tests are skipped."""
_OF_PICTURES = ("image_token_id", "image_token_index")
_IDS = {"image_token": _OF_PICTURES, "context_image_token": _OF_PICTURES, "video_token": ("video_token_id",)}
_IDS |= {"vision_start_token": ("vision_start_token_id",), "vision_end_token": ("vision_end_token_id",)}
_IDS |= {"boi_token": ("boi_token_index",), "eoi_token": ("eoi_token_index",)}


def build(name: str, *, mixed: bool = False) -> tuple[PreTrainedModel, ProcessorMixin]:
    """A backbone in float32 and its processor. `mixed`: the template knows texts beside parts."""
    facts = FAMILIES[name]
    if name in NEEDED:
        pytest.importorskip(NEEDED[name])
    tokenizer = AutoTokenizer.from_pretrained(FOLDER, extra_special_tokens=facts["tokens"])
    tokenizer.chat_template = (MIXED if mixed else TEMPLATE).replace("MARK", repr(facts["mark"]))
    ids = {
        key: tokenizer.convert_tokens_to_ids(token)
        for kind, token in facts["tokens"].items()
        for key in _IDS.get(kind, ())
    }
    text = {**BASE, "vocab_size": len(tokenizer), **facts["text"]}
    known = CONFIG_MAPPING[name]().to_dict()
    ids = {key: value for key, value in ids.items() if key in known or key == "image_token_id"}
    torch.manual_seed(0)
    config = CONFIG_MAPPING[name](text_config=text, vision_config=facts["vision"], **facts["more"], **ids)
    model: PreTrainedModel = AutoModelForImageTextToText.from_config(config)
    for each in model.parameters():  # Gemma 3's projector starts at zero, which no picture passes
        if each.ndim == 2 and not each.any():
            torch.nn.init.normal_(each, std=0.1)
    kind, settings = facts["image"]
    images = getattr(transformers, kind)(**settings)
    whole = facts.get("class") or type(model).__name__.replace("ForConditionalGeneration", "Processor")
    stock = picture_processor.without_videos(getattr(transformers, whole))
    processor = stock(
        image_processor=images, tokenizer=tokenizer, **facts["processor"], chat_template=tokenizer.chat_template
    )
    return model, processor


def save(name: str, folder: Path, *, mixed: bool = False) -> str:
    """Write a backbone of a family with its processor, in float32; returns what model.id names."""
    model, processor = build(name, mixed=mixed)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return str(folder)
