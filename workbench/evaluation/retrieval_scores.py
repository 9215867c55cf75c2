"""Scores of embeddings: how well texts find those that belong to them, and how similarities follow given ones.

Legend: Q queries, N passages, K results.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from workbench.evaluation import bootstrap, class_scores
from workbench.evaluation.bootstrap import RESAMPLES

Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
CUTOFF = 10
"""Results of a query that nDCG and recall look at."""


def ranked(similarity_N: Floats, relevant_N: Mask) -> Mask:
    """Whether the passages of a query are relevant, most similar first; relevant ones last among equals.

    So embeddings that are all alike score as the worst order does.
    """
    hit_N: Mask = relevant_N[np.lexsort((relevant_N, -similarity_N))]
    return hit_N


def of_query(hit_N: Mask) -> dict[str, float]:
    """Scores of one query from the relevance of its ranked passages, of which one at least is relevant.

    nDCG at CUTOFF with binary gains (Järvelin and Kekäläinen 2002), the share of relevant passages among the first 1
    and CUTOFF, and one over the rank of the first relevant one.
    """
    discount_K = 1 / np.log2(np.arange(2, CUTOFF + 2))
    relevant, top_K = int(hit_N.sum()), hit_N[:CUTOFF]
    return {
        f"ndcg@{CUTOFF}": float((top_K * discount_K[: len(top_K)]).sum() / discount_K[:relevant].sum()),
        "recall@1": float(hit_N[0] / relevant),
        f"recall@{CUTOFF}": float(top_K.sum() / relevant),
        "mrr": float(1 / (1 + hit_N.argmax())),
    }


def summary(score_by_query: list[dict[str, float]]) -> dict[str, float]:
    """The mean of each score over queries, with a 95 % interval (bootstrap over queries)."""
    names = list(score_by_query[0])
    value_QS = np.asarray([[each[name] for name in names] for each in score_by_query])
    return bootstrap.means(names, value_QS)


def accuracy(hits: int, queries: int) -> dict[str, float]:
    """Share of queries whose most similar passage is relevant, with Wilson's 95 % interval."""
    estimate = class_scores.accuracy_interval(hits, queries)
    return {"accuracy": estimate.mean, "accuracy_low": estimate.low, "accuracy_high": estimate.high}


def correlation(similarity_N: Floats, score_N: Floats) -> dict[str, float]:
    """Rank correlation of similarities with scores, with a 95 % interval (bootstrap over rows), and the linear one."""
    from scipy import stats  # half a second, which most runs do not need

    if np.ptp(similarity_N) == 0 or np.ptp(score_N) == 0:
        return {}
    rank_N = [stats.rankdata(each) for each in (similarity_N, score_N)]
    generator = np.random.default_rng(0)
    samples = [generator.integers(len(score_N), size=len(score_N)) for _ in range(RESAMPLES)]
    # Ranks within a sample differ from those of the whole by ties alone.
    correlations = [
        np.corrcoef(rank_N[0][some], rank_N[1][some])[0, 1] for some in samples if np.ptp(score_N[some]) > 0
    ]
    low, high = np.nanquantile(correlations, [0.025, 0.975]) if correlations else (np.nan, np.nan)
    return {
        "spearman": float(stats.spearmanr(similarity_N, score_N).statistic),
        "spearman_low": float(low),
        "spearman_high": float(high),
        "pearson": float(np.corrcoef(similarity_N, score_N)[0, 1]),
    }
