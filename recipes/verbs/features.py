"""`workbench features`: what a frozen backbone sees in rows, and what it knows of their labels already."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from workbench.config import RunConfig
from workbench.data.labelled.labelled_data import LabelledSet
from workbench.data.labelled.records import RowReader
from workbench.data.labelled.text_reader import TextReader, augmented_texts
from workbench.errors import ConfigError
from workbench.evaluation import comparison, label_preservation, simple_baseline
from workbench.evaluation.comparison import PairedScore
from workbench.evaluation.frozen_features import Floats, Probe, cached_features, linear_probe, probe
from workbench.evaluation.label_preservation import LabelPreservation, Rewriting
from workbench.evaluation.simple_baseline import Baseline
from workbench.recipes.load import Recipe, load
from workbench.recipes.over import crossval_labelled
from workbench.recipes.single import streamed_rows
from workbench.recipes.tasks.classify import class_run
from workbench.runs import files


class Known(NamedTuple):
    """Share of labels that features tell, of rows that were not looked at."""

    classes: int
    probe: Probe
    likeliest: float
    """Share of those rows that have the most frequent class of the others."""
    baseline: PairedScore
    """Accuracy of the linear probe (`first`) and of a simple classifier without a backbone (`second`) on those rows."""
    fitted: int
    """Training rows that the simple classifier was fitted to."""

    @property
    def sentence(self) -> str:
        """What the simple classifier reaches, and whether the backbone is what holds back."""
        reached = (
            f"Without a backbone, logistic regression on {self.baseline.name} of {self.fitted:,} rows gets "
            f"{self.baseline.second:.1%} right ({self.baseline.difference:+.1%} to the linear probe"
        )
        if self.baseline.interval is None:
            return f"{reached}; no interval, as no row differs or there are too few)."
        low, high = self.baseline.interval
        verdict = (
            "surely more than the backbone's frozen features. A trained model should beat this number; where it does "
            "not, try another model.id"
            if low > 0
            else "surely less than the backbone's frozen features"
            if high < 0
            else "no sure difference from the backbone's frozen features"
        )
        return f"{reached}, 95 % interval {low:+.1%} to {high:+.1%}): {verdict}."


class ProbedFeatures(NamedTuple):
    """Rows of a table of features."""

    rows: Mapping[str, int]
    """Number of rows by the split that they are in: train, held_out, test, unlabelled."""
    width: int
    known: Known | None
    """None where a row's label is not one class."""
    preservation: LabelPreservation | None = None
    """Whether rewritten rows are told to have the same class; None where training rewrites none, or `known` is None."""
    rewrites: bool = False
    """Whether training rewrites texts."""

    @property
    def sentence(self) -> str:
        """The findings for a person."""
        known = [self._known, *([self.known.sentence] if self.known else ())]
        return "\n".join([*known, *(self.preservation.sentences if self.preservation else ())])

    @property
    def _known(self) -> str:
        counts = ", ".join(f"{count:,} {split}" for split, count in self.rows.items())
        summary = f"{sum(self.rows.values()):,} rows ({counts}), {self.width:,} features."
        if self.known is None:
            unknown = " Nor is it known whether texts keep such labels where data.augment rewrites them."
            return f"{summary} Labels that are not one class are not compared with them.{unknown * self.rewrites}"
        nearest, linear = self.known.probe
        return (
            f"{summary} Of {self.known.classes} classes rows aside are told right without training the backbone: "
            f"{nearest:.1%} by the nearest training rows, {linear:.1%} by a linear probe; always naming the likeliest "
            f"class gives {self.known.likeliest:.1%}."
        )


