"""Clusters equal an exhaustive comparison on real sentences, and depend on nothing but the texts."""

from __future__ import annotations

import csv
from functools import cache
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from workbench.config.sections.folds_config import DuplicatesConfig
from workbench.data.folds import duplicates
from workbench.data.folds.duplicates import (
    components,
    find,
    joined,
    leaking,
    min_similarity,
    near_vectors,
    normalised,
    pairs_within,
    report,
    resolve,
    shingle_sets,
    shingles,
)
from workbench.errors import DataError

Kind = Literal["characters", "words"]
BANKING = Path(__file__).parents[3] / "files" / "banking77"
CARD = ["Where is my new card?", "where is my  new card", "Where is my new card now?", "I lost my PIN and need another"]
TEXTS = st.lists(st.text("ab c.", max_size=8) | st.sampled_from(CARD), max_size=14)


@cache
def banking(split: str) -> tuple[list[str], list[str]]:
    with (BANKING / f"{split}.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    return [row["text"] for row in rows], [row["category"] for row in rows]


@cache
def sets(kind: Kind, size: int) -> list[frozenset[str]]:
    """Of every different text of the training slice, in the order that `find` numbers them."""
    distinct = sorted({normalised(text) for text in banking("train")[0]})
    return [shingles(text, shingle=kind, size=size) for text in distinct]


@cache
def exhaustive(kind: Kind, size: int) -> NDArray[np.float64]:
    """Similarity of every text to every other."""
    every = sets(kind, size)
    column = {shingle: number for number, shingle in enumerate(sorted(frozenset.union(*every)))}
    holds = np.zeros((len(every), len(column)), dtype=np.float32)
    for row, each in enumerate(every):
        holds[row, [column[shingle] for shingle in each]] = 1
    common = (holds @ holds.T).astype(np.float64)
    return common / (holds.sum(1)[:, None] + holds.sum(1) - common)


def jaccard(one: frozenset[str], other: frozenset[str]) -> float:
    return len(one & other) / len(one | other)


CASES: list[tuple[float, Kind, int]] = [
    (0.5, "characters", 4),
    (0.7, "characters", 4),
    (0.9, "characters", 4),
    (0.8, "words", 1),
]


@pytest.mark.parametrize(("threshold", "kind", "size"), CASES)
def test_pairs_and_clusters_equal_an_exhaustive_comparison(threshold: float, kind: Kind, size: int) -> None:
    expected = set(map(tuple, np.argwhere(np.triu(exhaustive(kind, size) >= threshold, 1)).tolist()))
    found = find(banking("train")[0], threshold=threshold, shingle=kind, size=size)
    pairs = set(map(tuple, found.pairs_P2.tolist()))
    assert len(expected) > 10
    assert pairs <= expected
    assert len(pairs) >= 0.95 * len(expected)
    true_U = components(len(sets(kind, size)), sorted(expected))
    together, kept = (each[:, None] == each[None, :] for each in (true_U, found.cluster_U))
    others = ~np.eye(len(true_U), dtype=bool)
    assert not (kept & ~together).any()
    assert (kept & others).sum() >= 0.95 * (together & others).sum()


def test_every_seed_finds_the_same_pairs_but_for_a_few() -> None:
    texts = banking("train")[0]
    pairs = [set(map(tuple, find(texts, seed=seed).pairs_P2.tolist())) for seed in range(3)]
    union, shared = set.union(*pairs), set.intersection(*pairs)
    assert len(shared) >= 0.99 * len(union)
    assert set(map(tuple, find(texts, seed=1).pairs_P2.tolist())) == pairs[1]


def test_the_report_equals_counts_made_by_hand() -> None:
    texts, labels = banking("train")
    found = find(texts)
    result = report(found, labels)
    rows = found.cluster_N.tolist()
    size = {cluster: rows.count(cluster) for cluster in set(rows)}
    same = found.cluster_U[:, None] == found.cluster_U
    assert result.rows == len(texts) == 1488
    assert result.exact == len(texts) - len({normalised(text) for text in texts}) > 0
    assert result.clusters == sum(count > 1 for count in size.values())
    assert result.clustered == sum(count for count in size.values() if count > 1)
    assert result.largest == max(size.values())
    assert result.least_similar == pytest.approx(exhaustive("characters", 4)[same].min())
    assert result.least_similar < 0.7
    expected = {tuple(r for r in range(len(rows)) if rows[r] == c) for c in size if size[c] > 1}
    assert set(result.conflicts) == {each for each in expected if len({labels[row] for row in each}) > 1}
    assert len(result.conflicts) > 0
    assert report(found).conflicts == ()


@given(texts=TEXTS, data=st.data())
@settings(max_examples=60, deadline=None)
def test_the_order_of_rows_only_permutes_the_clusters(texts: list[str], data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(texts))))
    groups = find(texts).groups
    assert find([texts[row] for row in order]).groups == [groups[row] for row in order]


