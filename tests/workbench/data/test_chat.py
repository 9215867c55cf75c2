"""Masks: what carries loss is what the model has to generate, for the templates that models ship with.

The templates are those of TRL's wheel; what they should write for an answer is written out here by hand.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import processors
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from workbench.data.chat import DEFAULT_TEMPLATE, Encoded, Template, truncate
from workbench.data.formats import Example
from workbench.errors import BackboneError, DataError
from workbench.starter import FOLDER

SPEC = importlib.util.find_spec("trl")
assert SPEC is not None and SPEC.submodule_search_locations is not None
TEMPLATES = Path(SPEC.submodule_search_locations[0]) / "chat_templates"
STORIES = Path(__file__).parents[2] / "files" / "stories260k"

SPECIAL = """<|im_start|> <|im_end|> <|eot_id|> <|start_header_id|> <|end_header_id|> <start_of_turn> <end_of_turn> <|end|>
<|start|> <|message|> <|channel|> <|return|> <|call|> <|observation|> <|START_OF_TURN_TOKEN|> <|END_OF_TURN_TOKEN|>
<|CHATBOT_TOKEN|> <|USER_TOKEN|> <|SYSTEM_TOKEN|> <|START_RESPONSE|> <|END_RESPONSE|> <｜end▁of▁sentence｜> <｜User｜>
<｜Assistant｜> </s> <end_of_utterance> <|eot|> <|eom|> <turn|> <|turn> <|tool_response> <tool_response|>""".split()
PLAIN = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<|tool_call>", "<tool_call|>"]

Message = dict[str, Any]


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def assistant(content: str, **more: Any) -> Message:
    return {"role": "assistant", "content": content, **more}


ASK, FIRST, MORE, SECOND = user("Name a river."), assistant("The Loire."), user("Another?"), assistant("<b>Rhine</b>")
SYSTEM = {"role": "system", "content": "Be brief."}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}
ONE = (ASK, FIRST)
MULTI = (ASK, FIRST, MORE, SECOND)
TOOL = (
    user("Is it warm?"),
    assistant("", tool_calls=[CALL]),
    {"role": "tool", "name": "weather", "content": "31 degrees"},
    assistant("Yes, very."),
)
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string", "description": "Where."}}}
TOOLS = ({"type": "function", "function": {"name": "weather", "description": "Now.", "parameters": PARAMETERS}},)


@lru_cache
def tokenizer() -> PreTrainedTokenizerBase:
    """The starter's byte-level BPE with every family's special tokens; its eos is <|endoftext|>."""
    result = AutoTokenizer.from_pretrained(FOLDER)
    result.add_special_tokens({"additional_special_tokens": SPECIAL})
    result.add_tokens(PLAIN)
    return result


@lru_cache
def template(name: str) -> Template:
    return Template(tokenizer(), (TEMPLATES / f"{name}.jinja").read_text())


def example(messages: tuple[Message, ...], tools: tuple[Message, ...] = ()) -> Example:
    return Example("chat.jsonl, row 3", messages=messages, tools=tools)


def runs(encoded: Encoded, *, supervised: bool = True) -> list[str]:
    """The decoded stretches of tokens that do, or do not, carry loss."""
    found: list[list[int]] = []
    before = not supervised
    for token, carries in zip(encoded.input_ids, encoded.supervised, strict=True):
        if carries == supervised:
            if before != supervised:
                found.append([])
            found[-1].append(token)
        before = carries
    return [tokenizer().decode(run) for run in found]


@dataclass(frozen=True)
class Family:
    """What a template writes for an answer after its generation prompt; {} is the answer."""

    names: str
    turn: str
    call: str = ""
    """The call of weather(city="Paris"); empty where the template refuses or leaves out tool calls."""
    last: str = ""
    """The answer that ends the conversation, where it is written differently."""
    system: bool = True
    before_tool: str = field(default="")
    """An answer that a later answer but no later question follows, where it is written differently."""

    @property
    def final(self) -> str:
        return self.last or self.turn


HERMES = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call><|im_end|>'
XML = "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>"
PYTHONIC = "<|tool_call_start|>[weather(city='Paris')]<|tool_call_end|><|im_end|>"
GLM_CALL = (
    "\n<think></think>\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
    "</tool_call><|observation|>"
)
ATEM = (
    ' to=weather<|message|><atem:function_calls>\n<atem:invoke name="weather">\n'
    '<atem:parameter name="city">Paris</atem:parameter>\n</atem:invoke>\n</atem:function_calls><|eot|>'
)
FAMILIES = (
    Family("cohere", "{}<|END_OF_TURN_TOKEN|>"),
    Family("cohere2", "{}<|END_RESPONSE|><|END_OF_TURN_TOKEN|>"),
    # The prompt ends in <think>, the history has no reasoning: what both share is <｜Assistant｜>.
    Family("deepseekv3 deepseek_r1_distill", "{}<｜end▁of▁sentence｜>"),
    Family("gemma", "{}<end_of_turn>", system=False),
    Family("gemma3", "{}<end_of_turn>"),
    Family(
        "gemma4 gemma4_v3 gemma4_v4 gemma4_v5",
        "{}<turn|>",
        '<|tool_call>call:weather{city:<|"|>Paris<|"|>}<tool_call|><|tool_response>',
    ),
    # GLM writes no end of turn: generation stops at the next turn's role, and at eos.
    Family("glm4moe", "\n<think></think>\n{}<|user|>", GLM_CALL, last="\n<think></think>\n{}<|endoftext|>"),
    # gpt-oss generates <|return|>; the <|end|> that takes its place in history must not be learnt.
    Family(
        "gptoss",
        "<|channel|>final<|message|>{}",
        ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Paris"}<|call|>',
        last="<|channel|>final<|message|>{}<|return|>",
    ),
    Family("lfm2", "{}<|im_end|>"),
    Family("lfm2_v2 lfm2_2_5 lfm2_2_5_v2 lfm2_2_5_vl", "{}<|im_end|>", PYTHONIC),
    Family("llama3", "{}<|eot_id|>"),
    Family("llama3_1 llama3_2", "{}<|eot_id|>", '{"name": "weather", "parameters": {"city": "Paris"}}<|eot_id|>'),
    Family("muse_glimmer", " to=user<|message|>{}<|eot|>", ATEM),
    # The prompt already holds <think>.
    Family(
        "nemotron_3_nano nemotron_3_super nemotron_3_ultra nemotron_3_5_lightning",
        "</think>{}<|im_end|>",
        "</think>\n" + XML + "\n<|im_end|>",
    ),
    Family("phi3 phi3_5", "{}<|end|>"),
    Family("qwen2_5 qwen3_instruct_2507 qwen3_vl", "{}<|im_end|>", HERMES),
    Family("qwen2_5_vl", "{}<|im_end|>"),
    Family("qwen3", "{}<|im_end|>", "<think>\n\n</think>\n\n" + HERMES, last="<think>\n\n</think>\n\n{}<|im_end|>"),
    Family("qwen3_5_nothink", "{}<|im_end|>", XML + "<|im_end|>"),
    Family(
        "qwen3_5_think qwen3_6",
        "{}<|im_end|>",
        "\n</think>\n\n" + XML + "<|im_end|>",
        last="\n</think>\n\n{}<|im_end|>",
    ),
    Family("qwen3_8", "\n</think>\n\n{}<|im_end|>", "\n</think>\n\n" + XML + "<|im_end|>"),
)
ALL = [pytest.param(name, family, id=name) for family in FAMILIES for name in family.names.split()]
# Templates of models that also see images: they look for the text in a list of parts and would drop ours.
REFUSED = ("idefics3", "llava_next", "smolvlm")


def test_every_template_of_the_wheel_has_its_place_in_the_table():
    shipped = {path.stem for path in TEMPLATES.glob("*.jinja") if not path.stem.endswith("_training")}
    known = {name for family in FAMILIES for name in family.names.split()} | set(REFUSED) | {"diffusion_gemma"}
    # A newer TRL may ship more; none of those known may vanish unseen.
    assert known <= shipped


@pytest.mark.parametrize(("name", "family"), ALL)
def test_one_turn(name, family):
    encoded = template(name).encode(example(ONE), loss_on="assistant")
    assert runs(encoded) == [family.final.format("The Loire.")]
    assert encoded.ends == 1


@pytest.mark.parametrize(("name", "family"), ALL)
@pytest.mark.parametrize("system", [False, True])
def test_several_turns(name, family, system):
    messages = (SYSTEM, *MULTI) if system else MULTI
    if system and not family.system:
        with pytest.raises(
            DataError, match=r"chat\.jsonl, row 3: .*System role not supported(.|\n)*chat_template=FILE"
        ):
            template(name).encode(example(messages), loss_on="assistant")
        return
    encoded = template(name).encode(example(messages), loss_on="assistant")
    assert runs(encoded) == [family.turn.format("The Loire."), family.final.format("<b>Rhine</b>")]
    assert encoded.ends == 2 - (name == "gptoss")
    rest = "".join(runs(encoded, supervised=False))
    assert "Loire" not in rest and "Rhine" not in rest
    assert all(text in rest for text in ("Name a river.", "Another?", *(["Be brief."] if system else [])))


@pytest.mark.parametrize(("name", "family"), ALL)
def test_tool_calls(name, family):
    if not family.call:
        with pytest.raises(DataError, match=r"chat\.jsonl, row 3: the chat template of .* (refuses|leaves out)"):
            template(name).encode(example(TOOL, TOOLS), loss_on="assistant")
        return
    encoded = template(name).encode(example(TOOL, TOOLS), loss_on="assistant")
    assert runs(encoded) == [family.call, family.final.format("Yes, very.")]
    assert encoded.ends == 2
    rest = "".join(runs(encoded, supervised=False))
    assert "31 degrees" in rest and "Yes, very." not in rest


@pytest.mark.parametrize(("name", "family"), ALL)
def test_the_ids_are_those_that_transformers_serves(name, family):
    messages = [dict(message) for message in MULTI]
    source = template(name).source
    served = tokenizer().apply_chat_template(messages, chat_template=source, return_dict=False)
    encoded = template(name).encode(example(MULTI), loss_on="assistant")
    added = [tokenizer().eos_token_id] if name == "glm4moe" else []
    assert encoded.input_ids == served + added
    asked = tokenizer().apply_chat_template(
        messages[:3], chat_template=source, add_generation_prompt=True, return_dict=False
    )
    assert template(name).prompt(messages[:3]) == asked


@pytest.mark.parametrize("name", REFUSED)
def test_templates_that_drop_the_answer_are_refused_by_name(name):
    tokens = AutoTokenizer.from_pretrained(FOLDER)
    tokens.name_or_path = f"models/{name}"
    with pytest.raises(DataError, match=rf"row 3: the chat template of {name} (refuses|leaves out)"):
        Template(tokens, (TEMPLATES / f"{name}.jinja").read_text()).encode(example(ONE), loss_on="assistant")


TRAINING = sorted(path.stem for path in TEMPLATES.glob("*_training.jinja") if path.stem[:-9] not in REFUSED)


@pytest.mark.parametrize("name", TRAINING)
def test_generation_tags_are_followed(name):
    """Against Transformers' own mask, which also covers the blank text that some templates tag after the end."""
    messages = [dict(message) for message in MULTI]
    official = tokenizer().apply_chat_template(
        messages, chat_template=template(name).source, return_dict=True, return_assistant_tokens_mask=True
    )
    encoded = template(name).encode(example(MULTI), loss_on="assistant")
    assert encoded.input_ids == official["input_ids"]
    assert sum(encoded.supervised) > 10
    after_end = False
    for token, ours, theirs in zip(encoded.input_ids, encoded.supervised, official["assistant_masks"], strict=True):
        blank = not tokenizer().decode([token]).strip()
        assert ours == (theirs and not (blank and after_end))
        after_end = token in tokenizer().all_special_ids or (after_end and blank)


