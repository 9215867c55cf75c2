"""What a simple model without a backbone tells of rows' labels: the least that a fine-tuned model has to beat.

Legend: T training rows, M other rows, F features, C outputs (classes, or 1 for a number).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import cv2
import numpy as np
import numpy.typing as npt
from numpy.typing import NDArray

from workbench.config import RunConfig
from workbench.config.sections import metrics
from workbench.config.sections.classes_config import Kind
from workbench.data.images.picture_reader import PictureRows
from workbench.data.labelled.labelled_data import LabelledSet
from workbench.data.labelled.labels import Floats, Labels
from workbench.data.labelled.records import RowReader
from workbench.data.sound.sound_reader import SoundRows
from workbench.evaluation import chosen_metric, classification_scores, comparison
from workbench.evaluation.classification_scores import OneHot
from workbench.evaluation.comparison import PairedScore
from workbench.runs import run_directory, units
from workbench.runs.run_directory import Run

LEAST, MOST = 64, 4000  # training rows: of fewer it says nothing, more take minutes
WORK = 6_000_000  # characters of the training rows times classes that are read beside a run, for some seconds
LONGEST, PICTURE = 5000, 100  # characters of a text that are read; those that a picture takes as long as
SIDE, COLOURS = 64, 8  # pixels of a side from which gradients are counted; bins of each colour channel
TEXTS, PICTURES = "TF-IDF of words and letters", "gradient and colour histograms"
SOUND = "a small picture of the spectrum"
NUMBERS = "TF-IDF of words and letters and numbers of columns"
SCORES: Mapping[Kind, str] = {"several": "micro_f1", "number": "rmse"}
"""The metric that compares models where `evaluate.metric` names none; else accuracy."""


class Baseline(NamedTuple):
    """Predictions of a linear model on features that are counted rather than learnt."""

    features: str
    model: str
    rows: int
    """Training rows that it was fitted to."""
    values_MC: Floats
    """Probabilities of the classes, or numbers, as Labels.values gives."""


class Beside(NamedTuple):
    """A model (`first`) and a simple baseline (`second`) on the same rows."""

    features: str
    model: str
    rows: int
    """Training rows that the baseline was fitted to."""
    score: PairedScore
    higher: bool
    """Whether higher scores are better."""
    floor: float
    """Score of the same answer for every row, by the training rows' labels."""

    @property
    def ahead(self) -> tuple[float, float] | None:
        """By how much the baseline surely is better at least, and at most; None where no row tells."""
        if self.score.interval is None:
            return None
        low, high = self.score.interval
        return (low, high) if self.higher else (-high, -low)

    @property
    def facts(self) -> dict[str, Any]:
        """For a JSON file; `sentence` reads them."""
        return {
            "features": self.features,
            "model": self.model,
            "rows": self.rows,
            "others": self.score.rows,
            "score": self.score.name,
            "run": self.score.first,
            "baseline": self.score.second,
            "constant": self.floor,
            "difference": self.score.difference,
            "interval": self.score.interval,
            "ahead": self.ahead,
        }


def sentence(facts: Mapping[str, Any], model: str = "this run") -> tuple[bool, str]:
    """`Beside.facts` in words, and whether the model is not surely better than the baseline."""
    told = (
        f"Without a backbone, {facts['model']} on {facts['features']} of {facts['rows']:,} rows: {facts['score']} "
        f"{facts['baseline']:.3f}; {model} {facts['run']:.3f}, the same answer for every row {facts['constant']:.3f}"
    )
    if facts["ahead"] is None:
        return False, f"{told}."
    low, high = facts["interval"]
    least, most = facts["ahead"]
    if most < 0:
        return False, f"{told}."
    surely = "is surely better than" if least > 0 else "may be as good as"
    return True, (
        f"{told}. The simple model {surely} {model} (difference {facts['difference']:+.3f}, 95 % interval {low:+.3f} "
        f"to {high:+.3f}): the backbone may be what holds back. Try another model.id, or train longer."
    )


