"""The adapters of a cross-validation: what each learns, how rounds of them train, and what they predict.

Legend: M adapters, N labelled rows, T test rows, U unlabelled rows, C outputs (classes, or 1 for a number).
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors import numpy as safetensors
from torch import from_numpy

from workbench import adapters
from workbench.adapters import Full, anatomy
from workbench.adapters.banks import bank
from workbench.adapters.banks.bank import Bank
from workbench.config import RunConfig
from workbench.crossval.ensembles import Mask
from workbench.data.batching import first_rows
from workbench.data.folds.stratified_folds import FoldAssignment, Split
from workbench.data.labelled.class_sampling import balanced
from workbench.data.labelled.fold_data import FoldData
from workbench.data.labelled.labelled_data import LabelledSet
from workbench.data.labelled.labels import Floats, Labels
from workbench.data.labelled.records import RowReader
from workbench.errors import TrainingError
from workbench.evaluation import classification_scores
from workbench.evaluation.forward_passes import ResultStore
from workbench.losses.class_losses import criterion
from workbench.losses.label_losses import LabelTap, class_losses
from workbench.models import backbones, classifier, model_sizes
from workbench.models.backbones import Backbone, Loader
from workbench.models.classifier import Classifier
from workbench.runs import files
from workbench.runs.ranks import ALONE
from workbench.runs.run_directory import Run
from workbench.runs.trust import Trust
from workbench.training import bank_trainer, capacity
from workbench.training.adapter_trainer import TrainTask
from workbench.training.bank_trainer import BankTrainer
from workbench.training.callbacks import BankProgress, Callback
from workbench.training.distributed import data_parallel
from workbench.training.distributed.placement import WHOLE, Placement, Reading
from workbench.training.freezing import freezer as freezing
from workbench.training.freezing.prefix_cache import PrefixCache, reading
from workbench.training.signal import TrainingSignal
from workbench.training.trainer import Trainer

OUTPUTS = "outputs.safetensors"
"""File of the outputs of a round's adapters."""


class FoldAdapter(NamedTuple):
    """One adapter of a cross-validation: it trains on all folds of a repeat but one."""

    split: Split
    seed: int
    """Counts the adapters of a fold."""
    also: int | None = None
    """Another fold that it does not train on."""
    passes: float = 1.0
    """Times `train.epochs`: an adapter that is to train without some rows takes as many steps as with them."""

    @property
    def name(self) -> str:
        """Name of its folder."""
        folds = str(self.split.fold) if self.also is None else f"{self.split.fold}-{self.also}"
        return f"repeat-{self.split.repeat}-fold-{folds}-seed-{self.seed}"

    def without(self, dropped_N: NDArray[np.bool_]) -> FoldAdapter:
        """The adapter that takes as many steps on the other rows; it is validated on the same ones."""
        kept_N = self.split.train_N & ~dropped_N
        passes = self.passes * float(self.split.train_N.sum() / kept_N.sum())
        return self._replace(split=self.split._replace(train_N=kept_N), passes=passes)


@dataclass(frozen=True)
class FoldTask:
    """Training rows and settings of one fold's adapter."""

    name: str
    seed: int
    """Seed of its initial values and of the order of its rows."""
    train: LabelledSet
    validation: LabelledSet | None
    """Rows whose loss is watched; they choose nothing."""
    passes: float = 1.0
    """Times `train.epochs`."""

    def config(self, config: RunConfig) -> RunConfig:
        """The run's configuration with the settings of this task."""
        every = None if self.validation is None else config.evaluate.every
        own: dict[str, Any] = {"seed": self.seed, "evaluate": config.evaluate.model_copy(update={"every": every})}
        if self.passes != 1 and (config.train.epochs is not None or config.budget.unlimited):
            own["train"] = config.train.model_copy(update={"epochs": self.passes * (config.train.epochs or 1)})
        return config.model_copy(update=own)


class SavedBank(NamedTuple):
    """Saved adapters, loaded over their backbone."""

    bank: Bank
    backbone: Backbone
    reading: Reading