# Where our mask from X.jinja differs from the tags of X_training.jinja, and why ours is kept:
HEADS = {  # the tags take in what the generation prompt has already written
    "deepseekv3": "<｜Assistant｜>",
    "deepseek_r1_distill": "<｜Assistant｜>",
    "nemotron_3_nano": "<think>",
    "nemotron_3_super": "<think>",
    "nemotron_3_ultra": "<think>",
    "nemotron_3_5_lightning": "<think>",
    "qwen2_5": "\n",
    "qwen3_5_think": "<think>\n",
    "qwen3_5_nothink": "<think>\n\n</think>\n\n",
    "qwen3_6": "<think>\n",
    "qwen3_8": "<think>\n",
}
TAILS = {  # (ours, theirs) at the end of a conversation
    "glm4moe": ("<|endoftext|>", "<|user|>"),  # generation stops at both; only eos is there without a next turn
    "phi3": ("<|end|>", "<|end|><|endoftext|>"),  # generation has stopped at <|end|>
    "phi3_5": ("<|end|>", "<|end|><|endoftext|>"),
}


@pytest.mark.parametrize("name", TRAINING)
@pytest.mark.parametrize(("messages", "tools"), [(ONE, ()), (TOOL, TOOLS)], ids=["one", "tool"])
def test_untagged_templates_agree_with_their_tagged_twins(name, messages, tools):
    plain = name.removesuffix("_training")
    try:
        ours = runs(template(plain).encode(example(messages, tools), loss_on="assistant"))
    except DataError:
        pytest.skip("the untagged template refuses this conversation")
    theirs = template(name).encode(example(messages, tools), loss_on="assistant")
    expected = [run.removeprefix(HEADS.get(plain, "")) for run in runs(theirs)]
    if plain in TAILS and expected[-1] == "<|endoftext|>":
        expected = ["".join([*expected[:-2], *expected[-2:]])]
    mine, tagged = TAILS.get(plain, ("", ""))
    if plain == "diffusion_gemma" and tools:
        # After a tool's result its generation prompt is empty: the model itself has to write the turn's start.
        expected[1] = "<|turn>model\n" + expected[1]
        expected[0] += "<|tool_response>"
    assert ours == [*expected[:-1], expected[-1].removesuffix(tagged) + mine]


