"""Intervals by resampling rows: the percentile bootstrap (Efron and Tibshirani 1993, chapter 13), always of one seed.

Legend: N rows, C classes, K kinds of rows, R resamples, S scores.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
RESAMPLES = 1000
"""Samples of rows by which a 95 % interval is told."""
_AT_ONCE = 100


def bounds(score_RS: Floats) -> list[tuple[float, float]]:
    """The 95 % interval of each score from its values in resamples; those without a value are left out."""
    low_S, high_S = np.nanquantile(score_RS, [0.025, 0.975], axis=0)
    return list(zip(low_S.tolist(), high_S.tolist(), strict=True))


def means(names: Sequence[str], value_NS: Floats) -> dict[str, float]:
    """The mean of each column, and its 95 % interval as NAME_low and NAME_high; one row alone has none."""
    generator, rows = np.random.default_rng(0), len(value_NS)
    scores = {name: float(mean) for name, mean in zip(names, value_NS.mean(0), strict=True)}
    if rows < 2:
        return scores
    drawn_RS = np.stack([value_NS[generator.integers(rows, size=rows)].mean(0) for _ in range(RESAMPLES)])
    return with_bounds(scores, dict(zip(names, bounds(drawn_RS), strict=True)))


def with_bounds(scores: Mapping[str, float], intervals: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """Scores, each that has an interval followed by it as NAME_low and NAME_high."""
    together: dict[str, float] = {}
    for name, score in scores.items():
        together[name] = score
        if name in intervals:
            together |= dict(zip((f"{name}_low", f"{name}_high"), intervals[name], strict=True))
    return together


def resampled(count_K: npt.NDArray[np.int64]) -> Iterator[Floats]:
    """How often each kind of row is drawn in some resamples (r, K) at a time, RESAMPLES together.

    Rows of a kind count alike, so that their numbers among as many drawn rows are multinomial: it costs as much as
    there are kinds, and not rows.
    """
    generator, rows = np.random.default_rng(0), int(count_K.sum())
    for _ in range(RESAMPLES // _AT_ONCE):
        yield generator.multinomial(rows, count_K / rows, size=_AT_ONCE).astype(np.float64)


def of_f1(true_NC: Bools, predicted_NC: Bools) -> dict[str, tuple[float, float]]:
    """The 95 % intervals of micro- and macro-F1.

    A class that no row of a resample has or is given is left out of the resample's macro-F1: it is 0 where no row of
    the set has or is given it, as in the score itself, and elsewhere a matter of the draw.

    Args:
        true_NC: Whether a row has a class.
        predicted_NC: Whether it is given it.
    """
    kinds, count_K = np.unique(np.packbits(np.hstack([true_NC, predicted_NC]), axis=1), axis=0, return_counts=True)
    true_KC, predicted_KC = np.split(np.unpackbits(kinds, axis=1, count=2 * true_NC.shape[1]).astype(float), 2, axis=1)
    known = float((true_NC | predicted_NC).any(0).mean())
    score_RS = []
    for drawn_RK in resampled(count_K):
        both_RC, either_RC = drawn_RK @ (true_KC * predicted_KC), drawn_RK @ (true_KC + predicted_KC)
        with np.errstate(invalid="ignore"):  # of no row there is no share
            micro_R = 2 * both_RC.sum(1) / either_RC.sum(1)
            f1_RC = 2 * both_RC / either_RC
        present_R = np.maximum(1, (either_RC > 0).sum(1))
        score_RS.append(np.stack([np.nan_to_num(micro_R), known * np.nansum(f1_RC, axis=1) / present_R], axis=1))
    return dict(zip(("micro_f1", "macro_f1"), bounds(np.concatenate(score_RS)), strict=True))
