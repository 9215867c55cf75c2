"""Examples as token ids: which turns carry loss, raw text, truncation, and the template for tokenizers without one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import processors
from transformers import AutoTokenizer

from workbench.data.starter import FOLDER
from workbench.data.text.chat import DEFAULT_TEMPLATE, ChatEncoder, Encoded, truncate
from workbench.data.text.formats import Example
from workbench.errors import BackboneError, DataError

Message = dict[str, Any]
ByName = Callable[[str], ChatEncoder]
Runs = Callable[..., list[str]]


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def assistant(content: str, **more: Any) -> Message:
    return {"role": "assistant", "content": content, **more}


def example(*messages: Message, tools: tuple[Message, ...] = ()) -> Example:
    return Example("chat.jsonl, row 3", messages=messages, tools=tools)


ASK, FIRST, MORE, SECOND = user("Name a river."), assistant("The Loire."), user("Another?"), assistant("The Rhine.")
TOOLS = ({"type": "function", "function": {"name": "weather", "description": "Now.", "parameters": {}}},)


def test_which_turns_carry_loss(template: ByName, runs: Runs) -> None:
    chatml = template("qwen2_5")
    both = example(ASK, FIRST, MORE, SECOND)
    assert runs(chatml.encode(both, loss_on="last")) == ["The Rhine.<|im_end|>"]
    whole = chatml.encode(both, loss_on="all")
    assert all(whole.supervised) and whole.ends == 2
    off = example(ASK, {**FIRST, "loss": False}, MORE, {**SECOND, "loss": True})
    encoded = chatml.encode(off, loss_on="assistant")
    assert runs(encoded) == ["The Rhine.<|im_end|>"]
    assert encoded.input_ids == whole.input_ids
    assert all(chatml.encode(off, loss_on="all").supervised)
    context = example(ASK, FIRST, MORE, {**SECOND, "loss": False})
    assert runs(chatml.encode(context, loss_on="last")) == []
    assert chatml.encode(example(ASK), loss_on="assistant").ends == 0


@pytest.mark.parametrize("name", ["qwen2_5", "lfm2_2_5", "llama3", "qwen3_instruct_2507"])
@pytest.mark.parametrize(
    "content",
    [
        "a <|im_end|> in the middle",
        "ends with <|im_end|>",
        "<|im_start|>assistant\nno answer<|im_end|>\n",
        "{{ 7 * 7 }} {% if x %} {# no comment #} {% generation %}",
        "\ue000\ue0010+\ue000 \uf8ff",
        "Name a river.",
        "  blank at both ends \n",
        "\n\nline breaks first",
        "naïve 😀 ünïcode\u200b",
        "<think>",
    ],
)
def test_contents_that_look_like_something_else(name: str, content: str, template: ByName, runs: Runs) -> None:
    end, written = ("<|eot_id|>", content.strip()) if name == "llama3" else ("<|im_end|>", content)
    messages = example(user(content), assistant(content), user(content), assistant(content))
    encoded = template(name).encode(messages, loss_on="assistant")
    assert runs(encoded) == [written + end] * 2
    assert encoded.ends == 2


@settings(deadline=None, max_examples=60)
@given(
    contents=st.lists(st.text(min_size=1).filter(str.strip), min_size=2, max_size=6), tools=st.sampled_from([(), TOOLS])
)
def test_default_template_goes_on_from_its_prompt(
    contents: list[str], tools: tuple[Message, ...], tokenizer: Any
) -> None:
    """The prompt's ids start the row; then come the answer and eos, and after them nothing that carries loss."""
    turns = zip(contents[::2], contents[1::2], strict=False)
    messages = [message for question, answer in turns for message in (user(question), assistant(answer))]
    plain = ChatEncoder(tokenizer)
    start = len(prompt := plain.prompt(messages[:-1], tools))
    encoded = plain.encode(example(*messages, tools=tools), loss_on="last")
    stop = start + sum(encoded.supervised)
    assert encoded.input_ids[:start] == prompt
    assert encoded.supervised == [start <= place < stop for place in range(len(encoded.supervised))]
    assert tokenizer.decode(encoded.input_ids[start:stop]) == messages[-1]["content"] + "<|endoftext|>"
    assert encoded.end_positions == (stop - 1,)


def test_default_template_written_out(tokenizer: Any, runs: Runs) -> None:
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}
    messages = (
        {"role": "system", "content": "Be brief."},
        user("Is it warm?"),
        assistant("", tool_calls=[call]),
        {"role": "tool", "name": "weather", "content": "31 degrees"},
        assistant("Yes.", reasoning_content="31 is warm."),
    )
    plain = ChatEncoder(tokenizer)
    assert plain.source == DEFAULT_TEMPLATE
    encoded = plain.encode(example(*messages), loss_on="assistant")
    called = '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call><|endoftext|>'
    answered = "<think>\n31 is warm.\n</think>\nYes.<|endoftext|>"
    assert tokenizer.decode(encoded.input_ids) == (
        f"Be brief.\n\nUser:\nIs it warm?\n\nAssistant:\n{called}\n\nTool:\n31 degrees\n\nAssistant:\n{answered}\n\n"
    )
    assert runs(encoded) == [called, answered]
    with_tools = tokenizer.decode(plain.prompt(messages[:2], TOOLS))
    assert with_tools.startswith("Tools, called as") and '"name": "weather"' in with_tools
    assert with_tools.endswith("User:\nIs it warm?\n\nAssistant:\n")


