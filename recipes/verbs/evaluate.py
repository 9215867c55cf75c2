"""`evaluate`: the scores of a finished run's adapter on other rows, and settings that leave it as it was trained."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from workbench.errors import ConfigError
from workbench.evaluation.forward_passes import dealt_results
from workbench.recipes.single import streamed_rows
from workbench.recipes.task import ScoringOptions, implementation
from workbench.recipes.verbs.asked_config import asked_config
from workbench.runs import process_memory
from workbench.runs.ranks import joined
from workbench.runs.trust import Trust


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