def features(recipe: Recipe, overrides: Sequence[str] = (), *, out: Path | str | None = None) -> ProbedFeatures:
    """Compute the frozen backbone's features of all rows that a recipe names, and what they tell of the labels.

    Args:
        recipe: A configuration, a YAML file, or the name of a shipped recipe whose rows have labels.
        overrides: `key=value` words on top of a file or name.
        out: A .parquet file to write: a line for each row, with its features and its label where there is one.

    Returns:
        The number of `rows` of each split, the `width` of the features, and the accuracy of a linear `known.probe` and
        of the nearest neighbours on rows aside; `sentence` says it.

    Raises:
        ConfigError: The recipe has no rows whose labels are learnt.

    Examples:
        >>> import workbench
        >>> probed = workbench.features("classify/quickstart", ["data.limit=200"])
        >>> probed.width, probed.known.probe.linear > probed.known.likeliest
        (256, True)
    """
    config, out = load(recipe, overrides), None if out is None else Path(out)
    if not config.task.labelled:
        raise ConfigError(
            f"features: recipe={config.recipe} learns no labels. Name a recipe of classify or crossval, with your rows "
            "as data.train."
        )
    if out is not None:
        files.require_writable(out)
    reader, splits, aside_N = _rows(streamed_rows.local(config))
    rewritten = _rewritings(config, reader, splits, aside_N)
    wanted = [*(rows.inputs for rows in splits.values()), *(each.inputs for each in rewritten)]
    computed = cached_features(config.model, reader, wanted)
    split_features = dict(zip(splits, computed, strict=False))
    if out is not None:
        tables = [
            pd.DataFrame(
                {
                    "row": [record.place for record in rows.records],
                    reader.title: [reader.describe(record) for record in rows.records],
                    "split": name,
                    "label": [None if label is None else str(label) for label in rows.labels],
                    "features": list(split_features[name]),
                }
            )
            for name, rows in splits.items()
        ]
        files.write_bytes(out, pd.concat(tables, ignore_index=True).to_parquet())
    counts = {name: len(rows) for name, rows in splits.items()}
    known, preservation = None, None
    if config.classes.kind == "one":
        seen, others = _compared(splits, split_features, aside_N)
        train, aside = splits["train"], splits.get("held_out")
        if aside_N is not None:
            train, aside = train.subset(~aside_N), train.subset(aside_N)
        assert aside is not None, "a run without a cross-validation holds rows out"
        known = _known(seen, others, simple_baseline.fit(train, aside, reader, seed=config.seed))
        if config.data.augment.is_on:
            features = computed[len(splits) :]
            chosen = label_preservation.chosen(len(others.label_N))
            tell = linear_probe(seen.features_ND, seen.label_N).predict
            preservation = label_preservation.compare(
                rewritten,
                tell(others.features_ND[chosen]),
                [tell(each) for each in features],
                others.label_N[chosen],
                likeliest=known.likeliest,
            )
    return ProbedFeatures(
        counts, split_features["train"].shape[1], known, preservation, rewrites=config.data.augment.is_on
    )


def _rows(config: RunConfig) -> tuple[RowReader, dict[str, LabelledSet], npt.NDArray[np.bool_] | None]:
    """Rows by their split; of a cross-validation, also which training rows are aside: those of the first fold."""
    if config.crossvalidates:
        reader, folds, *_ = crossval_labelled.prepare(config)
        named = {"train": folds.rows, "test": folds.test, "unlabelled": folds.unlabelled}
        aside_N = folds.folds.fold_RN[0] == 0
    else:
        reader, data, _ = class_run.prepare(config)
        named, aside_N = {"train": data.train, "held_out": data.held_out, "test": data.test}, None
    return reader, {name: rows for name, rows in named.items() if rows is not None}, aside_N


class _Labelled(NamedTuple):
    """Features of rows, and their labels."""

    features_ND: Floats
    label_N: npt.NDArray[np.str_]

    def where(self, keep_N: npt.NDArray[np.bool_]) -> _Labelled:
        """Some of the rows."""
        return _Labelled(self.features_ND[keep_N], self.label_N[keep_N])


def _compared(
    splits: Mapping[str, LabelledSet], scores: Mapping[str, Floats], aside_N: npt.NDArray[np.bool_] | None
) -> tuple[_Labelled, _Labelled]:
    """Rows that a probe is fitted to, and those aside."""
    train = _Labelled(scores["train"], _names(splits["train"]))
    if aside_N is None:
        return train, _Labelled(scores["held_out"], _names(splits["held_out"]))
    return train.where(~aside_N), train.where(aside_N)


def _names(rows: LabelledSet) -> npt.NDArray[np.str_]:
    return np.asarray([str(label) for label in rows.labels])


def _known(seen: _Labelled, others: _Labelled, simple: Baseline) -> Known:
    names, counts = np.unique(seen.label_N, return_counts=True)
    told = linear_probe(seen.features_ND, seen.label_N).predict(others.features_ND)
    right = ((each == others.label_N).astype(np.float64) for each in (told, simple.predicted_M))
    return Known(
        classes=len(names),
        probe=probe(seen.features_ND, seen.label_N.tolist(), others.features_ND, others.label_N.tolist()),
        likeliest=float(np.mean(others.label_N == names[counts.argmax()])),
        baseline=comparison.paired(simple.features, *right),
        fitted=simple.rows,
    )


def _rewritings(
    config: RunConfig, reader: RowReader, splits: Mapping[str, LabelledSet], aside_N: npt.NDArray[np.bool_] | None
) -> list[Rewriting]:
    """Rows aside as each operator of `data.augment` rewrites them, where a probe can tell what becomes of them."""
    if not config.data.augment.is_on or config.classes.kind != "one":
        return []
    assert isinstance(reader, TextReader), "pictures are refused"
    aside = splits["held_out"] if aside_N is None else splits["train"].subset(aside_N)
    return label_preservation.rewritings(
        augmented_texts(aside.subset(label_preservation.chosen(len(aside))), config, reader)
    )
