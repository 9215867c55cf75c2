"""`workbench check`: what the model will see, which tokens carry loss, and every reason not to start."""

from __future__ import annotations

import importlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from transformers import PretrainedConfig

from workbench.adapters import anatomy
from workbench.adapters.target_modules import about_experts, about_targets
from workbench.adapters.weights import semi_structured
from workbench.config import RunConfig
from workbench.config.expansions import search_expansion, sweep_expansion
from workbench.config.sections.curriculum_config import CurriculumConfig
from workbench.data import resampling, unread_columns
from workbench.data.batching import Examples
from workbench.data.text.tokenized_set import TokenizedSet
from workbench.errors import ConfigError, WorkbenchError
from workbench.models import backbones
from workbench.recipes.inspection import Inspection, raw_text
from workbench.recipes.load import Recipe, load
from workbench.recipes.over import crossval_verbs, crossval_words, distill_verbs, fleet_training, search_checks, sweep
from workbench.recipes.over.crossval_verbs import CrossvalInspection
from workbench.recipes.over.sweep_tasks import require_members
from workbench.recipes.single import streamed_rows
from workbench.recipes.task import implementation
from workbench.recipes.tasks.classify.task import ClassInspection
from workbench.recipes.tasks.embed.task import EmbedInspection
from workbench.recipes.verbs import start_checks
from workbench.runs.ranks import ALONE, Ranks
from workbench.runs.run_directory import Run
from workbench.training import layer_and_token_drop, packing
from workbench.training.callbacks import Silent
from workbench.training.freezing.layer_map import stack
from workbench.training.sampling.row_orders import row_order

AnyInspection = Inspection | ClassInspection | CrossvalInspection | EmbedInspection


def check(recipe: Recipe, overrides: Sequence[str] = ()) -> AnyInspection:
    """What the model will see, and which tokens carry loss: everything that `run` does before it loads weights.

    Args:
        recipe: A configuration, a YAML file, or the name of a shipped recipe.
        overrides: `key=value` words on top of a file or name.

    Returns:
        Findings on the task: `data`, the rows of each split; `examples`, some of them as the model reads them; `steps`,
        the length of the run; `notes`, sentences on everything else.

    Raises:
        WorkbenchError: The run would fail, or would silently learn nothing.

    Examples:
        >>> import workbench
        >>> found = workbench.check("sft/quickstart", ["data.limit=40", "train.epochs=2"])
        >>> len(found.data.train), found.steps
        (40, 6)
        >>> place, pieces = found.examples[0]
        >>> [text for text, carries_loss in pieces if carries_loss]
        ['a man carrying a large goose under his arm<|endoftext|>']
    """
    config = backbones.with_arriving_weights(streamed_rows.local(load(recipe, overrides)))
    start_checks.require(config, Ranks(0, config.distributed.together))
    return _inspected(config)


def _reads(config: RunConfig) -> Collection[str] | None:
    """Columns that are read besides those of rows, such as folds; None: all are."""
    reads = config.task.reads(config)
    if reads is None or not config.crossvalidates:
        return reads
    return {*reads, *filter(None, (config.folds.group, config.folds.column, config.folds.time))}


def _inspected(config: RunConfig) -> AnyInspection:
    if config.over is not None and not config.over.adapters:  # a student that is yet to be made is there meanwhile
        student: AnyInspection = distill_verbs.with_student(config, _inspected)
        return student
    with unread_columns.noting() as unread:
        inspection, task = _looked_at(config), implementation(config)
    model = backbones.skeleton(inspection.config.model, task=task.head(inspection))
    data = inspection.config.data
    if isinstance(inspection, CrossvalInspection):
        train_N = max((split.train_N for split in inspection.data.folds.splits()), key=np.count_nonzero)
        rows: Examples = inspection.data.rows.subset(train_N)
    else:
        rows = inspection.data.train
    if not data.sources:  # which `_text` has mixed
        row_order(rows, inspection.config, inspection.steps, ALONE)
    ordered = [data.curriculum.in_words(), *_extremes(rows, data.curriculum)] if data.curriculum.by != "none" else []
    weight_N = rows.weights if isinstance(rows, TokenizedSet) else rows.supervised
    weighed = resampling.weights_in_words(weight_N) if data.weighs else []
    notes = [
        *inspection.notes,
        *raw_text(rows, inspection.config),
        *unread_columns.in_words(unread, _reads(config)),
        *_scored_sets(inspection),
        *data.select.in_words(),
        *weighed,
        *ordered,
        *([data.sampling.in_words()] if data.sampling.by != "all" else []),
        *inspection.config.regularise.in_words(),
        *inspection.config.layer_drop.in_words(),
        *layer_and_token_drop.always_computed(inspection.config, model),
        *inspection.config.token_drop.in_words(),
        *inspection.config.grow.in_words(sum(map(len, anatomy.blocks(model)))),
        *([semi_structured.sentence(model)] if inspection.config.model.sparsity is not None else ()),
        *filter(None, [about_experts(model, config.adapter), about_targets(model, config.adapter)]),
        *_shared(inspection, model.config),
    ]
    frozen = inspection.config.freeze.policy != "none"
    return replace(inspection, blocks=len(stack(model)) if frozen else None, notes=notes)


