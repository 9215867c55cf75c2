"""The matrix of shingles equals sets of strings, and signatures equal datasketch's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import numpy as np
import pytest
from datasketch import MinHash
from datasketch.hashfunc import sha1_hash32
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.data.folds import duplicates
from workbench.data.folds.duplicates import shingle_sets, shingles, signatures

TEXTS = ["", "a", "abc", "abcd", "abcdabcd", "the cat sat on the mat", "\U0001f600 the cat \u4e2d\u6587", "the the the"]


@pytest.fixture(autouse=True, scope="module")
def small_blocks() -> Iterator[None]:
    """Blocks that end between the texts of a test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(duplicates, "TEXTS_AT_ONCE", 3)
        yield


@pytest.mark.parametrize("kind", ["characters", "words"])
@given(texts=st.lists(st.text("ab \u4e2d", max_size=12) | st.sampled_from(TEXTS), min_size=1), size=st.integers(1, 40))
@settings(max_examples=60, deadline=None)
def test_a_row_holds_the_shingles_of_its_text(
    kind: Literal["characters", "words"], texts: list[str], size: int
) -> None:
    found = shingle_sets(texts * 2, shingle=kind, size=size)
    assert found.table_UV.has_sorted_indices
    assert len(set(found.hash_V.tolist())) == len(found.hash_V) == found.table_UV.shape[1]
    assert (found.table_UV.data == 1).all()
    for row, text in enumerate(texts * 2):
        wanted = {sha1_hash32(each.encode()) for each in shingles(text, shingle=kind, size=size)}
        held = found.table_UV.indices[found.table_UV.indptr[row] : found.table_UV.indptr[row + 1]]
        assert sorted(found.hash_V[held].tolist()) == sorted(wanted)


def test_signatures_are_those_of_datasketch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(duplicates, "HASHED_AT_ONCE", 3)
    found = signatures(shingle_sets(TEXTS, shingle="characters", size=4), hashes=32, bands=5, width=6, seed=7)
    values_UK = []
    for text in TEXTS:
        known = MinHash(num_perm=32, seed=7, scheme="affine32")
        known.update_batch([each.encode() for each in shingles(text, shingle="characters", size=4)])
        values_UK.append(known.hashvalues)
    assert (found.sketch_UK == np.array(values_UK) % 256).all()
    for band in range(5):
        of_band = [tuple(values[6 * band : 6 * band + 6].tolist()) for values in values_UK]
        equal = [[one == other for other in of_band] for one in of_band]
        assert ((found.band_BU[band][:, None] == found.band_BU[band]) == equal).all()
