"""Sets of shingles of many texts as one sparse matrix, and their MinHash values, without Python objects for each.

Shapes: U distinct texts, W windows of all texts, V distinct shingles, K hashes, B bands.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from scipy.sparse import csr_array

Ints: TypeAlias = NDArray[np.int64]

BLOCK = 2**15
"""Texts of which shingles are taken at a time."""
TEXTS = 1024
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
    for start in range(0, len(texts), BLOCK):
        table, names = _block(texts[start : start + BLOCK], shingle, size)
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
    for first in range(0, count, TEXTS):
        rows = slice(first, min(first + TEXTS, count))
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
