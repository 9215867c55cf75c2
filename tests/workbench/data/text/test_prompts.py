"""Rows to answer: read without their answers, and sampled from several sources."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from tests.run_files import write_lines
from workbench.config import DataConfig
from workbench.data.rows import RawRow
from workbench.data.text import tokenized
from workbench.data.text.chat import ChatEncoder
from workbench.data.text.formats import Example
from workbench.data.text.prompts import MixedPrompts, PromptEncoder, own_answer, read_prompts, reworded
from workbench.data.text.tokenized_set import TokenizedSet
from workbench.errors import DataError

SECRET = "the answer"
TURNS = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Who?"}]
SHAREGPT = [{"from": "human", "value": "Who?"}, {"from": "gpt", "value": SECRET}]


def _prompts(path: Path, *rows: Any, **data: Any) -> list[Example]:
    write_lines(path, rows)
    return list(read_prompts(str(path), DataConfig.model_validate({"train": "unused.jsonl", **data})))


@pytest.mark.parametrize(
    ("row", "answer"),
    [
        ({"question": "Who?", "answer": SECRET}, SECRET),
        ({"question": "Who?"}, None),
        ({"question": "Who?", "answer": None}, None),
        ({"prompt": "Who? ", "completion": SECRET}, SECRET),
        ({"prompt": "2 + 3 =", "answer": 5}, "5"),
        ({"instruction": "Say", "input": "hi", "output": SECRET}, SECRET),
        ({"messages": [*TURNS, {"role": "assistant", "content": SECRET}]}, SECRET),
        ({"messages": TURNS}, None),
        ({"conversations": [*SHAREGPT[:1], {"from": "gpt", "value": "no"}, *SHAREGPT]}, SECRET),
    ],
)
def test_the_answer_that_a_row_holds(row: dict[str, Any], answer: str | None) -> None:
    assert own_answer(RawRow("row 1", row), DataConfig(train="x")) == answer


def test_a_wording_is_of_the_user_s_last_turn_and_replaces_nothing_in_the_prompt() -> None:
    asked = ({"role": "user", "content": "One?"}, {"role": "assistant", "content": "1"})
    chat = Example("row 1", messages=(*asked, {"role": "user", "content": "{} {prompt} {x}?"}))
    worded = reworded(chat, "{prompt} Again: {prompt}")
    assert worded.messages[:2] == asked
    assert worded.messages[2]["content"] == "{} {prompt} {x}? Again: {} {prompt} {x}?"
    assert reworded(chat, "{prompt}") is chat
    raw = Example("row 2", text=(("One, ", False), ("two,", False)))
    assert reworded(raw, "Count: {prompt}").text == (("Count: One, two,", False),)
    with pytest.raises(DataError, match=r"row 3: .*no user does. Leave --wording out"):
        reworded(Example("row 3", messages=({"role": "system", "content": "Be kind."},)), "Now: {prompt}")


@pytest.mark.parametrize(
    ("row", "asked"),
    [
        ({"question": "Who?", "answer": SECRET}, ["Who?"]),
        ({"question": "Who?"}, ["Who?"]),
        ({"question": "Who?", "answer": ""}, ["Who?"]),
        ({"question": "Who?", "answer": None}, ["Who?"]),
        ({"context": "A cat.", "question": "Who?"}, ["A cat.\n\nWho?"]),
        ({"instruction": "Say", "input": "hi", "output": SECRET}, ["Say\n\nhi"]),
        ({"instruction": "Say"}, ["Say"]),
        ({"messages": [*TURNS, {"role": "assistant", "content": SECRET}]}, ["Be kind.", "Who?"]),
        ({"messages": TURNS}, ["Be kind.", "Who?"]),
        ({"conversations": SHAREGPT}, ["Who?"]),
        ({"conversations": SHAREGPT[:1]}, ["Who?"]),
        ({"conversations": [*SHAREGPT, *SHAREGPT]}, ["Who?", SECRET, "Who?"]),
        ({"text": "Good!", "label": SECRET}, ["Good!"]),
        ({"prompt": TURNS, "chosen": [{"role": "assistant", "content": SECRET}], "rejected": []}, ["Be kind.", "Who?"]),
        ({"messages": TURNS, "chosen": SECRET, "rejected": "no"}, ["Be kind.", "Who?"]),
        ({"conversations": SHAREGPT[:1], "chosen": SHAREGPT[1], "rejected": SHAREGPT[1]}, ["Who?"]),
    ],
)
def test_a_conversation_up_to_its_last_answer(tmp_path: Path, row: dict[str, Any], asked: list[str]) -> None:
    (example,) = _prompts(tmp_path / "rows.jsonl", row)
    assert [message["content"] for message in example.messages] == asked
    assert example.messages[-1]["role"] == "user" and not example.text
    assert example.place == "rows.jsonl, row 1"


@pytest.mark.parametrize(
    "row",
    [{"prompt": "Once", "completion": SECRET}, {"prompt": "Once"}, {"text": "Once"}],
    ids=lambda row: " ".join(row),
)
def test_raw_text_without_its_completion(tmp_path: Path, row: dict[str, Any]) -> None:
    (example,) = _prompts(tmp_path / "rows.jsonl", row)
    assert example.text == (("Once", False),) and not example.messages


def test_columns_are_renamed_as_in_training(tmp_path: Path) -> None:
    found = _prompts(tmp_path / "rows.jsonl", {"q": "Who?"}, {"q": "What?", "a": SECRET}, columns={"question": "q"})
    assert [example.messages[-1]["content"] for example in found] == ["Who?", "What?"]
    both = _prompts(tmp_path / "rows.jsonl", {"q": "Who?"}, columns={"question": "q", "answer": "a"})
    assert [example.messages[-1]["content"] for example in both] == ["Who?"]


def test_order_is_that_of_the_file(tmp_path: Path) -> None:
    found = _prompts(tmp_path / "rows.jsonl", *({"question": f"Question {n}?"} for n in range(25)))
    assert [example.messages[0]["content"] for example in found] == [f"Question {n}?" for n in range(25)]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"messages": [{"role": "assistant", "content": "Hi"}]}, "row 1: the answer comes first"),
        ({"question": ""}, "row 1: `question` is empty"),
        ({"question": 7}, "row 1: `question` must be a string"),
        ({"colour": "red"}, "row 1"),
        ("just text", "row 1: a row must be an object"),
    ],
)
def test_a_row_with_nothing_to_answer_is_named(tmp_path: Path, row: Any, expected: str) -> None:
    with pytest.raises(DataError) as caught:
        _prompts(tmp_path / "rows.jsonl", row)
    assert "rows.jsonl, " + expected in str(caught.value)


def test_rows_with_nothing_to_answer_are_left_out_where_the_run_says_so(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "Who?"}\n{"question": ""}\n{"question": "What?"}\n')
    skipped: list[str] = []
    found = list(read_prompts(str(path), DataConfig(train="-", on_bad_row="skip"), skipped))
    assert [example.messages[-1]["content"] for example in found] == ["Who?", "What?"]
    assert len(skipped) == 1 and "row 2: `question` is empty" in skipped[0]


def test_a_file_of_which_no_row_is_left_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": ""}\n{"question": 3}\n')
    with pytest.raises(DataError, match=r"rows.jsonl: none of its rows can be answered. The last one: .*row 2"):
        list(read_prompts(str(path), DataConfig(train="-", on_bad_row="skip")))


DRAWS = 30


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory, stories: str) -> TokenizedSet:
    """Prompts of two sources, of which the second has columns of its own and no answers."""
    folder, tokenizer = tmp_path_factory.mktemp("prompts"), AutoTokenizer.from_pretrained(stories)
    for name, key, size in (("sums", "question", 20), ("tales", "ask", 4)):
        rows = [{key: f"{name} {n}?" + " Please." * n} for n in range(size)]
        write_lines(folder / f"{name}.jsonl", rows)
    sources = {
        "sums": {"path": str(folder / "sums.jsonl")},
        "tales": {"path": str(folder / "tales.jsonl"), "columns": {"question": "ask"}},
    }
    config = DataConfig.model_validate({"sources": sources, "held_out": str(folder / "sums.jsonl"), "overlap": "drop"})
    encoder = PromptEncoder(ChatEncoder(tokenizer))
    files = config.training_files
    return tokenized.together({name: tokenized.read(own.train, own, tokenizer, encoder) for name, own in files.items()})


def test_each_draw_of_a_prompt_in_an_epoch_has_a_number_that_is_the_prompt(prompts: TokenizedSet) -> None:
    mixed = MixedPrompts(prompts, np.asarray([0.2, 0.8]), DRAWS, 7)
    seen = np.zeros(len(prompts), dtype=np.int64)
    for epoch in range(4):
        numbers = mixed.sample(np.arange(DRAWS), epoch=epoch)
        assert len(set(numbers.tolist())) == DRAWS
        rows = numbers % len(prompts)
        assert np.bincount(prompts.source_N[rows]).tolist() == [6, 24]
        assert [mixed.numbered.place(int(each)) for each in numbers] == [prompts.place(int(row)) for row in rows]
        assert (mixed.numbered.lengths[numbers] == prompts.lengths[rows]).all()
        seen += np.bincount(rows, minlength=len(prompts))
    assert np.ptp(seen[:20]) <= 1 and np.ptp(seen[20:]) == 0


def test_a_prompt_of_a_source_is_read_as_its_columns_say(prompts: TokenizedSet, stories: str) -> None:
    text = AutoTokenizer.from_pretrained(stories).decode(prompts[21].input_ids[:-1])
    assert "tales 1?" in text and "sums" not in text
