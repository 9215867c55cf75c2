"""Teacher outputs for the rows of a classifier: computed once, before training, and kept in the run directory.

Legend: N rows, C outputs (classes, or 1 for a number).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
from safetensors import SafetensorError, safe_open
from safetensors import numpy as safetensors

from workbench.config import RunConfig
from workbench.data.folds.duplicates import normalised
from workbench.data.labelled import labelled_data
from workbench.data.labelled.labelled_data import ClassSplits, LabelledSet
from workbench.data.labelled.labels import Floats, Labels
from workbench.data.labelled.records import RowReader
from workbench.distillation.class_teachers import ClassTeacher, class_teachers
from workbench.distillation.teacher_sources import TeacherSource
from workbench.errors import ConfigError, DataError
from workbench.evaluation import target_scores
from workbench.runs import files
from workbench.runs.run_directory import Run
from workbench.training.callbacks import Callback

KEPT = "teacher.safetensors"
"""In the run directory."""
OUT_OF_FOLD = "out_of_fold.parquet"
"""In that of a cross-validation."""


class TeacherOutputs(NamedTuple):
    """Outputs (N, C) of the teacher in the student's order of classes: logits, or standardised numbers."""

    train_NC: Floats
    extra_NC: Floats | None
    held_out_NC: Floats
    test_NC: Floats | None


def teacher_outputs(
    config: RunConfig, source: TeacherSource, data: ClassSplits, extra: LabelledSet | None, run: Run, callback: Callback
) -> TeacherOutputs:
    """Teacher outputs for all rows; a resumed run reads those that it kept, if they are of the same rows.

    The first of several processes asks, and tells the others.

    Args:
        config: The distillation's.
        extra: Rows without labels.
    """
    outputs_by_set = run.ranks.agreed(
        _first_told(config, source, data, extra, run, callback) if run.ranks.first else {}
    )
    return TeacherOutputs(
        outputs_by_set["train"], outputs_by_set.get("extra"), outputs_by_set["held_out"], outputs_by_set.get("test")
    )


def _first_told(
    config: RunConfig, source: TeacherSource, data: ClassSplits, extra: LabelledSet | None, run: Run, callback: Callback
) -> dict[str, Floats]:
    named = {"train": data.train, "extra": extra, "held_out": data.held_out, "test": data.test}
    sets = {name: rows for name, rows in named.items() if rows is not None}
    path, wanted = run.path / KEPT, _digest(config, data.labels, sets)
    outputs_by_set = _kept(path, wanted) if run.resumed else None
    if outputs_by_set is None:
        callback.say(f"Asking the teacher, {source.name}, about {sum(map(len, sets.values())):,} rows ...")
        outputs, share = _computed(config, source, data.labels, list(sets.values()))
        outputs_by_set = dict(zip(sets, outputs, strict=True))
        files.write_bytes(path, safetensors.save(outputs_by_set, {"rows": wanted}))
        facts = {name: len(rows) for name, rows in sets.items()}
        loss = target_scores.loss(data.labels, outputs_by_set["held_out"], data.held_out.targets_NC)
        run.note(distill={"teacher": source.name, "teacher_loss": loss, "rows": facts, "out_of_fold": share})
    return outputs_by_set


def unlabelled(config: RunConfig, data: ClassSplits, reader: RowReader) -> LabelledSet | None:
    """The rows of distill.unlabelled without those that are also held out or tested on; labels are not looked at.

    Raises:
        DataError: nothing is left.
    """
    path = config.distill.unlabelled
    if path is None:
        return None
    source = reader.read(path, labelled=False)
    measured = [data.held_out, *([data.test] if data.test is not None else [])]
    known = {record.key for rows in measured for record in rows.records}
    new = np.asarray([record.key not in known for record in source.records])
    if not new.any():
        raise DataError(f"distill.unlabelled: every row of {path} is also held out or tested on. Give other rows.")
    if not new.all():
        source = source.subset(new, f"{int((~new).sum())} rows that are also held out or tested on")
    return labelled_data.encode(source, reader, data.labels)


def _computed(
    config: RunConfig, source: TeacherSource, labels: Labels, rows: Sequence[LabelledSet]
) -> tuple[list[Floats], float | None]:
    """Outputs (N, C) of each set, and the share of the training rows that was said out of fold, where that is asked."""
    teachers = class_teachers(source, config, labels)
    if config.distill.teacher.out_of_fold:
        assert source.run is not None
        return _out_of_fold(teachers[0], source.run, rows, config, labels)
    return _together(teachers, rows, config, labels), None


def _together(
    teachers: Sequence[ClassTeacher], rows: Sequence[LabelledSet], student: RunConfig, labels: Labels
) -> list[Floats]:
    """Outputs (N, C) of the teachers together for each set of rows, in the student's classes: the mean of their values.

    What one says alone keeps the scale of its logits.
    """
    outputs = [_outputs(teacher, [teacher.rows(each, student) for each in rows], labels) for teacher in teachers]
    if len(outputs) == 1:
        return outputs[0]
    values = [[labels.values(outputs_NC) for outputs_NC in each] for each in outputs]
    return [target_scores.outputs(labels, np.mean(each, axis=0)) for each in zip(*values, strict=True)]


