"""Cells to labels, labels to targets, and outputs back to labels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from workbench.config.sections.classes_config import ClassesConfig
from workbench.data.labelled import labels
from workbench.data.labelled.labels import Label
from workbench.errors import DataError

KINDS = {kind: ClassesConfig.model_validate({"kind": kind}) for kind in ("one", "several", "number", "pair")}


@pytest.mark.parametrize(
    ("kind", "cell", "wanted"),
    [
        ("one", " cat ", "cat"),
        ("one", 3, "3"),
        ("one", 3.0, "3"),
        ("one", False, "false"),
        ("one", " ", None),
        ("one", float("nan"), None),
        ("several", ["cat", 3, "cat"], ("cat", "3")),
        ("several", [], ()),
        ("several", None, None),
        ("number", "2.5", 2.5),
        ("number", 0, 0.0),
        ("number", "", None),
        ("pair", "model_b", "b"),
        ("pair", "tie (bothbad)", "tie"),
    ],
)
def test_cells(kind: str, cell: Any, wanted: Label | None) -> None:
    assert labels.read(cell, KINDS[kind]) == wanted


def test_separated_classes() -> None:
    config = ClassesConfig.model_validate({"kind": "several", "separator": ";"})
    assert labels.read("a; b;;a", config) == ("a", "b") and labels.read("", config) == ()


@pytest.mark.parametrize(
    ("kind", "rows", "names"),
    [
        ("one", ["b", "a", "b"], ("a", "b")),
        ("one", ["10", "2", "-1"], ("-1", "2", "10")),
        ("several", [("x", "y"), (), ("z",)], ("x", "y", "z")),
        ("pair", ["tie", "b", "a"], ("a", "b", "tie")),
    ],
)
def test_targets_are_what_perfect_outputs_are_predicted_as(
    kind: Any, rows: list[Label], names: tuple[str, ...]
) -> None:
    found = labels.fit(kind, rows, source="rows")
    assert found.names == names
    targets = found.targets([*rows, None])
    assert not targets[-1].any() and targets.dtype == np.float32
    values = found.values(40.0 * targets[:-1].astype(np.float64) - 20)
    assert found.predicted(values) == rows
    np.testing.assert_allclose(values, targets[:-1], atol=1e-8)


def test_numbers_come_back() -> None:
    found = labels.fit("number", [1.0, 3.0, 8.0], source="rows")
    targets = found.targets([1.0, 3.0, 8.0])
    assert targets.mean() == pytest.approx(0, abs=1e-6) and targets.std() == pytest.approx(1)
    assert found.predicted(found.values(targets.astype(np.float64))) == pytest.approx([1.0, 3.0, 8.0])


@pytest.mark.parametrize(
    ("names", "same"),
    [
        (["cat", "dog", "Cat"], ("cat", "Cat")),
        (["sea  lion", "sea lion"], ("sea  lion", "sea lion")),
        (["caf\u00e9", "cafe\u0301"], ("caf\u00e9", "cafe\u0301")),
        (["cat", "cats", "c at"], None),
        ([], None),
    ],
)
def test_names_that_differ_only_by_case_or_spaces(names: list[str], same: tuple[str, str] | None) -> None:
    assert labels.alike(names) == same


@pytest.mark.parametrize(
    ("names", "numbers"),
    [
        ([f"{i}.04" for i in range(60)], True),
        ([f"{i * 7}" for i in range(60)], True),
        ([f"-{i}e-3" for i in range(1, 60)], True),
        ([f"{i / 2}" for i in range(21)] * 2, False),  # a scale of ratings
        ([str(i) for i in range(77)] * 3, False),  # numbered classes
        ([f"{i}.04" for i in range(59)] + ["unknown"], False),
    ],
)
def test_numbers_that_are_to_be_classes_are_refused(names: list[str], numbers: bool) -> None:
    if not numbers:
        return labels.require_classes("one", names, source="rows.csv")
    with pytest.raises(DataError, match=r"classes\.kind=number"):
        labels.require_classes("one", names, source="rows.csv")
    labels.require_classes("several", names, source="rows.csv")


@pytest.mark.parametrize(
    ("kind", "cells", "wanted"),
    [
        ("one", {"a": "0", "b": "1"}, "b"),
        ("one", {"a": 1.0, "b": 0}, "a"),
        ("one", {"a": False, "b": True}, "b"),
        ("one", {"a": "", "b": None}, None),
        ("several", {"a": "0", "b": "0.0"}, ()),
        ("several", {"a": 1, "b": "1"}, ("a", "b")),
    ],
)
def test_one_hot_columns(kind: str, cells: dict[str, Any], wanted: Label | None) -> None:
    assert labels.read_columns(cells, ClassesConfig(kind=kind, columns=("a", "b"))) == wanted


@pytest.mark.parametrize(
    ("kind", "cells", "says"),
    [
        ("one", {"a": 1, "b": 1}, "`a` and `b` are 1, and a row has one class. .*classes.kind=several"),
        ("one", {"a": "0", "b": "0"}, "none of a, b is 1"),
        ("several", {"a": 0.5, "b": 1}, "`a` must be 1 .* found 0.5"),
        ("several", {"a": "1", "b": ""}, "`b` must be 1"),
        ("one", {"a": "yes", "b": 1}, "`a` must be 1 .* found 'yes'"),
    ],
)
def test_one_hot_columns_that_contradict(kind: str, cells: dict[str, Any], says: str) -> None:
    with pytest.raises(DataError, match=says):
        labels.read_columns(cells, ClassesConfig(kind=kind, columns=("a", "b")))