@given(texts=TEXTS)
@settings(max_examples=60, deadline=None)
def test_clusters_partition_the_rows_and_hold_all_exact_duplicates(texts: list[str]) -> None:
    found = find(texts)
    names: dict[str, str] = {}
    for text, group in zip(texts, found.groups, strict=True):
        assert names.setdefault(normalised(text), group) == group
    for one, other in found.pairs_P2:
        assert found.cluster_U[one] == found.cluster_U[other]
    # Each row weighs 1 / size: every cluster weighs 1, and one row of it is kept.
    clusters = len(set(found.groups))
    assert resolve(found, [0] * len(texts), "weight")[1].sum() == pytest.approx(clusters)
    kept = resolve(found, [0] * len(texts), "keep_one")[0]
    assert sorted(np.array(found.groups, dtype=object)[kept]) == sorted(set(found.groups))


@given(st.text())
def test_normalising_leaves_single_spaces_and_never_empties_a_text(text: str) -> None:
    once = normalised(text)
    assert bool(once) == bool(text.split())
    assert once == " ".join(once.split())


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("How do I TOP-UP?", "how do i top up", True),
        ("I haven\u2019t got it...", "I haven't got it", True),
        ("\uff21\uff22\uff23", "abc", True),
        ("It costs 1.5", "It costs 15", False),
        ("5 - 3", "5 + 3", False),
        ("?!", "...", False),
        ("\U0001f600", "\U0001f621", False),
    ],
)
def test_what_normalising_keeps_apart(one: str, other: str, same: bool) -> None:
    assert (normalised(one) == normalised(other)) == same


def test_a_chain_joins_texts_that_are_not_alike() -> None:
    chain = ["abcdefghijkl", "cdefghijklmn", "efghijklmnop", "ghijklmnopqr"]
    found = find(chain, threshold=0.5)
    result = report(found)
    assert (result.clusters, result.largest) == (1, 4)
    assert result.least_similar == jaccard(
        shingles(chain[0], shingle="characters", size=4), shingles(chain[3], shingle="characters", size=4)
    )
    assert result.least_similar < 0.5


def test_the_row_that_is_kept_carries_the_majority_label() -> None:
    found = find([CARD[0], CARD[1], CARD[0], CARD[3]])
    assert resolve(found, ["pin", "card", "card", "pin"], "keep_one")[0].tolist() == [False, True, False, True]
    kept_N, weight_N = resolve(found, ["pin", "card", "card", "pin"], "weight")
    assert kept_N.all()
    assert weight_N.tolist() == [1 / 3, 1 / 3, 1 / 3, 1]
    assert resolve(found, ["pin"] * 4, "together")[1].tolist() == [1] * 4
    assert resolve(found, ["pin"] * 4, "keep_one")[0].tolist() == [True, False, False, True]


def _across_by_hand(texts: list[str], sides: list[int], threshold: float) -> list[bool]:
    every = [shingles(normalised(text), shingle="characters", size=4) for text in texts]
    return [
        any(sides[a] != sides[b] and jaccard(one, other) >= threshold for b, other in enumerate(every))
        for a, one in enumerate(every)
    ]


@given(
    rows=st.lists(st.tuples(st.sampled_from([*CARD, "abcdef", "abcdefg", "bcdefgh"]), st.integers(0, 3)), max_size=12)
)
@settings(max_examples=60, deadline=None)
def test_leaks_equal_a_search_by_hand(rows: list[tuple[str, int]]) -> None:
    texts, sides = [text for text, _ in rows], [side for _, side in rows]
    leaks = leaking(find(texts, threshold=0.6), np.array(sides, dtype=np.int64))
    assert leaks.tolist() == _across_by_hand(texts, sides, 0.6)


def test_shingles_have_the_length_that_suits_their_kind() -> None:
    assert (DuplicatesConfig().length, DuplicatesConfig(shingle="words").length, DuplicatesConfig(size=7).length) == (
        4,
        3,
        7,
    )
    assert shingles("a b c d", shingle="words", size=3) == {"a b c", "b c d"}
    assert shingles("abcde", shingle="characters", size=4) == {"abcd", "bcde"}
    assert shingles("ab", shingle="characters", size=4) == {"ab"}


