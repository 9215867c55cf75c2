"""`run --each KEY=[VALUE, VALUE]`: a run for each value, one after another, and all of them side by side."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from workbench.config.expansions.member_runs import folder_name
from workbench.config.yaml_text import load_yaml
from workbench.errors import ConfigError
from workbench.recipes.load import Recipe, load


def run_each(
    recipe: Recipe,
    each: str,
    overrides: Sequence[str] = (),
    *,
    out: Path | str,
    resume: bool = False,
    quiet: bool = False,
    ended: Callable[[Path], object] = lambda run: None,
) -> list[Path]:
    """Run a recipe once for each value of a key, whatever key it is, one after another.

    Members of a sweep share a backbone and its rows, and these share nothing: sizes of a student, models, data.

    Args:
        recipe: A YAML file, or the name of a shipped recipe.
        each: The key and its values: `distill.student.layers=[important-25%, important-50%]`.
        overrides: `key=value` words on top of a file or name.
        out: A folder for the runs, named after their values.
        resume: Continue the runs there, and begin those that are not.
        quiet: Draw no progress.
        ended: Is given each run directory.

    Returns:
        The run directories, for `workbench.compare`.

    Raises:
        WorkbenchError: A value is wrong, before anything runs; or a run fails.

    Examples:
        >>> import workbench
        >>> words = ["data.train=starter/arithmetic_start.jsonl", "data.held_out=0.2", "evaluate.answers=0"]
        >>> words += ["train.steps=2"]
        >>> runs = workbench.run_each("sft/quickstart", "adapter.rank=[2, 4]", words, out="ranks", quiet=True)
        >>> [run.name for run in runs]
        ['rank=2', 'rank=4']
    """
    import workbench

    key, values = _values(each)
    configs = {  # mistakes in any come first
        folder_name({key: value}): load(recipe, [*overrides, f"{key}={json.dumps(value)}"]) for value in values
    }
    runs = []
    for name, config in configs.items():
        folder = Path(out) / name
        runs.append(workbench.run(config, out=folder, resume=resume and folder.exists(), quiet=quiet))
        ended(runs[-1])
    return runs


def _values(each: str) -> tuple[str, list[Any]]:
    """The key, and the values that it takes."""
    key, _, text = each.partition("=")
    values = load_yaml(text) if key and text else None
    if not isinstance(values, list) or len(values) < 2 or len({json.dumps(value) for value in values}) < len(values):
        raise ConfigError(
            f"--each {each}: write a key and two different values or more, such as "
            "--each 'distill.student.layers=[important-25%, important-50%]'."
        )
    return key, values