@dataclass(frozen=True)
class FoldContext:
    """Model, data and settings that the adapters of all folds share."""

    config: RunConfig
    labels: Labels
    reader: RowReader
    rows: Sequence[LabelledSet] = ()
    """All that the run reads."""
    placement: Placement = WHOLE
    """The processes that share the adapters, and what each holds of the backbone."""
    kept: PrefixCache = field(default_factory=PrefixCache)
    """Outputs of the frozen blocks, kept across rounds."""
    scored: ResultStore | None = None
    """Outputs of adapters so far, where scoring may be interrupted."""
    loader: Loader = backbones.load
    trust: Trust = field(default_factory=Trust)
    """Whether code that the run directories of a blend's parts name is executed."""
    banks: dict[tuple[Path, ...], SavedBank] | None = None
    """Saved adapters by their folders, where they are kept from one question to the next."""

    def backbone(self) -> Backbone:
        """Loaded, with a fresh head."""
        return self.loader(
            self.config.model,
            self.reader.tokenizer,
            task=classifier.task(self.labels, seed=self.config.seed),
            trainable=isinstance(self.config.adapter, Full),
            waiting=self.placement.waiting,
        )

    def saved(self, folders: Sequence[Path]) -> SavedBank:
        """Adapters of these folders in one bank."""
        saved_bank = (self.banks or {}).get(tuple(folders))
        if saved_bank is None:
            backbone = self.backbone()
            loaded = bank.load(backbone.model, folders)
            saved_bank = SavedBank(loaded, backbone, self.placement.reading(loaded.model))
            if self.banks is not None:
                self.banks[tuple(folders)] = saved_bank
        return saved_bank


def fold_adapters(folds: FoldAssignment, *, seeds: int) -> list[FoldAdapter]:
    """Every adapter of a cross-validation: fold by fold, the seeds of a fold together."""
    return [FoldAdapter(split, seed) for split in folds.splits() for seed in range(seeds)]


def fold_task(adapter: FoldAdapter, data: FoldData, more: LabelledSet | None, *, seed: int) -> FoldTask:
    """The training task of an adapter: the rows of its folds, and rows that are added to them.

    Args:
        seed: Of the run.
    """
    own = data.training(adapter.split)
    drawn = np.random.SeedSequence([seed, adapter.split.repeat, adapter.split.fold, adapter.seed]).generate_state(1)[0]
    train = own if more is None else own.concatenated(more)
    return FoldTask(
        adapter.name, int(drawn) % 2**31, train, data.rows.subset(adapter.split.validation_N), adapter.passes
    )


def train(context: FoldContext, run: Run, fold_tasks: Sequence[FoldTask], callback: Callback) -> None:
    """Train each task and save its adapter in `run`/NAME/adapter; finished adapters are not trained again.

    Several processes train a part of the tasks each, and wait for the others; or where they share weights, all.

    Raises:
        TrainingError: the loss of one exploded: the cross-validation would lack a fold.
        Stopped: the callback asked for it; every adapter has a checkpoint.
    """
    places = [run.home / each.name / "adapter" for each in fold_tasks]
    dealt = context.placement.dealt
    if not all(place.exists() for place in dealt.share(places)):
        mine = dealt.share(fold_tasks)
        reason = (
            "folds.together=false asks for it"
            if not context.config.folds.together
            else bank_trainer.refusal(context.config)
        )
        if reason is None:
            _together(context, run, mine, callback)
        else:
            callback.say(f"One after another over the same backbone: {reason}.")
            _apart(context, run, mine, callback)
    data_parallel.wait_for_ranks(lambda: all(place.exists() for place in places), callback)


def outputs(
    context: FoldContext, folders: Sequence[Path], wanted: Sequence[Sequence[LabelledSet]]
) -> list[list[Floats]]:
    """Outputs (N, C) of each saved adapter for each set of rows that is asked of it.

    Args:
        folders: Of adapters, each with its reader and classes.json.
        wanted: Sets of rows for each adapter.
    """
    placement = context.placement
    dealt = ALONE if placement.cuts_weights else placement.ranks
    mine = dealt.share(list(zip(folders, wanted, strict=True)))
    return dealt.collected(_shard_of_outputs(context, mine) if mine else [])


