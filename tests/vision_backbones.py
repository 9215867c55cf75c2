"""Tiny backbones of every family that reads pictures, with seeded weights, for 32 x 32 pixels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from transformers import PreTrainedModel

SIZE = 32
TRANSFORMER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": SIZE,
    "patch_size": 8,
    "drop_path_rate": 0.0,
}
TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "vocab_size": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
STAGES: dict[str, Any] = {"hidden_sizes": [16, 32], "depths": [1, 2], "num_stages": 2}
WINDOWS: dict[str, Any] = {
    "image_size": SIZE, "patch_size": 2, "embed_dim": 16, "depths": [1, 2], "num_heads": [2, 4], "window_size": 4,
    "drop_path_rate": 0.0,
}  # fmt: skip
TOWERS: dict[str, Any] = {"vision_config": TRANSFORMER, "text_config": TEXT}
VISION: dict[str, dict[str, Any]] = {
    "Beit": {**TRANSFORMER, "use_relative_position_bias": True},
    "CLIP": TOWERS,
    "ConvNext": STAGES,
    "ConvNextV2": STAGES,
    "DeiT": TRANSFORMER,
    "DeiTWithTeacher": TRANSFORMER,
    "Dinov2": {**TRANSFORMER, "mlp_ratio": 2},
    "Dinov2WithRegisters": {**TRANSFORMER, "mlp_ratio": 2, "num_register_tokens": 2},
    "EfficientNet": {
        "width_coefficient": 0.1,
        "depth_coefficient": 0.1,
        "image_size": SIZE,
        "hidden_dim": 128,
        "dropout_rate": 0.0,
        "drop_connect_rate": 0.0,
    },
    "MobileNetV2": {"depth_multiplier": 0.1, "image_size": SIZE, "classifier_dropout_prob": 0.0},
    "ResNet": {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 2], "layer_type": "basic"},
    "Siglip": TOWERS,
    "Swin": WINDOWS,
    "Swinv2": WINDOWS,
    "ViT": TRANSFORMER,
}
"""Configuration classes, with the sizes of each; without dropout, as `backbones.load` leaves them."""
PYRAMID: dict[str, Any] = {
    "num_encoder_blocks": 2,
    "depths": [1, 2],
    "hidden_sizes": [16, 32],
    "strides": [4, 2],
    "num_attention_heads": [2, 4],
    "mlp_ratios": [2, 2],
    "drop_path_rate": 0.0,
}
OTHERS: dict[str, dict[str, Any]] = {
    "Bit": {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 2], "num_groups": 8},
    "Data2VecVision": {**TRANSFORMER, "use_relative_position_bias": True},
    "FocalNet": {
        "image_size": SIZE,
        "patch_size": 4,
        "embed_dim": 16,
        "depths": [1, 2],
        "focal_levels": [1, 1],
        "focal_windows": [3, 3],
        "hidden_sizes": [16, 32],
        "drop_path_rate": 0.0,
    },
    "HGNetV2": {
        "embedding_size": 16,
        "depths": [1, 1],
        "hidden_sizes": [16, 32],
        "stem_channels": [3, 8, 16],
        "stage_in_channels": [16, 16],
        "stage_mid_channels": [8, 8],
        "stage_out_channels": [16, 32],
        "stage_num_blocks": [1, 1],
        "stage_numb_of_layers": [2, 2],
        "stage_downsample": [False, True],
        "stage_light_block": [False, True],
        "stage_kernel_size": [3, 3],
    },
    "Hiera": {
        "image_size": [SIZE, SIZE],
        "embed_dim": 16,
        "depths": [1, 1],
        "num_heads": [1, 2],
        "patch_size": [3, 3],
        "patch_stride": [4, 4],
        "patch_padding": [1, 1],
        "masked_unit_size": [2, 2],
        "num_query_pool": 1,
        "query_stride": [2, 2],
        "drop_path_rate": 0.0,
    },
    "IJepa": TRANSFORMER,
    "MobileNetV1": {"depth_multiplier": 0.1, "image_size": SIZE, "min_depth": 8, "classifier_dropout_prob": 0.0},
    "Pvt": {**PYRAMID, "image_size": SIZE, "patch_sizes": [4, 2], "sequence_reduction_ratios": [2, 1]},
    "PvtV2": {**PYRAMID, "image_size": SIZE, "patch_sizes": [3, 3], "sr_ratios": [2, 1]},
    "RegNet": {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 2], "groups_width": 8},
    "Segformer": {**PYRAMID, "patch_sizes": [7, 3], "sr_ratios": [2, 1], "classifier_dropout_prob": 0.0},
    "SwiftFormer": {
        "image_size": SIZE,
        "depths": [1, 1],
        "embed_dims": [16, 32],
        "mlp_ratio": 2,
        "drop_path_rate": 0.0,
    },
    "ViTMSN": TRANSFORMER,
}
"""More of them, which are loaded and given LoRA; not each is in every other test."""


def tiny_vision(name: str, *, labels: int = 3, **settings: Any) -> PreTrainedModel:
    """A backbone of one of `VISION` with a head for `labels` classes; weights large enough for the logits to differ."""
    family = name.removesuffix("WithTeacher")
    sizes = VISION[name] if name in VISION else OTHERS[name]
    config = getattr(transformers, f"{family}Config")(**{**sizes, **settings})
    config.num_labels = labels
    kind = f"{family}ForImageClassification{'WithTeacher' if family != name else ''}"
    torch.manual_seed(0)
    model: PreTrainedModel = getattr(transformers, kind)(config)
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            torch.nn.init.normal_(parameter, std=0.2 if parameter.ndim == 2 else 1.5 * parameter[0].numel() ** -0.5)
    for module in model.modules():
        if isinstance(module, _BatchNorm):  # statistics as of pretraining, which are not those of a batch
            module.running_mean.normal_(std=0.1)  # type: ignore[union-attr]
            module.running_var.uniform_(0.5, 1.5)  # type: ignore[union-attr]
            torch.nn.init.uniform_(module.weight, 0.5, 1.5)
    return model.eval()


def save_vision(folder: Path, name: str, **settings: Any) -> str:
    """A saved backbone of a family: what model.id names."""
    tiny_vision(name, **settings).save_pretrained(folder)
    return str(folder)


def pixels(rows: int = 2, *, size: int = SIZE) -> Tensor:
    """Normalised pictures (B, 3, H, W), each with a bright square on noise."""
    generator = torch.Generator().manual_seed(7)
    pixels_B3HW = torch.randn(rows, 3, size, size, generator=generator)
    for row in range(rows):
        place = 3 * row % (size // 2)
        pixels_B3HW[row, :, place : place + size // 3, place : place + size // 3] += 2
    return pixels_B3HW