def _looked_at(config: RunConfig) -> AnyInspection:
    """Findings on the task, or on what a recipe over it does with it."""
    over = config.over
    if over is None:
        inspection: AnyInspection = implementation(config).inspect(config)
        return inspection
    if config.crossvalidates:
        return crossval_verbs.inspect(config)
    if over.inspects is not None:
        inspection = importlib.import_module(over.inspects).inspect(config)
        return inspection
    if not over.ships:
        inspections: dict[str, Inspection | ClassInspection] = {}
        mistakes: list[str] = []
        for trial in fleet_training.trials(config):
            own = streamed_rows.local(trial.config)
            try:
                inspections[trial.name] = implementation(own).inspect(own)
            except WorkbenchError as error:
                mistakes.append(f"fleet.members.{trial.name}: {error}")
        if mistakes:
            raise ConfigError("\n  ".join(mistakes))
        name, first = next(iter(inspections.items()))
        limit = config.fleet.at_once
        how = "as many at a time as memory holds" if limit == "auto" else f"{limit} at a time"
        ends = ", ".join(f"{each} {one.steps or '?'} steps" for each, one in list(inspections.items())[:8])
        more = ", ..." if len(inspections) > 8 else ""
        notes = [f"{len(inspections)} members, {how}: {ends}{more}. The first is shown: {name}.", *first.notes]
        return replace(first, notes=notes)
    return _at_the_ends(config) if over.own_clock else _first_member(config)


def _scored_sets(inspection: AnyInspection) -> Iterator[str]:
    splits = inspection.data._asdict()
    for name, title in {"held_out": "Held-out", "test": "Test"}.items():
        if (rows := splits.get(name)) is not None and rows.sources:
            yield f"{title} rows: {', '.join(f'{name} {count:,}' for name, count in rows.rows_by_source.items())}."


def _extremes(rows: Examples, curriculum: CurriculumConfig) -> list[str]:
    """Sentence on the easiest and the hardest row, where that is known before a run."""
    if curriculum.measured:
        return ["  A run begins with reading all rows to find it, a forward pass without gradients."]
    if curriculum.by == "self_paced":
        return []
    difficulty_N = rows.lengths if rows.difficulty is None else rows.difficulty
    ends = {"Lowest": int(difficulty_N.argmin()), "highest": int(difficulty_N.argmax())}
    return ["  " + ", ".join(f"{end} {difficulty_N[row]:g} ({rows.place(row)})" for end, row in ends.items()) + "."]


def _shared(inspection: AnyInspection, backbone: PretrainedConfig) -> list[str]:
    """Sentence on what all rows begin with, where a step computes that once."""
    if not isinstance(inspection, Inspection):
        return []
    why = packing.refusal(backbone, longest=int(inspection.data.train.lengths.max()), reads_packed=True)
    return packing.in_words(inspection.config, inspection.data.train, why=why)


def _first_member(config: RunConfig) -> Inspection | ClassInspection:
    """Findings on everything that the members of a sweep share, and their names."""
    shared, trials = sweep_expansion.shared(config), sweep_expansion.trials(config)
    inspection: Inspection | ClassInspection = implementation(shared).inspect(shared)
    require_members(shared, trials, inspection.data)
    if crossval_words.wanted(config):
        with TemporaryDirectory() as folder:
            scratch = Run(Path(folder), None, resumed=False)
            crossval_words.prepare(config, implementation(shared).begin(shared, scratch, Silent()))
    names = [trial.name for trial in trials]
    why = sweep.apart(config)
    how = "together in one bank" if why is None else f"one after another: {why}"
    shown = f"{', '.join(names[:8])}{', ...' if len(names) > 8 else ''}"
    return replace(inspection, notes=[f"{len(names)} members, {how}. The first is shown: {shown}.", *inspection.notes])


def _at_the_ends(config: RunConfig) -> Inspection | ClassInspection:
    """Findings on everything that the members of a search share, and what it will do."""
    shared, ends = search_expansion.shared(config), search_expansion.ends(config)
    inspection: Inspection | ClassInspection = implementation(shared).inspect(shared)
    require_members(shared, ends, inspection.data)
    search_checks.require_rungs(config, len(inspection.data.train), ends)
    search_checks.require_bank(config, ends)
    return replace(inspection, notes=[*search_checks.outlook(config, inspection.steps), *inspection.notes])
