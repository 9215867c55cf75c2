"""Limits of SGLang's LoRA, and the line that serves an export with it."""

from __future__ import annotations

from workbench.models.exporting.lora_limits import LoraLimits

LAYERS = frozenset({"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"})
LIMITS = LoraLimits("SGLang", rslora=False, ranks=False, layers=LAYERS)


def adapter_command(base: str, *, rank: int) -> str:
    """The line that serves an adapter over its base model as the model `tuned`."""
    start = f"python -m sglang.launch_server --model-path {base} --enable-lora"
    return f"{start} --lora-paths tuned=DIR --max-lora-rank {rank}"


def model_command() -> str:
    """The line that serves a whole model."""
    return "python -m sglang.launch_server --model-path DIR"
