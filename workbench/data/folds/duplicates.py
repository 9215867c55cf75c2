"""Exact and near-duplicates of texts, and the clusters they form.

Shapes: N rows, U distinct texts, P pairs of distinct texts, V shingles, F folds or other sides of a split.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from workbench.data.folds.similarity import Ints, components, least, near_pairs, normalised, shingles, table
from workbench.errors import DataError

Mask: TypeAlias = NDArray[np.bool_]


@dataclass(frozen=True)
class DuplicateClusters:
    """Which rows are near-duplicates of which, and the clusters that this makes."""

    text_N: Ints
    """Number of each row's distinct text; rows with equal numbers are exact duplicates."""
    pairs_P2: Ints
    """Pairs of distinct texts at or above the threshold."""
    cluster_U: Ints
    """The smallest number of a text in the same cluster. Rows of a cluster are linked by a chain of pairs."""
    least_U: NDArray[np.float64]
    """Smallest Jaccard similarity of two texts of the same cluster; 1 where it has one text."""
    name_U: tuple[str, ...]
    """A digest of each distinct text, which no other row changes."""

    @property
    def cluster_N(self) -> Ints:
        """Cluster of each row."""
        return self.cluster_U[self.text_N]

    @property
    def groups(self) -> list[str]:
        """Name of each row's cluster: it depends on the cluster's texts, never on the order of rows."""
        return [self.name_U[cluster] for cluster in self.cluster_N]

    def subset(self, kept_N: Mask) -> DuplicateClusters:
        """The same for some of the rows; clusters keep their names and `least_U`."""
        return replace(self, text_N=self.text_N[kept_N])


class DuplicateReport(NamedTuple):
    """Duplicates found by `find`. A cluster has two rows or more here."""

    rows: int
    exact: int
    """Rows that equal another one that is kept, but for case, spacing and punctuation."""
    clusters: int
    clustered: int
    """Rows that stand in a cluster."""
    largest: int
    """Rows of the largest cluster."""
    least_similar: float
    """Smallest Jaccard similarity of two rows of one cluster. Similarity is not transitive: a chain may go lower than
    the threshold."""
    conflicts: tuple[tuple[int, ...], ...]
    """Row numbers, from 0, of every cluster whose rows carry different labels."""


class OverlapReport(NamedTuple):
    """How far the training rows know the test rows."""

    test_rows: int
    """Test rows that have a near-duplicate among the training rows."""
    train_rows: int
    """Training rows that stand in a cluster with a test row, some of them only by a chain."""
    kept_N: Mask
    """The rows without those."""


def find(
    texts: Sequence[str],
    *,
    threshold: float = 0.7,
    shingle: Literal["characters", "words"] = "characters",
    size: int = 4,
    seed: int = 0,
) -> DuplicateClusters:
    """Rows that are equal after `normalised`, or whose sets of shingles have a Jaccard similarity of `threshold`.

    MinHash and banding propose pairs (Broder 1997; Leskovec et al., Mining of Massive Datasets, chapter 3), each of
    which is then measured exactly: no pair is wrong, and one at the threshold is overlooked with a chance below MISSED.
    The result depends on the set of texts and the seed; the order of rows only permutes it.

    Args:
        texts: One for each row.
        threshold: Jaccard similarity, in (0, 1].
        shingle: Runs of characters suit short sentences. A set of ten words loses a fifth to any other word, a typo as
            much as a new meaning, and nothing to their order. Of Banking77's pairs from 0.7 on, 95 % carry the same
            label with runs of four characters, 84 % with single words.
        size: Characters or words in a shingle.
        seed: Of the hash functions.

    Raises:
        DataError: Thousands of different texts are alike, as if from one template.
    """
    plain = [normalised(text) for text in texts]
    distinct = sorted(set(plain))
    number = {text: index for index, text in enumerate(distinct)}
    sets = [shingles(text, shingle=shingle, size=size) for text in distinct]
    table_UV = table(sets)
    pairs_P2 = near_pairs(sets, table_UV, threshold=threshold, seed=seed)
    cluster_U = components(len(distinct), pairs_P2)
    return DuplicateClusters(
        text_N=np.array([number[text] for text in plain], dtype=np.int64),
        pairs_P2=pairs_P2,
        cluster_U=cluster_U,
        least_U=least(table_UV, cluster_U),
        name_U=tuple(blake2b(text.encode(), digest_size=12).hexdigest() for text in distinct),
    )


