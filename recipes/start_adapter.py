"""The adapter of another run, from which training goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from peft import PeftModel, set_peft_model_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from workbench.adapters import Bottleneck
from workbench.config import RunConfig
from workbench.errors import ConfigError, FileError
from workbench.models import backbones, exported
from workbench.runs import run_directory
from workbench.runs.trust import Trust

METHODS = ("lora", "rslora", "lora+", "dora", "ia3", "houlsby", "pfeiffer", "parallel")
"""Methods that leave the backbone's weights as they are, so that an adapter's own tensors are all of it."""


def require(config: RunConfig) -> None:
    """Refuse a start that is not there, or is of another backbone or form.

    Raises:
        ConfigError: says what to write.
    """
    start, section = config.prefer.start, config.prefer
    if start is None:
        return
    path = Path(start).expanduser()
    if not (path / "config.yaml").is_file():
        raise ConfigError(
            f"prefer.start={start} is no run directory (no config.yaml). Name a finished run, or leave it out; the "
            "folder of a merged model goes into model.id."
        )
    begun = run_directory.shipped_config(path, Trust(section.trust, "prefer.trust=true"))
    if begun.recipe not in ("sft", "prefer"):
        raise ConfigError(
            f"prefer.start={start}: recipe {begun.recipe} trains no model that answers. Name one of recipe sft."
        )
    exported.require_saved(path, begun)
    if config.adapter.method not in METHODS or begun.adapter.method not in METHODS:
        method = begun.adapter.method if begun.adapter.method not in METHODS else config.adapter.method
        raise ConfigError(
            f"prefer.start: adapter.method={method} changes the backbone itself when it starts. Write `workbench merge "
            f"{start} --out merged`, and model.id=merged in place of prefer.start."
        )
    mine, theirs = config.adapter.model_dump(mode="json"), begun.adapter.model_dump(mode="json")
    free = {"dropout", "rate_ratio"}  # how it trains, not what it is
    different = [key for key in mine if key not in free and mine[key] != theirs.get(key)]
    if different:
        key = different[0]
        raise ConfigError(
            f"prefer.start={start} has adapter.{key}={theirs.get(key)}, and this run {mine[key]}. Write "
            f"adapter.{key}={theirs.get(key)}, or merge that run and write its folder as model.id."
        )
    for key in ("id", "revision", "new_tokens"):
        if getattr(config.model, key) != getattr(begun.model, key):
            raise ConfigError(
                f"prefer.start={start} is an adapter over model.{key}={getattr(begun.model, key)}, and this run has "
                f"{getattr(config.model, key)}. Write model.{key}={getattr(begun.model, key)}."
            )
    blocks = backbones.hub_config(config.model).get_text_config(decoder=True).num_hidden_layers
    # Blocks that never train get no adapter, so that there is no place for what that run learnt of them; bottlenecks
    # stand in all blocks, and are frozen there.
    if not isinstance(config.adapter, Bottleneck) and config.freeze.never(blocks) > begun.freeze.never(blocks):
        raise ConfigError(
            f"prefer.start={start} has an adapter in all but the first {begun.freeze.never(blocks)} blocks, and "
            f"freeze.policy={config.freeze.policy} leaves this run none in the first {config.freeze.never(blocks)}. "
            "Write section freeze as that run has it, or merge that run and write its folder as model.id."
        )


def load(config: RunConfig, model: nn.Module) -> None:
    """Give a fresh adapter the values of `prefer.start`, which `require` found to be alike.

    Raises:
        FileError: its file is damaged.
    """
    assert config.prefer.start is not None and isinstance(model, PeftModel)
    file = Path(config.prefer.start).expanduser() / "adapter" / "adapter_model.safetensors"
    try:
        tensors = load_file(str(file))
    except (SafetensorError, OSError) as error:
        raise FileError(f"{file}: damaged ({error}). Restore it, or train that run again.") from None
    found: Any = set_peft_model_state_dict(model, tensors)
    assert not found.unexpected_keys, found.unexpected_keys
