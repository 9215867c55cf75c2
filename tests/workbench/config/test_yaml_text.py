"""YAML text: what is written reads back equal."""

from __future__ import annotations

import math
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.config.yaml_text import dump_yaml, load_yaml

texts = st.text(st.characters(exclude_categories=["Cs"])) | st.sampled_from(
    ["no", "~", "1e5", "1e-05", "2026-01-01", "2026-13-45", "=", "<<", "010", "1:30", "1_000", "a: b", "*a", "!!int 1"]
)
leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts
trees = st.recursive(leaves, lambda each: st.lists(each, max_size=4) | st.dictionaries(texts, each, max_size=4))


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(texts, trees, max_size=4))
def test_what_is_written_as_yaml_reads_back_equal(values: dict[str, Any]) -> None:
    text = dump_yaml(values)
    assert same(load_yaml(text), values), "as it was written"
    dump_yaml({})  # now it is parsed
    assert same(load_yaml(text), values)
    assert same(yaml.safe_load(text), values), "by a reader of YAML 1.1"


def same(one: Any, other: Any) -> bool:
    """Whether they are equal, and of the same types."""
    if isinstance(one, dict) and isinstance(other, dict):
        return [*one] == [*other] and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


@pytest.mark.parametrize("value", [math.inf, -math.inf])
def test_numbers_without_an_end_are_written(value: float) -> None:
    assert load_yaml(dump_yaml({"a": value})) == yaml.safe_load(dump_yaml({"a": value})) == {"a": value}


def test_a_long_key_is_a_key() -> None:
    values = {"a" * 2000: {"b" * 1500: [1, {"c": [2]}]}}
    text = dump_yaml(values)
    dump_yaml({})
    assert load_yaml(text) == yaml.safe_load(text) == values


def test_texts_are_bare_where_they_may_be() -> None:
    values = {"model": {"id": "org/model-1.5", "new_tokens": ["<a>"]}, "steps": 3, "on": None, "rate": 1e-05, "of": {}}
    wanted = "model:\n  id: org/model-1.5\n  new_tokens:\n  - '<a>'\nsteps: 3\n'on': null\nrate: 1.0e-05\nof: {}\n"
    assert dump_yaml(values) == wanted


def test_lists_that_are_one_object_are_written_twice() -> None:
    one = ["a"]
    assert load_yaml(dump_yaml({"b": one, "c": one})) == {"b": one, "c": one}


def test_a_text_that_was_read_before_gives_values_of_its_own() -> None:
    text = "a: {b: [1, 2]}"
    first = load_yaml(text)
    first["a"]["b"].append(3)
    assert load_yaml(text) == {"a": {"b": [1, 2]}}
