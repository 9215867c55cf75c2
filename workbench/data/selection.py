"""The part of the training rows that `data.select` keeps.

Legend: N training rows, V buckets of n-grams.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from workbench.config.sections.sampling_config import SelectConfig
from workbench.data.batching import Indices
from workbench.errors import ConfigError, DataError

Floats: TypeAlias = npt.NDArray[np.float64]

BUCKETS = 10_000  # buckets into which words and pairs of words are hashed, as in the paper
PRIOR = 1_000
"""N-grams of the training rows that count as seen among the target's: what a small target lacks is not impossible."""
_SCORES = {"perplexity": "loss", "ifd": "difficulty", "gradient": "influence"}


def selected(
    config: SelectConfig,
    lengths_N: Indices,
    *,
    seed: int,
    texts: Callable[[], Iterable[str]],
    target: Callable[[str], Iterable[str]],
) -> tuple[Indices, str]:
    """Numbers of the rows that are kept, in their order, and a note on those that are not.

    Where the backbone chooses, chance stands in for it, as for a plan: `chosen` has its choice. Raises ConfigError: the
    budget holds all rows, so that there is nothing to choose; DataError: no row fits into the budget, or the target has
    no words.

    Args:
        lengths_N: Tokens of each row.
        texts: The text of each row, where by=importance reads it.
        target: The texts of a file of target rows.
    """
    weight_N = np.zeros(len(lengths_N))
    if config.by == "importance":
        assert config.target is not None
        weight_N = importance(texts(), target(config.target), name=config.target)
    order_N = gumbel_order(weight_N, seed=seed)
    count = _count(config, lengths_N[order_N])
    like = "" if config.target is None else f" by likeness to {config.target}"
    like = ", at random for now: the backbone chooses when the run begins" if config.by_backbone else like
    return np.sort(order_N[:count]), f"{len(order_N) - count:,} rows that data.select did not choose{like}"


def chosen(config: SelectConfig, lengths_N: Indices, score_NG: Floats) -> Indices:
    """Numbers of the rows that are kept by a score of the backbone, in their order. Raises ConfigError: the budget
    holds all rows that are wanted at all; DataError: none fits into the budget, or none is wanted.

    Args:
        lengths_N: Tokens of each row.
        score_NG: Mean loss of each row or its difficulty (N, 1), or its influence on each part (see `wanted`).
    """
    order_W = wanted(config, score_NG)
    if not len(order_W):
        raise DataError(
            "data.select.by=ifd: no prompt helps the backbone to foresee its answer, so that no row is kept.\n"
            "  Look whether prompts and answers belong together, or write data.select.by=perplexity."
        )
    return np.sort(order_W[: _count(config, lengths_N[order_W])])


def most_kept(config: SelectConfig, lengths_N: Indices) -> int:
    """How many rows fit into the budget at most, whichever they are. Raises ConfigError: all rows do; DataError: no row
    does."""
    return _count(config, np.sort(lengths_N))


def note(config: SelectConfig, score_N: Floats, kept_K: Indices) -> str:
    """Sentence on the rows that the backbone did not choose, and on the scores of those that are kept."""
    low, high = score_N[kept_K].min(), score_N[kept_K].max()
    what = f"{_SCORES[config.by]} of what is kept: {low:.3g} to {high:.3g}"
    return f"{len(score_N) - len(kept_K):,} rows that data.select did not choose ({what})"


def wanted(config: SelectConfig, score_NG: Floats) -> Indices:
    """Row numbers (W,), the most wanted first.

    By perplexity those whose place in the order of losses is nearest to the `band`: its start, middle or end; of equal
    ones the earlier row. By instruction-following difficulty the highest below 1: from there on the prompt makes the
    answer less likely, as in rows whose parts do not belong together (Li et al. 2023, arXiv:2308.12032, section 2.3).
    By gradient those of the highest influence, which the parts of the target take in turns.
    """
    if config.by == "gradient":
        return in_turns(score_NG)
    score_N = score_NG[:, 0]
    order_N = np.argsort(score_N, kind="stable")
    if config.by == "ifd":
        return order_N[::-1][(score_N < 1)[order_N[::-1]]]
    place = {"low": 0.0, "middle": (len(order_N) - 1) / 2, "high": len(order_N) - 1.0}[config.band]
    return order_N[np.argsort(np.abs(np.arange(len(order_N)) - place), kind="stable")]


