"""Rounds of a cross-validation: adapters trained and asked, and the rows that they label for the next round.

Legend: M adapters, N labelled rows, T test rows, U unlabelled rows, V views, C outputs (classes, or 1 for a number).
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from safetensors import numpy as safetensors

from workbench.crossval import pseudo_labels
from workbench.crossval.combining import Combiner, OutOfFold
from workbench.crossval.ensembles import Mask
from workbench.crossval.fold_adapters import FoldAdapter, FoldContext, FoldTask, fold_task, outputs, train
from workbench.crossval.pseudo_labels import PseudoLabels
from workbench.data.labelled.fold_data import FoldData
from workbench.data.labelled.labelled_data import LabelledSet
from workbench.data.labelled.labels import Floats
from workbench.runs import files
from workbench.runs.run_directory import Run
from workbench.training.callbacks import Callback

OUTPUTS = "outputs.safetensors"
"""File of the outputs of a round's adapters."""


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


def folder(number: int, adapter: FoldAdapter | None = None) -> str:
    """Where a round stands in a run directory, or one adapter of it."""
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
    """Train the adapters of a round, each with its own further rows; what is saved is loaded again and asked."""
    own = run.child("members").child(f"round-{number}")
    if not run.ranks.agreed((own.home / OUTPUTS).exists()):
        fold_tasks = [
            fold_task(each, data.rows, added, seed=context.config.seed)
            for each, added in zip(members, more, strict=True)
        ]
        train(context, own, fold_tasks, callback)
        if run.ranks.first:
            run.note(model=own.manifest["model"])
        callback.say("Asking what was saved ...")
        others = [rows for rows in (data.test, data.unlabelled) if rows is not None]
        member_outputs = outputs(
            context,
            adapters(run, number, members),
            [[data.rows.subset(each.split.validation_N), *others] for each in members],
        )
        files.write_bytes(own.path / OUTPUTS, safetensors.save(_arrays(data, members, member_outputs)))
        run.ranks.wait()
    return read(run, number)


def read(run: Run, number: int) -> RoundOutputs:
    """Outputs of the adapters of a finished round."""
    arrays = safetensors.load_file(run.home / folder(number) / OUTPUTS)
    return RoundOutputs(number, arrays["oof"], arrays.get("test"), arrays.get("unlabelled"))


def adapters(run: Run, number: int, members: Sequence[FoldAdapter]) -> list[Path]:
    """Folders of the adapters of a round."""
    return [run.home / folder(number, each) / "adapter" for each in members]


def viewed(
    context: FoldContext, folders: Sequence[Path], members: Sequence[FoldAdapter], views: Sequence[LabelledSet]
) -> Iterator[Floats]:
    """Outputs (M, N, C) of each view of the labelled rows, by the adapters that did not train on them."""
    masks = [each.split.validation_N for each in members]
    member_outputs = outputs(context, folders, [[rows.subset(mask_N) for rows in views] for mask_N in masks])
    for number in range(len(views)):
        yield _placed([each[number] for each in member_outputs], masks)


def predict(context: FoldContext, folders: Sequence[Path], rows: Sequence[LabelledSet]) -> list[Floats]:
    """Outputs (M, X, C) of all adapters, of each of several sets of rows that none of them trained on."""
    member_outputs = outputs(context, folders, [rows] * len(folders))
    return [np.stack(each) for each in zip(*member_outputs, strict=True)]


def refitted(
    context: FoldContext, run: Run, data: FoldData, more: LabelledSet | None, callback: Callback, *, passes: float = 1.0
) -> Path:
    """One adapter that trained on all rows, saved as the adapter of the run; returns its folder.

    Args:
        passes: Times `train.epochs`.
    """
    own = run.child("members")
    rows = data.rows if more is None else data.rows.concatenated(more)
    train(context, own, [FoldTask("refit", context.config.seed, rows, None, passes)], callback)
    if run.ranks.first and not run.adapter.exists():
        with files.new_folder(run.adapter) as aside:
            shutil.copytree(own.path / "refit" / "adapter", aside, dirs_exist_ok=True)
    run.ranks.wait()
    return run.home / "adapter"


