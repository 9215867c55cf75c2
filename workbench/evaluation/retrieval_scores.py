"""Scores of embeddings and rerankers: how well texts find what belongs to them, and how similarities follow given ones.

Legend: U texts, D numbers of an embedding, Q queries, N passages or rows, C candidates of a row, P pairs, K results.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from workbench.data import named_sets
from workbench.data.batching import Indices
from workbench.data.embedding import rerank_candidates
from workbench.data.embedding.pair_set import PairSet, TextUnits
from workbench.data.embedding.rerank_candidates import CandidateSet, PairedTexts, Ranking
from workbench.evaluation import metrics
from workbench.evaluation.forward_passes import ModelResults, over_rows
from workbench.evaluation.metrics import RESAMPLES
from workbench.losses.ranking_losses import leading
from workbench.models.embedder import Embedder, EmbeddingForm, mean_loss
from workbench.models.reranker import Reranker
from workbench.runs import units

if TYPE_CHECKING:
    import pandas as pd

Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
CUTOFF = 10  # results of a query that nDCG and recall look at
NDCG = f"ndcg@{CUTOFF}"  # by its name among the scores and in the tables of queries
AT_ONCE = 1024  # queries whose similarities are held at a time


def ranked_relevance(similarity_N: Floats, relevant_N: Mask) -> Mask:
    """Whether each passage of a query is relevant, most similar first.

    Among equals the relevant ones come last, so that embeddings that are all alike get the worst score.
    """
    return np.asarray(relevant_N[np.lexsort((relevant_N, -similarity_N))], dtype=np.bool_)


def scores_of_query(hit_N: Mask) -> dict[str, float]:
    """Scores of one query from the relevance of its ranked passages, at least one of which is relevant.

    nDCG at CUTOFF with binary gains (Järvelin and Kekäläinen 2002), the share of relevant passages among the first 1
    and CUTOFF, and one over the rank of the first relevant one.
    """
    discount_K = 1 / np.log2(np.arange(2, CUTOFF + 2))
    relevant, top_K = int(hit_N.sum()), hit_N[:CUTOFF]
    return {
        NDCG: float((top_K * discount_K[: len(top_K)]).sum() / discount_K[:relevant].sum()),
        "recall@1": float(hit_N[0] / relevant),
        f"recall@{CUTOFF}": float(top_K.sum() / relevant),
        "mrr": float(1 / (1 + hit_N.argmax())),
    }


def mean_query_scores(score_by_query: list[dict[str, float]]) -> dict[str, float]:
    """The mean of each score over queries, with a 95 % interval (bootstrap over queries)."""
    names = list(score_by_query[0])
    return metrics.bootstrap_means(names, np.asarray([[each[name] for name in names] for each in score_by_query]))


def correlation(similarity_N: Floats, score_N: Floats) -> dict[str, float]:
    """Rank correlation of similarities with scores, with a 95 % interval (bootstrap over rows), and the linear one."""
    from scipy import stats  # 0.5 s, which most runs do not need

    if np.ptp(similarity_N) == 0 or np.ptp(score_N) == 0:
        return {}
    rank_N = [stats.rankdata(each) for each in (similarity_N, score_N)]
    generator = np.random.default_rng(0)
    samples = [generator.integers(len(score_N), size=len(score_N)) for _ in range(RESAMPLES)]
    # Ranks within a sample differ from those of the whole only by ties.
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


@dataclass(frozen=True)
class Search:
    """Queries, passages, and which passages belong to each query."""

    query_Q: Indices  # units of the queries' set
    row_Q: Indices  # a row that each is the anchor of
    passage_N: Indices  # units of the passages' set
    relevant: list[Indices]  # for each query, the places among the passages of those that it should find
    left_out: list[Indices]  # for each query, the places of the passages that do not count: its own text


@dataclass(frozen=True)
class RankedRows:
    """Scores of rows by name, and a table of what each query finds first."""

    scores: dict[str, float]
    table: pd.DataFrame


def embed_texts(embedder: Embedder, units: TextUnits, *, scoring: ModelResults | None = None) -> Tensor:
    """Embeddings (U, D) float32 of texts, before they are normalised."""
    device = next(embedder.model.parameters()).device

    def compute(numbers: Indices) -> list[list[float]]:
        some: list[list[float]] = embedder.pooled(units.batch(numbers).to(device)).cpu().tolist()
        return some

    embeddings = over_rows(embedder.model, units.lengths, compute, scoring=scoring, content=units.arrays())
    return torch.tensor(embeddings, dtype=torch.float32)


def embedding_losses(embedder: Embedder, rows: PairSet, *, batch: int) -> dict[str, float]:
    """Mean training loss of rows in batches of `batch` rows, in their order, and that of each named set among them."""
    own_UD = embed_texts(embedder, rows.units)

    def mean(rows: PairSet, own_UD: Tensor) -> dict[str, float]:
        return {"loss": mean_loss(embedder, rows, own_UD, size=batch)}

    return mean(rows, own_UD) | named_sets.scored_apart(rows, lambda own: mean(*_of_set(rows, own, own_UD)))


def score_embeddings(
    embedder: Embedder, rows: PairSet, gallery: PairSet, *, batch: int, scoring: ModelResults | None = None
) -> RankedRows:
    """Scores of rows: `loss` first, then retrieval scores, or the correlation with given scores.

    Texts with a class search `gallery` for others of that class; anchors search all passages of their own set for their
    positives. For every further size of `embed.sizes` the first score is given again, by size. Each named set among the
    rows is scored by itself too.

    Args:
        gallery: The training rows.
        batch: Rows that the loss compares, as in training.
    """
    own_UD = embed_texts(embedder, rows.units, scoring=scoring)
    there_UD = embed_texts(embedder, gallery.units, scoring=scoring) if rows.form == "labelled" else None
    return score_vectors(embedder, rows, own_UD, gallery, there_UD, batch=batch)


def score_vectors(
    form: EmbeddingForm, rows: PairSet, own_UD: Tensor, gallery: PairSet, there_UD: Tensor | None, *, batch: int
) -> RankedRows:
    """`score_embeddings` from the embeddings of all texts of the rows, and, where rows have classes, of `gallery`."""

    def scores(rows: PairSet, own_UD: Tensor) -> RankedRows:
        among = (rows, own_UD) if there_UD is None else (gallery, there_UD)
        return _embedding_scores(form, rows, own_UD, *among, batch)

    whole = scores(rows, own_UD)
    each = named_sets.scored_apart(rows, lambda own: scores(*_of_set(rows, own, own_UD)).scores)
    return RankedRows(whole.scores | each, whole.table)


def _of_set(rows: PairSet, own: Indices, own_UD: Tensor) -> tuple[PairSet, Tensor]:
    """Some rows as a set of their own, with the embeddings of its texts."""
    part = rows.subset(own)
    alone = part.with_partners(epoch=0) if rows.form == "labelled" else part
    return alone, own_UD[torch.from_numpy(rows.units_of(own))]


def _embedding_scores(
    form: EmbeddingForm, rows: PairSet, own_UD: Tensor, among: PairSet, there_UD: Tensor, batch: int
) -> RankedRows:
    """`score_embeddings` from the embeddings of the texts of rows, and of the texts that they search."""
    scores, tables = {"loss": mean_loss(form, rows, own_UD, size=batch)}, []
    search = None if rows.form == "scored" else _search(rows, among)
    for size in reversed(form.sizes):
        if search is None:
            # Similarity (N,) of the two texts of each row.
            one, other = (
                leading(own_UD[torch.from_numpy(each)], size, normalise=form.config.normalise)
                for each in (rows.anchor_N, rows.positive_N)
            )
            similarity_N = np.asarray((one * other).sum(1).double().numpy())
            size_scores, table = correlation(similarity_N, rows.score_N), _scored_table(rows, similarity_N)
        else:
            size_scores, table = _searched(form, rows, among, search, own_UD, there_UD, size)
        if size == form.width:
            scores |= size_scores
        elif size_scores:  # of shorter embeddings the first score alone
            first = next(iter(size_scores))
            scores[f"{first}[{size}]"] = size_scores[first]
        tables.append(table)
    return RankedRows(units.rounded(scores), tables[0])


def _search(rows: PairSet, among: PairSet) -> Search:
    query_Q, row_Q = np.unique(rows.anchor_N, return_index=True)
    if rows.form == "labelled":
        passage_N, first_N = np.unique(among.anchor_N, return_index=True)
        classes = np.asarray([among.records[row].label for row in first_N])
        texts = {among.units.texts[unit]: place for place, unit in enumerate(passage_N)}
        relevant = [np.flatnonzero(classes == rows.records[row].label) for row in row_Q]
        same = [texts.get(rows.units.texts[unit]) for unit in query_Q]
        left_out = [np.asarray([] if place is None else [place], dtype=np.int64) for place in same]
        return Search(query_Q, row_Q, passage_N, relevant, left_out)
    passage_N = np.unique(np.concatenate([rows.positive_N, *rows.negatives]))
    positives: dict[int, list[int]] = {}
    for anchor, positive in zip(rows.anchor_N.tolist(), rows.positive_N.tolist(), strict=True):
        positives.setdefault(anchor, []).append(positive)
    relevant = [np.searchsorted(passage_N, np.unique(positives[unit])) for unit in query_Q.tolist()]
    left_out = [
        np.setdiff1d(np.flatnonzero(rows.known(query_Q[[place]], passage_N)[0]), own)
        for place, own in enumerate(relevant)
    ]
    return Search(query_Q, row_Q, passage_N, relevant, left_out)


def _searched(
    form: EmbeddingForm, rows: PairSet, among: PairSet, search: Search, own_UD: Tensor, there_UD: Tensor, size: int
) -> tuple[dict[str, float], pd.DataFrame]:
    """Scores of the queries, and a table row for each with what it finds first."""
    import pandas as pd  # 0.2 s, which the first step need not wait for

    normalise = form.config.normalise
    passage_ND = leading(there_UD[torch.from_numpy(search.passage_N)], size, normalise=normalise)
    query_scores: list[dict[str, float]] = []
    first: list[int] = []
    gain_Q = np.full(len(search.query_Q), np.nan)
    for start in range(0, len(search.query_Q), AT_ONCE):
        some = search.query_Q[start : start + AT_ONCE]
        query_QD = leading(own_UD[torch.from_numpy(some)], size, normalise=normalise)
        similarity_QN = (query_QD @ passage_ND.T).double().numpy()
        for place, similarity_N in enumerate(similarity_QN, start=start):
            kept_N = np.ones(len(similarity_N), dtype=bool)
            kept_N[search.left_out[place]] = False
            relevant_N = np.zeros(len(similarity_N), dtype=bool)
            relevant_N[search.relevant[place]] = True
            relevant_N &= kept_N
            first.append(int(np.where(kept_N, similarity_N, -np.inf).argmax()))
            hit_N = ranked_relevance(similarity_N[kept_N], relevant_N[kept_N])
            if hit_N.any():
                query_scores.append(scores_of_query(hit_N))
                gain_Q[place] = query_scores[-1][NDCG]
    scores = mean_query_scores(query_scores)
    nearest = search.passage_N[first]
    table = pd.DataFrame(
        {
            "row": [rows.place(row) for row in search.row_Q],
            "text": [rows.units.texts[unit] for unit in search.query_Q],
            "nearest": [among.units.texts[unit] for unit in nearest],
            NDCG: gain_Q,
        }
    )
    if rows.form != "labelled":
        return scores, table.assign(right=[place in own for place, own in zip(first, search.relevant, strict=True)])
    label_of = dict(zip(among.anchor_N.tolist(), (record.label for record in among.records), strict=True))
    table = table.assign(
        label=[rows.records[row].label for row in search.row_Q],
        nearest_label=[label_of[unit] for unit in nearest.tolist()],
    )
    hits = int((table["label"] == table["nearest_label"]).sum())
    kept = {name: value for name, value in scores.items() if not name.startswith("recall")}
    return {**metrics.accuracy_interval(hits, len(table)).scores("accuracy"), **kept}, table


def _scored_table(rows: PairSet, similarity_N: Floats) -> pd.DataFrame:
    import pandas as pd

    return pd.DataFrame(
        {
            "row": [record.place for record in rows.records],
            "text": [rows.units.texts[unit] for unit in rows.anchor_N],
            "other": [rows.units.texts[unit] for unit in rows.positive_N],
            "score": rows.score_N,
            "similarity": similarity_N,
        }
    )


def pair_scores(model: Reranker, pairs: PairedTexts, *, scoring: ModelResults | None = None) -> Floats:
    """Score (P,) of each pair; pairs that occur twice are computed once."""
    device = next(model.model.parameters()).device
    keys_P = pairs.query_P * len(pairs.units.texts) + pairs.passage_P
    _, first_D, place_P = np.unique(keys_P, return_index=True, return_inverse=True)
    different = pairs.take(first_D)

    def compute(numbers: Indices) -> list[float]:
        batch_scores: list[float] = model.scores(different.batch(numbers).to(device)).double().cpu().tolist()
        return batch_scores

    score_D = over_rows(model.model, different.lengths, compute, scoring=scoring, content=different.arrays())
    return np.asarray(score_D, dtype=np.float64)[place_P]


def rerank_losses(model: Reranker, rows: CandidateSet, score_NC: Floats | None = None) -> dict[str, float]:
    """Mean loss of rows with their own candidates, and that of each named set among them; from scores (N, C) of these
    where they are known."""
    if score_NC is None:
        score_NC = pair_scores(model, rows.all_pairs).reshape(-1, rows.each)

    def mean(numbers: Indices) -> dict[str, float]:
        return {"loss": float(model.loss_of(torch.from_numpy(score_NC[numbers]).float(), rows, numbers)) / len(numbers)}

    return mean(np.arange(len(rows))) | named_sets.scored(rows, mean)


def score_reranker(
    model: Reranker, rows: CandidateSet, *, candidates: int, scoring: ModelResults | None = None
) -> RankedRows:
    """Scores of rows: `loss` first, then scores of the ranked candidates, or the correlation with given scores.

    Each named set among the rows is scored by itself too, with candidates from all sets. `candidates`: see
    `candidate_set.ranking`.
    """
    if rows.pairs.form == "scored":
        score_N = pair_scores(model, rows.all_pairs, scoring=scoring)

        def correlated(numbers: Indices) -> dict[str, float]:
            return correlation(score_N[numbers], rows.pairs.score_N[numbers])

        scores = {**rerank_losses(model, rows, score_N[:, None]), **correlated(np.arange(len(rows)))}
        scores |= named_sets.scored(rows, correlated)
        return RankedRows(units.rounded(scores), _scored_table(rows.pairs, score_N))
    order = rerank_candidates.ranking(rows, candidates=candidates)
    query_P = np.repeat(rows.pairs.anchor_N[order.row_Q], [len(each) for each in order.passages])
    asked = PairedTexts(rows.pairs.units, rows.joins, query_P, np.concatenate(order.passages))
    score_P = pair_scores(model, asked, scoring=scoring)
    keys_P = query_P * len(rows.pairs.units.texts) + asked.passage_P
    wanted_NC = rows.pairs.anchor_N[:, None] * len(rows.pairs.units.texts) + rows.passage_NC
    score_NC = score_P[np.searchsorted(keys_P, wanted_NC)]  # queries ascend, and the passages of each
    hits, table = ranked_candidates(
        rows, order, np.split(score_P, np.cumsum([len(each) for each in order.passages])[:-1])
    )

    def of_queries(numbers: Indices) -> dict[str, float]:
        own = np.flatnonzero(np.isin(order.row_Q, numbers))
        return mean_query_scores([hits[query] for query in own]) if len(own) else {}

    scores = {
        **rerank_losses(model, rows, score_NC),
        **of_queries(np.arange(len(rows))),
        **named_sets.scored(rows, of_queries),
    }
    return RankedRows(units.rounded(scores), table)


def ranked_candidates(
    rows: CandidateSet, order: Ranking, scores: list[Floats]
) -> tuple[list[dict[str, float]], pd.DataFrame]:
    """Scores of each query from those of its candidates, and a table row for each with what it finds first."""
    import pandas as pd

    hits, first = [], []
    for relevant, own in zip(order.relevant, scores, strict=True):
        hits.append(scores_of_query(ranked_relevance(own, relevant)))
        first.append(int(np.lexsort((relevant, -own))[0]))
    texts, anchor_N = rows.pairs.units.texts, rows.pairs.anchor_N
    table = pd.DataFrame(
        {
            "row": [rows.place(row) for row in order.row_Q],
            "text": [texts[anchor_N[row]] for row in order.row_Q],
            "nearest": [texts[own[place]] for own, place in zip(order.passages, first, strict=True)],
            "right": [bool(own[place]) for own, place in zip(order.relevant, first, strict=True)],
            "score_nearest": [float(own[place]) for own, place in zip(scores, first, strict=True)],
            NDCG: [each[NDCG] for each in hits],
        }
    )
    return hits, table
