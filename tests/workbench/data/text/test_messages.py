"""Messages in OpenAI's and ShareGPT's forms become one; malformed ones are named with their number."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.data.text.messages import last_answer_only, messages_of, tools_of, without_loss
from workbench.errors import DataError

ROLES = ["system", "user", "assistant"]
CALL = {"name": "add", "arguments": {"a": 1}}
REGULAR_CALL = {"type": "function", "function": CALL}

plain = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(ROLES), "content": st.text(min_size=1).filter(str.strip)}),
    min_size=1,
)


@given(plain)
def test_regular_messages_stay_as_they_are(messages: list[dict[str, Any]]) -> None:
    assert messages_of(messages, "messages") == messages


@given(plain)
def test_sharegpt_is_openai_with_other_names(messages: list[dict[str, Any]]) -> None:
    names = {"system": "system", "user": "human", "assistant": "gpt"}
    told = [{"from": names[message["role"]], "value": message["content"]} for message in messages]
    assert messages_of(told, "conversations") == messages


@given(plain)
def test_only_assistant_turns_lose_their_loss(messages: list[dict[str, Any]]) -> None:
    answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    assert [m["content"] for m in without_loss(messages)] == [m["content"] for m in messages]
    assert [index for index, m in enumerate(without_loss(messages)) if m.get("loss") is False] == answers
    assert [index for index, m in enumerate(last_answer_only(messages)) if m.get("loss") is False] == answers[:-1]
    assert all("loss" not in message for message in messages)


@pytest.mark.parametrize(
    "content",
    ["a b", [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}], [{"type": "text", "value": "a b"}]],
)
def test_content_is_a_string_or_text_parts(content: Any) -> None:
    assert messages_of([{"role": "user", "content": content}], "messages") == [{"role": "user", "content": "a b"}]


@pytest.mark.parametrize(
    "call",
    [
        {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": CALL}]},
        {"role": "assistant", "tool_calls": [{"function": CALL | {"arguments": '{"a": 1}'}}], "refusal": None},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"from": "function_call", "value": json.dumps(CALL)},
        {"from": "function_call", "value": json.dumps([CALL | {"arguments": '{"a": 1}'}])},
    ],
)
def test_tool_calls_have_one_form(call: dict[str, Any]) -> None:
    # "" and not null, which many templates print as the word None.
    assert messages_of([call], "messages") == [{"role": "assistant", "content": "", "tool_calls": [REGULAR_CALL]}]


def test_the_results_of_tools_may_be_empty_and_keep_their_keys() -> None:
    regular = {"role": "tool", "content": "", "tool_call_id": "1"}
    assert messages_of([regular], "messages") == [regular]
    assert messages_of([{"from": "observation", "value": "", "tool_call_id": "1"}], "conversations") == [regular]


def test_calls_without_arguments_and_with_an_id() -> None:
    (message,) = messages_of(
        [{"role": "assistant", "tool_calls": [{"id": "c1", "function": {"name": "now", "arguments": ""}}]}], "messages"
    )
    assert message["tool_calls"] == [{"type": "function", "id": "c1", "function": {"name": "now", "arguments": {}}}]


@pytest.mark.parametrize("key", ["loss_weight", "weight", "loss"])
@pytest.mark.parametrize(("value", "carries"), [(0, False), (0.0, False), (1, True), (1.0, True), (True, True)])
def test_a_weight_of_0_or_1_becomes_loss(key: str, value: Any, carries: bool) -> None:
    (message,) = messages_of([{"role": "assistant", "content": "a", key: value}], "messages")
    assert message == {"role": "assistant", "content": "a", "loss": carries}
    assert message["loss"] is carries


SCHEMA = {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}}


@pytest.mark.parametrize("value", [[SCHEMA], json.dumps([SCHEMA]), [{"type": "function", "function": SCHEMA}]])
def test_tools_have_one_form(value: Any) -> None:
    assert tools_of(value) == ({"type": "function", "function": SCHEMA},)


@pytest.mark.parametrize("value", [None, [], "", " ", "[]", "null"])
def test_no_tools(value: Any) -> None:
    assert tools_of(value) == ()


def assistant(**keys: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": "Hi"}, {"role": "assistant", **keys}]


MALFORMED: list[tuple[Any, list[str]]] = [
    (None, ["`messages` must be a list of messages", "null"]),
    ([], ["must be a list of messages", "[]"]),
    ("Hi", ["must be a list of messages", "'Hi'"]),
    (["Hi"], ["message 1 of `messages`", "role and content"]),
    ([{"content": "Hi"}], ["message 1", "role and content"]),
    ([{"role": "asistant", "content": "Hi"}], ["unknown role 'asistant'", "Did you mean `assistant`?"]),
    ([{"role": "human", "content": "Hi"}], ["unknown role 'human'", "Known: assistant"]),
    ([{"role": 3, "content": "Hi"}], ["unknown role 3"]),
    ([{"role": ["user"], "content": "Hi"}], ["unknown role ['user']"]),
    ([{"from": "gtp", "value": "Hi"}], ["unknown speaker 'gtp'", "Did you mean `gpt`?"]),
    ([{"from": ["gpt"], "value": "Hi"}], ["unknown speaker ['gpt']"]),
    (assistant(content=""), ["message 2 of `messages` (assistant)", "neither content nor tool_calls"]),
    (assistant(content=" \n"), ["neither content nor tool_calls"]),
    (assistant(content=None, tool_calls=[]), ["neither content nor tool_calls"]),
    ([{"role": "user", "content": None}], ["message 1 of `messages` (user)"]),
    (assistant(content=3), ["message 2", "content must be a string", "3"]),
    (assistant(content={"text": "a"}), ["content must be a string"]),
    (assistant(content=[{"type": "video_url", "video_url": "x"}]), ["content part", "video_url"]),
    (assistant(content=["a"]), ["content part", "'a'"]),
    (assistant(content="a", loss_weight=0.5), ["loss_weight is 0.5", "Write 0 or 1"]),
    (assistant(content="a", loss_weight="1"), ["loss_weight is '1'"]),
    ([{"role": "user", "content": "Hi", "tool_calls": [CALL]}], ["belong to the assistant, not to the user"]),
    (assistant(tool_calls="add(1)"), ["tool_calls must be a list"]),
    (assistant(tool_calls=[{"function": {"arguments": {}}}]), ["a tool call must be an object with name"]),
    (assistant(tool_calls=["add"]), ["a tool call must be", "'add'"]),
    (assistant(tool_calls=[CALL | {"arguments": "{a"}]), ["the arguments of add", "not valid JSON"]),
    (assistant(tool_calls=[CALL | {"arguments": [1]}]), ["the arguments of add must be an object", "[1]"]),
    ([{"from": "function_call", "value": "add(1)"}], ["message 1", "'add(1)' is not valid JSON"]),
    ([{"from": "function_call"}], ["a tool call must be", "null"]),
]


@pytest.mark.parametrize("value", MALFORMED, ids=range(len(MALFORMED)))
def test_malformed_messages_are_told(value: tuple[Any, list[str]]) -> None:
    with pytest.raises(DataError) as caught:
        messages_of(value[0], "messages")
    for word in value[1]:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("value", "word"),
    [
        ("{", "not valid JSON"),
        ({"name": "add"}, "must be a list"),
        (["add"], "tool 1 must be"),
        ([{}], "tool 1 must be"),
    ],
)
def test_malformed_tools_are_told(value: Any, word: str) -> None:
    with pytest.raises(DataError, match=word):
        tools_of(value)


KEYS = "role", "content", "from", "value", "tool_calls", "function", "name", "arguments", "type", "text", "loss_weight"
json_values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(
            st.sampled_from(KEYS),
            inner,
        )
    ),
    max_leaves=12,
)


@given(json_values)
def test_nothing_but_data_errors_is_raised(value: Any) -> None:
    for convert in (lambda: messages_of([value], "messages"), lambda: tools_of([value])):
        try:
            convert()
        except DataError as error:
            assert str(error)
