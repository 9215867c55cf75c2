"""Exact and near-duplicates of texts, and the clusters that duplicates of texts or pictures form.

Shapes: N rows, U distinct contents, P pairs of them, V shingles, F folds or other parts of a split, D features.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from workbench.data.folds.shingle_sets import shingle_sets
from workbench.data.folds.similarity import Ints, components, min_similarity, near_pairs, near_vectors, normalised
from workbench.errors import DataError

Mask: TypeAlias = NDArray[np.bool_]


@dataclass(frozen=True)
class DuplicateClusters:
    """Near-duplicates among rows, and the clusters that they form."""

    distinct_N: Ints
    """Number of each row's distinct content; rows with equal numbers are exact duplicates."""
    pairs_P2: Ints
    """Pairs of distinct contents at or above the threshold."""
    cluster_U: Ints
    """The smallest number of a content in the same cluster. Rows of a cluster are linked by a chain of pairs."""
    similarity_U: NDArray[np.float64]
    """Smallest similarity of two texts of the same cluster, of two linked pictures, of features that link; 1 where it
    has one content."""
    name_U: tuple[str, ...]
    """A digest of each distinct content."""

    @property
    def cluster_N(self) -> Ints:
        """Cluster of each row."""
        return self.cluster_U[self.distinct_N]

    @property
    def groups(self) -> list[str]:
        """Name of each row's cluster, which depends on the texts of the cluster but not on the order of rows."""
        return [self.name_U[cluster] for cluster in self.cluster_N]

    def subset(self, kept_N: Mask) -> DuplicateClusters:
        """The clusters of some of the rows, with unchanged names and similarities."""
        return replace(self, distinct_N=self.distinct_N[kept_N])


class DuplicateReport(NamedTuple):
    """Counts of duplicates. Only clusters of two rows or more are counted."""

    rows: int
    exact: int
    """Rows that repeat another one, but for case, spacing and punctuation."""
    clusters: int
    clustered: int
    """Rows that are in a cluster."""
    largest: int
    """Rows of the largest cluster."""
    least_similar: float
    """Smallest Jaccard similarity of two rows of one cluster; below the threshold where a chain of pairs links them."""
    conflicts: tuple[tuple[int, ...], ...]
    """Row numbers, from 0, of every cluster whose rows carry different labels."""


class OverlapReport(NamedTuple):
    """Near-duplicates between training and test rows."""

    test_rows: int
    """Test rows that have a near-duplicate among the training rows."""
    train_rows: int
    """Training rows in a cluster with a test row, some of them only by a chain of pairs."""
    kept_N: Mask
    """False for those training rows."""


def find(
    texts: Sequence[str],
    *,
    threshold: float = 0.7,
    shingle: Literal["characters", "words"] = "characters",
    size: int = 4,
    seed: int = 0,
) -> DuplicateClusters:
    """Find rows that are equal after `normalised`, or whose sets of shingles reach a Jaccard similarity of `threshold`.

    MinHash and banding propose pairs (Broder 1997; Leskovec et al., Mining of Massive Datasets, chapter 3), each of
    which is then measured exactly: no pair is wrong, and one at the threshold is missed with a probability below
    MISS_PROBABILITY. The result depends on the set of texts and the seed; the order of rows only permutes it.

    Args:
        texts: One for each row.
        threshold: Jaccard similarity, in (0, 1].
        shingle: Sequences of characters suit short sentences. A changed word alters a fifth of a set of ten words,
            whether it is a typo or a new meaning, and word order alters nothing. Of Banking77's pairs above 0.7, 95 %
            have the same label with sequences of four characters, 84 % with single words.
        size: Characters or words in a shingle.
        seed: Seed of the hash functions.

    Raises:
        DataError: Thousands of different texts are similar, as if from one template.
    """
    texts = [normalised(text) for text in texts]
    distinct = sorted(set(texts))
    number = {text: index for index, text in enumerate(distinct)}
    sets = shingle_sets(distinct, shingle=shingle, size=size)
    pairs_P2 = near_pairs(sets, threshold=threshold, seed=seed)
    cluster_U = components(len(distinct), pairs_P2)
    return DuplicateClusters(
        distinct_N=np.array([number[text] for text in texts], dtype=np.int64),
        pairs_P2=pairs_P2,
        cluster_U=cluster_U,
        similarity_U=min_similarity(sets.table_UV, cluster_U),
        name_U=tuple(blake2b(text.encode(), digest_size=12).hexdigest() for text in distinct),
    )


def joined(clusters: DuplicateClusters, vectors_ND: NDArray[np.float32], *, threshold: float) -> DuplicateClusters:
    """The clusters, those of which are one that two rows with like vectors link.

    Args:
        vectors_ND: Features of each row; of equal rows the first one's count.
        threshold: Cosine similarity of vectors, less their mean.

    Raises:
        DataError: Very many vectors are alike.
    """
    _, first_U = np.unique(clusters.distinct_N, return_index=True)
    near_P2, similarity_P = near_vectors(vectors_ND[first_U], threshold=threshold)
    pairs_P2 = np.unique(np.concatenate([clusters.pairs_P2.reshape(-1, 2), near_P2]), axis=0)
    cluster_U = components(len(first_U), pairs_P2)
    similarity_U = np.ones(len(first_U))
    np.minimum.at(similarity_U, cluster_U, clusters.similarity_U)
    np.minimum.at(similarity_U, cluster_U[near_P2[:, 0]], similarity_P)
    return replace(clusters, pairs_P2=pairs_P2, cluster_U=cluster_U, similarity_U=similarity_U[cluster_U])


