"""Scores of searches equal scikit-learn's, or counting by hand; ties count as the worst order."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats
from sklearn import metrics

from workbench.evaluation import retrieval_scores
from workbench.evaluation.retrieval_scores import mean_query_scores, ranked_relevance, scores_of_query


@pytest.mark.parametrize("relevant", [1, 3, 15])
def test_ndcg_is_that_of_scikit_learn(relevant: int) -> None:
    generator = np.random.default_rng(relevant)
    similarity, wanted = generator.normal(size=40), np.arange(40) < relevant
    found = scores_of_query(ranked_relevance(similarity, wanted))
    assert found["ndcg@10"] == pytest.approx(metrics.ndcg_score([wanted.astype(float)], [similarity], k=10))
    order = np.argsort(-similarity)
    assert found["mrr"] == pytest.approx(1 / (1 + min(np.flatnonzero(wanted[order]))))
    assert found["recall@10"] == pytest.approx(wanted[order[:10]].sum() / relevant)
    assert found["recall@1"] == pytest.approx(wanted[order[0]] / relevant)


def test_embeddings_that_are_all_alike_find_nothing_first() -> None:
    found = scores_of_query(ranked_relevance(np.ones(30), np.arange(30) == 0))
    assert found == {"ndcg@10": 0, "recall@1": 0, "recall@10": 0, "mrr": pytest.approx(1 / 30)}


def test_intervals_hold_the_mean() -> None:
    found = [scores_of_query(ranked_relevance(np.arange(12.0), np.arange(12) == n)) for n in range(12)]
    scores = mean_query_scores(found)
    for name in ("ndcg@10", "recall@10", "mrr"):
        assert scores[name] == pytest.approx(np.mean([each[name] for each in found]))
        assert scores[f"{name}_low"] < scores[name] < scores[f"{name}_high"]
    normal = 1.96 * np.std([each["mrr"] for each in found]) / np.sqrt(12)
    assert scores["mrr_high"] - scores["mrr_low"] == pytest.approx(2 * normal, rel=0.15)


def test_correlation_is_that_of_scipy() -> None:
    generator = np.random.default_rng(0)
    score = generator.integers(5, size=200).astype(float)
    similarity = score + generator.normal(size=200)
    found = retrieval_scores.correlation(similarity, score)
    assert found["spearman"] == pytest.approx(stats.spearmanr(similarity, score).statistic)
    assert found["pearson"] == pytest.approx(stats.pearsonr(similarity, score).statistic)
    assert found["spearman_low"] < found["spearman"] < found["spearman_high"]
    assert retrieval_scores.correlation(np.ones(3), np.arange(3.0)) == {}
