"""Settings that do not go with folds, where every row is trained on, held out and scored in turn."""

from __future__ import annotations

from collections.abc import Iterator

from workbench.config.sections.basic_sections import DataConfig
from workbench.config.sections.cleaning_config import DUPLICATE_RULES
from workbench.config.sections.run_sections import RunSections


def mistakes(config: RunSections) -> Iterator[str]:
    """Contradictions between a cross-validation and the rest of a run, one sentence for each."""
    data = config.data
    if config.budget.timed:
        yield (
            "recipe=crossval has stages whose time is not known beforehand, so budget.time, energy and money cannot "
            "end it. Write train.steps or budget.tokens, which limit each of its adapters."
        )
    if data.sources:
        yield from _of_one_set(data)
    if config.average.method != "none":
        yield (
            f"average.method={config.average.method} would choose by the rows that the out-of-fold score is measured "
            "on. Leave average out."
        )
    repeats = [rule for rule in data.clean if rule in DUPLICATE_RULES]
    if repeats and not config.media:
        yield (
            f"data.clean={', '.join(repeats)}: recipe=crossval looks for duplicates itself, and knows their labels. "
            "Leave it out; duplicates.on_duplicate=keep_one does the same."
        )
    if data.select.by != "all":
        yield "recipe=crossval scores every row that it is given. Leave data.select out, and choose rows beforehand."
    if data.decontaminate.action != "off" and not (data.test is not None or data.decontaminate.against):
        yield (
            "data.decontaminate has nothing to compare: recipe crossval holds no rows out, and names no data.test. "
            "Name evaluation files in data.decontaminate.against."
        )
    if idle := idle_stages(config):
        yield f"folds.keep names {', '.join(idle)}, which this run does not have. Leave it out, or ask for the stage."
    yield from _of_nested(config)
    yield from _of_choice(config)


def _of_nested(config: RunSections) -> Iterator[str]:
    """Where outer folds cannot be dealt, or would be dealt twice."""
    folds, outer = config.folds, config.data.fold
    apart = "folds.nested" if folds.nested is not None else "data.fold" if outer.of is not None else None
    if apart is None:
        return
    if folds.nested is not None and outer.of is not None:
        yield "folds.nested deals the outer folds of which data.fold names one. Leave one of them out."
    for key, column in (("folds.column", folds.column), ("folds.time", folds.time)):
        if column is not None:
            cure = "data.test=FILE with the latest rows" if key == "folds.time" else f"folds.group={column} alone"
            yield (
                f"{apart} deals outer folds by itself, and {key} says which rows are in which. Write {cure}, or leave "
                f"{apart} out."
            )
    if given := [key for key in type(outer).model_fields if key not in ("of", "number") and outer.differs(key)]:
        yield (
            f"data.fold.{given[0]} is not read with recipe=crossval, where folds and duplicates say which rows stand "
            "together. Leave it out."
        )


def idle_stages(config: RunSections) -> list[str]:
    """Stages that `folds.keep` names and that do not run."""
    runs = {"pseudo_label": config.pseudo_label.unlabelled is not None, "tta": bool(config.tta.views)}
    if config.crossvalidates:
        judge, classes = config.evaluate.judge, config.classes.kind != "number"
        runs |= {
            "decision": config.ensemble.decide and classes and judge is not None and judge.of_labels,
            "calibration": config.ensemble.calibrate and classes,
            "drop_suspects": config.data.drop_suspects,
            "correction": config.correction.is_on,
            "consensus": config.ensemble.consensus,
        }
    return [name for name in config.folds.keep if not runs.get(name.partition(" ")[0], False)]


def _of_one_set(data: DataConfig) -> Iterator[str]:
    """Where the sources of a cross-validation would not be one set of rows."""
    uneven = [
        f"data.sources.{name}.{key}"
        for name, source in data.sources.items()
        for key in ("weight", "passes")
        if source.differs(key)
    ]
    if uneven := [*uneven, *(["data.mix"] if data.differs("mix") else [])]:
        yield (
            f"{', '.join(uneven)}: recipe=crossval deals the rows of all sources into folds as one set, and draws each "
            "as often as any other. Leave it out; data.columns={weight: NAME} says how much single rows count."
        )


def _of_choice(config: RunSections) -> Iterator[str]:
    """Where the rows that a fold is scored on would also choose what is scored."""
    if reason := config.pseudo_label.refusal(config.classes.kind):
        yield reason
    if config.folds.time is not None:
        later = {
            "data.drop_suspects": config.data.drop_suspects,
            "correction": config.correction.is_on,
            "pseudo_label": config.differs("pseudo_label"),
        }
        for key in (key for key, on in later.items() if on):
            yield f"folds.time trains on the past alone, and {key} would look at later rows. Leave one of them out."
    if reason := config.correction.refusal(config.folds):
        yield reason
    if config.data.drop_suspects and config.classes.kind in ("number", "several"):
        yield (
            f"data.drop_suspects is for classes.kind one and pair, not {config.classes.kind}: only of a single class "
            "is it known how sure a model is that it is another. Leave it out."
        )
    if config.data.differs("held_out"):
        yield "recipe=crossval validates on folds; folds.k says how many. Leave data.held_out out, or write 0.05."
    if config.save.ship == "best" or config.evaluate.patience is not None:
        yield (
            "save.ship=best and evaluate.patience would choose steps by the rows that the out-of-fold score is "
            "measured on, and flatter it. Write save.ship=last, evaluate.patience=null and train.epochs."
        )