def in_turns(score_NG: Floats) -> Indices:
    """Row numbers (N,) as the parts take them in turns, each the row with the highest score for it that is left.

    By their highest scores alone, a part whose scores are low all over would get none (Ivison et al. 2025,
    arXiv:2503.01807, take turns too). Of equal scores the later row comes first.
    """
    left_G = [iter(np.argsort(score_N, kind="stable")[::-1].tolist()) for score_N in score_NG.T]
    taken: dict[int, None] = {}
    for part_rows in itertools.islice(itertools.cycle(left_G), len(score_NG)):
        taken[next(row for row in part_rows if row not in taken)] = None
    return np.fromiter(taken, dtype=np.int64)


def importance(texts: Iterable[str], target: Iterable[str], *, name: str = "the target") -> Floats:
    """Log importance weights (N,) of texts for a target distribution: DSIR (Xie et al. 2023).

    Both distributions are bags of hashed words and pairs of words. For texts of one length and a large target it is the
    paper's sum of log ratios. Elsewhere two things differ, as rows are short and unequal here, where the paper chooses
    among documents of 128 words: a text's weight is its mean log ratio times the usual length, for else the shortest
    texts would win, and the target's distribution has a prior at that of the texts.
    """
    from sklearn.feature_extraction.text import HashingVectorizer  # half a second, for runs that choose rows so

    pairs = HashingVectorizer(
        n_features=BUCKETS, ngram_range=(1, 2), token_pattern=r"\w+|[^\w\s]+", alternate_sign=False, norm=None
    )
    count_NV = pairs.transform(texts)
    raw_V = np.asarray(count_NV.sum(0)).ravel()
    aim_V = np.asarray(pairs.transform(target).sum(0)).ravel()
    if not aim_V.sum():
        raise DataError(f"{name}: holds no word, so that no row is like it. Name another file as data.select.target.")
    raw_V /= max(raw_V.sum(), 1)
    aim_V = (aim_V + PRIOR * raw_V) / (aim_V.sum() + PRIOR)
    ratio_V = np.zeros(BUCKETS)
    seen_V = raw_V > 0
    ratio_V[seen_V] = np.log(aim_V[seen_V]) - np.log(raw_V[seen_V])
    length_N = np.maximum(np.asarray(count_NV.sum(1)).ravel(), 1)
    weight_N: Floats = count_NV @ ratio_V / length_N * np.median(length_N)
    return weight_N


def gumbel_order(weight_N: Floats, *, seed: int) -> Indices:
    """Row numbers as drawn one after another without replacement, with chances in proportion to exp(weight)."""
    return np.argsort(-(weight_N + np.random.default_rng([seed, 6]).gumbel(size=len(weight_N))), kind="stable")


def _count(config: SelectConfig, lengths_N: Indices) -> int:
    """How many of the rows, which have these lengths, fit into the budget."""
    total = len(lengths_N)
    if config.tokens is not None:
        key, budget = "tokens", f"{config.tokens}"
        count = int(np.searchsorted(np.cumsum(lengths_N), config.tokens, side="right"))
        all_of_them = f"{lengths_N.sum():,} tokens"
    else:
        assert config.rows is not None
        key, budget, all_of_them = "rows", f"{config.rows}", f"{total:,} rows"
        count = round(config.rows * total) if config.rows < 1 else int(config.rows)
    if count >= total:
        raise ConfigError(
            f"data.select.{key}={budget}: the training rows have {all_of_them} in all, so that nothing is chosen.\n"
            f"  Write a smaller data.select.{key}, or leave data.select out."
        )
    if not count:
        raise DataError(f"data.select.{key}={budget} keeps no row of {all_of_them}.\n  Write a larger budget.")
    return count
