"""Verifiers read answers as they are written, and exactly."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.config.sections.rewards_config import JsonReward, NumberReward, PatternReward
from workbench.data.text.generated_answers import Answer
from workbench.errors import ConfigError, DataError
from workbench.evaluation.rewards.verifiers import JsonVerifier, NumberVerifier, PatternVerifier, fenced, number_in


@pytest.mark.parametrize(
    ("text", "number"),
    {
        "Natalia sold 48/2 = 24 clips.\n#### 72": "72",
        "#### 1,234.50 in all, not 3": "1234.50",
        "It costs $18.": "18",
        "10-4": "4",
        "1e-05 and 1e+16": "1e16",
        "#### 2.5E-3": "0.0025",
        "room 3e8b": "8",
        "x = -4": "-4",
        "the answer is \u22124.0": "-4.0",
        "1,23": "23",
        "1,234,567": "1234567",
        "#### none": None,
        "no number": None,
        "": None,
    }.items(),
)
def test_the_number_of_a_text(text: str, number: str | None) -> None:
    assert number_in(text) == (None if number is None else Decimal(number))


@settings(max_examples=25)
@given(st.decimals(allow_nan=False, allow_infinity=False, places=3), st.text())
def test_a_number_is_found_behind_the_mark_whatever_stands_before(number: Decimal, before: str) -> None:
    assert number_in(f"{before} #### {number:,}") == number
    assert number_in(f"{before} #### {number}") == number


def test_numbers_are_equal_as_decimals_and_within_a_tolerance() -> None:
    answers = [Answer("p", text, row={"answer": "#### 0.3"}) for text in ("0.30", "0.31", "none")]
    assert NumberVerifier(NumberReward())(answers) == [1, 0, 0]
    assert NumberVerifier(NumberReward(tolerance=0.01))(answers) == [1, 1, 0]


def test_a_row_without_a_right_answer_is_named() -> None:
    with pytest.raises(DataError, match=r"rows.jsonl, row 3: no column `answer`.*Did you mean `answers`"):
        NumberVerifier(NumberReward())([Answer("p", "3", row={"answers": "3"}, place="rows.jsonl, row 3")])
    with pytest.raises(DataError, match=r"row 3: `answer` holds no number, found 'many'"):
        NumberVerifier(NumberReward())([Answer("p", "3", row={"answer": "many"}, place="row 3")])


def test_patterns_are_found_and_compared() -> None:
    answers = [Answer("p", "<a> Yes </a>", row={"right": "yes"}), Answer("p", "yes", row={"right": "yes"})]
    assert PatternVerifier(PatternReward(pattern="<a>.*</a>"))(answers) == [1, 0]
    assert PatternVerifier(PatternReward(pattern="(?i)yes", whole=True))(answers) == [0, 1]
    assert PatternVerifier(PatternReward(pattern="(?i)(yes)", answer="right"))(answers) == [0, 1]
    with pytest.raises(ConfigError, match="has no group to compare with column `right`"):
        PatternVerifier(PatternReward(pattern="yes", answer="right"))


def test_a_pattern_that_takes_for_ever_is_named() -> None:
    endless = PatternVerifier(PatternReward(pattern="(a+)+b", timeout=0.05))
    with pytest.raises(ConfigError, match=r"'\(a\+\)\+b' took more than 0.05 s"):
        endless([Answer("p", "a" * 40)])


def test_a_fenced_block_is_the_last_one() -> None:
    assert fenced("```\none\n```\nand\n```python\ntwo\n```") == "two"
    assert fenced("```json\nunfinished") == "unfinished"
    assert fenced("plain") == "plain"


SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["name", "tags"],
    "additionalProperties": False,
    "properties": {
        "name": {"type": "string", "minLength": 1, "pattern": "^[a-z]+$"},
        "age": {"type": "integer", "minimum": 0, "exclusiveMaximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", 1]}, "maxItems": 2, "uniqueItems": True},
        "next": {"anyOf": [{"type": "null"}, {"$ref": "#"}]},
        "kind": {"oneOf": [{"multipleOf": 2}, {"multipleOf": 3}], "not": {"const": 9}},
    },
}
FITS = [
    '{"name": "x", "tags": []}',
    '```json\n{"name": "x", "age": 3.0, "tags": ["a", 1.0]}\n```',
    '{"name": "x", "tags": [], "next": {"name": "y", "tags": [], "next": null}}',
    '{"name": "x", "tags": [], "kind": 4}',
]
FITS_NOT = [
    "not json",
    "[]",
    '{"name": "x"}',
    '{"name": "X", "tags": []}',
    '{"name": "x", "tags": ["c"]}',
    '{"name": "x", "tags": [true]}',
    '{"name": "x", "tags": ["a", "a"]}',
    '{"name": "x", "tags": ["a", "b", 1]}',
    '{"name": "x", "tags": [], "age": true}',
    '{"name": "x", "tags": [], "age": 1.5}',
    '{"name": "x", "tags": [], "age": 150}',
    '{"name": "x", "tags": [], "other": 1}',
    '{"name": "x", "tags": [], "next": {"name": "y"}}',
    '{"name": "x", "tags": [], "kind": 6}',
    '{"name": "x", "tags": [], "kind": 9}',
    '{"name": "x", "tags": [], "age": NaN}',
    "[" * 100_000,
]


def test_json_is_held_to_its_schema() -> None:
    verifier = JsonVerifier(JsonReward(json_schema=SCHEMA))
    assert verifier([Answer("p", text) for text in FITS]) == [1.0] * len(FITS)
    assert [text[:40] for text in FITS_NOT if verifier([Answer("p", text)]) != [0.0]] == []


def test_a_schema_whose_pattern_takes_for_ever_is_stopped() -> None:
    verifier = JsonVerifier(JsonReward(json_schema={"pattern": "^(a+)+$"}, timeout=0.05))
    assert verifier([Answer("p", '"aaa"')]) == [1.0]
    with pytest.raises(ConfigError, match=r"took more than 0.05 s.*repetitions inside of repetitions"):
        verifier([Answer("p", f'"{"a" * 40}b"')])


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"typ": "object"}, "typ is no keyword. Did you mean `type`"),
        ({"properties": {"a": {"type": "text"}}}, "$.properties.a.type: 'text' is not valid"),
        ({"items": 3}, "$.items: 3 is not of type"),
        ({"anyOf": {}}, "$.anyOf: {} is not of type 'array'"),
        ({"pattern": "("}, "'(' is not a 'regex'"),
        ({"$ref": "#/$defs/none"}, "leads nowhere"),
        ({"$ref": "https://example.org/schema.json"}, "leads nowhere"),
    ],
)
def test_what_is_no_schema_is_refused(schema: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        JsonVerifier(JsonReward(json_schema=schema))
    assert message in str(error.value)


@pytest.mark.parametrize("text", ["true", "5", "[]", "null"])
def test_a_file_with_something_else_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "schema.json").write_text(text)
    with pytest.raises(ConfigError, match=r"schema.json: is .*a schema is an object. Correct the schema"):
        JsonVerifier(JsonReward(json_schema=tmp_path / "schema.json"))
