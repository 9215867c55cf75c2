"""The adapter of another run, from which training goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from torch import nn
from transformers import PreTrainedModel

from workbench import adapters
from workbench.adapters import Bottleneck
from workbench.config import RunConfig
from workbench.data import starter
from workbench.errors import ConfigError
from workbench.models import backbones, exported
from workbench.runs import files, run_directory
from workbench.runs.trust import Trust

METHODS = ("lora", "rslora", "lora+", "dora", "ia3", "houlsby", "pfeiffer", "parallel")
"""Methods that leave the backbone's weights as they are, so that an adapter's own tensors are all of it."""


class Start(NamedTuple):
    """The run that training goes on from."""

    section: str
    """Section of the configuration that names it."""
    run: str | None
    """None: training starts with a fresh adapter."""
    trust: bool


def wanted(config: RunConfig) -> Start:
    """The start that the section of the recipe names."""
    key = config.task.start
    if key is None:
        return Start("train", None, False)
    section = getattr(config, key)
    return Start(key, section.start, section.trust)


def folder(start: str) -> Path:
    """The run directory of a start; `starter/tools` is shipped."""
    return Path(starter.resolve(start)).expanduser()


def require(config: RunConfig) -> None:
    """Refuse a start that is not there, or is of another backbone or form.

    Raises:
        ConfigError: says what to write.
    """
    section, start, trusted = wanted(config)
    key = f"{section}.start"
    if start is None:
        return
    path = folder(start)
    if not (path / "config.yaml").is_file():
        cure = " Name a finished run, or leave it out; the folder of a merged model goes into model.id."
        raise ConfigError(f"{key}={start} is no run directory (no config.yaml).{run_directory.instead(path) or cure}")
    begun = run_directory.shipped_config(path, Trust(trusted, f"{section}.trust=true"))
    if not begun.task.writes_text:
        raise ConfigError(f"{key}={start}: recipe {begun.recipe} trains no model that answers. Name one of recipe sft.")
    exported.require_saved(path, begun)
    if others := files.read_json(path / "manifest.json").get("adopted", {}).get("beside", {}).get("other modules"):
        raise ConfigError(
            f"{key}={start} changes {', '.join(others)}, outside of the blocks, which no training goes on with. "
            f"Leave {key} out, which begins with a fresh adapter."
        )
    if config.adapter.method not in METHODS or begun.adapter.method not in METHODS:
        method = begun.adapter.method if begun.adapter.method not in METHODS else config.adapter.method
        raise ConfigError(
            f"{key}: adapter.method={method} changes the backbone itself when it starts. Write `workbench merge "
            f"{start} --out merged`, and model.id=merged in place of {key}."
        )
    mine, theirs = config.adapter.model_dump(mode="json"), begun.adapter.model_dump(mode="json")
    free = {"dropout", "rate_ratio"}  # how it trains, not what it is
    different = [name for name in mine if name not in free and mine[name] != theirs.get(name)]
    if different:
        name = different[0]
        words = json.dumps({name: value for name, value in theirs.items() if name not in free})
        raise ConfigError(
            f"{key}={start} has adapter.{name}={theirs.get(name)}, and this run {mine[name]}. Write adapter='{words}', "
            "or merge that run and write its folder as model.id."
        )
    for name in ("id", "revision", "sparsity", "new_tokens"):
        if getattr(config.model, name) != getattr(begun.model, name):
            raise ConfigError(
                f"{key}={start} is an adapter over model.{name}={getattr(begun.model, name)}, and this run has "
                f"{getattr(config.model, name)}. Write model.{name}={getattr(begun.model, name)}."
            )
    blocks = backbones.hub_config(config.model).get_text_config(decoder=True).num_hidden_layers
    # Blocks that never train get no adapter, so that there is no place for what that run learnt of them; bottlenecks
    # stand in all blocks, and are frozen there.
    if not isinstance(config.adapter, Bottleneck) and config.freeze.never(blocks) > begun.freeze.never(blocks):
        raise ConfigError(
            f"{key}={start} has an adapter in all but the first {begun.freeze.never(blocks)} blocks, and "
            f"freeze.policy={config.freeze.policy} leaves this run none in the first {config.freeze.never(blocks)}. "
            "Write section freeze as that run has it, or merge that run and write its folder as model.id."
        )


def load(config: RunConfig, backbone: PreTrainedModel) -> nn.Module:
    """A backbone under the adapter of the start, in its own form, which `require` found to be that of the run."""
    start = wanted(config).run
    assert start is not None
    return adapters.load(backbone, folder(start) / "adapter", dropout=config.adapter.noise)