def report(found: DuplicateClusters, labels: Sequence[Hashable] | None = None) -> DuplicateReport:
    """Counts for a person to read; `labels`, one for each row, show the clusters that contradict themselves."""
    members = _members(found)
    several = [rows for rows in members.values() if len(rows) > 1]
    conflicts = [rows for rows in several if labels is not None and len({labels[row] for row in rows}) > 1]
    return DuplicateReport(
        rows=len(found.text_N),
        exact=len(found.text_N) - len(set(found.text_N.tolist())),
        clusters=len(several),
        clustered=sum(map(len, several)),
        largest=max(map(len, members.values()), default=0),
        least_similar=float(min((found.least_U[found.text_N[rows[0]]] for rows in several), default=1.0)),
        conflicts=tuple(map(tuple, conflicts)),
    )


def keep_one(found: DuplicateClusters, labels: Sequence[Hashable]) -> Mask:
    """True for one row of each cluster: the first that carries the cluster's most frequent label."""
    kept_N = np.zeros(len(found.text_N), dtype=bool)
    for rows in _members(found).values():
        ((label, _),) = Counter(labels[row] for row in rows).most_common(1)
        kept_N[next(row for row in rows if labels[row] == label)] = True
    return kept_N


def weights(found: DuplicateClusters) -> NDArray[np.float64]:
    """1 / size of each row's cluster, so that every cluster weighs as much as a row that stands alone."""
    _, cluster_N, size = np.unique(found.cluster_N, return_inverse=True, return_counts=True)
    return 1.0 / size[cluster_N]


def treat(
    found: DuplicateClusters, labels: Sequence[Hashable], action: Literal["together", "keep_one", "weight"]
) -> tuple[Mask, NDArray[np.float64]]:
    """Which rows are used, and how much each weighs; `action` is DuplicatesConfig.on_duplicate."""
    everything, ones = np.ones(len(labels), dtype=bool), np.ones(len(labels))
    if action == "keep_one":
        return keep_one(found, labels), ones
    return everything, weights(found) if action == "weight" else ones


def across(found: DuplicateClusters, side_N: Ints) -> Mask:
    """True for each row that has an exact or near-duplicate (a pair, not a chain) on another side.

    Args:
        side_N: Fold of each row, or 0 and 1 for train and test.
    """
    _, side_N = np.unique(side_N, return_inverse=True)
    here_UF = np.zeros((len(found.cluster_U), int(side_N.max(initial=0)) + 1), dtype=bool)
    here_UF[found.text_N, side_N] = True
    reached_UF = here_UF.copy()
    for near, far in (found.pairs_P2.T, found.pairs_P2.T[::-1]):
        np.logical_or.at(reached_UF, near, here_UF[far])
    return np.asarray(reached_UF.sum(axis=1)[found.text_N] > 1)


def overlap(found: DuplicateClusters, test_N: Mask) -> OverlapReport:
    """How many test rows stand near a training row, and the rows without what shares a cluster with a test row.

    Args:
        found: Of training and test rows together.
        test_N: True for a test row.
    """
    cluster_N = found.cluster_N
    shares_N = ~test_N & np.isin(cluster_N, cluster_N[test_N])
    near = across(found, test_N.astype(np.int64)) & test_N
    return OverlapReport(int(near.sum()), int(shares_N.sum()), ~shares_N)


def without_overlap(
    found: DuplicateClusters,
    test_N: Mask,
    *,
    action: Literal["refuse", "drop"],
    train: str = "data.train",
    test: str = "data.test",
) -> OverlapReport:
    """`overlap`, where it is empty or may be dropped.

    Args:
        action: Of DuplicatesConfig.overlap.
        train: How the training rows are called, such as their file.
        test: How the test rows are called.

    Raises:
        DataError: Training and test share a cluster and `action` is refuse, or nothing would be left to train on.
    """
    result = overlap(found, test_N)
    if result.train_rows == int((~test_N).sum()):
        raise DataError(f"{train}: every row has a near-duplicate in {test}. Name other data as data.train.")
    if result.train_rows and action == "refuse":
        raise DataError(
            f"{train}: {result.train_rows} rows share a cluster of near-duplicates with rows of {test}, of which "
            f"{result.test_rows} stand next to a training row: the test score would flatter.\n"
            "  Write duplicates.overlap=drop to leave them out of training."
        )
    return result


def _members(found: DuplicateClusters) -> dict[int, list[int]]:
    """Rows of each cluster, in their order."""
    members: dict[int, list[int]] = {}
    for row, cluster in enumerate(found.cluster_N.tolist()):
        members.setdefault(cluster, []).append(row)
    return members
