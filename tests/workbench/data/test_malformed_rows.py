"""Rows that are no examples: a place and a cure for each, and what is skipped is counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.workbench.data.reading import config, write
from workbench.data.text.formats import read
from workbench.errors import DataError


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
        ["Say which column is which", "'{question: frage, answer: antwort}'"],
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
        ["raw text has no `system` prompt", "'{question: prompt, answer: completion}'"],
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
    "tree with odd role": (
        {"message_tree_id": "x", "prompt": {"role": [], "text": "Q"}},
        {},
        ["message 1 must have role prompter or assistant"],
    ),
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


@settings(suppress_health_check=[HealthCheck.too_slow])  # where others use the cores
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
