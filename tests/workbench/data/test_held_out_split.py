"""Training, held-out and test rows, and the stratified share that is held out."""

from __future__ import annotations

from collections import Counter
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.data.held_out_split import Splits, hold_out


class Rows(NamedTuple):
    count: int

    def facts(self) -> dict[str, Any]:
        return {"rows": self.count}


def test_without_test_rows_nothing_is_made_of_them() -> None:
    splits = Splits(Rows(9), Rows(0), None)
    assert splits.named() == {"train": Rows(9), "held_out": Rows(0)}, "empty rows are rows"
    assert splits.map(lambda rows: Rows(rows.count + 1)) == Splits(Rows(10), Rows(1), None)
    assert splits.facts() == {"train": {"rows": 9}, "held_out": {"rows": 0}, "test": None}


def test_test_rows_come_last() -> None:
    assert list(Splits(Rows(1), Rows(2), Rows(3)).named()) == ["train", "held_out", "test"]


@settings(deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 12)), min_size=2, max_size=80),
    share=st.sampled_from([0.05, 0.2, 0.5]),
    seed=st.integers(0, 3),
    shuffle=st.randoms(use_true_random=False),
)
def test_every_class_stands_on_both_sides(
    rows: list[tuple[int, int]], share: float, seed: int, shuffle: object
) -> None:
    """Groups of one class each: the class is part of the group's name."""
    strata, groups = [(each,) for each, _ in rows], [f"{each} {group}" for each, group in rows]
    held = hold_out(strata, groups=groups, share=share, seed=seed)
    sides = {group: {bool(held[n]) for n, own in enumerate(groups) if own == group} for group in groups}
    assert all(len(side) == 1 for side in sides.values())
    for each in {each for each, _ in rows}:
        own = [n for n, (name, _) in enumerate(rows) if name == each]
        sizes = Counter(groups[n] for n in own)
        count = int(held[own].sum())
        assert (count >= 1) == (len(sizes) >= 2)
        assert count < len(own)
        assert count <= max(round(share * len(own)), max(sizes.values()))
    order = list(range(len(rows)))
    shuffle.shuffle(order)  # type: ignore[attr-defined]
    again = hold_out([strata[n] for n in order], groups=[groups[n] for n in order], share=share, seed=seed)
    assert np.array_equal(again, held[order])


def test_shares_are_met_where_rows_stand_alone() -> None:
    strata = [("a",)] * 100 + [("b",)] * 30 + [("c",)] * 3
    held = hold_out(strata, groups=[str(n) for n in range(133)], share=0.1, seed=0)
    assert Counter(strata[n][0] for n in np.flatnonzero(held)) == {"a": 10, "b": 3, "c": 1}
    assert not np.array_equal(held, hold_out(strata, groups=[str(n) for n in range(133)], share=0.1, seed=1))


def test_rows_with_several_classes_or_none() -> None:
    strata: list[tuple[str, ...]] = [("a", "b"), ("a",), ("b",), (), ()] * 12
    held = hold_out(strata, groups=[str(n) for n in range(60)], share=0.25, seed=0)
    classes = Counter(each for n in np.flatnonzero(held) for each in strata[n] or ("none",))
    assert 5 <= classes["a"] <= 7 and 5 <= classes["b"] <= 7 and classes["none"] == 6


@settings(deadline=None)
@given(
    rows=st.lists(st.tuples(st.frozensets(st.sampled_from(["a", "b", 3, "3"])).map(tuple), st.integers(0, 30))),
    share=st.sampled_from([0.01, 0.1, 0.3, 0.9]),
    seed=st.integers(0, 3),
)
def test_equals_taking_groups_by_name(rows: list[tuple[tuple[str | int, ...], int]], share: float, seed: int) -> None:
    strata, groups = [classes for classes, _ in rows], [f"group {group}" for _, group in rows]
    found = hold_out(strata, groups=iter(groups), share=share, seed=seed)
    assert found.tolist() == [group in _taken(strata, groups, share, seed) for group in groups]


def _taken(strata: list[tuple[str | int, ...]], groups: list[str], share: float, seed: int) -> set[str]:
    """The names of the groups that are held out, of which all are looked at for each class."""
    total = Counter(name for classes in strata for name in classes or ("",))
    counts = {group: Counter[str | int]() for group in groups}
    for classes, group in zip(strata, groups, strict=True):
        counts[group].update(classes or ("",))
    order = sorted(counts, key=lambda group: blake2b(f"{seed} {group}".encode(), digest_size=16).digest())
    target = {name: max(1, round(share * count)) for name, count in total.items()}
    taken: Counter[str | int] = Counter()
    held_out: set[str] = set()
    for name in sorted(total, key=lambda name: (total[name], str(name))):
        for strict in (True, False):
            for group in order:
                if taken[name] >= target[name]:
                    break
                own = counts[group]
                after = {each: taken[each] + own[each] for each in own}
                above = any(after[each] > target[each] and taken[each] for each in own if strict or each == name)
                if own[name] and group not in held_out and not above and all(after[c] < total[c] for c in own):
                    held_out.add(group)
                    taken.update(own)
    return held_out