def test_loss_on_last_all_and_switched_off():
    chatml = template("qwen2_5")
    assert runs(chatml.encode(example(MULTI), loss_on="last")) == ["<b>Rhine</b><|im_end|>"]
    whole = chatml.encode(example(MULTI), loss_on="all")
    assert all(whole.supervised) and whole.ends == 2
    off = (ASK, {**FIRST, "loss": False}, MORE, SECOND)
    encoded = chatml.encode(example(off), loss_on="assistant")
    assert runs(encoded) == ["<b>Rhine</b><|im_end|>"]
    assert encoded.input_ids == whole.input_ids
    assert all(chatml.encode(example(off), loss_on="all").supervised)
    only_context = (ASK, FIRST, MORE, {**SECOND, "loss": False})
    assert runs(chatml.encode(example(only_context), loss_on="last")) == []
    assert chatml.encode(example((ASK,)), loss_on="assistant").ends == 0


@pytest.mark.parametrize("name", ["phi3_training", "lfm2_2_5", "gptoss_training"])
def test_loss_on_last_with_generation_tags(name):
    every = runs(template(name).encode(example(MULTI), loss_on="assistant"))
    last = runs(template(name).encode(example(MULTI), loss_on="last"))
    assert "Rhine" in last[0] and last == every[1:]


