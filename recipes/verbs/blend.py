"""`workbench blend`: several cross-validations over the same folds as one run."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from workbench.errors import ConfigError
from workbench.recipes.over import blend
from workbench.recipes.over.blend import TITLES, Blended
from workbench.recipes.verbs.asked_config import asked_config
from workbench.runs import run_directory
from workbench.runs.trust import Trust
from workbench.training.callbacks import SILENT, Callback

OVERRIDES = ("evaluate.metric", "evaluate.better")


def blend_runs(
    runs: Sequence[Path | str],
    overrides: Sequence[str] = (),
    *,
    out: Path | str,
    way: str = "auto",
    trust: bool = False,
    callback: Callback = SILENT,
) -> Blended:
    """Write several cross-validations over the same folds as one run, which answers with all of them.

    Args:
        runs: Run directories of recipe crossval, over any backbones, of texts, pictures or both.
        overrides: `evaluate.metric=NAME`, by which weights are chosen and judged, and `evaluate.better`.
        out: Run directory to write; it must not exist.
        way: How parts become one answer: mean, greedy, convex, stacking, or auto, which keeps what is better out of
            fold than the best part and than equal weights.
        trust: Execute the Python code that the runs' config.yaml name.
        callback: Shows the stages.

    Returns:
        The blend that was `kept`, its `scores`, and what each of the `parts` is worth.

    Raises:
        ConfigError: The runs differ in rows, folds or classes, or are no finished cross-validations of labels.

    Examples:
        >>> import workbench
        >>> workbench.blend(["runs/short"], out="runs/both")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
            ...
        workbench.errors.ConfigError: blend takes two runs or more, over the same folds...
    """
    path = Path(out)
    if way != "auto" and way not in TITLES:
        raise ConfigError(f"--way {way}: expected auto, {', '.join(TITLES)}.")
    if path.exists():
        raise ConfigError(f"{path} exists already. Name another folder, or delete it first.")
    if other := [word for word in overrides if word.partition("=")[0] not in OVERRIDES]:
        raise ConfigError(f"{other[0]}: a blend takes its parts as they are, and {' and '.join(OVERRIDES)} alone.")
    parts = blend.read_parts([Path(run) for run in runs], trust=Trust(trust))
    config = asked_config(parts[0].run, overrides, verb="blend", trust=trust)
    config = config.model_copy(update={"folds": config.folds.model_copy(update={"refit": False})})
    run = run_directory.start(path, config, resume=False)
    try:
        return blend.write(run, config, parts, way=way, callback=callback)
    except BaseException:
        shutil.rmtree(path)
        raise
    finally:
        run.close()