def _shard_of_outputs(context: FoldContext, asked: Sequence[tuple[Path, Sequence[LabelledSet]]]) -> list[list[Floats]]:
    """Outputs of the adapters that this process asks."""

    def answer(model: Classifier, folder: Path, sets: Sequence[LabelledSet]) -> list[Floats]:
        name = "/".join(folder.parts[-3:-1])  # round-0/repeat-0-fold-1-seed-0
        scoring = None if context.scored is None else context.scored.by(name)
        with reading(context.kept, model.backbone):
            return [
                classification_scores.predict_outputs(model.model, model.outputs, rows, scoring=scoring)
                for rows in sets
            ]

    answers = []
    if bank.refusal(context.config.adapter) is not None:
        for folder, sets in asked:
            model = classifier.load(folder.parent, context.config, waiting=context.placement.waiting)
            answers.append(context.placement.reading(model.model)(partial(answer, model, folder, sets)))
        return answers
    together, backbone, read_by = context.saved([folder for folder, _ in asked])

    def answer_as(member: str, folder: Path, sets: Sequence[LabelledSet]) -> list[Floats]:
        with together.only(member):
            model = classifier.classification_model(together.model, backbone.model, context.reader, context.labels)
            return answer(model, folder, sets)

    members = zip(together.members, asked, strict=True)
    return [read_by(partial(answer_as, member, folder, sets)) for member, (folder, sets) in members]


class FoldBank(NamedTuple):
    """All folds' adapters together."""

    trainer: BankTrainer
    model: Classifier
    train_tasks: Sequence[TrainTask]
    progress: BankProgress


def fold_bank(context: FoldContext, run: Run, fold_tasks: Sequence[FoldTask], callback: Callback) -> FoldBank:
    """The tasks in one bank, training not begun."""
    backbone = context.backbone()
    callback.say(model_sizes.storage_summary(backbone, context.config.adapter))
    together, freezer = freezing.attach_bank(
        backbone.model,
        context.config,
        [context.config.adapter] * len(fold_tasks),
        seeds=[each.seed for each in fold_tasks],
    )
    run.note(model=model_sizes.member_facts(context.config, backbone, together, together.members[0]))
    with together.only(together.members[0]):
        model = classifier.classification_model(together.model, backbone.model, context.reader, context.labels)
    train_tasks = [
        _train_task(context.placement.own(run, each.name), context.config, each, model, partial(together.only, member))
        for each, member in zip(fold_tasks, together.members, strict=True)
    ]
    names = {member: each.name for each, member in zip(fold_tasks, together.members, strict=True)}
    progress = BankProgress(callback, names)
    tokens = max(
        capacity.tokens_per_device(
            each.config,
            each.train,
            backbone.model.device,
            width=anatomy.hidden_size(backbone.model.config),
            members=len(train_tasks),
            compute=backbone.compute,
        )
        for each in train_tasks
    )
    trainer = BankTrainer(
        together,
        train_tasks,
        freezer=freezer,
        rows=context.rows,
        kept=context.kept,
        objectives=[criterion(context.config.classes, from_numpy(each.train.targets_NC)) for each in fold_tasks],
        predict=model.outputs,
        compute=backbone.compute,
        tokens=tokens,
        callback=progress,
        label_losses=class_losses(context.labels.kind),
        reads_packed=model.reads_packed(context.config.adapter),
    )
    return FoldBank(trainer, model, train_tasks, progress)


def _together(context: FoldContext, run: Run, fold_tasks: Sequence[FoldTask], callback: Callback) -> None:
    fit, model, train_tasks, progress = fold_bank(context, run, fold_tasks, callback)
    try:
        fit.work()
    finally:
        progress.flush()
    from workbench.evaluation import training_dynamics  # with pandas, 0.2 s that the first step need not wait for

    for task, error in zip(train_tasks, (each.error for each in fit.members.values()), strict=True):
        if error is not None:
            raise TrainingError(f"{task.run.path.name}: {error}")
    run.note(batch=fit.batch_facts(next(iter(fit.members.values()))))
    for task, member in zip(train_tasks, fit.members, strict=True):
        if member in fit.visits:
            training_dynamics.write(task.run.path, fit.visits[member].visits(), task.train)
        with fit.final_values(member):
            if task.run.ranks.first:
                classifier.save(model, task.run.adapter, adapter=partial(fit.bank.save, member))


