"""Conversations as other tools publish them: flags of loss, transcripts, prompts of pairs, OpenAI's older calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.workbench.data.reading import config, write
from tests.workbench.data.text.test_formats import learnt, only, turns
from workbench.data.text import preference_pairs
from workbench.data.text.formats import read
from workbench.data.text.preference_pairs import PreferenceEncoder
from workbench.errors import DataError


def dialogue(**flag: Any) -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": "Q"},
        {"role": "assistant", "content": "BAD", **flag},
        {"role": "user", "content": "Q2"},
        {"role": "assistant", "content": "GOOD"},
    ]


@pytest.mark.parametrize(
    "flag",
    [
        {"train": False},
        {"training": False},
        {"trainable": False},
        {"trainable": 0},
        {"masked": True},
        {"loss": False},
        {"loss_mask": 0},
        {"weight": 0},
        {"loss_weight": 0.0},
        {"train": False, "masked": True},
        {"train_detail": [{"begin_offset": 0, "end_offset": 2, "train": False}]},
    ],
    ids=str,
)
def test_a_turn_that_its_author_keeps_from_the_loss_is_not_learnt(tmp_path: Path, flag: dict[str, Any]) -> None:
    assert learnt(only(tmp_path, {"messages": dialogue(**flag)})) == ["GOOD"]
    shared = [
        {"from": m.pop("role").replace("assistant", "gpt"), "value": m.pop("content"), **m} for m in dialogue(**flag)
    ]
    assert learnt(only(tmp_path, {"conversations": shared})) == ["GOOD"]
    assert learnt(only(tmp_path, {"messages": dialogue(**flag)}, ignore=tuple(flag))) == ["BAD", "GOOD"]


@pytest.mark.parametrize(
    "columns",
    [{"loss_mask": [0, 0, 0, 1]}, {"train": [False, False, False, True]}, {"masked": [1, 1, 1, 0]}],
    ids=str,
)
def test_a_row_says_which_of_its_turns_are_learnt(tmp_path: Path, columns: dict[str, Any]) -> None:
    assert learnt(only(tmp_path, {"messages": dialogue(), **columns})) == ["GOOD"]
    empty = [{"role": "system", "content": " "}, *dialogue()]
    longer = {name: [flags[0], *flags] for name, flags in columns.items()}
    assert learnt(only(tmp_path, {"messages": empty, **longer})) == ["GOOD"]
    with pytest.raises(DataError, match="3 values for 4 messages"):
        only(tmp_path, {"messages": dialogue(), **{name: flags[1:] for name, flags in columns.items()}})


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ({"train": 0.5}, "train is 0.5"),
        ({"train": True, "masked": True}, "contradict"),
        ({"train_detail": [{"train": False}, {"train": True}]}, "a part of the turn"),
        ({"loss_mask": [1, 0]}, "loss_mask is"),
        ({"weight": "0"}, "weight is '0'"),
    ],
)
def test_flags_that_cannot_be_obeyed_are_told(tmp_path: Path, flag: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError, match=words):
        only(tmp_path, {"messages": dialogue(**flag)})


def test_a_user_s_turn_that_is_to_be_learnt_is_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="the user's turn is to carry loss"):
        only(tmp_path, {"messages": [{**dialogue()[0], "train": True}, *dialogue()[1:]]})


@pytest.mark.parametrize(
    ("flag", "trains"),
    [({"train": "false"}, False), ({"masked": True}, False), ({"trainable": 0}, False), ({"loss_mask": True}, True)],
)
def test_a_row_is_left_out_by_its_flag(tmp_path: Path, flag: dict[str, Any], trains: bool) -> None:
    skipped: list[str] = []
    rows = [{"question": "Q", "answer": "A", **flag}, {"question": "Q", "answer": "B"}]
    assert len(list(read(write(tmp_path, rows), config(), skipped=skipped))) == 1 + trains
    assert len(skipped) == 1 - trains and all(next(iter(flag)) in note for note in skipped)


HH = "\n\nHuman: Hi\n\nAssistant: Hello\nthere\n\nHuman: What is it?\n\nAssistant:"
ASKED = [("user", "Hi"), ("assistant", "Hello\nthere"), ("user", "What is it?")]


@pytest.mark.parametrize(
    "row",
    [
        {"chosen": f"{HH} It is a cat.", "rejected": f"{HH} It is a car."},
        {"prompt": HH, "chosen": " It is a cat.", "rejected": " It is a car."},
        {"prompt": HH, "chosen": f"{HH} It is a cat.", "rejected": f"{HH} It is a car."},
        {k: HH.replace("\n\n", "\n") + f" It is a {v}." for k, v in {"chosen": "cat", "rejected": "car"}.items()},
        {k: HH.replace("\n\n", "### ") + f" It is a {v}." for k, v in {"chosen": "cat", "rejected": "car"}.items()},
        {
            k: HH.replace("Human", "User").lstrip() + f" It is a {v}."
            for k, v in {"chosen": "cat", "rejected": "car"}.items()
        },
    ],
    ids=range(6),
)
def test_transcripts_become_turns_and_a_prompt_ends_where_they_part(tmp_path: Path, row: dict[str, Any]) -> None:
    (pair,) = read(write(tmp_path, [row]), config(), skipped=[], conversion=preference_pairs.convert)
    assert pair.rejected is not None
    assert turns(pair) == [*ASKED, ("assistant", "It is a cat.")] and learnt(pair) == ["It is a cat."]
    assert turns(pair.rejected) == [*ASKED, ("assistant", "It is a car.")]
    assert turns(only(tmp_path, row)) == turns(pair)  # sft learns the better answer


OPENING = "\n\nHuman: Hi\n\nAssistant:"


@pytest.mark.parametrize(
    ("chosen", "rejected", "answers"),
    [
        (f"{OPENING} A\n\nHuman: No?\n\nAssistant: Yes", f"{OPENING} B", [["A", "Yes"], ["B"]]),
        (f"{OPENING} A", f"{OPENING} B\n\nHuman: No?\n\nAssistant: Yes", [["A"], ["B", "Yes"]]),
        (f"{HH} A\n\nHuman: B\n\nAssistant: C", f"{HH} A\n\nHuman: B\n\nAssistant: D", [["C"], ["D"]]),
    ],
)
def test_all_answers_are_learnt_from_where_the_turns_part(
    tmp_path: Path, chosen: str, rejected: str, answers: list[list[str]]
) -> None:
    row = {"chosen": chosen, "rejected": rejected}
    (pair,) = read(write(tmp_path, [row]), config(), skipped=[], conversion=preference_pairs.convert)
    assert pair.rejected is not None and [learnt(pair), learnt(pair.rejected)] == answers


def test_pairs_that_part_where_the_user_speaks_are_refused(tmp_path: Path) -> None:
    row = {"chosen": f"{HH} A\n\nHuman: B\n\nAssistant: C", "rejected": f"{HH} A\n\nHuman: D\n\nAssistant: E"}
    with pytest.raises(DataError, match="answer different prompts, from message 5 on"):
        list(read(write(tmp_path, [row]), config(), skipped=[], conversion=preference_pairs.convert))


def test_a_transcript_in_a_text_column_is_a_conversation_unless_the_format_says_text(tmp_path: Path) -> None:
    text = f"{HH} A cat."
    assert turns(only(tmp_path, {"text": text})) == [*ASKED, ("assistant", "A cat.")]
    assert turns(only(tmp_path, {"prompt": HH, "completion": " A cat."})) == [*ASKED, ("assistant", "A cat.")]
    assert only(tmp_path, {"text": text}, format="text").text == ((text, True),)


@pytest.mark.parametrize(
    "text", ["A story. Human: he said.", "Assistant: I begin.\n\nHuman: So?", "Human: Alone.", "The Human: a film", "-"]
)
def test_other_texts_are_no_transcripts(tmp_path: Path, text: str) -> None:
    assert only(tmp_path, {"text": text}).text
    assert not only(tmp_path, {"prompt": text, "completion": "A"}).messages


SYSTEM, QUESTION = ("system", "S"), ("user", "Q\n\nI")


@pytest.mark.parametrize(
    ("row", "asked"),
    [
        ({"system": "S", "question": "Q", "chosen": "A", "rejected": "B"}, [SYSTEM, ("user", "Q")]),
        ({"system": "", "question": "Q", "chosen": "A", "rejected": "B"}, [("user", "Q")]),
        ({"context": "C", "question": "Q", "chosen": "A", "rejected": "B"}, [("user", "C\n\nQ")]),
        ({"instruction": "Q", "input": "I", "chosen": "A", "rejected": "B"}, [QUESTION]),
        ({"instruction": "Q", "input": " \n", "chosen": "A", "rejected": "B"}, [("user", "Q")]),
        (
            {"instruction": "Q", "input": "I", "history": [["a", "b"]], "system": "S", "chosen": "A", "rejected": "B"},
            [SYSTEM, ("user", "a"), ("assistant", "b"), QUESTION],
        ),
        (
            {
                "conversations": [{"from": "system", "value": ""}, {"from": "human", "value": "Q"}],
                "chosen": {"from": "gpt", "value": "A"},
                "rejected": {"from": "gpt", "value": "B"},
            },
            [("user", "Q")],
        ),
    ],
    ids=range(7),
)
def test_pairs_of_other_tools(tmp_path: Path, row: dict[str, Any], asked: list[tuple[str, str]]) -> None:
    (pair,) = read(write(tmp_path, [row]), config(), skipped=[], conversion=preference_pairs.convert)
    assert pair.rejected is not None
    assert turns(pair) == [*asked, ("assistant", "A")] and turns(pair.rejected) == [*asked, ("assistant", "B")]
    assert learnt(pair) == ["A"]


@pytest.mark.parametrize("good", [True, False])
@pytest.mark.parametrize(
    "row",
    [
        {"instruction": "Q", "input": "", "output": "A"},
        {"question": "Q", "answer": "A"},
        {"conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]},
        {"messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]},
        {"instruction": "Q", "input": "", "output": "A", "history": [], "system": ""},
    ],
    ids=range(5),
)
def test_rated_answers_of_other_tools(tmp_path: Path, row: dict[str, Any], good: bool) -> None:
    path = write(tmp_path, [{**row, "kto_tag": good}])
    (rated,) = read(path, config(), skipped=[], conversion=PreferenceEncoder.conversion)
    assert turns(rated) == [("user", "Q"), ("assistant", "A")] and rated.desired is good


def test_calls_and_functions_of_openai_s_older_form(tmp_path: Path) -> None:
    call = {"name": "get_weather", "arguments": '{"city": "X"}'}
    messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "Let me check.", "function_call": call},
        {"role": "function", "name": "get_weather", "content": "rain"},
        {"role": "assistant", "content": "Rain."},
    ]
    example = only(tmp_path, {"messages": messages, "functions": [{"name": "get_weather", "parameters": {}}]})
    assert [role for role, _ in turns(example)] == ["user", "assistant", "tool", "assistant"]
    assert example.messages[1]["content"] == "Let me check." and "function_call" not in example.messages[1]
    assert example.messages[1]["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": {"city": "X"}}
    assert [tool["function"]["name"] for tool in example.tools] == ["get_weather"]


@pytest.mark.parametrize("words", ["", "  ", "\n"])
@pytest.mark.parametrize("role", ["system", "developer"])
def test_an_empty_system_prompt_is_as_if_absent(tmp_path: Path, words: str, role: str) -> None:
    messages = [{"role": role, "content": words}, *dialogue()]
    assert turns(only(tmp_path, {"messages": messages, "system": words})) == turns(
        only(tmp_path, {"messages": dialogue()})
    )
