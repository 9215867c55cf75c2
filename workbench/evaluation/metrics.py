"""Metrics and their 95 % intervals, from numpy arrays and texts alone; scikit-learn's where it has them.

Intervals are Wilson's for shares and the percentile bootstrap's elsewhere (Efron and Tibshirani 1993, chapter 13),
always with the same seed.

Legend: N rows, C classes, K kinds of rows, R resamples, S scores.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Labels = npt.NDArray[np.int64]
BINS = 15  # Bins of confidence in the calibration error, as in Guo et al. 2017.
_Z95 = 1.959963984540054  # the normal quantile of 97.5 %
RESAMPLES = 1000  # resamples of rows that a 95 % bootstrap interval is computed from
_AT_ONCE = 100
_WORD = re.compile(r"[぀-ヿ㐀-鿿가-힯]|[^\W_぀-ヿ㐀-鿿가-힯]+")
"""A word, or one character of a script that writes no spaces (Japanese, Chinese, Korean)."""


@dataclass(frozen=True)
class Interval:
    """A mean with the bounds of its 95 % confidence interval."""

    mean: float
    low: float
    high: float

    def scores(self, name: str) -> dict[str, float]:
        """The three numbers as scores NAME, NAME_low and NAME_high."""
        return {name: self.mean, f"{name}_low": self.low, f"{name}_high": self.high}


def probability_scores(p_NC: Floats, labels_N: Labels) -> dict[str, float]:
    """Accuracy, macro-F1, log-loss (nats), Brier score, expected calibration error; ROC-AUC for two classes.

    The Brier score is the squared distance summed over classes, so 2 is the worst.
    """
    from sklearn.metrics import accuracy_score, f1_score, log_loss, roc_auc_score  # 0.5 s, with scipy.stats

    classes = np.arange(p_NC.shape[1])
    predicted_N = p_NC.argmax(1)
    p_NC = np.minimum(p_NC, 1.0)  # a mean of rounded values may be 1 + 2**-52
    one_hot_NC = np.eye(len(classes))[labels_N]
    score_by_name = {
        "accuracy": float(accuracy_score(labels_N, predicted_N)),
        "macro_f1": float(f1_score(labels_N, predicted_N, labels=classes, average="macro", zero_division=0.0)),
        "log_loss": float(log_loss(labels_N, p_NC, labels=classes)),
        "brier": float(((p_NC - one_hot_NC) ** 2).sum(1).mean()),
        "calibration_error": calibration_error(p_NC, labels_N),
    }
    if len(classes) == 2 and len(np.unique(labels_N)) == 2:
        score_by_name["roc_auc"] = float(roc_auc_score(labels_N, p_NC[:, 1]))
    return score_by_name


def calibration_error(p_NC: Floats, labels_N: Labels) -> float:
    """Mean gap between confidence and accuracy over equal bins of confidence, weighted by their rows.

    Guo et al. 2017, arXiv:1706.04599, eq. 3.
    """
    confidence_N, hit_N = p_NC.max(1), p_NC.argmax(1) == labels_N
    bin_N = np.minimum((confidence_N * BINS).astype(np.int64), BINS - 1)
    gap_bins = np.bincount(bin_N, weights=hit_N - confidence_N, minlength=BINS)
    return float(np.abs(gap_bins).sum() / len(labels_N))


def accuracy_interval(hits: float, rows: float) -> Interval:
    """Wilson's 95 % interval of a proportion, which also holds for few rows and near 0 and 1 (Wilson 1927). `hits`: at
    most `rows`; a tie counts half. `rows`: the effective number where rows depend on each other."""
    share, spread = hits / rows, _Z95**2 / rows
    centre, half = share + spread / 2, _Z95 * math.sqrt(share * (1 - share) / rows + spread / (4 * rows))
    low, high = ((centre + side * half) / (1 + spread) for side in (-1, 1))
    return Interval(share, low if share > 0 else 0.0, high if share < 1 else 1.0)  # exactly 0 and 1 but for rounding


def percentile_bounds(score_RS: Floats) -> list[tuple[float, float]]:
    """The 95 % interval of each score from its values in resamples; those without a value are left out."""
    low_S, high_S = np.nanquantile(score_RS, [0.025, 0.975], axis=0)
    return list(zip(low_S.tolist(), high_S.tolist(), strict=True))


def bootstrap_means(names: Sequence[str], value_NS: Floats) -> dict[str, float]:
    """The mean of each column, and its 95 % interval as NAME_low and NAME_high; one row alone has none."""
    generator, rows = np.random.default_rng(0), len(value_NS)
    scores = {name: float(mean) for name, mean in zip(names, value_NS.mean(0), strict=True)}
    if rows < 2:
        return scores
    drawn_RS = np.stack([value_NS[generator.integers(rows, size=rows)].mean(0) for _ in range(RESAMPLES)])
    return with_bounds(scores, dict(zip(names, percentile_bounds(drawn_RS), strict=True)))


def with_bounds(scores: Mapping[str, float], intervals: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """The scores; each that has an interval is followed by NAME_low and NAME_high."""
    together: dict[str, float] = {}
    for name, score in scores.items():
        together[name] = score
        if name in intervals:
            together[f"{name}_low"], together[f"{name}_high"] = intervals[name]
    return together


def resampled(count_K: npt.NDArray[np.int64]) -> Iterator[Floats]:
    """How often each kind of row occurs in RESAMPLES resamples, yielded some resamples (r, K) at a time.

    Rows of a kind count alike, so their counts in a resample are multinomial: the cost depends on the number of kinds,
    not of rows.
    """
    generator, rows = np.random.default_rng(0), int(count_K.sum())
    for _ in range(RESAMPLES // _AT_ONCE):
        yield generator.multinomial(rows, count_K / rows, size=_AT_ONCE).astype(np.float64)


def f1_intervals(true_NC: Bools, predicted_NC: Bools) -> dict[str, tuple[float, float]]:
    """The 95 % intervals of micro- and macro-F1.

    A class that neither labels nor predictions of a resample contain is left out of its macro-F1, unless the whole set
    lacks it too: then it counts 0, as in the score itself.

    Args:
        true_NC: Whether a class is among the labels of a row.
        predicted_NC: Whether it is predicted for the row.
    """
    kinds, count_K = np.unique(np.packbits(np.hstack([true_NC, predicted_NC]), axis=1), axis=0, return_counts=True)
    true_KC, predicted_KC = np.split(np.unpackbits(kinds, axis=1, count=2 * true_NC.shape[1]).astype(float), 2, axis=1)
    known = float((true_NC | predicted_NC).any(0).mean())
    score_RS = []
    for drawn_RK in resampled(count_K):
        both_RC, either_RC = drawn_RK @ (true_KC * predicted_KC), drawn_RK @ (true_KC + predicted_KC)
        with np.errstate(invalid="ignore"):  # 0 / 0 where a class has no rows
            micro_R = 2 * both_RC.sum(1) / either_RC.sum(1)
            f1_RC = 2 * both_RC / either_RC
        present_R = np.maximum(1, (either_RC > 0).sum(1))
        score_RS.append(np.stack([np.nan_to_num(micro_R), known * np.nansum(f1_RC, axis=1) / present_R], axis=1))
    return dict(zip(("micro_f1", "macro_f1"), percentile_bounds(np.concatenate(score_RS)), strict=True))


def words(text: str) -> list[str]:
    """Lower-case words without punctuation and English articles, as SQuAD's scorer normalises them."""
    return [word for word in _WORD.findall(text.lower()) if word not in ("a", "an", "the")]


def token_f1(prediction: str, reference: str) -> float:
    """Harmonic mean of precision and recall over shared words, 0 to 1 (Rajpurkar et al. 2016)."""
    predicted, wanted = words(prediction), words(reference)
    if not predicted or not wanted:
        return float(predicted == wanted)
    shared = sum((Counter(predicted) & Counter(wanted)).values())
    return 2 * shared / (len(predicted) + len(wanted))


def rouge_l(prediction: str, reference: str) -> float:
    """F-measure of the longest common subsequence of words, 0 to 1 (Lin 2004)."""
    predicted, wanted = words(prediction), words(reference)
    # Length of the longest common subsequence, row by row of its table. Package rouge_score, which finds the
    # same, imports all of nltk and scipy.stats, 0.65 s before a first step.
    length = [0] * (len(wanted) + 1)
    for word in predicted:
        diagonal = 0
        for column, against in enumerate(wanted, start=1):
            longer = diagonal + 1 if word == against else max(length[column], length[column - 1])
            diagonal, length[column] = length[column], longer
    shared = length[-1]
    if not shared:
        return 0.0
    precision, recall = shared / len(predicted), shared / len(wanted)
    return 2 * precision * recall / (precision + recall)
