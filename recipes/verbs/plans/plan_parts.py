"""Outcome of the dry run of a training, of any recipe."""

from __future__ import annotations

import hashlib
import importlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

from transformers import PretrainedConfig

from workbench.adapters import Full, anatomy
from workbench.config import RunConfig
from workbench.config.model_heads import ModelHead
from workbench.data.batching import Examples, first_rows
from workbench.errors import ConfigError
from workbench.losses import chunked_loss
from workbench.models import backbones, model_sizes
from workbench.models.backbones import Backbone, Loader
from workbench.models.model_sizes import AdapterSize
from workbench.planning import depth, step_time
from workbench.planning.depth import Depths
from workbench.planning.dry_run import OPTIMIZER, DryRun
from workbench.planning.dry_trainings import Training
from workbench.planning.fake_tensors import BlueprintLoader
from workbench.planning.sharded_memory import Contents, contents_of
from workbench.planning.step_time import Measured, Small, StepWork, Subject
from workbench.runs import files, process_memory, run_directory
from workbench.runs.run_directory import Run
from workbench.training.freezing import freezer as freezing
from workbench.training.freezing.freezer import Freezer


def libraries() -> int:
    """Bytes of Python and of all that a run imports until its report is written, on a CPU; imports what is missing."""
    import workbench.evaluation.training_dynamics
    import workbench.report.pages  # noqa: F401

    importlib.import_module("sklearn.metrics")
    return process_memory.settled()


class DryRunParts(NamedTuple):
    """Outcome of a dry run."""

    backbone: Backbone
    size: AdapterSize
    training: Training
    dry_run: DryRun
    work: StepWork
    contents: Contents


class Carried(NamedTuple):
    """A dry run that was carried out."""

    backbone: Backbone
    training: Training
    dry_run: DryRun
    work: StepWork


MakeTraining = Callable[[RunConfig, Run, Loader], Training]
"""Makes the training of a run, with its own rows, over a backbone that the loader gives."""
_SIZES: dict[str, AdapterSize] = {}
_DEPTHS: dict[str, Depths | None] = {}


class CarryOut(Protocol):
    """Carries out the steps of a training over a backbone that the loader gives."""

    def __call__(
        self,
        own: RunConfig,
        run: Run,
        loader: BlueprintLoader,
        *,
        decisive: frozenset[str] | None = None,
        evaluates: bool = True,
    ) -> Carried:
        """Its outcome. `decisive`: the micro-batches that decide. `evaluates`: whether evaluations are carried out."""


_EVALUATED: dict[str, int] = {}
"""Bytes of evaluations of the same rows: dry runs of one plan differ in what is kept for the backward pass, and in
micro-batches."""


def parts(
    config: RunConfig,
    task: ModelHead,
    run: Run,
    carry_out: CarryOut,
    make: MakeTraining,
    *,
    loader: BlueprintLoader,
    timed: RunConfig | None = None,
    lengths: bytes | None = None,
) -> DryRunParts:
    """All that is known after a dry run, of the whole backbone or, where its blocks are alike, of few.

    Args:
        lengths: Of the rows that are evaluated; None: every dry run evaluates them.
        timed: The run of one of the members, where there are several.
    """
    few = depths(config, task)
    found = None if few is None else _multiplied(config, task, few, carry_out, lengths)
    if found is None:
        found = _known(config, task, carry_out(timed or config, run, loader))
    measured = measure(timed or config, found, make)
    return found._replace(
        work=replace(found.work, weight_bytes=_read_bytes(found.backbone, found.contents), measure=measured)
    )


def _known(config: RunConfig, task: ModelHead, done: Carried) -> DryRunParts:
    size = _size(config, task, below=config.freeze.never(len(done.training.freezer.blocks)))
    contents = contents_of(done.training, optimizer=done.dry_run.at_peak.get(OPTIMIZER, 0))
    return DryRunParts(done.backbone, size, done.training, done.dry_run, done.work, contents)


def _size(config: RunConfig, task: ModelHead, *, below: int) -> AdapterSize:
    """Size of the adapter, found once: dry runs of one plan differ in other settings, and in how weights are stored."""
    model = config.model.model_copy(update={"weights": "auto"})
    key = f"{model!r} {config.adapter!r} {task!r} {below}"
    if key not in _SIZES:
        _SIZES[key] = model_sizes.predict(config.model, config.adapter, task=task, below=below)
    return _SIZES[key]


