"""Rows to examples: every format, recognised by its columns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.workbench.data.reading import config, write
from workbench.data.text.formats import Example, read
from workbench.errors import DataError

FILES = Path(__file__).parents[3] / "files" / "formats"
CALL = '{"name": "add", "arguments": {"a": 1}}'


def only(folder: Path, row: dict[str, Any], **data: Any) -> Example:
    (example,) = read(write(folder, [row]), config(**data), skipped=[])
    return example


def turns(example: Example) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in example.messages]


def learnt(example: Example) -> list[str]:
    return [m["content"] for m in example.messages if m["role"] == "assistant" and m.get("loss", True)]


# format, a row, its turns as they must come out
CHATS: list[tuple[str, dict[str, Any], list[tuple[str, str]]]] = [
    (
        "messages",
        {"messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]},
        [("user", "Q"), ("assistant", "A")],
    ),
    (
        "messages",  # a trailing question is kept: it carries no loss
        {"messages": [{"role": r, "content": c} for r, c in [("user", "Q"), ("assistant", "A"), ("user", "Q2")]]},
        [("user", "Q"), ("assistant", "A"), ("user", "Q2")],
    ),
    (
        "sharegpt",
        {
            "system": "S",
            "conversations": [
                {"from": "human", "value": "Q"},
                {"from": "function_call", "value": CALL},
                {"from": "observation", "value": "1"},
                {"from": "gpt", "value": "A"},
            ],
        },
        [("system", "S"), ("user", "Q"), ("assistant", ""), ("tool", "1"), ("assistant", "A")],
    ),
    ("alpaca", {"instruction": "Q", "input": "", "output": "A"}, [("user", "Q"), ("assistant", "A")]),
    ("alpaca", {"instruction": "Q", "input": "I", "output": "A"}, [("user", "Q\n\nI"), ("assistant", "A")]),
    ("alpaca", {"instruction": "", "input": "I", "output": "A"}, [("user", "I"), ("assistant", "A")]),
    (
        "alpaca",
        {"instruction": "Q", "output": "A", "system": "S", "history": [["Q0", "A0"]]},
        [("system", "S"), ("user", "Q0"), ("assistant", "A0"), ("user", "Q"), ("assistant", "A")],
    ),
    ("question_answer", {"question": "Q", "answer": "A"}, [("user", "Q"), ("assistant", "A")]),
    ("question_answer", {"question": "Q", "answers": ["A", "B"]}, [("user", "Q"), ("assistant", "A")]),
    (
        "question_answer",
        {"context": "C", "question": "Q", "answers": {"text": ["A"], "answer_start": [0]}},
        [("user", "C\n\nQ"), ("assistant", "A")],
    ),
    ("text_label", {"text": "T", "label": "good"}, [("user", "T"), ("assistant", "good")]),
    (
        "prompt_completion",
        {"prompt": [{"role": "user", "content": "Q"}], "completion": [{"role": "assistant", "content": "A"}]},
        [("user", "Q"), ("assistant", "A")],
    ),
    (
        "prompt_completion",
        {"prompt": "Q", "completion": [{"role": "assistant", "content": "A"}]},
        [("user", "Q"), ("assistant", "A")],
    ),
    (
        "preference",
        {
            "prompt": "Q",
            "chosen": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}],
            "rejected": 0,
        },
        [("user", "Q"), ("assistant", "A")],
    ),
    (
        "preference",
        {"conversations": [{"from": "human", "value": "Q"}], "chosen": {"from": "gpt", "value": "A"}, "rejected": {}},
        [("user", "Q"), ("assistant", "A")],
    ),
    (
        "conversation_tree",
        {
            "message_tree_id": "x",
            "prompt": {
                "role": "prompter",
                "text": "Q",
                "replies": [
                    {"role": "assistant", "text": "worse", "rank": 1},
                    {"role": "assistant", "text": "gone", "rank": 0, "deleted": True},
                    {"role": "assistant", "text": "A", "rank": 0, "replies": [{"role": "prompter", "text": "Q2"}]},
                    {"role": "assistant", "text": "equal", "rank": 0},
                    {"role": "assistant", "text": "unranked", "rank": None},
                ],
            },
        },
        [("user", "Q"), ("assistant", "A")],
    ),
]


@pytest.mark.parametrize("case", CHATS, ids=[f"{index}-{case[0]}" for index, case in enumerate(CHATS)])
@pytest.mark.parametrize("named", [False, True], ids=["auto", "named"])
def test_chats(tmp_path: Path, case: tuple[str, dict[str, Any], list[tuple[str, str]]], named: bool) -> None:
    name, row, expected = case
    example = only(tmp_path, row, format=name if named else "auto")
    assert turns(example) == expected
    assert example.place == "my.jsonl, row 1"
    assert example.text == ()


def test_raw_text_is_exactly_as_written(tmp_path: Path) -> None:
    assert only(tmp_path, {"text": " a\n"}).text == ((" a\n", True),)
    assert only(tmp_path, {"prompt": "Q: ", "completion": " A\n"}).text == (("Q: ", False), (" A\n", True))
    assert only(tmp_path, {"prompt": "Q", "chosen": "A", "rejected": "B"}).text == (("Q", False), ("A", True))
    assert only(tmp_path, {"prompt": "Q", "completion": "A", "label": True}).text == (("Q", False), ("A", True))


DIALOGUE = [{"role": r, "content": c} for r, c in [("user", "Q"), ("assistant", "A"), ("user", "Q2")]]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": DIALOGUE, "completion": [{"role": "assistant", "content": "A2"}]},
        {"prompt": DIALOGUE, "completion": "A2"},
        {"messages": DIALOGUE, "chosen": "A2", "rejected": "no"},
        {"messages": DIALOGUE, "chosen": {"role": "assistant", "content": "A2"}, "rejected": "no"},
        {"chosen": [*DIALOGUE, {"role": "assistant", "content": "A2"}], "rejected": []},
        {"messages": [*DIALOGUE, {"role": "assistant", "content": "A2"}], "label": True},
    ],
)
def test_only_the_completion_or_the_judged_answer_is_learnt(tmp_path: Path, row: dict[str, Any]) -> None:
    example = only(tmp_path, row)
    assert turns(example) == [("user", "Q"), ("assistant", "A"), ("user", "Q2"), ("assistant", "A2")]
    assert learnt(example) == ["A2"]


def test_tools_come_with_the_chat(tmp_path: Path) -> None:
    schema = {"name": "add", "description": "Adds.", "parameters": {}}
    example = only(
        tmp_path, {"conversations": [{"from": "function_call", "value": CALL}], "tools": json.dumps([schema])}
    )
    assert example.tools == ({"type": "function", "function": schema},)
    assert example.messages[0]["tool_calls"] == [{"type": "function", "function": json.loads(CALL)}]


def test_undesirable_rows_are_counted_and_no_mistake(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]
    rows = [{"messages": messages, "label": label} for label in (True, False, True)]
    skipped: list[str] = []
    examples = list(read(write(tmp_path, rows), config(), skipped=skipped))
    assert [example.place for example in examples] == ["my.jsonl, row 1", "my.jsonl, row 3"]
    assert skipped == ["my.jsonl, row 2: its label is false: a bad answer, which is not trained on."]


def test_columns_are_renamed_even_crosswise(tmp_path: Path) -> None:
    row = {"text": "T", "category": "good"}
    assert turns(only(tmp_path, row, columns={"label": "category"})) == [("user", "T"), ("assistant", "good")]
    crossed = only(tmp_path, {"question": "A", "answer": "Q"}, columns={"question": "answer", "answer": "question"})
    assert turns(crossed) == [("user", "Q"), ("assistant", "A")]


def test_a_column_that_alone_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"It lacks .*`rejected` for preference"):
        only(tmp_path, {"prompt": "Q", "chosen": "A"})
    with pytest.raises(DataError) as nothing:
        only(tmp_path, {"said": "A"})
    assert "It lacks" not in str(nothing.value)
    with pytest.raises(DataError) as question:
        only(tmp_path, {"question": "Q"})
    assert str(question.value).splitlines()[1:] == [
        "It lacks `answer` for question_answer. Add that column, or say which one of the file stands for it, such as "
        "data.columns='{answer: NAME}'."
    ]


def test_a_column_renamed_away_no_longer_counts(tmp_path: Path) -> None:
    row = {"question": "Q", "answer": "A"}
    example = only(tmp_path, row, columns={"instruction": "question", "output": "answer"})
    assert turns(example) == [("user", "Q"), ("assistant", "A")]


# file, its number of examples, of left-out rows, the roles of its last example (none: raw text)
REAL_FILES = {
    "alpaca_en_demo.json": (5, 0, ["user", "assistant"]),
    "alpaca_zh_demo.json": (5, 0, ["user", "assistant"]),
    "identity.json": (5, 0, ["user", "assistant"]),
    "dpo_en_demo.json": (3, 0, ["user", "assistant"] * 2),
    "kto_en_demo.json": (3, 2, ["user", "assistant"] * 3),
    "glaive_toolcall_en_demo.json": (4, 0, ["user", "assistant"] * 5),
    "v1_sft_demo.jsonl": (4, 0, ["user", "assistant"]),
    "gsm8k_train.jsonl": (5, 0, ["user", "assistant"]),
    "gsm8k_test.jsonl": (3, 0, ["user", "assistant"]),
    "oasst_en_100_tree.jsonl": (4, 0, ["user", "assistant"]),
    "oasst_pref_pairs.jsonl": (4, 0, ["user", "assistant"] * 2),
    "c4_demo.jsonl": (4, 0, []),
    "wiki_demo.txt": (2, 0, []),
    "tiny_stories.txt": (6, 0, []),
}


@pytest.mark.parametrize("name", REAL_FILES)
def test_files_of_other_tools(name: str) -> None:
    count, left_out, roles = REAL_FILES[name]
    skipped: list[str] = []
    examples = list(read(str(FILES / name), config(), skipped=skipped))
    assert (len(examples), len(skipped)) == (count, left_out)
    assert [message["role"] for message in examples[-1].messages] == roles
    assert all(bool(example.messages) != bool(example.text) for example in examples)
    assert all(learnt(example) for example in examples if example.messages)


def test_every_real_file_is_tested() -> None:
    assert sorted(REAL_FILES) == sorted(path.name for path in FILES.iterdir())


def test_tool_calls_of_a_real_file() -> None:
    example = next(read(str(FILES / "glaive_toolcall_en_demo.json"), config(), skipped=[]))
    calls = [call for message in example.messages for call in message.get("tool_calls", [])]
    assert calls
    assert {call["function"]["name"] for call in calls} <= {tool["function"]["name"] for tool in example.tools}
    assert all(isinstance(call["function"]["arguments"], dict) for call in calls)


cells = st.text(st.characters(codec="utf-8"), min_size=1).filter(str.strip)


@given(rows=st.lists(st.fixed_dictionaries({"question": cells, "answer": cells}), min_size=1, max_size=4))
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, str]]) -> None:
    examples = read(write(tmp_path_factory.mktemp("rows"), rows), config(), skipped=[])
    assert [turns(e) for e in examples] == [[("user", row["question"]), ("assistant", row["answer"])] for row in rows]