def _out_of_fold(
    teacher: ClassTeacher, run: Path, rows: Sequence[LabelledSet], student: RunConfig, labels: Labels
) -> tuple[list[Floats], float]:
    """Outputs of a cross-validation for each set, of its own rows by adapters that never trained on them.

    Args:
        run: The cross-validation's.
        rows: The student's training rows first.

    Returns:
        Outputs (N, C) of each set, and the share of the training rows that are the cross-validation's own, known by
        their text but for case and punctuation.
    """
    known = _table(run / OUT_OF_FOLD, teacher)
    read = [teacher.rows(each, student) for each in rows]
    texts = [_texts(teacher, each) for each in read]
    own = [np.asarray([text in known for text in each]) for each in texts]
    others = iter(_outputs(teacher, [each.subset(~mask) for each, mask in zip(read, own, strict=True)], labels))
    set_outputs = []
    for each, mask in zip(texts, own, strict=True):
        outputs_NC = np.zeros((len(each), len(labels.names)))
        outputs_NC[~mask] = next(others)
        if mask.any():
            values_nC = np.stack([known[text] for text in each if text in known])
            outputs_NC[mask] = _aligned(target_scores.outputs(teacher.labels, values_nC), teacher.labels, labels)
        set_outputs.append(outputs_NC)
    return set_outputs, float(own[0].mean())


def require_own_rows(teacher: ClassTeacher, run: Path, train: LabelledSet, student: RunConfig) -> None:
    """Raise ConfigError where a cross-validation has seen less than half of the training rows, or forgot what it said.

    Args:
        run: The cross-validation's.
    """
    path = run / OUT_OF_FOLD
    known = _table(path, teacher)
    own = sum(text in known for text in _texts(teacher, teacher.rows(train, student)))
    if 2 * own < len(train):
        raise ConfigError(
            f"distill.teacher.out_of_fold: only {own} of the {len(train)} training rows of {train.source} stand in "
            f"{path}. Write distill.teacher.out_of_fold=false, or the data.train of the cross-validation, "
            f"{' + '.join(own.train for own in teacher.config.data.training_files.values())}."
        )


def _texts(teacher: ClassTeacher, rows: LabelledSet) -> list[str]:
    """By which rows are known, whatever their case and punctuation."""
    return [normalised(text) for text in teacher.described(rows)]


def _outputs(teacher: ClassTeacher, rows: Sequence[LabelledSet], labels: Labels) -> list[Floats]:
    """Outputs of one teacher for several sets, in the student's classes; it is loaded once, or not at all."""
    whole = rows[0]
    for each in rows[1:]:
        whole = whole.concatenated(each)
    outputs_NC = teacher.predict(whole) if len(whole) else np.zeros((0, len(teacher.labels.names)))
    return np.split(_aligned(outputs_NC, teacher.labels, labels), np.cumsum([len(each) for each in rows])[:-1])


def _aligned(outputs_NC: Floats, theirs: Labels, ours: Labels) -> Floats:
    """The same said in the student's order of classes, or in units of the student's numbers."""
    if ours.kind == "number":
        return target_scores.outputs(ours, theirs.values(outputs_NC))
    return np.ascontiguousarray(outputs_NC[:, [theirs.names.index(name) for name in ours.names]])


def _table(path: Path, teacher: ClassTeacher) -> dict[str, Floats]:
    """Values (C,) by text or picture; of a row that stands there several times, such as once a repeat, their mean."""
    if not path.exists():
        raise ConfigError(
            f"distill.teacher.out_of_fold: no {path}. Restore it, or write distill.teacher.out_of_fold=false."
        )
    table = pd.read_parquet(path)
    labels, title = teacher.labels, teacher.reader.title
    columns = ["predicted"] if labels.kind == "number" else [f"p_{name}" for name in labels.names]
    means = table.groupby(table[title].map(normalised), sort=False)[columns].mean()
    return dict(zip(means.index, means.to_numpy(np.float64), strict=True))


def _kept(path: Path, rows: str) -> dict[str, Floats] | None:
    """Outputs that the run kept for these rows; None where it kept none, or those of other rows."""
    try:
        with safe_open(path, "np") as file:
            known = (file.metadata() or {}).get("rows") == rows
    except (OSError, SafetensorError):
        return None
    return dict(safetensors.load_file(path)) if known else None


def _digest(config: RunConfig, labels: Labels, sets: Mapping[str, LabelledSet]) -> str:
    """Digest of the teachers, the rows and the classes."""
    rows = {name: [each.fingerprint, *(record.place for record in each.records)] for name, each in sets.items()}
    text = json.dumps([config.distill.teacher.model_dump(mode="json"), labels.facts, rows])
    return hashlib.sha256(text.encode()).hexdigest()