def _multiplied(
    config: RunConfig, task: ModelHead, few: Depths, carry_out: CarryOut, lengths: bytes | None
) -> DryRunParts | None:
    """Outcome of dry runs of two depths, multiplied; None where they do not say what the whole backbone takes."""
    hub, done, trainable = backbones.hub_config(config.model), list[DryRunParts](), list[int]()
    train = config.train.model_copy(update={"checkpointing": False, "offload_activations": "auto"})
    batch = config.batch.model_copy(update={"tokens_per_device": "auto"})
    same = config.model_copy(update={"train": train, "batch": batch})
    rows = None if lengths is None else hashlib.sha256(lengths).hexdigest()
    key = f"{same!r} {chunked_loss.planned_memory()} {rows}"
    evaluates = rows is None or key not in _EVALUATED
    for blocks in (few.shallow, few.deeper):
        with smaller(config, hub, Small(blocks)) as (own, run):
            decisive = done[0].dry_run.decisive if done else None
            carried = carry_out(own, run, BlueprintLoader(), decisive=decisive, evaluates=evaluates)
            done.append(_known(config, task, carried))
            cut = config.distributed.tensor > 1  # of which a device has a part
            whole = model_sizes.predict(own.model, own.adapter, task=task, below=0).trainable if cut else None
            trainable.append(done[-1].contents.trainable if whole is None else whole)
    less, more = done
    contents = depth.contents(less.contents, more.contents, few.times)
    if contents is None or depth.further(trainable[0], trainable[1], few.times) != more.size.trainable:
        return None  # some blocks alone have adapters
    every = depth.dry_run(less.dry_run, more.dry_run, few.times)
    if evaluates:
        _EVALUATED[key] = every.evaluation
    return more._replace(
        dry_run=replace(every, evaluation=_EVALUATED[key]),
        contents=contents,
        work=replace(more.work, forward=depth.further(less.work.forward, more.work.forward, few.times)),
    )


def depths(config: RunConfig, task: ModelHead) -> Depths | None:
    """How deep two backbones are that say what the run takes; None: the whole one has to be carried out."""
    multiple = depth.multiple_of(config)
    if multiple is None:
        return None
    key = f"{config.model!r} {isinstance(config.adapter, Full)} {task!r} {multiple}"
    if key not in _DEPTHS:
        _DEPTHS[key] = _depths(config, task, multiple)
    return _DEPTHS[key]


def _depths(config: RunConfig, task: ModelHead, multiple: int) -> Depths | None:
    skeleton = partial(backbones.skeleton, task=task, trainable=isinstance(config.adapter, Full))
    whole, hub = skeleton(config.model), backbones.hub_config(config.model)
    kinds = depth.kinds(whole)
    if (found := depth.depths(kinds, multiple=multiple)) is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        few = skeleton(step_time.smaller(config.model, hub, Small(found.deeper), Path(folder)))
    same = depth.kinds(few) == kinds[: found.deeper] and depth.outside(few) == depth.outside(whole)
    return found if same else None


def one_after_another(config: RunConfig, reason: str) -> ConfigError:
    """The refusal of members that no bank holds, and how one of them is planned."""
    if config.crossvalidates:
        alone = f"recipe=classify and data.held_out={1 / config.folds.k:.2g}, and leave folds and duplicates out"
    else:
        alone = f"recipe={config.task.name} and the values of a member, and leave {config.recipe} out"
    return ConfigError(
        f"recipe={config.recipe}: its members train one after another ({reason}). Plan one of them: in a copy of the "
        f"recipe, write {alone}."
    )


def _read_bytes(backbone: Backbone, held: Contents) -> int:
    """Bytes of weights that every micro-batch reads: all but an embedding that is no output head."""
    if not anatomy.reads_tokens(backbone.model):
        return held.weight_bytes
    (embedding,) = backbone.model.get_input_embeddings().parameters(recurse=False)
    head = backbone.model.get_output_embeddings()
    is_head = head is not None and any(each is embedding for each in head.parameters())
    return held.weight_bytes - (0 if is_head else embedding.nbytes)


def attached(backbone: Backbone, config: RunConfig, train: Examples, new_token_ids: Sequence[int] = ()) -> Freezer:
    """The backbone with the adapter of the run, fresh."""
    sample = partial(first_rows, train, seed=config.seed)
    config = config.model_copy(update={"adapter": config.adapter.planned})
    return freezing.attach(backbone.model, config, seed=config.seed, new_token_ids=new_token_ids, sample=sample)


def measure(config: RunConfig, found: DryRunParts, make: MakeTraining) -> step_time.Measure:
    """Times small models of the kind of the backbone, when it is asked to."""
    hub = backbones.hub_config(config.model)
    subject = Subject(
        depth=step_time.depth(hub),
        narrower=step_time.narrowing(hub, parts=config.distributed.tensor),
        parameters=found.size.total,
        trainable=found.contents.trainable,
        flops=found.dry_run.flops_per_token * found.dry_run.padded_tokens,
        dtype=found.backbone.compute,
        packed=found.backbone.weights in backbones.QUANTISED,
    )

    @contextmanager
    def build(small: Small) -> Iterator[Training]:
        with smaller(config, hub, small) as (own, run):  # a distilled student's folder is gone by then
            yield make(own, run, BlueprintLoader())

    def timed(clock: Callable[[], float], seconds: float) -> Measured:
        return step_time.measure(build, subject, clock=clock, seconds=seconds)

    return timed


@contextmanager
def smaller(config: RunConfig, hub: PretrainedConfig, small: Small) -> Iterator[tuple[RunConfig, Run]]:
    """The same run, never begun, over a backbone that is cut down."""
    with tempfile.TemporaryDirectory() as folder:
        model = step_time.smaller(config.model, hub, small, Path(folder) / "model")
        own = config.model_copy(update={"model": model, "trackers": ()})
        with planned_run(own, Path(folder)) as run:
            yield own, run


@contextmanager
def planned_run(config: RunConfig, folder: Path) -> Iterator[Run]:
    """A run directory in `folder` for a training that is never begun, and before which nothing is scored."""
    run = run_directory.start(folder / "run", config, resume=False)
    files.write_json(run.path / "before.json", {})
    try:
        yield run
    finally:
        run.close()
