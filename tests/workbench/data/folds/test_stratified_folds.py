"""Folds partition the rows, keep groups whole and classes even, and refuse what would teach or measure too little."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from sklearn.model_selection import StratifiedGroupKFold

from workbench.config.sections.folds_config import FoldsConfig
from workbench.data.folds.duplicates import DuplicateClusters, find, leaking
from workbench.data.folds.stratified_folds import (
    Class,
    Label,
    assign,
    bin_numbers,
    make_folds,
    merge_groups,
    several_in_one,
    singletons,
    ungrouped_leak,
)
from workbench.data.rows import RawRow, read_rows
from workbench.errors import ConfigError, DataError, WorkbenchError
from workbench.schema import parse

BANKING = Path(__file__).parents[3] / "files" / "banking77" / "train.csv"
ROW = st.tuples(st.sampled_from("abc"), st.integers(0, 12).map(str))
LABELLED = st.lists(ROW, min_size=1, max_size=60)
SEVERAL = st.lists(st.tuples(st.sets(st.sampled_from("abcd")).map(tuple), st.integers(0, 12).map(str)), max_size=40)


@cache
def banking() -> tuple[list[str], DuplicateClusters]:
    rows = [row.columns for row in read_rows(str(BANKING))]
    return [row["category"] for row in rows], find([row["text"] for row in rows])


def rows(count: int, **columns: Sequence[Any]) -> list[RawRow]:
    return [
        RawRow(f"train.csv, row {n + 1}", {"text": f"t{n}", **{name: values[n] for name, values in columns.items()}})
        for n in range(count)
    ]


def table(fold_N: NDArray[np.int64], labels: Sequence[Class], k: int) -> NDArray[np.int64]:
    """Rows of each class in each fold."""
    classes, label_N = np.unique(np.array(labels), return_inverse=True)
    counts = np.zeros((k, len(classes)), dtype=np.int64)
    np.add.at(counts, (fold_N, label_N), 1)
    return counts


@given(data=SEVERAL, k=st.integers(2, 6), repeats=st.integers(1, 3), seed=st.integers(0, 99))
@settings(deadline=None)
def test_every_row_validates_once_a_repeat_and_no_group_stands_on_both_sides(
    data: list[tuple[tuple[str, ...], str]], k: int, repeats: int, seed: int
) -> None:
    groups = [group for _, group in data]
    folds = assign([classes for classes, _ in data], groups=groups, k=k, repeats=repeats, seed=seed)
    splits = list(folds.splits())
    assert len(splits) == k * repeats
    for repeat in range(repeats):
        own = [split for split in splits if split.repeat == repeat]
        assert (sum(split.validation_N.astype(int) for split in own) == 1).all()
    for split in splits:
        assert (split.train_N ^ split.validation_N).all()
        sides = [{g for g, inside in zip(groups, part_N, strict=True) if inside} for part_N in split[2:]]
        assert not sides[0] & sides[1]


@given(data=LABELLED, k=st.integers(2, 6), seed=st.integers(0, 99))
@settings(deadline=None)
def test_class_counts_stay_within_the_stated_bound(data: list[tuple[str, str]], k: int, seed: int) -> None:
    labels, groups = [label for label, _ in data], [group for _, group in data]
    counts = table(assign([(x,) for x in labels], groups=groups, k=k, seed=seed).fold_RN[0], labels, k)
    of_group: dict[str, Counter[str]] = {}
    for label, group in data:
        of_group.setdefault(group, Counter())[label] += 1
    for column, name in enumerate(sorted(set(labels))):
        alone_in = [each[name] for each in of_group.values() if set(each) == {name}]
        mixed = sum(each[name] for each in of_group.values() if len(each) > 1)
        assert np.ptp(counts[:, column]) <= max([*alone_in, mixed])


@given(
    labels=st.lists(st.sampled_from("abcdefg"), min_size=1, max_size=80), k=st.integers(2, 6), stratify=st.booleans()
)
@settings(deadline=None)
def test_without_groups_classes_and_sizes_differ_by_one_at_most(labels: list[str], k: int, stratify: bool) -> None:
    strata: list[tuple[Class, ...]] = [(label,) if stratify else () for label in labels]
    fold_N = assign(strata, groups=singletons(labels), k=k).fold_RN[0]
    assert np.ptp(np.bincount(fold_N, minlength=k)) <= 1
    if stratify:
        assert np.ptp(table(fold_N, labels, k), axis=0).max() <= 1


@given(data=SEVERAL, k=st.integers(2, 5), seed=st.integers(0, 99), draw=st.data())
@settings(deadline=None)
def test_the_order_of_rows_only_permutes_the_folds(
    data: list[tuple[tuple[str, ...], str]], k: int, seed: int, draw: st.DataObject
) -> None:
    order = draw.draw(st.permutations(range(len(data))))
    folds = [
        assign([classes for classes, _ in each], groups=[group for _, group in each], k=k, repeats=2, seed=seed).fold_RN
        for each in (data, [data[row] for row in order])
    ]
    assert np.array_equal(folds[0][:, order], folds[1])


def test_seeds_and_repeats_deal_anew_and_a_seed_deals_the_same_on_every_machine() -> None:
    labels, found = banking()
    strata = [(label,) for label in labels]
    two = assign(strata, groups=found.groups, k=5, repeats=2, seed=3).fold_RN
    assert np.array_equal(two[:1], assign(strata, groups=found.groups, k=5, seed=3).fold_RN)
    _, size = np.unique(found.groups, return_counts=True)
    clustered_N = size[np.unique(found.groups, return_inverse=True)[1]] > 1
    # Two deals into five folds that have nothing to do with each other agree in about a fifth of the rows.
    for other in (two[1], assign(strata, groups=found.groups, k=5, seed=4).fold_RN[0]):
        assert 0.15 < (other == two[0]).mean() < 0.25
        assert 0.1 < (other == two[0])[clustered_N].mean() < 0.3
    digest = hashlib.sha256(two.astype("<i8").tobytes()).hexdigest()
    assert digest[:16] == "89881f1d974544b6"


@pytest.mark.parametrize("k", [3, 5, 10])
def test_classes_are_as_even_as_scikit_learn_makes_them(k: int) -> None:
    labels, found = banking()
    ours_N = assign([(label,) for label in labels], groups=found.groups, k=k).fold_RN[0]
    theirs_N = np.zeros_like(ours_N)
    splitter = StratifiedGroupKFold(k, shuffle=True, random_state=0)
    for fold, (_, validation) in enumerate(splitter.split(labels, labels, found.groups)):
        theirs_N[validation] = fold
    ours, theirs = (table(fold_N, labels, k) for fold_N in (ours_N, theirs_N))
    assert ours.std(axis=0).mean() <= theirs.std(axis=0).mean() * 1.001
    assert np.ptp(ours, axis=0).max() <= 1


def test_grouped_folds_do_not_leak_and_the_others_are_told() -> None:
    labels, found = banking()
    grouped = assign([(label,) for label in labels], groups=found.groups, k=5).fold_RN[0]
    assert leaking(found, grouped).sum() == 0
    assert ungrouped_leak(found, labels, k=5, seed=0) > 0.1 * len(labels)
    apart = find([f"{n}{chr(97 + n) * 8}" for n in range(20)])
    assert ungrouped_leak(apart, ["x"] * 20, k=5, seed=0) == 0


@given(st.lists(st.tuples(st.integers(0, 6).map(str), st.integers(0, 6).map(str)), max_size=12))
def test_joined_groups_are_the_closure_of_both(pairs: list[tuple[str, str]]) -> None:
    together = np.array([[a == c or b == d for c, d in pairs] for a, b in pairs], dtype=np.int64)
    together = together.reshape(len(pairs), len(pairs))
    for _ in pairs:
        together = np.minimum(1, together @ together)
    names = merge_groups([a for a, _ in pairs], [b for _, b in pairs])
    assert [[one == other for other in names] for one in names] == together.astype(bool).tolist()
    assert all(name in {a for a, _ in pairs} for name in names)


@given(st.lists(st.integers(0, 30).map(float), min_size=1, max_size=80), st.integers(1, 10))
def test_ranges_rise_and_hold_enough_rows(numbers: list[float], least: int) -> None:
    found = [value for (value,) in bin_numbers(numbers, min_rows=least)]
    assert found[numbers.index(min(numbers))] == 0
    for one, of_one in zip(numbers, found, strict=True):
        for other, of_other in zip(numbers, found, strict=True):
            assert of_one == of_other if one == other else (of_one <= of_other) == (one < other) or of_one == of_other
    sizes = Counter(found)
    assert len(sizes) <= 10
    assert min(sizes.values()) >= least or len(sizes) == 1


def test_a_regression_is_dealt_by_ranges() -> None:
    labels: list[Label] = [float(n % 50) for n in range(200)]
    folds = make_folds(FoldsConfig(k=4), rows(200), labels, clusters=singletons([str(n) for n in range(200)]), seed=0)
    means = [np.mean([labels[row] for row in np.flatnonzero(split.validation_N)]) for split in folds.splits()]  # type: ignore[misc]
    assert np.ptp(means) < 1.5  # of 0 to 49; folds at random differ by about 4


def test_a_column_of_groups_joins_the_clusters() -> None:
    users = [str(n // 3) for n in range(30)]
    clusters = [*singletons([str(n) for n in range(28)]), "twins", "twins"]
    clusters[0] = "twins"  # ties user 0 to user 9
    labels: list[Label] = ["ab"[n % 2] for n in range(30)]
    folds = make_folds(
        FoldsConfig(k=3, group="user", repeats=2), rows(30, user=users), labels, clusters=clusters, seed=0
    )
    for fold_N in folds.fold_RN:
        assert all(len({fold_N[n] for n in range(30) if users[n] == user}) == 1 for user in users)
        assert fold_N[0] == fold_N[29]


def test_a_column_of_folds_is_taken_as_it_stands() -> None:
    column = [10, 9, 2, "x", 2, 9, 10, "x"]
    config = FoldsConfig(k=4, column="part")
    folds = make_folds(config, rows(8, part=column), ["a"] * 8, clusters=["same"] * 8, seed=0)
    assert folds.names == ("2", "9", "x", "10")
    assert [folds.names[fold] for fold in folds.fold_RN[0]] == list(map(str, column))
    assert folds.k == 4


ALPHABET = [str(n) for n in range(12)]
HALVES: list[Label] = ["a"] * 6 + ["b"] * 6
MISTAKES: dict[str, tuple[dict[str, Any], dict[str, Any], list[str]]] = {
    "a class smaller than k": (
        {"k": 4},
        {"labels": ["a"] * 9 + ["b"] * 3},
        ["folds.k=4: the class `b` has only 3 row(s)", "Write folds.k=3, or give it more rows"],
    ),
    "a class of one row": (
        {"k": 2},
        {"labels": ["a"] * 11 + ["b"]},
        ["the class `b` has only 1 row(s)", "Give it more rows, or write folds.every_class=false"],
    ),
    "fewer groups than k": (
        {"k": 5},
        {"clusters": [str(n % 4) for n in range(12)]},
        ["folds.k=5: the 12 rows form only 4 groups", "Write folds.k=4, or give more rows."],
    ),
    "a class in fewer groups than k": (
        {"k": 5},
        {"clusters": ["x"] * 4 + [str(n) for n in range(8)]},
        ["the 6 rows of the class `a` form only 3 groups", "absent from a fold", "Write folds.k=3"],
    ),
    "one row unlabelled": (
        {},
        {"labels": [*HALVES[:11], None]},
        ["train.csv, row 12: has no label; 1 of 12 training rows", "Label them, or move them to a file of their own."],
    ),
    "numbers beside classes": ({}, {"labels": [*HALVES[:11], 0.5]}, ["1 of 12 labels are decimal numbers", "Give one"]),
    "an unknown group column": (
        {"group": "usr"},
        {"user": ALPHABET},
        ["folds.group=usr: no row", "Did you mean `user`?"],
    ),
    "a gap in the group column": (
        {"group": "user"},
        {"user": [*ALPHABET[:11], ""]},
        ["train.csv, row 12: has no value in the column `user`", "write folds.group=null"],
    ),
    "an unknown fold column": (
        {"column": "fold"},
        {"part": ALPHABET},
        ["folds.column=fold: no row", "Known: part, text."],
    ),
    "a gap in the fold column": (
        {"column": "part", "k": 2},
        {"part": [0, 1] * 5 + [float("nan"), None]},
        [
            "train.csv, row 11: has no value in the column `part`, which folds.column names; 2 of 12 rows",
            "Fill in the values",
        ],
    ),
    "a fold column of one value": (
        {"column": "part"},
        {"part": ["7"] * 12},
        ["every row has the value `7`", "folds.column=null"],
    ),
    "a class that a fold of the user's does not validate": (
        {"column": "part", "k": 3},
        {"part": [0, 1] * 3 + [0, 1, 2] * 2},
        ["the class `a` is absent from fold `2`", "folds.every_class=false"],
    ),
    "a class that a fold of the user's does not train": (
        {"column": "part", "k": 2, "every_class": False},
        {"part": [0] * 6 + [0, 1] * 3},
        ["all rows of the class `a` are in fold `0`", "Spread the class over several folds"],
    ),
    "a class that stands in one group, whatever is asked": (
        {"k": 2, "every_class": False},
        {"clusters": ["x"] * 6 + [str(n) for n in range(6)]},
        ["all rows of the class `a` are in fold `", "give it more rows"],
    ),
    "a group torn by the fold column": (
        {"column": "part", "group": "user", "k": 2},
        {"part": [0, 1] * 6, "user": ["u", "u", *ALPHABET[2:]]},
        ["train.csv, row 2: is in fold `1`, but train.csv, row 1", "`user`", "folds.group=null"],
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_refused_with_its_place_and_cure(name: str) -> None:
    config, changed, expected = MISTAKES[name]
    given: dict[str, Any] = {"labels": HALVES, "clusters": ALPHABET, **changed}
    columns = {key: values for key, values in given.items() if key not in ("labels", "clusters")}
    with pytest.raises(WorkbenchError) as caught:
        make_folds(FoldsConfig(**config), rows(12, **columns), given["labels"], clusters=given["clusters"], seed=0)
    assert isinstance(caught.value, (ConfigError, DataError))
    for part in expected:
        assert part in str(caught.value)


def test_a_rare_class_may_be_absent_where_that_is_accepted() -> None:
    labels: list[Label] = ["a"] * 10 + ["b"] * 2
    for seed in range(10):
        folds = make_folds(FoldsConfig(k=4, every_class=False), rows(12), labels, clusters=ALPHABET, seed=seed)
        assert np.bincount(folds.fold_RN[0]).tolist() == [3] * 4
        assert folds.fold_RN[0, 10] != folds.fold_RN[0, 11]  # so that each fold trains on one of them


def test_a_fold_column_is_not_repeated() -> None:
    with pytest.raises(ConfigError, match=r"folds\.repeats=1"):
        parse(FoldsConfig, {"column": "part", "repeats": 2}, source="my.yaml")
    with pytest.raises(ConfigError, match="greater than or equal to 2, found 1"):
        parse(FoldsConfig, {"k": 1}, source="my.yaml")


def test_neither_the_sections_nor_the_folds_need_torch() -> None:
    heavy = "[m for m in ('torch', 'scipy', 'sklearn', 'datasketch') if m in sys.modules]"
    modules = ("workbench.config.sections.folds_config", "workbench.data.folds.stratified_folds")
    code = "import sys; " + "; ".join(f"import {module}; print({heavy})" for module in modules)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["[]", "[]"]


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (["animal", "animal,cat", "cat,pet", "pet"], "classes.separator=','"),
        (["a; b", "b; c", "a; c"], "classes.separator=';'"),
        (["Drama|War", "War|Crime", "Crime|Drama"], "classes.separator='|'"),
        (["Paris, France", "Rome, Italy"], ""),
        (["card arrival", "card payment", "lost card"], ""),
        (["a", "b"], ""),
    ],
)
def test_names_that_look_like_several_classes(names: list[str], says: str) -> None:
    found = several_in_one(names)
    assert says in found and bool(found) == bool(says)