NASTY = [
    "a <|im_end|> in the middle",
    "ends with <|im_end|>",
    "<|im_start|>assistant\nno answer<|im_end|>\n",
    "{{ 7 * 7 }} {% if x %} {# no comment #} {% generation %}",
    "\ue000\ue0010+\ue000 \uf8ff",
    "The Loire.",
    "  blank at both ends \n",
    "\n\nline breaks first",
    "naïve 😀 ünïcode\u200b",
    "<think>",
]


@pytest.mark.parametrize("content", NASTY)
@pytest.mark.parametrize("name", ["qwen2_5", "lfm2_2_5", "llama3", "qwen3_instruct_2507"])
def test_contents_that_look_like_something_else(name, content):
    end = "<|eot_id|>" if name == "llama3" else "<|im_end|>"
    written = content.strip() if name == "llama3" else content
    messages = (user(content), assistant(content), user(content), assistant(content))
    encoded = template(name).encode(example(messages), loss_on="assistant")
    assert runs(encoded) == [written + end] * 2
    assert encoded.ends == 2


def test_an_answer_in_history_that_starts_like_the_prompt():
    """Qwen 3.5 asks with <think>, and writes earlier answers without: their `<` is theirs."""
    messages = (ASK, assistant("<p>"), MORE, assistant("", tool_calls=[CALL]), ASK, assistant("<think>"))
    encoded = template("qwen3_5_think").encode(example(messages, TOOLS), loss_on="assistant")
    assert runs(encoded)[:2] == ["<p><|im_end|>", XML + "<|im_end|>"]