def _apart(context: FoldContext, run: Run, fold_tasks: Sequence[FoldTask], callback: Callback) -> None:
    """One task after another; the backbone is loaded again only where a method has changed it."""
    backbone: Backbone | None = None
    for each in fold_tasks:
        own = context.placement.own(run, each.name)
        if (own.home / "adapter").exists():
            continue
        backbone = backbone or context.backbone()
        freezer = freezing.attach(
            backbone.model, context.config, seed=each.seed, sample=partial(first_rows, each.train, seed=each.seed)
        )
        attached = freezer.model
        run.note(model=model_sizes.model_facts(context.config, backbone, attached))
        model = classifier.classification_model(attached, backbone.model, context.reader, context.labels)
        task = _train_task(own, context.config, each, model, nullcontext)
        tap = LabelTap(class_losses(context.labels.kind))
        strength = context.config.regularise.r_drop
        loss = model.row_loss(
            criterion(context.config.classes, from_numpy(each.train.targets_NC)), tap, strength=strength
        )
        fit = Trainer(
            model=attached,
            signal=TrainingSignal(task.train, loss, tap=tap, reads_packed=model.reads_packed(context.config.adapter)),
            freezer=freezer,
            held_out=context.rows,
            kept=context.kept,
            width=anatomy.hidden_size(backbone.model.config),
            held_out_loss=task.held_out_loss,
            held_out_parts=task.held_out_parts,
            config=task.config,
            compute=backbone.compute,
            run=own,
            callback=callback,
        )
        fit.work()
        if fit.visits is not None:
            from workbench.evaluation import training_dynamics

            training_dynamics.write(own.path, fit.visits.visits(), task.train)
        with fit.final_values():
            if own.ranks.first:
                classifier.save(model, own.adapter)
        bare = None if context.config.distributed.sharded else adapters.detach(attached)
        backbone = None if bare is None else replace(backbone, model=bare)


def _train_task(
    own: Run, config: RunConfig, each: FoldTask, model: Classifier, alone: Callable[[], AbstractContextManager[None]]
) -> TrainTask:
    parts = dict[str, float]()

    def held_out_loss() -> float:
        assert each.validation is not None, "nothing is watched without rows to watch"
        with alone():
            outputs_NC = classification_scores.predict_outputs(model.model, model.outputs, each.validation)
        parts.update(classification_scores.metric_of(model.labels, outputs_NC, each.validation))
        return classification_scores.loss(model.labels, outputs_NC, each.validation.targets_NC)

    wanted = each.config(config)
    return TrainTask(balanced(each.train, wanted), held_out_loss, wanted, own, held_out_parts=parts)


class RoundOutputs(NamedTuple):
    """Outputs of the adapters of a round."""

    number: int
    """0 learns from all labelled rows and from no others."""
    oof_MNC: Floats
    """Zeros where an adapter has trained on a row."""
    test_MTC: Floats | None
    unlabelled_MUC: Floats | None
    taught_by: int | None = None
    """The round whose adapters gave pseudo-labels to this one; None where rows have none."""

    @property
    def unseen_MUC(self) -> Floats | None:
        """For rows without regard to labels that no adapter trained on: unlabelled ones, or else test rows."""
        return self.test_MTC if self.taught_by is not None or self.unlabelled_MUC is None else self.unlabelled_MUC


def round_folder(number: int, adapter: FoldAdapter | None = None) -> str:
    """Folder of a round in a run directory, or of one adapter of it."""
    return f"members/round-{number}" + (f"/{adapter.name}" if adapter else "")


