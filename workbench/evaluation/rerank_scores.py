"""Scores of a reranker's pairs, and how well they rank the candidates of each query.

Legend: N rows, C candidates of a row, P pairs, Q queries.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch

from workbench.data import named_sets
from workbench.data.batching import Indices
from workbench.data.embedding import rerank_candidates
from workbench.data.embedding.rerank_candidates import CandidateSet, PairedTexts, Ranking
from workbench.evaluation import retrieval_scores
from workbench.evaluation.result_store import ModelResults
from workbench.evaluation.row_passes import over_rows
from workbench.models.reranker import Reranker
from workbench.runs import units

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class RankedRows:
    """Scores of rows by name, and what each query finds first."""

    scores: dict[str, float]
    table: pd.DataFrame


def read(model: Reranker, pairs: PairedTexts, *, scoring: ModelResults | None = None) -> Floats:
    """Score (P,) of each pair, of which one that comes twice is computed once.

    Args:
        scoring: Results of an earlier process, where this one may be stopped.
    """
    device = next(model.model.parameters()).device
    keys_P = pairs.query_P * len(pairs.units.texts) + pairs.passage_P
    _, first_D, place_P = np.unique(keys_P, return_index=True, return_inverse=True)
    different = pairs.take(first_D)

    def compute(numbers: Indices) -> list[float]:
        batch_scores: list[float] = model.scores(different.batch(numbers).to(device)).double().cpu().tolist()
        return batch_scores

    score_by_pair = over_rows(model.model, different.lengths, compute, scoring=scoring, content=different.arrays())
    return np.asarray([score_by_pair[number] for number in range(len(first_D))], dtype=np.float64)[place_P]


def losses(model: Reranker, rows: CandidateSet, *, scoring: ModelResults | None = None) -> dict[str, float]:
    """Mean loss of rows with the candidates that they have, and that of each of several sets among them."""
    score_NC = read(model, rows.all_pairs, scoring=scoring).reshape(-1, rows.each)
    return _losses(model, rows, score_NC)


def _losses(model: Reranker, rows: CandidateSet, score_NC: Floats) -> dict[str, float]:
    def mean(numbers: Indices) -> dict[str, float]:
        total = model.loss_of(torch.from_numpy(score_NC[numbers]).float(), rows, numbers)
        return {"loss": float(total) / len(numbers)}

    return mean(np.arange(len(rows))) | named_sets.scored(rows, mean)


def score(model: Reranker, rows: CandidateSet, *, candidates: int, scoring: ModelResults | None = None) -> RankedRows:
    """Scores of rows: `loss` first, then those of ranking the candidates of queries, or the correlation with scores.

    Each of several sets among the rows has the scores that it has alone, its candidates being those of all.

    Args:
        candidates: See `candidate_set.ranking`.
    """
    if rows.pairs.form == "scored":
        return _scored(model, rows, scoring)
    order = rerank_candidates.ranking(rows, candidates=candidates)
    query_P = np.repeat(rows.pairs.anchor_N[order.row_Q], [len(each) for each in order.passages])
    asked = PairedTexts(rows.pairs.units, rows.joins, query_P, np.concatenate(order.passages))
    score_P = read(model, asked, scoring=scoring)
    keys_P = query_P * len(rows.pairs.units.texts) + asked.passage_P
    wanted_NC = rows.pairs.anchor_N[:, None] * len(rows.pairs.units.texts) + rows.passage_NC
    score_NC = score_P[np.searchsorted(keys_P, wanted_NC)]  # both are ascending: queries are, and their passages
    hits, table = ranked(rows, order, np.split(score_P, np.cumsum([len(each) for each in order.passages])[:-1]))

    def of_queries(numbers: Indices) -> dict[str, float]:
        own = np.flatnonzero(np.isin(order.row_Q, numbers))
        return retrieval_scores.summary([hits[query] for query in own]) if len(own) else {}

    scores = {
        **_losses(model, rows, score_NC),
        **of_queries(np.arange(len(rows))),
        **named_sets.scored(rows, of_queries),
    }
    return RankedRows(units.rounded(scores), table)


def ranked(rows: CandidateSet, order: Ranking, scores: list[Floats]) -> tuple[list[dict[str, float]], pd.DataFrame]:
    """Scores of each query from those of its candidates, and a line for each with what it finds first."""
    hits, first = [], []
    for relevant, own in zip(order.relevant, scores, strict=True):
        hits.append(retrieval_scores.of_query(retrieval_scores.ranked(own, relevant)))
        first.append(int(np.lexsort((relevant, -own))[0]))
    texts, anchor_N = rows.pairs.units.texts, rows.pairs.anchor_N
    table = pd.DataFrame(
        {
            "row": [rows.place(row) for row in order.row_Q],
            "text": [texts[anchor_N[row]] for row in order.row_Q],
            "nearest": [texts[own[place]] for own, place in zip(order.passages, first, strict=True)],
            "right": [bool(own[place]) for own, place in zip(order.relevant, first, strict=True)],
            "score_nearest": [float(own[place]) for own, place in zip(scores, first, strict=True)],
        }
    )
    return hits, table


def _scored(model: Reranker, rows: CandidateSet, scoring: ModelResults | None) -> RankedRows:
    score_N, pairs = read(model, rows.all_pairs, scoring=scoring), rows.pairs

    def correlated(numbers: Indices) -> dict[str, float]:
        return retrieval_scores.correlation(score_N[numbers], pairs.score_N[numbers])

    scores = {**_losses(model, rows, score_N[:, None]), **correlated(np.arange(len(rows)))}
    scores |= named_sets.scored(rows, correlated)
    table = pd.DataFrame(
        {
            "row": [record.place for record in pairs.records],
            "text": [pairs.units.texts[unit] for unit in pairs.anchor_N],
            "other": [pairs.units.texts[unit] for unit in pairs.positive_N],
            "score": pairs.score_N,
            "similarity": score_N,
        }
    )
    return RankedRows(units.rounded(scores), table)
