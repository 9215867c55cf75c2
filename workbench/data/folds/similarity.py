"""Similarity of texts: sets of shingles, and the pairs whose sets have a high Jaccard similarity; and of vectors.

Shapes: U distinct texts, P pairs of them, V shingles, K hashes; N vectors of D numbers.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from workbench.errors import DataError

if TYPE_CHECKING:
    from scipy.sparse import csr_array

Ints: TypeAlias = NDArray[np.int64]

PERMUTATIONS = 256
MISS_PROBABILITY = 1e-3
"""Highest probability that a pair exactly at the threshold is missed."""
MAX_PAIRS = 1_000_000
"""Most pairs that are compared, in all or in one bucket: as many as 1,400 texts from one template make."""

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


def incidence(sets: Sequence[frozenset[str]]) -> csr_array:
    """Sparse matrix (U, V) with a one where a set contains a shingle."""
    from scipy.sparse import csr_array

    column: dict[str, int] = {}
    columns = [column.setdefault(shingle, len(column)) for each in sets for shingle in each]
    starts = np.cumsum([0, *map(len, sets)])
    ones = np.ones(len(columns), dtype=np.int32)
    return csr_array((ones, np.array(columns, dtype=np.int64), starts), shape=(len(sets), len(column)))


def _banding(threshold: float) -> tuple[int, int]:
    """Number of bands and hashes in each: the widest that miss a pair at the threshold below MISS_PROBABILITY."""
    suitable = [
        (PERMUTATIONS // width, width)
        for width in range(1, PERMUTATIONS // 2 + 1)
        if (1 - threshold**width) ** (PERMUTATIONS // width) < MISS_PROBABILITY
    ]
    return suitable[-1]


def near_pairs(sets: Sequence[frozenset[str]], table_UV: csr_array, *, threshold: float, seed: int) -> Ints:
    """Pairs of sets, sorted, that agree in all MinHash values of some band and reach the threshold.

    Raises:
        DataError: There are more than MAX_PAIRS.
    """
    hash_UK = _minhashes(sets, seed=seed)
    bands, width = _banding(threshold)
    known = np.zeros(0, dtype=np.int64)
    # Sorted arrays rather than datasketch's index, whose buckets are Python sets: 1 kB per text instead of 26 kB.
    for start in range(0, bands * width, width):
        buckets = list(_buckets(hash_UK[:, start : start + width]))
        largest = max((len(bucket) for bucket in buckets), default=0)
        if largest * (largest - 1) // 2 > MAX_PAIRS or len(known) > MAX_PAIRS:
            raise DataError(
                f"{len(sets)} different texts have over {MAX_PAIRS} pairs of near-duplicates: do they share a "
                "template? Compare only the columns that differ, write a higher duplicates.threshold, or "
                "duplicates.on_duplicate=ignore."
            )
        codes = np.setdiff1d(_pair_codes(buckets, len(sets)), known, assume_unique=True)
        first, second = np.divmod(codes, len(sets))
        known = np.union1d(known, codes[_jaccard(table_UV, first, second) >= threshold])
    return np.stack(np.divmod(known, max(1, len(sets))), axis=1)


def near_vectors(vectors_ND: NDArray[np.float32], *, threshold: float) -> tuple[Ints, NDArray[np.float64]]:
    """Pairs (P, 2) of rows whose vectors, less their mean, have a cosine similarity of `threshold`, and it (P,).

    Raises:
        DataError: There are more than MAX_PAIRS.
    """
    import torch

    centred_ND = torch.from_numpy(vectors_ND - vectors_ND.mean(0, dtype=np.float64).astype(np.float32))
    unit_ND = torch.nn.functional.normalize(centred_ND, dim=1)
    pairs, found, count = [torch.zeros(0, 2, dtype=torch.int64)], [torch.zeros(0)], 0
    for start in range(0, len(unit_ND), VECTORS):
        similarity = unit_ND[start : start + VECTORS] @ unit_ND[start:].T
        near = torch.nonzero(torch.triu(similarity, diagonal=1) >= threshold)
        pairs.append(near + start)
        found.append(similarity[near[:, 0], near[:, 1]])
        count += len(near)
        if count > MAX_PAIRS:
            raise DataError(
                f"{len(unit_ND)} rows have over {MAX_PAIRS} pairs with a similarity of features of {threshold:g}. "
                "Write a higher duplicates.features, or null."
            )
    return torch.cat(pairs).numpy(), torch.cat(found).double().numpy()


def _minhashes(sets: Sequence[frozenset[str]], *, seed: int) -> NDArray[np.uint32]:
    """MinHash values of each set."""
    from datasketch import MinHash
    from datasketch.hashfunc import sha1_hash32

    value = {shingle: sha1_hash32(shingle.encode()) for shingle in frozenset().union(*sets)}
    ids = ([value[shingle] for shingle in each] for each in sets)
    # The ids are hashes already, so the hash function of MinHash is the identity.
    minhashes = MinHash.generator(ids, num_perm=PERMUTATIONS, seed=seed, hashfunc=int, scheme="affine32")
    return np.array([each.hashvalues for each in minhashes], dtype=np.uint32).reshape(len(sets), PERMUTATIONS)


def _pair_codes(buckets: Iterable[Ints], count: int) -> Ints:
    """Each pair of a bucket as one number: first * count + second."""
    pairs = [(bucket, *np.triu_indices(len(bucket), 1)) for bucket in buckets]
    return np.concatenate([np.zeros(0, np.int64), *(bucket[a] * count + bucket[b] for bucket, a, b in pairs)])


def _buckets(values_UK: NDArray[np.uint32]) -> Iterator[Ints]:
    """Sorted row numbers of each group of two or more equal rows."""
    _, bucket_U, size = np.unique(values_UK, axis=0, return_inverse=True, return_counts=True)
    bucket_U = bucket_U.ravel()  # numpy 2.0.0 returns a second axis
    shared = np.flatnonzero(size[bucket_U] > 1)
    order = shared[np.argsort(bucket_U[shared], kind="stable")]
    yield from np.split(order, np.flatnonzero(np.diff(bucket_U[order])) + 1) if len(order) else ()


def _jaccard(table_UV: csr_array, first_P: Ints, second_P: Ints) -> NDArray[np.float64]:
    """Jaccard similarity of each pair of sets."""
    size_U, similarities = table_UV.sum(axis=1), [np.zeros(0)]
    for start in range(0, len(first_P), 2**15):
        a, b = first_P[start : start + 2**15], second_P[start : start + 2**15]
        common = table_UV[a].multiply(table_UV[b]).sum(axis=1)
        similarities.append(common / (size_U[a] + size_U[b] - common))
    return np.concatenate(similarities)


def min_similarity(table_UV: csr_array, cluster_U: Ints) -> NDArray[np.float64]:
    """Smallest Jaccard similarity of two texts in the cluster of each text."""
    similarity_U = np.ones(len(cluster_U))
    _, size = np.unique(cluster_U, return_counts=True)
    for texts in np.split(np.argsort(cluster_U, kind="stable"), np.cumsum(size)[:-1]):
        if len(texts) > 1:
            similarity_U[texts] = min(map(float, _block_minima(table_UV[texts])))
    return similarity_U


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
