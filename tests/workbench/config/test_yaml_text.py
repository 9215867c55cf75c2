"""YAML text: what is written reads back equal."""

from __future__ import annotations

from typing import Any

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


def same(one: Any, other: Any) -> bool:
    """Whether they are equal, and of the same types."""
    if isinstance(one, dict) and isinstance(other, dict):
        return [*one] == [*other] and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


def test_lists_that_are_one_object_are_written_twice() -> None:
    one = ["a"]
    assert load_yaml(dump_yaml({"b": one, "c": one})) == {"b": one, "c": one}


def test_a_text_that_was_read_before_gives_values_of_its_own() -> None:
    text = "a: {b: [1, 2]}"
    first = load_yaml(text)
    first["a"]["b"].append(3)
    assert load_yaml(text) == {"a": {"b": [1, 2]}}


def test_what_changes_after_it_was_written_is_read_as_it_was_written() -> None:
    values = {"a": {"b": [1, 2]}}
    text = dump_yaml(values)
    values["a"]["b"].append(3)
    assert load_yaml(text) == {"a": {"b": [1, 2]}}
