"""The settings with which verbs read a finished run; imports no torch, so that a mistake is answered at once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from workbench.config import RunConfig
from workbench.config.yaml_text import override
from workbench.errors import ConfigError
from workbench.runs import run_directory
from workbench.runs.trust import Trust
from workbench.schema import parse

_SEEN = ("size", "depth", "prepare", "augment")
"""Settings of pictures that decide what an adapter has seen."""
_HEARD = ("max_seconds", "channels", "augment")
"""Settings of recordings that decide what an adapter has heard."""
_JUDGING = ("masking", "rewards", "reinforce")
"""Sections of tasks that may say how a finished run is judged."""
_OF_TRAINING = (
    *("sweep", "search", "distill", "train", "regularise", "layer_drop", "token_drop", "grow", "optimizer", "schedule"),
    *("budget", "freeze", "average", "save", "distributed", "trackers"),
)
"""Sections that nothing reads once a run is over."""


def asked_config(run: Path, overrides: Sequence[str], *, verb: str, trust: bool) -> RunConfig:
    """The configuration of a run with overrides that leave what was trained as it is."""
    moved = [word for word in overrides if word.startswith("model.id=")]
    before = run_directory.shipped_config(run, Trust(trust), moved)
    # Devices share no weights here, so that settings may ask for what the layout of the training could not.
    changes = [word for word in overrides if word not in moved]
    values = override(before.model_dump(mode="json", exclude={"distributed"}), changes)
    config = parse(RunConfig, values, source="the command line")
    own = (*config.task.sections, *([config.task.name] if config.task.section else ()))
    decided = (*(name for name in own if name not in _JUDGING), *(config.over.sections if config.over else ()))
    trained = [name for name in ("model", "adapter", *decided) if name not in ("image", "audio", "duplicates")]
    changed = [name for name in trained if getattr(config, name) != getattr(before, name)]
    changed += [f"image.{name}" for name in _SEEN if getattr(config.image, name) != getattr(before.image, name)]
    changed += [f"audio.{name}" for name in _HEARD if getattr(config.audio, name) != getattr(before.audio, name)]
    seen = [each.data.format if each.media else None for each in (config, before)]
    changed += ["data.format"] if seen[0] != seen[1] else []
    if changed:
        raise ConfigError(
            f"{verb} cannot change {changed[0]}: the adapter was trained with it. Leave it out, or start a new run."
        )
    named = {word.partition("=")[0].partition(".")[0] for word in changes}
    if unread := [name for name in _OF_TRAINING if name in named]:
        raise ConfigError(f"{verb} trains nothing, and {unread[0]} is about training alone. Leave it out.")
    return config
