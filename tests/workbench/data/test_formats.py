"""Rows to examples: every format, recognised by its columns, and a place and a cure for every malformed row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.config import DataConfig
from workbench.data.formats import Example, read
from workbench.errors import DataError

FILES = Path(__file__).parents[2] / "files" / "formats"
CALL = '{"name": "add", "arguments": {"a": 1}}'


def write(folder: Path, rows: list[Any]) -> str:
    path = folder / "my.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def config(**data: Any) -> DataConfig:
    return DataConfig.model_validate({"train": "unused", **data})


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
    assert skipped == ["my.jsonl, row 2: its label is false, an answer that is not to be learnt."]


def test_columns_are_renamed_even_crosswise(tmp_path: Path) -> None:
    row = {"text": "T", "category": "good"}
    assert turns(only(tmp_path, row, columns={"label": "category"})) == [("user", "T"), ("assistant", "good")]
    crossed = only(tmp_path, {"question": "A", "answer": "Q"}, columns={"question": "answer", "answer": "question"})
    assert turns(crossed) == [("user", "Q"), ("assistant", "A")]


def test_a_column_renamed_away_no_longer_counts(tmp_path: Path) -> None:
    row = {"question": "Q", "answer": "A"}
    example = only(tmp_path, row, columns={"instruction": "question", "output": "answer"})
    assert turns(example) == [("user", "Q"), ("assistant", "A")]


def test_limit_is_in_rows_looked_at(tmp_path: Path) -> None:
    source = write(tmp_path, [{"text": "a"}, {"text": ""}, {"text": "c"}, "broken"])
    skipped: list[str] = []
    examples = list(read(source, config(on_bad_row="skip"), skipped=skipped, limit=3))
    assert [example.text[0][0] for example in examples] == ["a", "c"]
    assert len(skipped) == 1
    assert len(list(read(source, config(), skipped=[], limit=1))) == 1


def test_skipping_counts_each_bad_row_with_its_reason(tmp_path: Path) -> None:
    path = tmp_path / "my.jsonl"
    path.write_text('{"text": "a"\n{"text": "b"}\n[]\n{"text": 3}\n{"other": "x"}\n{"text": "c"}\n')
    skipped: list[str] = []
    examples = list(read(str(path), config(on_bad_row="skip"), skipped=skipped))
    assert [example.place for example in examples] == ["my.jsonl, row 2", "my.jsonl, row 6"]
    assert [message.split(":")[0] for message in skipped] == [f"my.jsonl, row {number}" for number in (1, 3, 4, 5)]


def test_examples_are_read_only_as_far_as_they_are_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "a"}\n' * 2 + b"broken\n\xff\n")
    examples = read(str(path), config(), skipped=[])
    assert [next(examples).place, next(examples).place] == ["a.jsonl, row 1", "a.jsonl, row 2"]


def test_no_example_follows_a_bad_row(tmp_path: Path) -> None:
    found: list[str] = []
    with pytest.raises(DataError):
        for example in read(write(tmp_path, [{"text": text} for text in ("a", "", "b")]), config(), skipped=[]):
            found.append(example.place)
    assert found == ["my.jsonl, row 1"]


def test_a_refusal_holds_five_rows_at_most(tmp_path: Path) -> None:
    rows: list[Any] = [{"text": "a"}, *[{"text": ""}] * 3, {"text": "b"}]
    with pytest.raises(DataError) as caught:
        list(read(write(tmp_path, rows), config(), skipped=[]))
    lines = str(caught.value).splitlines()
    assert lines[0].endswith("my.jsonl has 3 malformed rows among the first 5:")
    assert lines[1:4] == [f"  my.jsonl, row {number}: `text` is empty." for number in (2, 3, 4)]
    assert "data.on_bad_row=skip" in lines[4]
    with pytest.raises(DataError, match="has 5 malformed rows among the first 7, where reading stopped"):
        list(read(write(tmp_path, [*rows, *[{"text": ""}] * 9]), config(), skipped=[]))


OK = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]
# a malformed row, keys of the section `data`, words of the message
MALFORMED: dict[str, tuple[Any, dict[str, Any], list[str]]] = {
    "unknown columns": (
        {"frage": "Q", "antwort": "A"},
        {},
        ["`frage`, `antwort`", "no known format", "question + answer"],
    ),
    "unknown columns, cure": (
        {"frage": "Q", "antwort": "A"},
        {},
        ["'{question: frage, answer: antwort}'", "data.format="],
    ),
    "no columns": ({}, {}, ["no known format", "none"]),
    "ambiguous": (
        {"instruction": "Q", "output": "A", "text": "QA"},
        {},
        ["fit several formats (alpaca, text)", "data.format=alpaca"],
    ),
    "rename to nothing": ({"q": "Q"}, {"columns": {"promt": "q"}}, ["`promt` is no column", "Did you mean `prompt`?"]),
    "rename of nothing": ({"quest": "Q"}, {"columns": {"text": "qest"}}, ["no column `qest`", "Did you mean `quest`?"]),
    "wrong format": ({"text": "a"}, {"format": "alpaca"}, ["alpaca needs instruction + output", "the row has text"]),
    "not an object": ("a", {}, ["must be an object", "'a'"]),
    "number label": ({"text": "a", "label": 3}, {}, ["`label` must be a string, found 3: map your classes to names"]),
    "null label": ({"text": "a", "label": None}, {}, ["`label` is missing or null"]),
    "text is a list": ({"text": ["a"]}, {}, ["`text` must be a string, found ['a']"]),
    "empty text": ({"text": "\n"}, {}, ["`text` is empty"]),
    "number answer": ({"question": "Q", "answer": 42}, {}, ["`answer` must be a string, found 42: write it in quotes"]),
    "empty answer": ({"question": "Q", "answer": " "}, {}, ["`answer` is empty"]),
    "no answers": ({"question": "Q", "answers": []}, {}, ["at least one answer", "[]"]),
    "SQuAD without answer": ({"question": "Q", "answers": {"text": []}}, {}, ["at least one answer"]),
    "answers of numbers": ({"question": "Q", "answers": [3]}, {}, ["`answers` must be a string, found 3"]),
    "context number": ({"context": 1, "question": "Q", "answer": "A"}, {}, ["`context` must be a string, found 1"]),
    "no instruction": (
        {"instruction": "", "input": "", "output": "A"},
        {},
        ["`instruction` is empty, and so is `input`"],
    ),
    "empty output": ({"instruction": "Q", "output": ""}, {}, ["`output` is empty"]),
    "history": ({"instruction": "Q", "output": "A", "history": ["Q0"]}, {}, ["[question, answer] pairs", "['Q0']"]),
    "empty history": ({"instruction": "Q", "output": "A", "history": [["Q0", ""]]}, {}, ["[question, answer] pairs"]),
    "no assistant": ({"messages": OK[:1]}, {}, ["no assistant message", "only user"]),
    "two systems": (
        {"messages": [{"role": "system", "content": "S"}, *OK], "system": "S"},
        {},
        ["`system` column and a system message"],
    ),
    "system and raw": (
        {"prompt": "Q", "completion": "A", "system": "S"},
        {},
        ["`system` has no place in raw text", "'{question: prompt, answer: completion}'"],
    ),
    "empty prompt": ({"prompt": "", "completion": "A"}, {}, ["`prompt` is empty"]),
    "empty completion": ({"prompt": "Q", "completion": ""}, {}, ["`completion` is empty"]),
    "empty completion chat": ({"prompt": OK[:1], "completion": ""}, {}, ["`completion` is empty"]),
    "completion of user": ({"prompt": "Q", "completion": OK[:1]}, {}, ["no assistant message"]),
    "completion of tool": (
        {"prompt": "Q", "completion": [{"role": "tool", "content": "1"}]},
        {},
        ["`completion` must end with the assistant, not with the tool"],
    ),
    "completion number": ({"prompt": "Q", "completion": 3}, {}, ["`completion` must be a list of messages, found 3"]),
    "chosen without prompt": ({"chosen": "A", "rejected": "B"}, {}, ["`prompt` is missing or null"]),
    "chosen null": ({"messages": OK[:1], "chosen": None, "rejected": "B"}, {}, ["`chosen` must be a list", "null"]),
    "chosen role": (
        {"prompt": "Q", "chosen": {"role": "bot", "content": "A"}, "rejected": 0},
        {},
        ["`chosen`", "'bot'"],
    ),
    "KTO label": ({"messages": OK, "label": 1}, {}, ["`label` must be true or false, found 1"]),
    "tree without answer": (
        {"message_tree_id": "x", "prompt": {"role": "prompter", "text": "Q", "replies": []}},
        {},
        ["no answer of the assistant"],
    ),
    "tree of text": ({"message_tree_id": "x", "prompt": "Q"}, {}, ["message 1 must have role prompter or assistant"]),
    "tree with odd reply": (
        {"message_tree_id": "x", "prompt": {"role": "prompter", "text": "Q", "replies": ["A"]}},
        {},
        ["message 2 must have role", "'A'"],
    ),
    "tree with odd replies": (
        {"message_tree_id": "x", "prompt": {"role": "prompter", "text": "Q", "replies": 3}},
        {},
        ["message 1", "`replies` must be a list, found 3"],
    ),
    "tools": ({"messages": OK, "tools": "add"}, {}, ["`tools`", "'add' is not valid JSON"]),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_rows_are_named_with_their_cure(tmp_path: Path, case: str) -> None:
    row, data, words = MALFORMED[case]
    with pytest.raises(DataError) as caught:
        list(read(write(tmp_path, [row]), config(**data), skipped=[]))
    place = "data.columns" if case.startswith("rename") else "my.jsonl"
    for word in [place, *words]:
        assert word in str(caught.value)


@pytest.mark.parametrize("content", ["\n \n", "[]", "text\n"], ids=["jsonl", "json", "csv"])
def test_a_file_without_rows_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / ({"[]": "a.json", "text\n": "a.csv"}.get(content, "a.jsonl"))
    path.write_text(content)
    with pytest.raises(DataError, match="holds no rows"):
        list(read(str(path), config(), skipped=[]))


def test_a_file_of_which_nothing_is_left_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"none of its 2 rows can be used. The last one: my.jsonl, row 2: `text` is empty"
    ):
        list(read(write(tmp_path, [{"text": ""}] * 2), config(on_bad_row="skip"), skipped=[]))


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


NAMES = [
    *("messages", "conversations", "instruction", "input", "output", "prompt", "completion", "question", "answer"),
    *("answers", "text", "label", "chosen", "rejected", "message_tree_id", "context", "system", "tools", "history"),
]
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(
            st.sampled_from(["role", "content", "from", "value", "text", "replies", "rank"]), inner, max_size=4
        )
    ),
    max_leaves=6,
)


@given(row=st.dictionaries(st.sampled_from(NAMES), values), data=st.data())
def test_no_row_raises_anything_but_a_data_error(
    tmp_path_factory: pytest.TempPathFactory, row: dict[str, Any], data: st.DataObject
) -> None:
    known = ["auto", "messages", "alpaca", "prompt_completion", "preference", "question_answer", "conversation_tree"]
    chosen = config(format=data.draw(st.sampled_from(known)))
    try:
        examples = list(read(write(tmp_path_factory.mktemp("rows"), [row]), chosen, skipped=[]))
    except DataError as error:
        assert "my.jsonl" in str(error)
    else:
        assert all(bool(example.messages) != bool(example.text) for example in examples)