def report(clusters: DuplicateClusters, labels: Sequence[Hashable] | None = None) -> DuplicateReport:
    """Count duplicates; `labels`, one for each row, show which clusters have conflicting labels."""
    members = _members(clusters)
    distinct_N = clusters.distinct_N
    repeated = [rows for rows in members.values() if len(rows) > 1]
    conflicts = [rows for rows in repeated if labels is not None and len({labels[row] for row in rows}) > 1]
    return DuplicateReport(
        rows=len(distinct_N),
        exact=len(distinct_N) - len(set(distinct_N.tolist())),
        clusters=len(repeated),
        clustered=sum(map(len, repeated)),
        largest=max(map(len, members.values()), default=0),
        least_similar=float(min((clusters.similarity_U[distinct_N[rows[0]]] for rows in repeated), default=1.0)),
        conflicts=tuple(map(tuple, conflicts)),
    )


def keep_one(clusters: DuplicateClusters, labels: Sequence[Hashable]) -> Mask:
    """True for one row of each cluster: the first with the cluster's most frequent label."""
    kept_N = np.zeros(len(clusters.distinct_N), dtype=bool)
    for rows in _members(clusters).values():
        ((label, _),) = Counter(labels[row] for row in rows).most_common(1)
        kept_N[next(row for row in rows if labels[row] == label)] = True
    return kept_N


def weights(clusters: DuplicateClusters) -> NDArray[np.float64]:
    """1 / size of each row's cluster, so that every cluster weighs as much as a single row."""
    _, cluster_N, size = np.unique(clusters.cluster_N, return_inverse=True, return_counts=True)
    return 1.0 / size[cluster_N]


def resolve(
    clusters: DuplicateClusters, labels: Sequence[Hashable], action: Literal["together", "keep_one", "weight"]
) -> tuple[Mask, NDArray[np.float64]]:
    """Mask of the rows that are used, and the weight of each row; `action` is DuplicatesConfig.on_duplicate."""
    everything, ones = np.ones(len(labels), dtype=bool), np.ones(len(labels))
    if action == "keep_one":
        return keep_one(clusters, labels), ones
    return everything, weights(clusters) if action == "weight" else ones


def leaking(clusters: DuplicateClusters, part_N: Ints) -> Mask:
    """True for each row that has an exact or near-duplicate (a pair, not a chain) in another part of the split.

    Args:
        part_N: Fold of each row, or 0 and 1 for train and test.
    """
    _, part_N = np.unique(part_N, return_inverse=True)
    own_UF = np.zeros((len(clusters.cluster_U), int(part_N.max(initial=0)) + 1), dtype=bool)
    own_UF[clusters.distinct_N, part_N] = True
    reached_UF = own_UF.copy()
    for first_P, second_P in (clusters.pairs_P2.T, clusters.pairs_P2.T[::-1]):
        np.logical_or.at(reached_UF, first_P, own_UF[second_P])
    return np.asarray(reached_UF.sum(axis=1)[clusters.distinct_N] > 1)


def overlap(clusters: DuplicateClusters, test_N: Mask) -> OverlapReport:
    """Count near-duplicates between training and test rows.

    Args:
        clusters: Clusters of training and test rows together.
        test_N: True for a test row.
    """
    cluster_N = clusters.cluster_N
    shared_N = ~test_N & np.isin(cluster_N, cluster_N[test_N])
    leaking_N = leaking(clusters, test_N.astype(np.int64)) & test_N
    return OverlapReport(int(leaking_N.sum()), int(shared_N.sum()), ~shared_N)


def check_overlap(
    clusters: DuplicateClusters,
    test_N: Mask,
    *,
    action: Literal["refuse", "drop"],
    train: str = "data.train",
    test: str = "data.test",
) -> OverlapReport:
    """`overlap`, refused unless it is empty or may be dropped.

    Args:
        action: DuplicatesConfig.overlap.
        train: Name of the training rows in messages, such as their file.
        test: Name of the test rows in messages.

    Raises:
        DataError: Training and test share a cluster and `action` is refuse, or nothing would be left to train on.
    """
    result = overlap(clusters, test_N)
    if result.train_rows == int((~test_N).sum()):
        raise DataError(f"{train}: every row has a near-duplicate in {test}. Name other data as data.train.")
    if result.train_rows and action == "refuse":
        raise DataError(
            f"{train}: {result.train_rows} rows share a cluster of near-duplicates with rows of {test}, and "
            f"{result.test_rows} test rows have a near-duplicate in training: the test score would be too good.\n"
            "  Write duplicates.overlap=drop to leave them out of training."
        )
    return result


def _members(clusters: DuplicateClusters) -> dict[int, list[int]]:
    """Rows of each cluster, in their order."""
    members: dict[int, list[int]] = {}
    for row, cluster in enumerate(clusters.cluster_N.tolist()):
        members.setdefault(cluster, []).append(row)
    return members