def train_round(
    context: FoldContext,
    run: Run,
    data: FoldData,
    members: Sequence[FoldAdapter],
    more: Sequence[LabelledSet | None],
    callback: Callback,
    *,
    number: int,
) -> RoundOutputs:
    """Train the adapters of a round, each with its own added rows; the saved ones are loaded again to predict."""
    rows_of = [(each.split.train_N.tobytes(), added) for each, added in zip(members, more, strict=True)]
    own = run.child("members").child(f"round-{number}", of=_digest(rows_of))
    if not run.ranks.agreed((own.home / OUTPUTS).exists()):
        seed = context.config.seed
        fold_tasks = [fold_task(each, data, added, seed=seed) for each, added in zip(members, more, strict=True)]
        train(context, own, fold_tasks, callback)
        if run.ranks.first:
            run.note(model=own.manifest["model"])
        callback.say("Asking what was saved ...")
        others = {"test": data.test, "unlabelled": data.unlabelled}
        asked = {name: rows for name, rows in others.items() if rows is not None}
        masks = [each.split.validation_N for each in members]
        sets = [[data.rows.subset(mask_N), *asked.values()] for mask_N in masks]
        of_members = outputs(context, adapter_folders(run, number, members), sets)
        arrays = {"oof": _placed([each[0] for each in of_members], masks)}
        arrays |= {name: np.stack([each[1 + place] for each in of_members]) for place, name in enumerate(asked)}
        files.write_bytes(own.path / OUTPUTS, safetensors.save(arrays))
        run.ranks.wait()
    return read_round(run, number)


def read_round(run: Run, number: int) -> RoundOutputs:
    """Outputs of the adapters of a finished round."""
    arrays = safetensors.load_file(run.home / round_folder(number) / OUTPUTS)
    return RoundOutputs(number, arrays["oof"], arrays.get("test"), arrays.get("unlabelled"))


def adapter_folders(run: Run, number: int, members: Sequence[FoldAdapter]) -> list[Path]:
    """Folders of the adapters of a round."""
    return [run.home / round_folder(number, each) / "adapter" for each in members]


def viewed(
    context: FoldContext, folders: Sequence[Path], members: Sequence[FoldAdapter], views: Sequence[LabelledSet]
) -> Iterator[Floats]:
    """Outputs (M, N, C) of each view of the labelled rows, by the adapters that did not train on them."""
    masks = [each.split.validation_N for each in members]
    member_outputs = outputs(context, folders, [[rows.subset(mask_N) for rows in views] for mask_N in masks])
    for number in range(len(views)):
        yield _placed([each[number] for each in member_outputs], masks)


def predict(context: FoldContext, folders: Sequence[Path], rows: Sequence[LabelledSet]) -> list[Floats]:
    """Outputs (M, X, C) of all adapters for each of several sets of rows that none of them trained on."""
    member_outputs = outputs(context, folders, [rows] * len(folders))
    return [np.stack(each) for each in zip(*member_outputs, strict=True)]


def refitted(
    context: FoldContext, run: Run, data: FoldData, more: LabelledSet | None, callback: Callback, *, passes: float = 1.0
) -> Path:
    """One adapter that trained on all rows, saved as the adapter of the run; returns its folder.

    Args:
        passes: Times `train.epochs`.
    """
    rows = data.rows
    labelled = f"{passes}".encode() + rows.lengths.tobytes() + rows.targets_NC.tobytes()
    own = run.child("members").child("all-rows", of=_digest([(labelled, more)]))
    if not own.resumed and run.ranks.first:
        shutil.rmtree(run.adapter, ignore_errors=True)
    for also in (data.past, more):
        rows = rows if also is None else rows.concatenated(also)
    train(context, own, [FoldTask("refit", context.config.seed, rows, None, passes)], callback)
    if run.ranks.first and not run.adapter.exists():
        with files.new_folder(run.adapter) as aside:
            shutil.copytree(own.path / "refit" / "adapter", aside, dirs_exist_ok=True)
    run.ranks.wait()
    return run.home / "adapter"


def _digest(tasks: Sequence[tuple[bytes, LabelledSet | None]]) -> str:
    """A hash of what stages decide about the rows of tasks: which labelled ones each has, and those added to them."""
    found = hashlib.sha256()
    for labelled, added in tasks:
        found.update(labelled)
        if added is not None:
            found.update(added.digests.tobytes() + added.supervised.tobytes())
    return found.hexdigest()


def _placed(outputs: Sequence[Floats], masks: Sequence[Mask]) -> Floats:
    """Outputs of some rows each, among zeros (M, N, C)."""
    found_MNC = np.zeros((len(outputs), len(masks[0]), outputs[0].shape[1]))
    for outputs_NC, values_nC, mask_N in zip(found_MNC, outputs, masks, strict=True):
        outputs_NC[mask_N] = values_nC
    return found_MNC
