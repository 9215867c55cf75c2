"""Reasons not to start that are known before a weight is read: `check` and `run` refuse the same."""

from __future__ import annotations

import importlib.util

from transformers import PretrainedConfig

from workbench import adapters, backbones, budget
from workbench.adapters import Full
from workbench.config import RunConfig
from workbench.data import checks
from workbench.data.tokens import Splits
from workbench.errors import ConfigError


def require_runnable(config: RunConfig, data: Splits) -> list[str]:
    """Refuse a run that would fail, or would silently do something else than its configuration says.

    Returns:
        The names of the modules that get an adapter; none for full fine-tuning.

    Raises:
        WorkbenchError: says what to change.
    """
    checks.require_teaching(data)
    for name in config.trackers:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"trackers: {name} is not installed, so nothing would be sent there. "
                f"Leave it out, or run: pip install 'peft-workbench[{name}]'"
            )
    budget.require_longest_fits(config, data.train)
    model = backbones.skeleton(config.model, trainable=isinstance(config.adapter, Full))
    _require_positions(config, data, model.config)
    adapters.require_fit(model, config.adapter)
    return config.adapter.modules(model)


def longest_sequence(hub: PretrainedConfig) -> int | None:
    """Tokens that a backbone was made for, stretched rotary positions included; None where it names no limit."""
    text = hub.get_text_config()
    limit: int | None = getattr(text, "max_position_embeddings", None)
    rope = getattr(text, "rope_parameters", None) or {}
    if limit is None or not rope.get("factor"):
        return limit
    return max(limit, int(rope["factor"] * rope.get("original_max_position_embeddings", limit)))


def _require_positions(config: RunConfig, data: Splits, hub: PretrainedConfig) -> None:
    """Beyond its positions a backbone fails, or computes what it never learnt."""
    limit = longest_sequence(hub)
    for split in (data.train, data.held_out, data.test):
        if limit is None or split is None or split.lengths.max() <= limit:
            continue
        row = int(split.lengths.argmax())
        raise ConfigError(
            f"data.max_tokens: {split.place(row)} has {split.lengths[row]} tokens, but {config.model.id} was made for "
            f"at most {limit}. Write data.max_tokens={limit}, which cuts longer rows, or take another backbone."
        )
