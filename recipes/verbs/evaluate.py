"""`evaluate`: the scores of a finished run's adapter on other rows, and settings that leave it as it was trained."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from workbench.config import RunConfig
from workbench.config.yaml_text import override
from workbench.errors import ConfigError
from workbench.evaluation.forward_passes import dealt_results
from workbench.recipes.single import streamed_rows
from workbench.recipes.task import ScoringOptions, implementation
from workbench.runs import process_memory, run_directory
from workbench.runs.ranks import joined
from workbench.runs.trust import Trust
from workbench.schema import parse

_SEEN = ("size", "depth", "prepare", "augment")
"""Settings of pictures that decide what an adapter has seen."""
_JUDGING = ("masking", "rewards", "reinforce")
"""Sections of tasks that may say how a finished run is judged."""
_OF_TRAINING = (
    *("sweep", "search", "distill", "train", "regularise", "layer_drop", "token_drop", "grow", "optimizer", "schedule"),
    *("budget", "freeze", "average", "save", "distributed", "trackers"),
)
"""Sections that nothing reads once a run is over."""


def evaluate(run: Path | str, overrides: Sequence[str] = (), *, trust: bool = False) -> dict[str, float]:
    """Score a finished run again, from what it saved.

    Processes that were started together read a share of the rows each, and return the same scores.

    Args:
        run: A run directory.
        overrides: `key=value` words of sections data and evaluate. `data.test=FILE` names the rows to score; without
            it the held-out ones are. `model.id=FOLDER` where the backbone has moved since.
        trust: Execute the Python code that the run's config.yaml names.

    Returns:
        Scores by name, such as `loss` in nats per supervised token.

    Raises:
        ConfigError: A setting would change what was trained.

    Examples:
        >>> import workbench
        >>> scores = workbench.evaluate("runs/short")
        >>> sorted(scores)
        ['loss', 'perplexity', 'token_accuracy']
    """
    process_memory.keep()
    run, ranks = Path(run), joined()
    config, scoring = asked_config(run, overrides, verb="evaluate", trust=trust), dealt_results(ranks)
    if scoring is not None and (reason := config.task.one_device_scores):
        raise ConfigError(f"evaluate: a run of recipe {config.recipe} {reason}. Leave --devices out.")
    if config.data.test is None and config.over is not None and config.over.folds:
        raise ConfigError(
            "evaluate scores the adapters of a cross-validation on other rows: name them, data.test=FILE. "
            f"Out-of-fold scores stand in {run}/scores.json."
        )
    if config.data.test is None:
        config = streamed_rows.local(config, ranks)
    return implementation(config).evaluate(run, config, ScoringOptions(scoring, Trust(trust)))


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
    trained = [name for name in ("model", "adapter", *decided) if name not in ("image", "duplicates")]
    changed = [name for name in trained if getattr(config, name) != getattr(before, name)]
    changed += [f"image.{name}" for name in _SEEN if getattr(config.image, name) != getattr(before.image, name)]
    changed += ["data.format"] if config.reads_pictures != before.reads_pictures else []
    if changed:
        raise ConfigError(
            f"{verb} cannot change {changed[0]}: the adapter was trained with it. Leave it out, or start a new run."
        )
    named = {word.partition("=")[0].partition(".")[0] for word in changes}
    if unread := [name for name in _OF_TRAINING if name in named]:
        raise ConfigError(f"{verb} trains nothing, and {unread[0]} is about training alone. Leave it out.")
    return config
