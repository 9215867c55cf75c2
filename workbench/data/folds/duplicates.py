"""Exact and near-duplicates of texts, pictures and vectors, and the clusters that they form.

Texts are compared as sets of shingles (sequences of characters or words): MinHash proposes pairs, whose Jaccard
similarity is then measured exactly.

Shapes: N rows, U distinct contents, P pairs of them, V shingles, W windows of all texts, K hashes, B bands, F folds or
other parts of a split, D features.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import blake2b
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from workbench.errors import DataError

if TYPE_CHECKING:
    from scipy.sparse import csr_array


Ints: TypeAlias = NDArray[np.int64]

TEXTS_AT_ONCE = 2**15
"""Texts whose shingles are taken at a time."""
HASHED_AT_ONCE = 1024
"""Texts that are hashed at a time: their shingles fit into a core's cache."""


class ShingleSets(NamedTuple):
    """Which shingles each text holds."""

    table_UV: csr_array
    """A one where a text holds a shingle; indices are sorted. Each text holds one or more."""
    hash_V: NDArray[np.uint32]
    """The first four bytes of each shingle's SHA-1."""


class Signatures(NamedTuple):
    """MinHash values of texts (Broder 1997), folded to what is compared."""

    band_BU: NDArray[np.uint64]
    """Equal where all values of a band are equal; different values have equal ones with a probability of 2**-64."""
    sketch_UK: NDArray[np.uint8]
    """The lowest byte of each value."""


def shingle_sets(texts: Sequence[str], *, shingle: Literal["characters", "words"], size: int) -> ShingleSets:
    """All sequences of `size` characters or words of each text; the whole text where it is shorter."""
    from datasketch.hashfunc import sha1_hash32
    from scipy.sparse import csr_array

    known: dict[str, int] = {}
    columns, counts = [np.zeros(0, dtype=np.int32)], [np.zeros(1, dtype=np.int64)]
    for start in range(0, len(texts), TEXTS_AT_ONCE):
        table, names = _block(texts[start : start + TEXTS_AT_ONCE], shingle, size)
        number = np.array([known.setdefault(name, len(known)) for name in names], dtype=np.int32)
        columns.append(number[table.indices])
        counts.append(np.diff(table.indptr))
    column_N = np.concatenate(columns)
    ones = np.ones(len(column_N), dtype=np.int32)
    table_UV = csr_array((ones, column_N, np.cumsum(np.concatenate(counts))), shape=(len(texts), len(known)))
    table_UV.sort_indices()
    hashes = (sha1_hash32(name.encode(errors="surrogatepass")) for name in known)
    return ShingleSets(table_UV, np.fromiter(hashes, dtype=np.uint32, count=len(known)))