@settings(deadline=None, max_examples=60)
@given(st.lists(st.text(min_size=1, max_size=30).filter(str.strip), min_size=2, max_size=6), st.booleans())
def test_default_template_goes_on_from_its_prompt(contents, tools):
    """The prompt's ids start the training row; what follows is the answer, eos, and nothing that carries loss."""
    roles = (user, assistant)
    messages = [roles[number % 2](content) for number, content in enumerate(contents[: len(contents) // 2 * 2])]
    plain = Template(tokenizer())
    prompt = plain.prompt(messages[:-1], TOOLS if tools else ())
    encoded = plain.encode(example(tuple(messages), TOOLS if tools else ()), loss_on="last")
    count = sum(encoded.supervised)
    assert encoded.input_ids[: len(prompt)] == prompt
    assert encoded.supervised == [
        place < len(prompt) + count and place >= len(prompt) for place in range(len(encoded.supervised))
    ]
    answer = encoded.input_ids[len(prompt) :][:count]
    assert tokenizer().decode(answer) == messages[-1]["content"] + "<|endoftext|>"
    assert encoded.end_positions == (len(prompt) + count - 1,)


def test_default_template_written_out():
    messages = (SYSTEM, *TOOL[:3], assistant("Yes.", reasoning_content="31 is warm."))
    plain = Template(tokenizer())
    assert plain.source == DEFAULT_TEMPLATE
    encoded = plain.encode(example(messages), loss_on="assistant")
    call = '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'
    assert tokenizer().decode(encoded.input_ids) == (
        f"Be brief.\n\nUser:\nIs it warm?\n\nAssistant:\n{call}<|endoftext|>\n\n"
        "Tool:\n31 degrees\n\nAssistant:\n<think>\n31 is warm.\n</think>\nYes.<|endoftext|>\n\n"
    )
    assert runs(encoded) == [f"{call}<|endoftext|>", "<think>\n31 is warm.\n</think>\nYes.<|endoftext|>"]
    with_tools = tokenizer().decode(plain.prompt(messages[:2], TOOLS))
    assert with_tools.startswith("Tools, called as") and '"name": "weather"' in with_tools
    assert with_tools.endswith("User:\nIs it warm?\n\nAssistant:\n")


def test_one_bos_where_the_tokenizer_adds_one():
    stories = AutoTokenizer.from_pretrained(STORIES)
    bos, eos = stories.bos_token_id, stories.eos_token_id
    plain = Template(stories).encode(example(ONE), loss_on="assistant")
    assert plain.input_ids[0] == bos and plain.input_ids.count(bos) == 1 and plain.bos
    llama3 = Template(stories, template("llama3").source).encode(example(ONE), loss_on="assistant")
    assert llama3.input_ids[0] == bos and llama3.input_ids.count(bos) == 1
    text = Template(stories).encode(Example("a", text=(("Once", False), (" upon a time", True))), loss_on="assistant")
    assert text.input_ids == [*stories("Once upon a time")["input_ids"], eos]
    assert text.bos and text.ends == 1


@pytest.mark.parametrize("trimmed", [False, True])
@pytest.mark.parametrize("separator", ["", " ", "\n", ": ", "😀", "\n\n"])
@pytest.mark.parametrize("folder", [FOLDER, STORIES], ids=["bytes", "sentencepiece"])
def test_raw_text_is_supervised_exactly_from_where_generation_starts(folder, separator, trimmed):
    """A token may not reach across: the row starts with the ids of the prompt alone, whatever stands between."""
    tokens = AutoTokenizer.from_pretrained(folder)
    if trimmed and folder == FOLDER:
        tokens.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    question, answer = f"Where is it{separator}", "Paris 😀 now"
    row = Template(tokens).encode(Example("a", text=((question, False), (answer, True))), loss_on="assistant")
    asked = tokens(question)["input_ids"]
    assert row.input_ids[: len(asked)] == asked
    assert row.supervised == [place >= len(asked) for place in range(len(row.input_ids))]
    said = tokens.decode(row.input_ids[len(asked) : -1])
    assert said == answer
    assert row.input_ids[-1] == tokens.eos_token_id and row.end_positions == (len(row.input_ids) - 1,)


def test_raw_text_pieces():
    plain = Template(tokenizer())
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
def test_truncation(data, max_tokens, side, bos):
    size = data.draw(st.integers(1, 25))
    supervised = data.draw(st.lists(st.booleans(), min_size=size, max_size=size))
    ends = tuple(place for place in range(size) if supervised[place] and data.draw(st.booleans()))
    whole = Encoded(list(range(size)), supervised, ends, bos)
    cut = truncate(whole, max_tokens=max_tokens, side=side)
    assert len(cut.input_ids) == len(cut.supervised) == min(size, max_tokens)
    # Ids are their own places, so alignment is visible.
    assert cut.supervised == [supervised[place] for place in cut.input_ids]
    assert [cut.input_ids[end] for end in cut.end_positions] == [end for end in ends if end in cut.input_ids]
    kept = max(0, min(size, max_tokens) - 1)
    if side == "right":
        assert cut.input_ids == list(range(min(size, max_tokens)))
    elif bos:
        assert cut.input_ids == [0, *range(size - kept, size)]
    else:
        assert cut.input_ids == list(range(size))[-max_tokens:]


CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
ASKED = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
# Old and hand-made styles that the wheel does not hold, each with what it writes for MULTI's answers.
STYLES = {
    "zephyr: the prompt is written inside the loop": (
        "{% for message in messages %}\n{% if message['role'] == 'user' %}\n{{ '<|user|>\n' + message['content'] + "
        "eos_token }}\n{% elif message['role'] == 'assistant' %}\n{{ '<|assistant|>\n' + message['content'] + "
        "eos_token }}\n{% endif %}\n{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n"
        "{% endfor %}",
        "{}<|endoftext|>",
    ),
    "llama 2: no generation prompt": (
        "{% for message in messages %}{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + "
        "message['content'].strip() + ' [/INST]' }}{% else %}{{ ' ' + message['content'].strip() + ' ' + eos_token }}"
        "{% endif %}{% endfor %}",
        " {} <|endoftext|>",
    ),
    "a macro writes the loop": (
        "{% macro all(chat) %}" + CHATML.replace("messages", "chat") + "{% endmacro %}{{ all(messages) }}" + ASKED,
        "{}<|im_end|>",
    ),
    "continue and break": (
        "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}<|im_start|>{{ m.role }}\n"
        "{{ m.content }}<|im_end|>\n{% if loop.last %}{% break %}{% endif %}{% endfor %}" + ASKED,
        "{}<|im_end|>",
    ),
    "a filtered loop, an inner loop and a loop that only looks": (
        "{% for m in messages %}{% if m.role == 'user' %}{% endif %}{% endfor %}"
        "{% for m in messages if m.role != 'system' %}<|im_start|>{{ m.role }}\n{% for other in messages %}"
        "{% set last = other %}{% endfor %}{% for line in [m.content] %}{{ line }}{% endfor %}<|im_end|>\n{% endfor %}"
        + ASKED,
        "{}<|im_end|>",
    ),
    "eos after the loop ends the last answer, the next turn the others": (
        "{% for m in messages %}{{ '<|user|>' if m.role == 'user' else '<|assistant|>' }}{{ m.content }}{% endfor %}"
        "{{ '<|assistant|>' if add_generation_prompt else eos_token }}",
        ("{}<|user|>", "{}<|endoftext|>"),
    ),
    "generation tags without a loop over the messages": (
        "{% for i in range(messages | length) %}<|im_start|>{{ messages[i].role }}\n{% if messages[i].role == 'assistant' %}"
        "{% generation %}{{ messages[i].content }}<|im_end|>{% endgeneration %}{% else %}{{ messages[i].content }}"
        "<|im_end|>{% endif %}\n{% endfor %}" + ASKED,
        "{}<|im_end|>",
    ),
    "no token ends a turn": (
        "{% for m in messages %}{{ m.role | upper }}: {{ m.content }}\n{% endfor %}"
        "{{ 'ASSISTANT:' if add_generation_prompt else '.' }}",
        " {}",
    ),
}


@pytest.mark.parametrize("style", STYLES)
def test_styles(style):
    source, turn = STYLES[style]
    first, last = turn if isinstance(turn, tuple) else (turn, turn)
    encoded = Template(tokenizer(), source).encode(example(MULTI), loss_on="assistant")
    assert runs(encoded) == [first.format("The Loire."), last.format("<b>Rhine</b>")]
    assert encoded.ends == (0 if style.startswith("no token") else 2)
    only = Template(tokenizer(), source).encode(example(MULTI), loss_on="last")
    assert runs(only) == [last.format("<b>Rhine</b>")]


UNTELLABLE = {
    "no loop over messages": "{% for i in range(messages | length) %}{{ messages[i].content }}{% endfor %}",
    "joins them": "{{ messages | map(attribute='content') | join('<|im_end|>') }}",
    "writes them twice": CHATML + CHATML + ASKED,
    "cuts the whole": "{% set all %}" + CHATML + "{% endset %}{{ all[:60] }}" + ASKED,
    "measures the whole": "{% set all %}" + CHATML + "{% endset %}{{ all }}{{ all | length }}" + ASKED,
    "asks in other words": CHATML + "{% if add_generation_prompt %}Answer:{% endif %}",
    "results inside the answer": (
        "{% for m in messages if m.role == 'assistant' %}<|im_start|>assistant\n{{ m.content }}"
        "{% for other in messages if other.role == 'user' %}{{ other.content }}{% endfor %}<|im_end|>{% endfor %}"
        + ASKED
    ),
}


@pytest.mark.parametrize("reason", UNTELLABLE)
def test_templates_whose_answers_cannot_be_told_are_refused_by_name(reason):
    tokens = AutoTokenizer.from_pretrained(FOLDER)
    tokens.name_or_path = "someone/odd-model"
    odd = Template(tokens, UNTELLABLE[reason])
    with pytest.raises(BackboneError, match=r"the chat template of odd-model .*(.|\n)*model\.chat_template=FILE"):
        odd.encode(example(MULTI), loss_on="assistant")


@pytest.mark.parametrize(
    ("name", "messages", "words"),
    [
        ("gemma", (ASK, ASK, FIRST), "Conversation roles must alternate"),
        ("gemma", (SYSTEM, *ONE), "System role not supported"),
        ("llama3_1", (ASK, assistant("", tool_calls=[CALL, CALL])), "only supports single tool-calls"),
        ("qwen3_5_think", (SYSTEM, FIRST), "No user query found in messages"),
        ("deepseekv3", TOOL, 'can only concatenate str \\(not "dict"\\)'),
        ("llama3", ({"role": "user"}, FIRST), "has no attribute 'content'"),
    ],
)
def test_what_a_template_refuses_is_told_in_its_own_words(name, messages, words):
    with pytest.raises(DataError, match=rf"chat\.jsonl, row 3: .*{words}(.|\n)*on_bad_row=skip"):
        template(name).encode(example(messages), loss_on="assistant")


def test_a_template_that_is_no_jinja():
    with pytest.raises(BackboneError, match=r"line 2: (.|\n)*chat_template=FILE"):
        Template(tokenizer(), "{% for m in messages %}\n{{ m.content }")


def test_a_tokenizer_without_offsets():
    with pytest.raises(BackboneError, match="no character offsets"):
        Template(SimpleNamespace(is_fast=False))


def test_tools_need_the_right_one_of_several_templates():
    tokens = AutoTokenizer.from_pretrained(FOLDER)
    tokens.chat_template = {"default": CHATML + ASKED, "tool_use": CHATML}
    several = Template(tokens)
    assert several.source == CHATML + ASKED
    assert several.encode(example(ONE), loss_on="assistant").input_ids
    with pytest.raises(DataError, match=r"row 3: has tools(.|\n)*chat_template=FILE"):
        several.encode(example(ONE, TOOLS), loss_on="assistant")


@pytest.mark.parametrize(
    ("name", "written"),
    [("qwen2_5", {"<|im_end|>"}), ("llama3", {"<|eot_id|>"}), ("glm4moe", {"<|user|>"}), ("gptoss", {"<|return|>"})],
)
def test_stops(name, written):
    assert set(tokenizer().convert_ids_to_tokens(template(name).stops())) == written | {"<|endoftext|>"}


def test_reasoning_is_supervised_after_what_the_prompt_has_written():
    messages = (ASK, assistant("The Loire.", reasoning_content="A river in France."))
    found = {
        name: runs(template(name).encode(example(messages), loss_on="assistant"))
        for name in ("qwen3", "qwen3_5_think", "gptoss", "glm4moe", "muse_glimmer")
    }
    assert found == {
        "qwen3": ["<think>\nA river in France.\n</think>\n\nThe Loire.<|im_end|>"],
        "qwen3_5_think": ["A river in France.\n</think>\n\nThe Loire.<|im_end|>"],
        "gptoss": [
            "<|channel|>analysis<|message|>A river in France.<|end|><|start|>assistant"
            "<|channel|>final<|message|>The Loire.<|return|>"
        ],
        "glm4moe": ["\n<think>A river in France.</think>\nThe Loire.<|endoftext|>"],
        "muse_glimmer": [
            " to=self<|message|>A river in France.<|eom|><|start|>assistant to=user<|message|>The Loire.<|eot|>"
        ],
    }
