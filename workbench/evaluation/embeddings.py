"""Embeddings of texts, and their scores on rows whose texts belong together.

Legend: U texts, Q queries, N passages, D numbers of an embedding.
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
from workbench.data.embedding.pair_set import PairSet, TextUnits
from workbench.evaluation import retrieval_scores
from workbench.evaluation.result_store import ModelResults
from workbench.evaluation.row_passes import over_rows
from workbench.losses.embedding_losses import leading
from workbench.models.embedder import Embedder
from workbench.models.embedding_objective import EmbeddingLoss
from workbench.runs import units

if TYPE_CHECKING:
    import pandas as pd

Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
AT_ONCE = 1024
"""Queries whose similarities are held at a time."""


@dataclass(frozen=True)
class Search:
    """Queries, passages, and which of these belong to each query."""

    query_Q: Indices
    """Units of the queries' set."""
    row_Q: Indices
    """A row that each is the anchor of."""
    passage_N: Indices
    """Units of the passages' set."""
    relevant: list[Indices]
    """Places among the passages of those that each query is to find."""
    left_out: list[Indices]
    """Places of those that it is not asked about: its own text."""


@dataclass(frozen=True)
class EmbeddingScores:
    """Scores of embeddings on a set of rows, and what each of its queries finds."""

    scores: dict[str, float]
    table: pd.DataFrame


def pooled(embedder: Embedder, units: TextUnits, *, scoring: ModelResults | None = None) -> Tensor:
    """Embeddings (U, D) float32 of texts, before they are normalised."""
    device = next(embedder.model.parameters()).device

    def compute(numbers: Indices) -> list[list[float]]:
        embeddings: list[list[float]] = embedder.pooled(units.batch(numbers).to(device)).cpu().tolist()
        return embeddings

    embedding_by_text = over_rows(embedder.model, units.lengths, compute, scoring=scoring, content=units.arrays())
    return torch.tensor([embedding_by_text[number] for number in range(len(units.texts))], dtype=torch.float32)


def losses(embedder: Embedder, rows: PairSet, *, batch: int) -> dict[str, float]:
    """Mean training loss of rows, in batches of so many in their order, and that of each of several sets among them."""
    own_UD = pooled(embedder, rows.units)

    def mean(rows: PairSet, own_UD: Tensor) -> dict[str, float]:
        return {"loss": EmbeddingLoss(embedder).mean(rows, own_UD, size=batch)}

    return mean(rows, own_UD) | named_sets.scored(rows, lambda own: mean(*_of_set(rows, own, own_UD)))


def score(
    embedder: Embedder, rows: PairSet, gallery: PairSet, *, batch: int, scoring: ModelResults | None = None
) -> EmbeddingScores:
    """Scores of rows: `loss` first, then those of searching, or the correlation with given scores.

    Texts with a class look for others of it among `gallery`; anchors look for their positives among all passages of
    their own set. Embeddings of further `embed.sizes` have their first score again, by size. Each of several sets among
    the rows has the scores that it has alone.

    Args:
        gallery: The training rows.
        batch: Rows that the loss compares, as in training.
    """
    own_UD = pooled(embedder, rows.units, scoring=scoring)
    there_UD = pooled(embedder, gallery.units, scoring=scoring) if rows.form == "labelled" else None

    def scores(rows: PairSet, own_UD: Tensor) -> EmbeddingScores:
        return _scored(embedder, rows, own_UD, *((rows, own_UD) if there_UD is None else (gallery, there_UD)), batch)

    whole = scores(rows, own_UD)
    each = named_sets.scored(rows, lambda own: scores(*_of_set(rows, own, own_UD)).scores)
    return EmbeddingScores(whole.scores | each, whole.table)


def _of_set(rows: PairSet, own: Indices, own_UD: Tensor) -> tuple[PairSet, Tensor]:
    """Some rows as a set of their own, with the embeddings of its texts."""
    part = rows.subset(own)
    alone = part.with_partners(epoch=0) if rows.form == "labelled" else part
    return alone, own_UD[torch.from_numpy(rows.units_of(own))]


def _scored(
    embedder: Embedder, rows: PairSet, own_UD: Tensor, among: PairSet, there_UD: Tensor, batch: int
) -> EmbeddingScores:
    """`score` from embeddings of the texts of rows, and of those among which they look."""
    scores = {"loss": EmbeddingLoss(embedder).mean(rows, own_UD, size=batch)}
    if rows.form == "scored":
        for size in reversed(embedder.sizes):
            similarity_N = _similarity(embedder, own_UD, rows, size)
            scores |= _named(retrieval_scores.correlation(similarity_N, rows.score_N), size, embedder)
        return EmbeddingScores(
            units.rounded(scores), _scored_table(rows, _similarity(embedder, own_UD, rows, embedder.width))
        )
    search, tables = _search(rows, among), []
    for size in reversed(embedder.sizes):
        size_scores, table = _searched(embedder, rows, among, search, own_UD, there_UD, size)
        scores |= _named(size_scores, size, embedder)
        tables.append(table)
    return EmbeddingScores(units.rounded(scores), tables[0])


def _named(scores: dict[str, float], size: int, embedder: Embedder) -> dict[str, float]:
    """All scores of whole embeddings; of shorter ones the first, by its size."""
    if size == embedder.width or not scores:
        return scores
    first = next(iter(scores))
    return {f"{first}[{size}]": scores[first]}


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
    embedder: Embedder, rows: PairSet, among: PairSet, search: Search, own_UD: Tensor, there_UD: Tensor, size: int
) -> tuple[dict[str, float], pd.DataFrame]:
    """Scores of the queries, and a line for each with what it finds first."""
    import pandas as pd  # 0.2 s, which the first step need not wait for

    normalise = embedder.config.normalise
    passage_ND = leading(there_UD[torch.from_numpy(search.passage_N)], size, normalise=normalise)
    query_scores: list[dict[str, float]] = []
    first: list[int] = []
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
            hit_N = retrieval_scores.ranked(similarity_N[kept_N], relevant_N[kept_N])
            if hit_N.any():
                query_scores.append(retrieval_scores.of_query(hit_N))
    scores = retrieval_scores.summary(query_scores)
    nearest = search.passage_N[first]
    table = pd.DataFrame(
        {
            "row": [rows.place(row) for row in search.row_Q],
            "text": [rows.units.texts[unit] for unit in search.query_Q],
            "nearest": [among.units.texts[unit] for unit in nearest],
        }
    )
    if rows.form != "labelled":
        right = [place in own for place, own in zip(first, search.relevant, strict=True)]
        return scores, table.assign(right=right)
    label_of = dict(zip(among.anchor_N.tolist(), (record.label for record in among.records), strict=True))
    table = table.assign(
        label=[rows.records[row].label for row in search.row_Q],
        nearest_label=[label_of[unit] for unit in nearest.tolist()],
    )
    hits = int((table["label"] == table["nearest_label"]).sum())
    kept = {name: value for name, value in scores.items() if not name.startswith("recall")}
    return {**retrieval_scores.accuracy(hits, len(table)), **kept}, table


def _similarity(embedder: Embedder, own_UD: Tensor, rows: PairSet, size: int) -> Floats:
    """Similarities of the two texts of each row."""
    one, other = (
        leading(own_UD[torch.from_numpy(each)], size, normalise=embedder.config.normalise)
        for each in (rows.anchor_N, rows.positive_N)
    )
    similarity: Floats = (one * other).sum(1).double().numpy()
    return similarity


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
