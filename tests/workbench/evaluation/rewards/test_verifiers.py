"""Verifiers read answers as they are written, and exactly."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from workbench.config.sections.rewards_config import JsonReward, NumberReward, PatternReward, VoteReward
from workbench.data.text.generated_answers import Answer
from workbench.errors import ConfigError, DataError
from workbench.evaluation.rewards import math_equality
from workbench.evaluation.rewards.verifiers import JsonVerifier, NumberVerifier, PatternVerifier, Vote, fenced


def test_numbers_are_equal_as_decimals_and_within_a_tolerance() -> None:
    answers = [Answer("p", text, row={"answer": "#### 0.3"}) for text in ("0.30", "0.31", "none")]
    assert NumberVerifier(NumberReward())(answers) == [1, 0, 0]
    assert NumberVerifier(NumberReward(tolerance=0.01))(answers) == [1, 1, 0]


def test_a_vote_is_the_share_of_the_answers_to_a_prompt_that_agree() -> None:
    said = {
        "first": ["It is 12.", "6 + 6, so 12", "#### 1.2e1", "perhaps 13", "no idea"],
        "second": ["Ann", " ann ", "It was Ann", "Bob"],
    }
    answers = [Answer("who?", text, place=place) for place, texts in said.items() for text in texts]
    mixed = [3, 8, 0, 5, 1, 7, 2, 6, 4]
    votes = Vote(VoteReward())([answers[number] for number in mixed])
    wanted = [0.6, 0.6, 0.6, 0.2, 0.2, 0.5, 0.5, 0.25, 0.25]
    assert votes == pytest.approx([wanted[number] for number in mixed])


def test_a_row_without_a_right_answer_is_named() -> None:
    with pytest.raises(DataError, match=r"rows.jsonl, row 3: no column `answer`.*Did you mean `answers`"):
        NumberVerifier(NumberReward())([Answer("p", "3", row={"answers": "3"}, place="rows.jsonl, row 3")])
    for cell in ("many", "3 apples and 4 pears", "2024-05-06", "x = 1 or x = 2", "3:45"):
        with pytest.raises(DataError, match=rf"row 3: `answer` holds no number, or more than one, found '{cell}'"):
            NumberVerifier(NumberReward())([Answer("p", "3", row={"answer": cell}, place="row 3")])


@pytest.mark.parametrize(
    ("right", "answers"),
    {
        "3/4": {"1/4": 0, "4": 0, "3/4": 1, "0.75": 1, "6/8": 1, r"$\frac{3}{4}$": 1, r"\boxed{\frac34}": 1, "75%": 1},
        "4": {"1/4": 0, "(3, 4)": 0, "10-4": 0, "2 + 4": 0, "3:4": 0, "x^4": 0, r"\sqrt{4}": 0, "2^2": 1, "4 km": 1},
        "2^10": {"10": 0, "1024": 1, "1,024": 1, "2^{10}": 1, "2**10": 1, "2¹⁰": 1},
        "16 cm^2": {"2": 0, "16": 1, "16 cm²": 1, r"\boxed{16 \text{ cm}^2}": 1},
        "1,234,567": {"567": 0, "1234567": 1, "1 234 567": 1, r"1{,}234{,}567": 1, "$1,234,567.00.": 1},
        "50%": {"0.5": 1, "50": 1, "50 %": 1, "0.5%": 0, "5": 0},
        "1 1/2": {"1/2": 0, "2": 0, "1.5": 1, "1½": 1, r"1\frac{1}{2}": 1, "3/2 cups": 1},
        "6.02e23": {"23": 0, "6.02 \u00d7 10^23": 1, r"6.02 \times 10^{23}": 1},
    }.items(),
)
def test_an_answer_is_compared_with_its_whole_value(right: str, answers: dict[str, float]) -> None:
    rows = [Answer("p", f"After 9 tries it is {text}", row={"answer": right}) for text in answers]
    assert dict(zip(answers, NumberVerifier(NumberReward())(rows), strict=True)) == answers


FORMULAS = {
    "(3, 4)": {"4": 0, "(3, 4)": 1, "(4, 3)": 0, r"$(3,4)$": 1, "[3, 4]": 0, r"\boxed{(3, 4)}": 1, "(3, 4, 5)": 0},
    "{1, 2}": {"2": 0, "{2, 1}": 1, r"$\{1,2\}$": 1, "{1, 2, 3}": 0},
    "[0, 1)": {"1": 0, "[0,1)": 1, "(0, 1)": 0, r"\boxed{0 \le x < 1}": 1, "[0, 1]": 0},
    r"(-\infty, 3]": {"3": 0, "(-∞, 3]": 1, r"$(-\infty,3)$": 0},
    r"\sqrt{8}": {"8": 0, "√8": 1, r"$2\sqrt{2}$": 1, r"\boxed{9^{9^{9^{9}}}}": 0, r"\boxed{2^{10^{10}}}": 0},
    r"(0,1) \cup (2,3)": {"3": 0, "(0, 1) \u222a (2, 3)": 1, r"$(2,3)\cup(0,1)$": 1},
}


@pytest.mark.slow
@pytest.mark.parametrize("right", FORMULAS)
def test_sets_intervals_and_formulas_are_compared(right: str) -> None:
    pytest.importorskip("math_verify")
    answers = FORMULAS[right]
    rows = [Answer("p", f"It is {text}", row={"answer": right}) for text in answers]
    with ThreadPoolExecutor(1) as thread:  # whose code no signal can interrupt
        assert dict(zip(answers, thread.submit(NumberVerifier(NumberReward()), rows).result(), strict=True)) == answers


@pytest.mark.skipif(math_equality.installed(), reason="math-verify is installed")
@pytest.mark.parametrize("right", FORMULAS)
def test_sets_intervals_and_formulas_need_a_library(right: str) -> None:
    with pytest.raises(DataError, match=r"is not one number.*pip install 'peft-workbench\[math\]'"):
        NumberVerifier(NumberReward())([Answer("p", "4", row={"answer": right})])


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
