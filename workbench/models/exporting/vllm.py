"""Limits of vLLM's LoRA, and the line that serves an export with it."""

from __future__ import annotations

from workbench.models.exporting.lora_limits import LoraLimits

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM's --max-lora-rank may have."""
LIMITS = LoraLimits("vLLM", rslora=True, ranks=False, max_rank=RANKS[-1])


def adapter_command(base: str, *, rank: int) -> str:
    """The line that serves an adapter over its base model as the model `tuned`."""
    most = next(each for each in RANKS if each >= rank)
    return f"vllm serve {base} --enable-lora --max-lora-rank {most} --lora-modules tuned=DIR"


def model_command() -> str:
    """The line that serves a whole model."""
    return "vllm serve DIR"