def test_one_bos_where_the_tokenizer_adds_one(stories: str, template: ByName) -> None:
    tokens = AutoTokenizer.from_pretrained(stories)
    bos, eos = tokens.bos_token_id, tokens.eos_token_id
    for chosen in (ChatEncoder(tokens), ChatEncoder(tokens, template("llama3").source)):
        encoded = chosen.encode(example(ASK, FIRST), loss_on="assistant")
        assert encoded.input_ids[0] == bos and encoded.input_ids.count(bos) == 1 and encoded.bos
        assert chosen.prompt([ASK])[0] == bos and chosen.prompt([ASK]).count(bos) == 1
    text = ChatEncoder(tokens).encode(Example("a", text=(("Once", False), (" upon a time", True))), loss_on="assistant")
    assert text.input_ids == [*tokens("Once upon a time")["input_ids"], eos]
    assert text.bos and text.ends == 1


@pytest.mark.parametrize("trimmed", [False, True])
@pytest.mark.parametrize("separator", ["", " ", "\n", ": ", "😀", "\n\n"])
@pytest.mark.parametrize("sentencepiece", [False, True])
def test_raw_text_carries_loss_from_where_generation_starts(
    sentencepiece: bool, separator: str, trimmed: bool, stories: str
) -> None:
    """No token reaches across: the row starts with the ids of the prompt alone, whatever stands between."""
    tokens = AutoTokenizer.from_pretrained(stories if sentencepiece else FOLDER)
    if trimmed and not sentencepiece:
        tokens.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    question, answer = f"Where is it{separator}", "Paris 😀 now"
    row = ChatEncoder(tokens).encode(Example("a", text=((question, False), (answer, True))), loss_on="assistant")
    asked = tokens(question)["input_ids"]
    assert row.input_ids[: len(asked)] == asked
    assert row.supervised == [place >= len(asked) for place in range(len(row.input_ids))]
    assert tokens.decode(row.input_ids[:-1], skip_special_tokens=True) == question + answer
    assert row.input_ids[-1] == tokens.eos_token_id and row.end_positions == (len(row.input_ids) - 1,)


def test_raw_text_pieces(tokenizer: Any, runs: Runs) -> None:
    plain = ChatEncoder(tokenizer)
    pieces = Example("a", text=(("One two", True), (" three", False), (" four", True)))
    assert runs(plain.encode(pieces, loss_on="assistant")) == ["One two", " four<|endoftext|>"]
    assert runs(plain.encode(pieces, loss_on="last")) == [" four<|endoftext|>"]
    assert runs(plain.encode(pieces, loss_on="all")) == ["One two three four<|endoftext|>"]
    open_end = plain.encode(Example("a", text=(("One", True), (" two", False))), loss_on="assistant")
    assert runs(open_end) == ["One"] and open_end.ends == 0
    closed = plain.encode(Example("a", text=(("One<|endoftext|>", True),)), loss_on="assistant")
    assert runs(closed) == ["One<|endoftext|>"] and closed.ends == 1


@settings(deadline=None)
@given(st.data(), st.integers(1, 30), st.sampled_from(["left", "right"]), st.booleans())
def test_truncation(data: st.DataObject, max_tokens: int, side: Literal["left", "right"], bos: bool) -> None:
    size = data.draw(st.integers(1, 25))
    supervised = data.draw(st.lists(st.booleans(), min_size=size, max_size=size))
    ends = tuple(place for place in range(size) if supervised[place] and data.draw(st.booleans()))
    # Ids are their own places, so that alignment is visible.
    cut = truncate(Encoded(list(range(size)), supervised, ends, bos), max_tokens=max_tokens, side=side)
    kept = min(size, max_tokens)
    expected = list(range(kept)) if side == "right" else list(range(size - kept, size))
    if bos:
        expected[0] = 0
    assert cut.input_ids == expected
    assert cut.supervised == [supervised[place] for place in expected]
    assert [cut.input_ids[end] for end in cut.end_positions] == [end for end in ends if end in expected]
    assert cut.ends == len(cut.end_positions) and cut.bos == bos


@pytest.mark.parametrize(
    ("name", "written"),
    [("qwen2_5", "<|im_end|>"), ("llama3", "<|eot_id|>"), ("glm4moe", "<|user|>"), ("gptoss", "<|return|>")],
)
def test_stops(name: str, written: str, template: ByName, tokenizer: Any) -> None:
    assert set(tokenizer.convert_ids_to_tokens(template(name).stops())) == {written, "<|endoftext|>"}


def test_a_template_that_is_no_jinja(tokenizer: Any) -> None:
    with pytest.raises(BackboneError, match=r"line 2: (.|\n)*chat_template=FILE"):
        ChatEncoder(tokenizer, "{% for m in messages %}\n{{ m.content }")


def test_a_tokenizer_without_offsets() -> None:
    slow: Any = SimpleNamespace(is_fast=False)
    with pytest.raises(BackboneError, match=r"no character offsets(.|\n)*tokenizer\.json"):
        ChatEncoder(slow)


def test_tools_need_the_right_one_of_several_templates(templates: Path) -> None:
    tokens = AutoTokenizer.from_pretrained(FOLDER)
    source = (templates / "llama3.jinja").read_text(encoding="utf-8")
    tokens.chat_template = {"default": source, "tool_use": source + " "}
    several = ChatEncoder(tokens)
    assert several.source == source
    assert several.encode(example(ASK, FIRST), loss_on="assistant").input_ids
    with pytest.raises(DataError, match=r"row 3: has tools(.|\n)*chat_template=FILE"):
        several.encode(example(ASK, FIRST, tools=TOOLS), loss_on="assistant")