def choices(
    context: FoldContext,
    data: FoldData,
    members: Sequence[FoldAdapter],
    known: OutOfFold,
    outputs: RoundOutputs,
    *,
    calibrate: bool,
    round_number: int = 1,
) -> list[PseudoLabels]:
    """The pseudo-labels of each adapter, of its fold's own adapters: all others have trained on the fold's rows.

    Args:
        round_number: Of pseudo-labels, from 1.
        outputs: By the adapters of the round before.
        calibrate: Divide outputs by a temperature, which is fitted without the fold's rows as well.
    """
    assert outputs.unlabelled_MUC is not None
    labels_by_fold: dict[tuple[int, int], PseudoLabels] = {}
    for each in members:
        key = each.split.repeat, each.split.fold
        if key not in labels_by_fold:
            mine_M = np.asarray([other.split.repeat == key[0] and other.split.fold == key[1] for other in members])
            same_M = np.asarray([other.split.repeat == key[0] for other in members])
            heat = temperature(known.only(same_M), outputs, each.split.train_N) if calibrate else 1.0
            labels_by_fold[key] = _choose(
                context, data, outputs.unlabelled_MUC[mine_M] / heat, each.split.train_N, round_number
            )
    return [labels_by_fold[each.split.repeat, each.split.fold] for each in members]


def all_choices(
    context: FoldContext,
    data: FoldData,
    known: OutOfFold,
    outputs: RoundOutputs,
    *,
    calibrate: bool,
    round_number: int = 1,
) -> PseudoLabels:
    """The pseudo-labels of all adapters together, for one that trains on all rows and is validated on none."""
    assert outputs.unlabelled_MUC is not None
    every_N = np.ones(len(data.rows), dtype=bool)
    heat = temperature(known, outputs, every_N) if calibrate else 1.0
    return _choose(context, data, outputs.unlabelled_MUC / heat, every_N, round_number)


def added(data: FoldData, chosen: PseudoLabels) -> LabelledSet | None:
    """Chosen rows as training rows."""
    assert data.unlabelled is not None
    if not len(chosen.rows):
        return None
    return data.unlabelled.subset(chosen.rows).with_targets(chosen.targets_nC).reweighted(chosen.weights_n)


def temperature(known: OutOfFold, round_outputs: RoundOutputs, mask_N: Mask) -> float:
    """Fitted on out-of-fold outputs of the rows of the mask."""
    return Combiner(calibrate=True, how="mean").fit(known, round_outputs.oof_MNC, mask_N).temperature


def _choose(context: FoldContext, data: FoldData, outputs_MUC: Floats, train_N: Mask, number: int) -> PseudoLabels:
    return pseudo_labels.choose(
        context.config.pseudo_label,
        data.labels,
        np.stack([data.labels.values(outputs_UC) for outputs_UC in outputs_MUC]),
        labelled_C=data.rows.targets_NC[train_N].astype(np.float64).sum(0),
        round_number=number,
    )


def _arrays(data: FoldData, members: Sequence[FoldAdapter], columns: Sequence[Sequence[Floats]]) -> dict[str, Floats]:
    names = [name for name, rows in (("test", data.test), ("unlabelled", data.unlabelled)) if rows is not None]
    others = {name: np.stack([each[1 + number] for each in columns]) for number, name in enumerate(names)}
    return {"oof": _placed([each[0] for each in columns], [each.split.validation_N for each in members]), **others}


def _placed(outputs: Sequence[Floats], masks: Sequence[Mask]) -> Floats:
    """Outputs of some rows each, among zeros (M, N, C)."""
    found_MNC = np.zeros((len(outputs), len(masks[0]), outputs[0].shape[1]))
    for outputs_NC, values_nC, mask_N in zip(found_MNC, outputs, masks, strict=True):
        outputs_NC[mask_N] = values_nC
    return found_MNC
