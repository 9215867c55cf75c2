"""Calls of tools are read back from what templates write, and whatever else a model writes is answered in words."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from transformers import PreTrainedTokenizerBase

from workbench.data.text.chat import ChatEncoder
from workbench.data.text.formats import Example
from workbench.data.text.tool_calls import FORMS, CallReader, ToolCall
from workbench.errors import BackboneError

KNOWN = ("qwen2_5", "qwen3", "qwen3_5_think", "nemotron_3_nano", "llama3_1", "gptoss", "glm4moe")
ARGUMENTS = ({"text": 'He said "no" {once}\n<b>'}, {"count": 3, "deep": {"a": [1, None, True]}}, {})
CALLED = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
HERMES = next(form for form in FORMS if form.read(CALLED, name="x")[1] == (ToolCall("f", {}),))


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.parametrize("arguments", ARGUMENTS)
def test_what_a_template_writes_is_read_back(
    name: str, arguments: dict[str, object], template: Callable[[str], ChatEncoder], tokenizer: PreTrainedTokenizerBase
) -> None:
    encoder, call = template(name), ToolCall("some_tool", arguments)
    turns = ({"role": "user", "content": "Go."}, {"role": "assistant", "content": "", "tool_calls": [call.message(0)]})
    encoded = encoder.encode(Example("a row", turns), loss_on="last")
    ids = [token for token, carries in zip(encoded.input_ids, encoded.supervised, strict=True) if carries]
    reader = CallReader(tokenizer, encoder)
    turn = reader.read(ids, stop=reader.stops, prefix=[], name="x")
    assert turn.calls == (call,) and not turn.message["content"]


@pytest.mark.parametrize("name", ["gemma3", "phi3", "gemma4"])
def test_templates_that_cannot_be_read_are_refused(
    name: str, template: Callable[[str], ChatEncoder], tokenizer: PreTrainedTokenizerBase
) -> None:
    with pytest.raises(BackboneError, match=r"writes (no tools|calls in no form).*model\.chat_template=FILE"):
        CallReader(tokenizer, template(name))


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("<tool_call>{not json}</tool_call>", "is not JSON"),
        ('So: <tool_call>{"name": "f"', "is not finished"),
        ('<tool_call>{"name": 3, "arguments": {}}</tool_call>', "an object with name and arguments"),
        ('<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "an object with name and arguments"),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "is not JSON"),
    ],
)
def test_calls_that_cannot_be_read_say_why(text: str, fault: str) -> None:
    content, (call,) = HERMES.read(text, name="stands_in")
    assert call.name == "stands_in" and fault in call.fault and "<tool_call>" not in content


def test_several_calls_stay_in_order() -> None:
    calls = "".join(f'<tool_call>{{"name": "f", "arguments": {{"n": {n}}}}}</tool_call>\n' for n in range(3))
    content, found = HERMES.read("First. " + calls, name="x")
    assert content == "First." and [call.arguments for call in found] == [{"n": n} for n in range(3)]


@pytest.mark.parametrize("form", FORMS, ids=range(len(FORMS)))
def test_any_text_is_read(form: object) -> None:
    """Pieces of calls in any order."""
    draw = random.Random(0)
    words = (
        '<tool_call> </tool_call> <function=f> [TOOL_CALLS] [ARGS] { } "name": "f", to=functions.f <|message|> <|call|>'
    )
    more = '<arg_key> "arguments": {} [ ] 1 <|channel|> </function>'
    pieces = [*words.split(), *more.split(), "\n"]
    for _ in range(300):
        text = "".join(draw.choices(pieces, k=draw.randrange(1, 12)))
        content, calls = form.read(text, name="x")  # type: ignore[attr-defined]
        assert isinstance(content, str) and all(isinstance(call.arguments, dict) for call in calls)
