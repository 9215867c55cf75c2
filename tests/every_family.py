"""Tiny backbones of every family that `adapters/FAMILIES.md` names, with a processor where the family sees or hears."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import VoxtralConfig, VoxtralForConditionalGeneration

from tests import text_families, vision_families
from tests.sound_backbones import save_qwen2_audio

FAMILIES = tuple(dict.fromkeys((*text_families.FAMILIES, *vision_families.FAMILIES, "qwen2_audio", "voxtral")))

VOXTRAL = {
    "audio_config": {
        **{"hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2},
        **{"num_mel_bins": 8, "max_source_positions": 52},
    },
    "text_config": {**text_families.BASE, "model_type": "llama"},
}


def untried(name: str) -> tuple[str, ...]:
    """Subjects of a family that need a package that is no dependency, and is not there."""
    there = find_spec(vision_families.NEEDED.get(name, "torch")) is not None
    return () if there or name not in text_families.FAMILIES else ("pictures",)


def save(name: str, folder: Path) -> str:
    """Write a backbone of a family; returns what model.id names."""
    if name == "qwen2_audio":
        return save_qwen2_audio(folder)
    if name == "voxtral":  # its processor is refused before it is loaded
        torch.manual_seed(0)
        VoxtralForConditionalGeneration(VoxtralConfig(**VOXTRAL)).save_pretrained(folder)
        return str(folder)
    if name in vision_families.FAMILIES and not untried(name):
        return vision_families.save(name, folder, mixed=True)
    return text_families.save(name, folder)
