"""Predictions by the adapters of a round, in views and corrected by neighbours where that was decided.

Legend: M adapters, V views with the plain row first, N labelled rows, T other rows, C outputs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import numpy as safetensors

from workbench.config import RunConfig
from workbench.crossval import fold_adapters, neighbour_correction, run_views
from workbench.crossval.blends import Blend
from workbench.crossval.ensembles import Combiner, FittedCombination, OutOfFold
from workbench.crossval.fold_adapters import FoldAdapter, FoldContext, RoundOutputs
from workbench.crossval.tta import TtaDecision
from workbench.data.labelled import labelled_data
from workbench.data.labelled.labelled_data import LabelledSet
from workbench.data.labelled.labels import Floats
from workbench.data.labelled.records import NamedColumns, named_columns
from workbench.data.tta_views import RowView
from workbench.errors import ConfigError, DataError
from workbench.models import classifier
from workbench.runs import files, provenance, run_directory
from workbench.runs.resume_command import finish
from workbench.runs.run_directory import Run

OUT_OF_FOLD = "out_of_fold.parquet"
"""File of a run directory: every labelled row, as adapters see it that did not train on it."""
OUT_OF_FOLD_MEMBERS = "out_of_fold_members.parquet"
"""The same of each adapter alone, before any stage."""
FILES = ("config.yaml", "classes.json", "decision.json", "neighbours.safetensors")
"""Of a run directory, besides its adapters, those that decide what it answers."""
_AGAIN = "Put it back, or blend what is there again: workbench blend {} ... --out OTHER"


def fold_context(run: Path, config: RunConfig) -> FoldContext:
    """Context of the finished cross-validation at `run`; raises ConfigError where it has not ended."""
    if not (run / "decision.json").exists():
        raise ConfigError(f"{run}: the cross-validation has not ended. Continue it: {finish(run)}")
    first = adapter_folders(run)[0].parent
    if parts := files.read_json(run / "decision.json").get("parts"):  # rows are read as by the first part
        model = run_directory.read_config(part_folder(run, parts[0])).model
        config = config.model_copy(update={"model": model})
    return FoldContext(
        config,
        replace(classifier.read_labels(run), metric=config.evaluate.judge),
        classifier.reader_of_run(first, config),
    )


def is_blend(run: Path) -> bool:
    """Whether the run directory is of a blend of several cross-validations."""
    return "parts" in files.read_json(run / "decision.json")


def adapter_folders(run: Path) -> list[Path]:
    """Folders of the adapters that the finished cross-validation, or blend of several, at `run` answers with."""
    known = files.read_json(run / "decision.json")
    if "parts" in known:
        return [folder for part in known["parts"] for folder in adapter_folders(part_folder(run, part))]
    return [run / fold_adapters.round_folder(known["round"]) / name / "adapter" for name in known["members"]]


def decided(run: Path, context: FoldContext, rows: LabelledSet) -> Floats:
    """Values (T, C) of other rows, by all that the cross-validation at `run` decided."""
    known = files.read_json(run / "decision.json")
    if "parts" in known:
        return _blended(run, context, rows, known)
    fitted = FittedCombination(known["temperature"], known["how"])
    folders = adapter_folders(run)
    (outputs_MTC,) = fold_adapters.predict(context, folders, [rows])
    values_TC = fitted.values(context.labels, outputs_MTC)
    if known["tta"] is not None:
        values_TC = merged(context, folders, fitted, TtaDecision.from_facts(known["tta"]), rows, values_TC)
    return neighbour_correction.corrected_by_run(run, context, rows, values_TC, known.get("correction"))


def _blended(run: Path, context: FoldContext, rows: LabelledSet, known: Mapping[str, Any]) -> Floats:
    """Values (T, C) of other rows by a blend: each part reads them again, as its backbone wants them."""
    blend, labels = Blend.from_facts(known["blend"]), context.labels
    values_PTC = np.zeros((len(known["parts"]), len(rows), len(labels.names)))
    for place, part in enumerate(known["parts"]):
        if blend.weights_P[place] == 0:
            continue
        folder = part_folder(run, part)
        _require_same(run, folder, part)
        own = fold_context(folder, run_directory.shipped_config(folder, context.trust))
        named = [
            NamedColumns(each.row, named_columns(each.row, context.config.data, own.config.data))
            for each in rows.records
        ]
        if lacking := [name for name in own.reader.columns if any(name not in each.columns for each in named)]:
            raise DataError(
                f"{rows.source} has no column `{lacking[0]}`, which {folder} of the blend reads. Give it one."
            )
        source = own.reader.reread(rows.source, rows.fingerprint, named)
        again = labelled_data.encode(source, own.reader, own.labels)
        values = decided(folder, replace(own, scored=context.scored, trust=context.trust), again)
        values_PTC[place] = values[:, [own.labels.names.index(name) for name in labels.names]]
    return blend.values(labels, values_PTC)


def part_folder(run: Path, part: Mapping[str, Any]) -> Path:
    """The run directory of a part of the blend at `run`; raises ConfigError where it is gone, or decided otherwise."""
    folder = Path(os.path.normpath(run / part["run"]))
    decision = folder / "decision.json"
    if not decision.exists():
        raise ConfigError(f"{run}: its part {folder} is not there any more. {_AGAIN.format(folder)}")
    if provenance.digest(decision) != part["files"].get(decision.name):
        raise ConfigError(f"{run}: its part {folder} has changed since: {decision.name}. {_AGAIN.format(folder)}")
    return folder


def _require_same(run: Path, folder: Path, part: Mapping[str, Any]) -> None:
    """Raise ConfigError where a file of a part is no longer what was blended."""
    now = digests(folder)
    if changed := [name for name, digest in part["files"].items() if now.get(name) != digest]:
        raise ConfigError(f"{run}: its part {folder} has changed since: {changed[0]}. {_AGAIN.format(folder)}")


def digests(run: Path) -> dict[str, str]:
    """SHA-256 of what the answers of the finished cross-validation at `run` depend on, by name."""
    found = {name: provenance.digest(run / name) for name in FILES if (run / name).exists()}
    for folder in adapter_folders(run):
        found |= provenance.digests(folder, title=os.path.relpath(folder, run))
    return found


def out_of_fold(
    context: FoldContext,
    run: Run,
    members: Sequence[FoldAdapter],
    known: OutOfFold,
    round_outputs: RoundOutputs,
    combiner: Combiner,
    seen: Sequence[RowView],
    rows: LabelledSet,
) -> Floats:
    """Values (V, N, C) of the labelled rows in all views, of adapters that did not train on them."""
    path = fold_adapters.round_folder(round_outputs.number) + "/views.safetensors"
    if not run.ranks.agreed((run.home / path).exists()):
        shown = [view.rows(rows, context.reader) for view in seen]
        view_values = [combiner.out_of_fold(known, round_outputs.oof_MNC)]
        folders = fold_adapters.adapter_folders(run, round_outputs.number, members)
        for view, outputs_MNC in zip(seen, fold_adapters.viewed(context, folders, members, shown), strict=True):
            view_values.append(combiner.out_of_fold(known, round_outputs.oof_MNC, _own(view, outputs_MNC)))
        files.write_bytes(run.path / path, safetensors.save({"oof": np.stack(view_values)}))
        run.ranks.wait()
    values_VNC: Floats = safetensors.load_file(run.home / path)["oof"]
    return values_VNC


def merged(
    context: FoldContext,
    folders: Sequence[Path],
    fitted: FittedCombination,
    decision: TtaDecision,
    rows: LabelledSet,
    plain_TC: Floats,
) -> Floats:
    """Values (T, C) of other rows by the adapters in `folders`, merged over views where these are needed."""

    def read(shown: Sequence[LabelledSet]) -> Iterator[Floats]:
        for outputs_MTC in fold_adapters.predict(context, folders, shown):
            yield fitted.values(context.labels, outputs_MTC)

    return run_views.merged(context.config, context.reader, context.labels, decision, rows, plain_TC, read)


def _own(view: RowView, outputs_MXC: Floats) -> Floats:
    """Outputs of a view as those of the plain rows."""
    return np.stack([view.outputs(outputs_XC) for outputs_XC in outputs_MXC])
