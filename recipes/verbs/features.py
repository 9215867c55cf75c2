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
from workbench.data.labelled.labels import Labels
from workbench.data.labelled.records import RowReader
from workbench.data.labelled.text_reader import TextReader, augmented_texts
from workbench.errors import ConfigError
from workbench.evaluation import frozen_features, label_preservation, simple_baseline
from workbench.evaluation.frozen_features import Probe, cached_features, linear_probe, probe
from workbench.evaluation.label_preservation import LabelPreservation, Rewriting
from workbench.evaluation.simple_baseline import Beside
from workbench.recipes.load import Recipe, load
from workbench.recipes.over import crossval_labelled
from workbench.recipes.single import streamed_rows
from workbench.recipes.tasks.classify import class_run
from workbench.runs import files


class Known(NamedTuple):
    """What features tell of the labels of rows that were not looked at."""

    baseline: Beside
    """The linear probe (`score.first`) and a simple model without a backbone (`score.second`) on those rows."""
    classes: int = 0
    probe: Probe | None = None
    """Shares of rows whose one class is told; None of other labels."""
    likeliest: float = 0.0
    """Share of those rows that have the most frequent class of the others."""

    @property
    def sentence(self) -> str:
        """What the simple model reaches, and whether the backbone is what holds back."""
        found, ahead = self.baseline, self.baseline.ahead
        name, second = found.score.name, found.score.second
        reached = (
            f"Without a backbone, {found.model} on {found.features} of {found.rows:,} rows reaches {name} "
            f"{second:.3f}, the linear probe {found.score.first:.3f}, the same answer for every row {found.floor:.3f} "
            f"(difference {found.score.difference:+.3f}"
        )
        if ahead is None or found.score.interval is None:
            return f"{reached}; no interval, as no row differs or there are too few)."
        low, high = found.score.interval
        verdict = (
            "surely better than the backbone's frozen features. A trained model should beat this number; where it does "
            "not, try another model.id"
            if ahead[0] > 0
            else "surely worse than the backbone's frozen features"
            if ahead[1] < 0
            else "no sure difference from the backbone's frozen features"
        )
        return f"{reached}, 95 % interval {low:+.3f} to {high:+.3f}): {verdict}."


class ProbedFeatures(NamedTuple):
    """Rows of a table of features."""

    rows: Mapping[str, int]
    """Number of rows by the split that they are in: train, held_out, test, unlabelled."""
    width: int
    known: Known
    preservation: LabelPreservation | None = None
    """Whether rewritten rows are told to have the same class; None where training rewrites none, or a
    row's label is not one class."""
    rewrites: bool = False
    """Whether training rewrites texts."""

    @property
    def sentence(self) -> str:
        """The findings for a person."""
        return "\n".join(
            [self._known, self.known.sentence, *(self.preservation.sentences if self.preservation else ())]
        )

    @property
    def _known(self) -> str:
        counts = ", ".join(f"{count:,} {split}" for split, count in self.rows.items())
        summary = f"{sum(self.rows.values()):,} rows ({counts}), {self.width:,} features."
        if self.known.probe is None:
            unknown = " It is not known whether texts keep such labels where data.augment rewrites them."
            return f"{summary}{unknown * self.rewrites}"
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
    reader, labels, splits, aside_N = _rows(streamed_rows.local(config))
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
    preservation = None
    train, aside, train_TD = splits["train"], splits.get("held_out"), split_features["train"]
    aside_MD = split_features.get("held_out", train_TD)
    if aside_N is not None:
        train, aside, train_TD, aside_MD = (
            train.subset(~aside_N),
            train.subset(aside_N),
            train_TD[~aside_N],
            train_TD[aside_N],
        )
    assert aside is not None, "a run without a cross-validation holds rows out"
    told = frozen_features.linear_values(labels, train_TD, train.targets_NC)
    simple = simple_baseline.fit(train, aside, reader, labels, seed=config.seed)
    known = Known(simple_baseline.compare(labels, simple, told(aside_MD), aside.targets_NC, train.targets_NC))
    if labels.kind == "one":
        seen, asked = _names(train), _names(aside)
        names, class_counts = np.unique(seen, return_counts=True)
        known = known._replace(
            classes=len(names),
            probe=probe(train_TD, seen.tolist(), aside_MD, asked.tolist()),
            likeliest=float(np.mean(asked == names[class_counts.argmax()])),
        )
        if config.data.augment.is_on:
            chosen = label_preservation.chosen(len(asked))
            tell = linear_probe(train_TD, seen).predict
            preservation = label_preservation.compare(
                rewritten,
                tell(aside_MD[chosen]),
                [tell(each) for each in computed[len(splits) :]],
                asked[chosen],
                likeliest=known.likeliest,
            )
    return ProbedFeatures(
        counts, split_features["train"].shape[1], known, preservation, rewrites=config.data.augment.is_on
    )


def _rows(config: RunConfig) -> tuple[RowReader, Labels, dict[str, LabelledSet], npt.NDArray[np.bool_] | None]:
    """Rows by their split; of a cross-validation, also which training rows are aside: those of the first fold."""
    named: dict[str, LabelledSet | None]
    if config.crossvalidates:
        reader, folds, *_ = crossval_labelled.prepare(config)
        named = {"train": folds.rows, "test": folds.test, "unlabelled": folds.unlabelled}
        labels, aside_N = folds.labels, folds.folds.fold_RN[0] == 0
    else:
        reader, data, _ = class_run.prepare(config)
        named = {"train": data.train, "held_out": data.held_out, "test": data.test}
        labels, aside_N = data.labels, None
    return reader, labels, {name: rows for name, rows in named.items() if rows is not None}, aside_N


def _names(rows: LabelledSet) -> npt.NDArray[np.str_]:
    return np.asarray([str(label) for label in rows.labels])


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