def test_texts_from_one_template_are_refused_before_memory_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    body = " ".join(str(n) for n in range(60))
    texts = [f"{body} {n}" for n in range(170)]
    for limit in ("MAX_PAIRS", "MAX_CANDIDATES"):
        with monkeypatch.context() as patch:
            patch.setattr(duplicates, limit, 10_000)
            with pytest.raises(DataError, match=r"170 different texts have over \d+ pairs.*share a template") as caught:
                find(texts, shingle="words")
        assert "duplicates.on_duplicate=ignore" in str(caught.value)
    assert report(find(texts, shingle="words")).clusters == 1


def test_pairs_are_those_within_groups_in_blocks_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    group_N = np.random.default_rng(0).integers(0, 9, size=80)
    expected = {(a, b) for a in range(80) for b in range(a + 1, 80) if group_N[a] == group_N[b]}
    for block in (1, 7, 10**6):
        monkeypatch.setattr(duplicates, "PAIRS_AT_ONCE", block)
        found = [tuple(pair) for pairs_P2 in pairs_within(group_N) for pair in pairs_P2.tolist()]
        assert len(found) == len(set(found)) and set(found) == expected
    assert not list(pairs_within(np.zeros(0, dtype=np.int64)))


def test_large_clusters_have_the_similarity_that_pairs_have(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = sorted({normalised(text) for text in banking("train")[0]})[:60]
    table_UV = shingle_sets(texts, shingle="characters", size=4).table_UV
    cluster_U = components(60, [(n, n + 1) for n in range(0, 59) if n % 7])
    expected = min_similarity(table_UV, cluster_U)
    monkeypatch.setattr(duplicates, "SMALL_CLUSTER", 1)
    assert np.array_equal(min_similarity(table_UV, cluster_U), expected) and len(set(expected)) > 5


def test_vectors_link_what_an_exhaustive_comparison_links(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    vectors_ND = np.repeat(rng.normal(size=(20, 12)), 3, axis=0) + rng.normal(scale=0.2, size=(60, 12)) + 5
    unit_ND = vectors_ND - vectors_ND.mean(0)
    unit_ND /= np.linalg.norm(unit_ND, axis=1, keepdims=True)
    expected = {(a, b) for a in range(60) for b in range(a + 1, 60) if unit_ND[a] @ unit_ND[b] >= 0.9}
    monkeypatch.setattr(duplicates, "VECTORS_AT_ONCE", 7)
    pairs_P2, similarity_P = near_vectors(vectors_ND.astype(np.float32), threshold=0.9)
    assert {tuple(pair) for pair in pairs_P2.tolist()} == expected and 20 < len(expected) < 100
    np.testing.assert_allclose(similarity_P, [unit_ND[a] @ unit_ND[b] for a, b in pairs_P2], atol=1e-5)
    monkeypatch.setattr(duplicates, "MAX_PAIRS", 10)
    with pytest.raises(DataError, match=r"higher duplicates\.features"):
        near_vectors(vectors_ND.astype(np.float32), threshold=0.9)


@pytest.mark.parametrize("seed", range(3))
def test_joined_clusters_are_the_components_of_both_kinds_of_pairs(seed: int) -> None:
    rng = np.random.default_rng(seed)
    texts = [*banking("train")[0][:80], *banking("train")[0][:5]]
    vectors_ND = rng.normal(size=(85, 16)).astype(np.float32)
    linked = [tuple(pair) for pair in rng.choice(80, size=(8, 2), replace=False).tolist()]
    for first, second in linked:
        vectors_ND[second] = vectors_ND[first] * 1.001
    vectors_ND[80:] = vectors_ND[:5]
    order = rng.permutation(85)
    plain = find(texts, threshold=0.5)
    found = joined(plain, vectors_ND, threshold=0.995)
    expected = components(
        85, [*linked, *((a, b) for a in range(85) for b in range(a) if plain.cluster_N[a] == plain.cluster_N[b])]
    )
    same = np.asarray(found.cluster_N)[:, None] == found.cluster_N
    assert (same == (expected[:, None] == expected)).all()
    assert (found.similarity_U <= plain.similarity_U + 1e-9).all() and leaking(found, np.arange(85)).sum() >= 16
    again = joined(find([texts[row] for row in order], threshold=0.5), vectors_ND[order], threshold=0.995)
    assert (same[order][:, order] == (np.asarray(again.cluster_N)[:, None] == again.cluster_N)).all()
    unlinked = joined(plain, rng.normal(size=(85, 64)).astype(np.float32), threshold=0.999)
    assert (unlinked.cluster_U == plain.cluster_U).all() and (unlinked.similarity_U == plain.similarity_U).all()