def fit(
    train: LabelledSet, others: LabelledSet, reader: RowReader, labels: Labels, *, seed: int, most: int = MOST
) -> Baseline:
    """What a linear model says of other rows that is fitted to at most so many training rows, of different labels;
    takes seconds. Texts: TF-IDF of words, pairs of words and parts of words, and standardised columns of the template
    that are numbers; pictures: histograms of oriented gradients (Dalal and Triggs, 2005) and of colours; sound: the
    spectrum as a picture of 32 x 16."""
    from sklearn.compose import make_column_transformer
    from sklearn.impute import SimpleImputer
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    train = train.subset(_some(len(train), most, seed))
    seen: Any
    asked: Any
    if isinstance(train.inputs, PictureRows):
        features, scale, strength = PICTURES, StandardScaler(), 0.01
        seen, asked = (np.stack([*map(picture_counts, each.inputs.arrays())]) for each in (train, others))
    elif isinstance(train.inputs, SoundRows):
        features, scale, strength = SOUND, StandardScaler(), 0.01
        seen, asked = (
            np.stack([spectrum_counts(each.inputs.picture(row)) for row in range(len(each))])
            for each in (train, others)
            if isinstance(each.inputs, SoundRows)
        )
    else:
        features, scale, strength = TEXTS, text_features(), 1.0 if labels.kind == "number" else 10.0
        seen, asked = ([reader.describe(each)[:LONGEST] for each in rows.records] for rows in (train, others))
        seen_TK, asked_MK = (number_columns(rows) for rows in (train, others))
        numbers = np.flatnonzero(np.isfinite(seen_TK).all(0))
        if len(numbers):
            columns = [
                (text_features(), 0),
                (make_pipeline(StandardScaler(), SimpleImputer()), 1 + np.arange(len(numbers))),
            ]
            scale, features = make_column_transformer(*columns), NUMBERS
            seen, asked = (
                np.column_stack([np.asarray(texts, dtype=object), values[:, numbers]])
                for texts, values in ((seen, seen_TK), (asked, asked_MK))
            )
    kind = "ridge regression" if labels.kind == "number" else "logistic regression"
    values = linear_values(labels, seen, train.targets_NC, strength, lambda model: make_pipeline(scale, model))
    return Baseline(features, kind, len(train), values(asked))


