"""Similarity of texts: sets of shingles, and the pairs whose sets have a high Jaccard similarity; and of vectors.

Shapes: U distinct texts, P pairs of them, V shingles, K hashes; N vectors of D numbers.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from workbench.data.folds.shingle_sets import ShingleSets, signatures
from workbench.errors import DataError

if TYPE_CHECKING:
    from scipy.sparse import csr_array

Ints: TypeAlias = NDArray[np.int64]

PERMUTATIONS = 256
MISS_PROBABILITY = 1e-3
"""Highest probability that a pair exactly at the threshold is missed."""
MAX_PAIRS = 1_000_000
"""Most pairs of near-duplicates: as many as 1,400 texts from one template make."""
MAX_CANDIDATES = 2**24
"""Most pairs of one bucket that are compared: those of 5,800 texts."""

BLOCK = 2**21
"""Pairs that are compared at a time."""
SMALL_CLUSTER = 64
"""Texts of the largest cluster whose pairs are compared one by one, rather than by a product of matrices."""
VECTORS = 2048
"""Vectors that are compared with all others at a time."""

_HYPHEN = re.compile(r"(?<=[^\W\d])[-\u2010\u2011](?=[^\W\d])")
_MARK = "[.,;:!?()\\[\\]\"'`\u2018\u2019\u201c\u201d\u2026\u00bf\u00a1]"
# A period or colon between digits is part of a number.
_PUNCTUATION = re.compile(rf"(?<!\d){_MARK}|{_MARK}(?!\d)")


def normalised(text: str) -> str:
    """`text` without case, extra spaces, hyphens and sentence punctuation."""
    spaced = " ".join(_HYPHEN.sub(" ", unicodedata.normalize("NFKC", text).casefold()).split())
    return " ".join(_PUNCTUATION.sub("", spaced).split()) or spaced


def shingles(text: str, *, shingle: Literal["characters", "words"], size: int) -> frozenset[str]:
    """All sequences of `size` characters or words in `text`; the whole text where it is shorter."""
    if shingle == "characters":
        return frozenset(text[start : start + size] for start in range(max(1, len(text) - size + 1)))
    words = text.split()
    return frozenset(" ".join(words[start : start + size]) for start in range(max(1, len(words) - size + 1)))


def _banding(threshold: float) -> tuple[int, int]:
    """Number of bands and hashes in each: the widest that miss a pair at the threshold below MISS_PROBABILITY."""
    suitable = [
        (PERMUTATIONS // width, width)
        for width in range(1, PERMUTATIONS // 2 + 1)
        if (1 - threshold**width) ** (PERMUTATIONS // width) < MISS_PROBABILITY
    ]
    return suitable[-1]


def near_pairs(sets: ShingleSets, *, threshold: float, seed: int) -> Ints:
    """Pairs of sets, sorted, that agree in all MinHash values of some band and reach the threshold.

    Raises:
        DataError: There are more than MAX_PAIRS.
    """
    count = sets.table_UV.shape[0]
    bands, width = _banding(threshold)
    minhashes = signatures(sets, hashes=PERMUTATIONS, bands=bands, width=width, seed=seed)
    size_U = np.diff(sets.table_UV.indptr)
    known = np.zeros(0, dtype=np.int64)
    # Sorted arrays rather than datasketch's index, whose buckets are Python sets: 1 kB per text instead of 26 kB.
    for band_U in minhashes.band_BU:
        for pairs_P2 in pairs_within(band_U):
            first, second = _new(pairs_P2, known, count).T
            likely = _likely(size_U, minhashes.sketch_UK, first, second, threshold)
            first, second = first[likely], second[likely]
            near = jaccard(sets.table_UV, first, second) >= threshold
            known = np.union1d(known, first[near] * count + second[near])
            if len(known) > MAX_PAIRS:
                raise _too_many(count)
    return np.stack(np.divmod(known, max(1, count)), axis=1)


def near_vectors(vectors_ND: NDArray[np.float32], *, threshold: float) -> tuple[Ints, NDArray[np.float64]]:
    """Pairs (P, 2) of rows whose vectors, less their mean, have a cosine similarity of `threshold`, and it (P,).

    Raises:
        DataError: There are more than MAX_PAIRS.
    """
    import torch

    centred_ND = torch.from_numpy(vectors_ND - vectors_ND.mean(0, dtype=np.float64).astype(np.float32))
    unit_ND = torch.nn.functional.normalize(centred_ND, dim=1)
    pairs, similarities, count = [torch.zeros(0, 2, dtype=torch.int64)], [torch.zeros(0)], 0
    for start in range(0, len(unit_ND), VECTORS):
        similarity = unit_ND[start : start + VECTORS] @ unit_ND[start:].T
        near = torch.nonzero(torch.triu(similarity, diagonal=1) >= threshold)
        pairs.append(near + start)
        similarities.append(similarity[near[:, 0], near[:, 1]])
        count += len(near)
        if count > MAX_PAIRS:
            raise DataError(
                f"{len(unit_ND)} rows have over {MAX_PAIRS} pairs with a similarity of features of {threshold:g}. "
                "Write a higher duplicates.features, or null."
            )
    return torch.cat(pairs).numpy(), torch.cat(similarities).double().numpy()


def jaccard(table_UV: csr_array, first_P: Ints, second_P: Ints) -> NDArray[np.float64]:
    """Jaccard similarity of each pair of sets."""
    size_U, similarities = table_UV.sum(axis=1), [np.zeros(0)]
    for start in range(0, len(first_P), 2**15):
        a, b = first_P[start : start + 2**15], second_P[start : start + 2**15]
        common = table_UV[a].multiply(table_UV[b]).sum(axis=1)
        similarities.append(common / (size_U[a] + size_U[b] - common))
    return np.concatenate(similarities)


def min_similarity(table_UV: csr_array, cluster_U: Ints) -> NDArray[np.float64]:
    """Smallest Jaccard similarity of two texts in the cluster of each text."""
    least_U = np.ones(len(cluster_U))
    _, number_U, size = np.unique(cluster_U, return_inverse=True, return_counts=True)
    size_U = size[number_U]
    small = np.flatnonzero((size_U > 1) & (size_U <= SMALL_CLUSTER))
    for pairs_P2 in pairs_within(cluster_U[small]):
        first, second = small[pairs_P2].T
        np.minimum.at(least_U, cluster_U[first], jaccard(table_UV, first, second))
    for cluster in np.unique(cluster_U[size_U > SMALL_CLUSTER]):
        least_U[cluster] = min(map(float, _block_minima(table_UV[np.flatnonzero(cluster_U == cluster)])))
    similarity_U: NDArray[np.float64] = least_U[cluster_U]
    return similarity_U


def pairs_within(group_N: Ints | NDArray[np.uint64]) -> Iterator[Ints]:
    """Pairs (P, 2) of the members of each group, the smaller first, in blocks.

    Raises:
        DataError: One group has more than MAX_CANDIDATES.
    """
    order = np.argsort(group_N, kind="stable")
    starts = np.flatnonzero(np.diff(group_N[order], prepend=group_N[order[:1]] + 1 if len(order) else 0))
    size = np.diff(np.append(starts, len(order)))
    if (largest := int(size.max(initial=0))) * (largest - 1) // 2 > MAX_CANDIDATES:
        raise _too_many(len(group_N))
    # How many members of the same group follow each one.
    left = np.repeat(starts + size, size) - 1 - np.arange(len(order))
    at = np.flatnonzero(left)
    left = left[at]
    while len(at):
        block = max(1, int(np.searchsorted(np.cumsum(left), BLOCK)))
        first = np.repeat(at[:block], left[:block])
        ends = np.cumsum(left[:block])
        second = first + 1 + np.arange(ends[-1]) - np.repeat(ends - left[:block], left[:block])
        yield np.stack([order[first], order[second]], axis=1)
        at, left = at[block:], left[block:]


def _new(pairs_P2: Ints, known: Ints, count: int) -> Ints:
    """The pairs, sorted, that are not known, as first * count + second, already."""
    codes = np.setdiff1d(pairs_P2[:, 0] * count + pairs_P2[:, 1], known, assume_unique=True)
    return np.stack(np.divmod(codes, max(1, count)), axis=1)


def _likely(
    size_U: Ints, sketch_UK: NDArray[np.uint8], first_P: Ints, second_P: Ints, threshold: float
) -> NDArray[np.bool_]:
    """Whether pairs can reach the threshold by the sizes of their sets, and are likely to by their MinHash values.

    The share of equal values has the similarity as its mean: a pair at the threshold is six deviations above the
    share that is asked for.
    """
    one_P, other_P = size_U[first_P], size_U[second_P]
    likely_P: NDArray[np.bool_] = np.minimum(one_P, other_P) / np.maximum(one_P, other_P) >= threshold
    share = threshold - 6 * np.sqrt(threshold * (1 - threshold) / sketch_UK.shape[1])
    for start in range(0, len(first_P), 2**15):
        rows = start + np.flatnonzero(likely_P[start : start + 2**15])
        equal = sketch_UK[first_P[rows]] == sketch_UK[second_P[rows]]
        likely_P[rows] = equal.sum(axis=1) >= share * sketch_UK.shape[1]
    return likely_P


def _too_many(count: int) -> DataError:
    return DataError(
        f"{count} different texts have over {MAX_PAIRS} pairs of near-duplicates: do they share a "
        "template? Compare only the columns that differ, write a higher duplicates.threshold, or "
        "duplicates.on_duplicate=ignore."
    )


def _block_minima(table_UV: csr_array) -> Iterator[np.float64]:
    """Smallest similarity of the pairs of a cluster, by blocks of rows that fit in memory."""
    size_U = table_UV.sum(axis=1)
    for start in range(0, len(size_U), 2**10):
        rows = slice(start, start + 2**10)
        common = (table_UV[rows] @ table_UV.T).toarray()
        yield (common / (size_U[rows, None] + size_U[None, :] - common)).min()


def components(count: int, pairs_P2: Sequence[tuple[int, int]] | Ints) -> Ints:
    """The smallest member of the connected component of each of 0 to `count` - 1, which `pairs_P2` link."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    if count == 0:
        return np.zeros(0, dtype=np.int64)
    first_P, second_P = np.asarray(pairs_P2, dtype=np.int64).reshape(-1, 2).T
    graph = coo_array((np.ones(len(first_P)), (first_P, second_P)), shape=(count, count))
    _, component_N = connected_components(graph, directed=False)
    _, smallest = np.unique(component_N, return_index=True)
    return np.asarray(smallest[component_N], dtype=np.int64)