def signatures(sets: ShingleSets, *, hashes: int, bands: int, width: int, seed: int) -> Signatures:
    """MinHash values of each set, as datasketch's scheme affine32 makes them; `width` of them make a band."""
    from datasketch import MinHash

    factor_K, shift_K = MinHash(num_perm=hashes, seed=seed, scheme="affine32").permutations
    mixed_V, starts = _mixed(sets.hash_V), sets.table_UV.indptr
    count = len(starts) - 1
    minhashes = Signatures(np.zeros((bands, count), dtype=np.uint64), np.zeros((count, hashes), dtype=np.uint8))
    for first in range(0, count, HASHED_AT_ONCE):
        rows = slice(first, min(first + HASHED_AT_ONCE, count))
        value = mixed_V[sets.table_UV.indices[starts[first] : starts[rows.stop]]]
        begin = np.asarray(starts[rows] - starts[first], dtype=np.int64)
        for number, (factor, shift) in enumerate(zip(factor_K, shift_K, strict=True)):
            least = np.minimum.reduceat(value * factor + shift, begin)
            minhashes.sketch_UK[rows, number] = least.astype(np.uint8)
            if number < bands * width:
                band = minhashes.band_BU[number // width, rows]
                band ^= least
                band *= np.uint64(0x9E3779B97F4A7C15)
    return minhashes


def _block(texts: Sequence[str], shingle: Literal["characters", "words"], size: int) -> tuple[csr_array, list[str]]:
    """The table of some texts, and the shingles that its columns stand for."""
    import pandas as pd
    from scipy.sparse import csr_array

    split = [text.split() for text in texts] if shingle == "words" else None
    units, length_U = _units(texts, split)
    start_W, count_U = _windows(length_U, size)
    padded, kinds = _padded(units, length_U, size)
    column_W, distinct = pd.factorize(_codes(padded, kinds, start_W, size))
    last_U = np.cumsum(count_U)
    table = csr_array(
        (np.ones(len(column_W), dtype=np.int32), column_W, np.append(0, last_U)), shape=(len(texts), len(distinct))
    )
    first_V = np.flatnonzero(np.diff(np.maximum.accumulate(column_W), prepend=-1))
    table.sum_duplicates()  # in place: column_W is the table's
    text_V = np.searchsorted(last_U, first_V, side="right")
    at_V = first_V - (last_U - count_U)[text_V]
    held = zip(text_V.tolist(), at_V.tolist(), strict=True)
    if split is None:
        return table, [texts[text][at : at + size] for text, at in held]
    return table, [" ".join(split[text][at : at + size]) for text, at in held]


def _units(texts: Sequence[str], split: Sequence[Sequence[str]] | None) -> tuple[Ints, Ints]:
    """Characters or words of all texts, one after another, as numbers; and how many each text has."""
    if split is None:
        joined = "".join(texts).encode("utf-32-le", errors="surrogatepass")
        return np.frombuffer(joined, dtype=np.uint32).astype(np.int64), np.array([*map(len, texts)], dtype=np.int64)
    known: dict[str, int] = {}
    numbers = [known.setdefault(word, len(known)) for words in split for word in words]
    return np.array(numbers, dtype=np.int64), np.array([*map(len, split)], dtype=np.int64)


def _windows(length_U: Ints, size: int) -> tuple[Ints, Ints]:
    """Where each window starts in the padded units, and how many each text has."""
    count_U = np.maximum(1, length_U - size + 1)
    before_U = np.cumsum(count_U) - count_U
    padded_U = np.maximum(size, length_U)
    first_U = np.cumsum(padded_U) - padded_U
    return np.repeat(first_U - before_U, count_U) + np.arange(int(count_U.sum())), count_U


def _padded(units: Ints, length_U: Ints, size: int) -> tuple[Ints, int]:
    """Units from 1, with zeros after texts that are shorter than a window; and the number of kinds of them."""
    kinds, number = np.unique(units, return_inverse=True)
    padded_U = np.maximum(size, length_U)
    padded = np.zeros(int(padded_U.sum()), dtype=np.int64)
    first_U, before_U = np.cumsum(padded_U) - padded_U, np.cumsum(length_U) - length_U
    padded[np.repeat(first_U - before_U, length_U) + np.arange(len(units))] = number.ravel() + 1
    return padded, len(kinds) + 1


def _codes(padded: Ints, kinds: int, start_W: Ints, size: int) -> Ints:
    """A number for each window, equal for equal windows alone."""
    import pandas as pd

    code_W, codes = padded[start_W], kinds
    for offset in range(1, size):
        if codes * kinds >= 2**63:
            code_W, distinct = pd.factorize(code_W)
            codes = len(distinct)
        code_W = code_W * kinds + padded[start_W + offset]
        codes *= kinds
    return code_W


def _mixed(value: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """MurmurHash3's finaliser, with which datasketch mixes what it is given."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        value = (value ^ (value >> np.uint32(shift))) * np.uint32(factor)
    value = value ^ (value >> np.uint32(16))
    return value


PERMUTATIONS = 256
MISS_PROBABILITY = 1e-3
"""Highest probability that a pair exactly at the threshold is missed."""
MAX_PAIRS = 1_000_000
"""Most pairs of near-duplicates: as many as 1,400 texts from one template make."""
MAX_CANDIDATES = 2**24
"""Most pairs of one bucket that are compared: those of 5,800 texts."""

PAIRS_AT_ONCE = 2**21
"""Pairs that are compared at a time."""
SMALL_CLUSTER = 64
"""Texts of the largest cluster whose pairs are compared one by one, rather than by a product of matrices."""
VECTORS_AT_ONCE = 2048
"""Vectors that are compared with all others at a time."""

NEAR = "nearly equal"
"""Kind of texts that are near-duplicates."""

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


def near_pairs(sets: ShingleSets, *, threshold: float, seed: int, part_U: Ints | None = None) -> Ints:
    """Pairs of sets, sorted, that agree in all MinHash values of some band and reach the threshold; only those of
    different `part_U` where it is given.

    Raises:
        DataError: There are more than MAX_PAIRS.
    """
    count = sets.table_UV.shape[0]
    # Bands and hashes in each: the widest that miss a pair at the threshold below MISS_PROBABILITY.
    suitable = [
        (PERMUTATIONS // width, width)
        for width in range(1, PERMUTATIONS // 2 + 1)
        if (1 - threshold**width) ** (PERMUTATIONS // width) < MISS_PROBABILITY
    ]
    bands, width = suitable[-1]
    minhashes = signatures(sets, hashes=PERMUTATIONS, bands=bands, width=width, seed=seed)
    size_U = np.diff(sets.table_UV.indptr)
    known = np.zeros(0, dtype=np.int64)
    # Sorted arrays rather than datasketch's index, whose buckets are Python sets: 1 kB per text instead of 26 kB.
    for band_U in minhashes.band_BU:
        for pairs_P2 in pairs_within(band_U):
            if part_U is not None:
                pairs_P2 = pairs_P2[part_U[pairs_P2[:, 0]] != part_U[pairs_P2[:, 1]]]
            codes = np.setdiff1d(pairs_P2[:, 0] * count + pairs_P2[:, 1], known, assume_unique=True)
            first, second = np.stack(np.divmod(codes, max(1, count)), axis=1).T
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
    for start in range(0, len(unit_ND), VECTORS_AT_ONCE):
        similarity = unit_ND[start : start + VECTORS_AT_ONCE] @ unit_ND[start:].T
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
        block = max(1, int(np.searchsorted(np.cumsum(left), PAIRS_AT_ONCE)))
        first = np.repeat(at[:block], left[:block])
        ends = np.cumsum(left[:block])
        second = first + 1 + np.arange(ends[-1]) - np.repeat(ends - left[:block], left[:block])
        yield np.stack([order[first], order[second]], axis=1)
        at, left = at[block:], left[block:]


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


class TooManyPairs(DataError):
    """So many rows are alike that their pairs cannot be kept."""


def _too_many(count: int) -> TooManyPairs:
    return TooManyPairs(
        f"{count} different texts have over {MAX_PAIRS} pairs of near-duplicates: do they share a "
        "template? Compare only the columns that differ, or write data.overlap=exact (and with recipe crossval "
        "duplicates.on_duplicate=ignore, or a higher duplicates.threshold)."
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
    has one content, and for texts of different parts of a split, which are compared in pairs alone."""
    name_U: tuple[str, ...]
    """A digest of each distinct content."""
    kind_P: tuple[str, ...] = ()
    """What was done to one of each pair, in words; empty where all are NEAR."""

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


def find(
    texts: Sequence[str],
    *,
    threshold: float = 0.7,
    shingle: Literal["characters", "words"] = "characters",
    size: int = 4,
    seed: int = 0,
    part_N: Ints | None = None,
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
        part_N: The part of a split that each is in: only near-duplicates in different ones are looked for; None: all.

    Raises:
        DataError: Thousands of different texts are similar, as if from one template.
    """
    return _find(tuple(texts), threshold, shingle, size, seed, None if part_N is None else tuple(part_N.tolist()))


@lru_cache(maxsize=1)  # a run's first look and the run itself compare the same rows
def _find(
    texts: tuple[str, ...],
    threshold: float,
    shingle: Literal["characters", "words"],
    size: int,
    seed: int,
    part_N: tuple[int, ...] | None,
) -> DuplicateClusters:
    texts = tuple(normalised(text) for text in texts)
    distinct = sorted(set(texts))
    number = {text: index for index, text in enumerate(distinct)}
    sets = shingle_sets(distinct, shingle=shingle, size=size)
    distinct_N = np.array([number[text] for text in texts], dtype=np.int64)
    part_U = None
    if part_N is not None:
        part_U = np.zeros(len(distinct), dtype=np.int64)
        part_U[distinct_N] = part_N
    pairs_P2 = near_pairs(sets, threshold=threshold, seed=seed, part_U=part_U)
    cluster_U = components(len(distinct), pairs_P2)
    return DuplicateClusters(
        distinct_N=distinct_N,
        pairs_P2=pairs_P2,
        cluster_U=cluster_U,
        similarity_U=min_similarity(sets.table_UV, cluster_U) if part_U is None else np.ones(len(distinct)),
        name_U=tuple(blake2b(text.encode(), digest_size=12).hexdigest() for text in distinct),
    )


def joined(clusters: DuplicateClusters, vectors_ND: NDArray[np.float32], *, threshold: float) -> DuplicateClusters:
    """Merge the clusters that are linked by two rows with similar vectors.

    Args:
        vectors_ND: Features of each row; of equal rows the first one's count.
        threshold: Cosine similarity of vectors, less their mean.

    Raises:
        DataError: Very many vectors are alike.
    """
    _, first_U = np.unique(clusters.distinct_N, return_index=True)
    near_P2, similarity_P = near_vectors(vectors_ND[first_U], threshold=threshold)
    kinds = [*(clusters.kind_P or [NEAR] * len(clusters.pairs_P2)), *["of like features"] * len(near_P2)]
    both_P2 = np.concatenate([clusters.pairs_P2.reshape(-1, 2), near_P2])
    pairs_P2, first_P = np.unique(both_P2, axis=0, return_index=True)
    cluster_U = components(len(first_U), pairs_P2)
    similarity_U = np.ones(len(first_U))
    np.minimum.at(similarity_U, cluster_U, clusters.similarity_U)
    np.minimum.at(similarity_U, cluster_U[near_P2[:, 0]], similarity_P)
    return replace(
        clusters,
        pairs_P2=pairs_P2,
        cluster_U=cluster_U,
        similarity_U=similarity_U[cluster_U],
        kind_P=tuple(kinds[each] for each in first_P.tolist()),
    )


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


def resolve(
    clusters: DuplicateClusters, labels: Sequence[Hashable], action: Literal["together", "keep_one", "weight"]
) -> tuple[Mask, NDArray[np.float64]]:
    """Mask of the rows that are used, and the weight of each row; `action` is DuplicatesConfig.on_duplicate."""
    kept_N, weight_N = np.ones(len(labels), dtype=bool), np.ones(len(labels))
    if action == "keep_one":  # the first with the cluster's most frequent label
        kept_N[:] = False
        for rows in _members(clusters).values():
            ((label, _),) = Counter(labels[row] for row in rows).most_common(1)
            kept_N[next(row for row in rows if labels[row] == label)] = True
    elif action == "weight":  # every cluster weighs as much as a single row
        _, cluster_N, size = np.unique(clusters.cluster_N, return_inverse=True, return_counts=True)
        weight_N = 1.0 / size[cluster_N]
    return kept_N, weight_N


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


def _members(clusters: DuplicateClusters) -> dict[int, list[int]]:
    """Rows of each cluster, in their order."""
    members: dict[int, list[int]] = {}
    for row, cluster in enumerate(clusters.cluster_N.tolist()):
        members.setdefault(cluster, []).append(row)
    return members