def number_columns(rows: LabelledSet) -> Floats:
    """The columns of the template as numbers (rows, columns), NaN where they are none."""

    def number(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            return math.nan
        return value if math.isfinite(value) else math.nan

    return np.asarray([[number(text) for text in record.fields] for record in rows.records], dtype=np.float64)


def linear_values(
    labels: Labels, seen: Any, targets_TC: OneHot, strength: float, pipeline: Callable[[Any], Any]
) -> Callable[[Any], Floats]:
    """A function from rows to values (M, C), as Labels.values gives, by a linear model that is fitted to training rows:
    logistic regression, of several classes one against the rest each; ridge regression of numbers.

    Args:
        strength: Inverse strength of the penalty.
        pipeline: Puts what makes features before the model.
    """
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression, Ridge
    from sklearn.multiclass import OneVsRestClassifier

    if labels.kind == "number":
        ridge = pipeline(Ridge(alpha=1 / strength)).fit(seen, targets_TC[:, 0].astype(np.float64))
        return lambda asked: labels.values(np.asarray(ridge.predict(asked), dtype=np.float64)[:, None])
    model, wanted = LogisticRegression(C=strength, max_iter=100), targets_TC > 0.5
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # a rough fit is enough
        if labels.kind == "several":
            known_C = wanted.any(0) & ~wanted.all(0)
            values_C = wanted.mean(0)
            fitted = pipeline(OneVsRestClassifier(model)).fit(seen, wanted[:, known_C].astype(np.int64))
        else:
            number_T = targets_TC.argmax(1)
            known_C, values_C = np.isin(np.arange(targets_TC.shape[1]), number_T), np.zeros(targets_TC.shape[1])
            fitted = pipeline(model).fit(seen, number_T)

    def values(asked: Any) -> Floats:
        told = np.asarray(fitted.predict_proba(asked), dtype=np.float64)
        values_MC = np.tile(values_C.astype(np.float64), (len(told), 1))
        values_MC[:, known_C] = told[:, -known_C.sum() :] if labels.kind == "several" else told
        return values_MC

    return values


def compare(labels: Labels, baseline: Baseline, first_MC: Floats, others: OneHot, train: OneHot) -> Beside:
    """A model's values of rows beside those of a baseline, by the metric of `labels`. `others`, `train`: targets of
    the rows, and of the training rows, whose mean is the least that a model has to beat."""
    labels = judged(labels, others)
    assert labels.metric is not None
    constant = labels.values(classification_scores.baseline(labels, train, rows=len(others)))
    if (
        labels.metric == metrics.choice("accuracy", None) and labels.kind != "several"
    ):  # its rows say more than resamples
        said = (labels.moved(each, labels.shift).argmax(1) for each in (first_MC, baseline.values_MC))
        score = comparison.paired("accuracy", *((each == others.argmax(1)).astype(np.float64) for each in said))
    else:
        score = chosen_metric.paired(labels, first_MC, baseline.values_MC, labels.true(others))
    return Beside(
        baseline.features,
        baseline.model,
        baseline.rows,
        score,
        labels.metric.higher,
        chosen_metric.of_targets(labels, constant, others),
    )


def judged(labels: Labels, targets_NC: OneHot) -> Labels:
    """Labels with a metric that is defined on rows: that of `evaluate.metric` where it is, else the usual one."""
    if chosen_metric.judges(labels, targets_NC):
        return labels
    return replace(labels, metric=metrics.choice(SCORES.get(labels.kind, "accuracy"), None))


def quick(
    labels: Labels, train: LabelledSet, others: LabelledSet, reader: RowReader, first_MC: Floats, *, seed: int
) -> Beside | None:
    """A fine-tuned model beside a baseline that costs a few seconds at most; None where training rows are too few."""
    if (most := _affordable(labels, train, reader)) < LEAST or not _differ(train, most, seed):
        return None
    judged_N = _some(len(others), MOST, seed)
    others, first_MC = others.subset(judged_N), first_MC[judged_N]
    baseline = fit(train, others, reader, labels, seed=seed, most=most)
    return compare(labels, baseline, first_MC, others.targets_NC, train.targets_NC)


def quick_folds(
    labels: Labels,
    rows: LabelledSet,
    splits: Sequence[tuple[LabelledSet, NDArray[np.bool_]]],
    reader: RowReader,
    first_NC: Floats,
    *,
    seed: int,
) -> Beside | None:
    """`quick` out of fold: of all folds together, each with its training rows and the mask of those it predicts."""
    values_NC, judged_N = np.zeros(first_NC.shape), np.isin(np.arange(len(rows)), _some(len(rows), MOST, seed))
    for train, own_N in splits:
        most, own_N = _affordable(labels, train, reader, fits=len(splits)), own_N & judged_N
        if most < LEAST or not own_N.any() or not _differ(train, most, seed):
            return None
        baseline = fit(train, rows.subset(own_N), reader, labels, seed=seed, most=most)
        values_NC[own_N] = baseline.values_MC
    baseline, targets_NC = baseline._replace(values_MC=values_NC[judged_N]), rows.targets_NC
    return compare(labels, baseline, first_NC[judged_N], targets_NC[judged_N], targets_NC)


def wanted(config: RunConfig, run: Run) -> bool:
    """Whether a run compares itself with a baseline: not where `evaluate.probe` is 0, a clock limits the run, or the
    run is one of several."""
    return config.evaluate.probe != 0 and not run.deadline.limited and run_directory.whole(run.home) == run.home


def told(
    found: Beside | None, run: Run, say: Callable[[str], None], *, summary: bool = False
) -> dict[str, dict[str, float]]:
    """Say and note the comparison; returns what scores.json gets of it. `summary`: warnings follow at the end."""
    if found is None:
        return {}
    run.note(simple_baseline=found.facts)
    behind, text = sentence(found.facts)
    if not (behind and summary):
        say(text)
    return {"simple_baseline": units.rounded({found.score.name: found.score.second})}


def in_check(
    labels: Labels, train: LabelledSet, others: LabelledSet, reader: RowReader, *, seed: int, linear: float | None
) -> str:
    """What a baseline reaches beside the same answer for every row, in a sentence of `check`; empty where rows are too
    few. `linear`: accuracy of a linear probe of the backbone, where that is known."""
    constant = labels.values(classification_scores.baseline(labels, train.targets_NC, rows=len(others)))
    found = quick(labels, train, others, reader, constant, seed=seed)
    if found is None:
        return ""
    told = (
        f"Without a backbone, {found.model} on {found.features} of {found.rows:,} training rows: {found.score.name} "
        f"{found.score.second:.3f}; the same answer for every row {found.floor:.3f}."
    )
    if linear is not None and found.score.name == "accuracy" and found.score.second > linear:
        told += " More than the frozen backbone's linear probe: the backbone may be what holds back."
    return f"{told} `workbench features` compares them row by row."


def _affordable(labels: Labels, train: LabelledSet, reader: RowReader, *, fits: int = 1) -> int:
    """Training rows that so many fits read in a few seconds."""
    some = train.records[: len(train) : max(1, len(train) // 200)]
    pictures = isinstance(train.inputs, PictureRows | SoundRows)
    length = PICTURE if pictures else np.mean([min(LONGEST, len(reader.describe(each))) for each in some])
    return min(MOST, len(train), int(WORK / (fits * max(1.0, float(length)) * len(labels.names))))


def fit_bytes(rows: LabelledSet) -> int:
    """Bytes that a fit to such training rows works in: of each coefficient some 30 numbers, as L-BFGS keeps its last
    ten steps and their gradients."""
    count = min(MOST, len(rows))
    features = 2000 if isinstance(rows.inputs, PictureRows | SoundRows) else min(20_000, 8 * count) + 3 * count
    return 30 * 8 * features * rows.targets_NC.shape[1] if count >= LEAST else 0


def _some(count: int, most: int, seed: int) -> NDArray[np.int64]:
    """A random choice of rows, in their order."""
    return np.sort(np.random.default_rng(seed).permutation(count)[:most])


def _differ(train: LabelledSet, most: int, seed: int) -> bool:
    """Whether rows that are fitted to have different labels."""
    return bool((np.ptp(train.targets_NC[_some(len(train), most, seed)], axis=0) > 0).any())


def text_features() -> Any:
    """What makes TF-IDF of words, pairs of words and parts of words of texts; to be fitted."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.pipeline import make_union

    words = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True, token_pattern=r"\S+")
    return make_union(
        words, TfidfVectorizer(analyzer="char_wb", ngram_range=(2, 4), sublinear_tf=True, max_features=20_000)
    )


def picture_counts(picture_HW3: npt.NDArray[np.uint8]) -> NDArray[np.float32]:
    """Histograms of oriented gradients, and the square roots of those of each colour in each quarter of a picture."""
    square = np.asarray(cv2.resize(picture_HW3, (SIDE, SIDE), interpolation=cv2.INTER_AREA))
    gradients = cv2.HOGDescriptor((SIDE, SIDE), (16, 16), (8, 8), (8, 8), 9).compute(square)
    half = SIDE // 2
    quarters = square.reshape(2, half, 2, half, 3).transpose(0, 2, 4, 1, 3).reshape(12, -1)
    colours = [np.histogram(each, COLOURS, (0, 256))[0] for each in quarters]
    return np.concatenate([np.ravel(gradients), np.sqrt(np.concatenate(colours) / half**2)]).astype(np.float32)


def spectrum_counts(picture_HW3: npt.NDArray[np.uint8]) -> NDArray[np.float32]:
    """Brightness of a spectrum in 32 spans of time and 16 bands of frequencies."""
    small_HW3 = np.asarray(cv2.resize(picture_HW3, (32, 16), interpolation=cv2.INTER_AREA))
    return np.ravel(small_HW3.mean(2) / 255).astype(np.float32)
