"""What carries loss is what the model has to generate, for the chat templates that models ship with.

The templates are those of TRL's wheel; what they write for an answer is written out here by hand.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.workbench.data.text.test_chat import assistant, user
from workbench.data.starter import FOLDER
from workbench.data.text.chat import ChatEncoder
from workbench.data.text.formats import Example
from workbench.errors import BackboneError, DataError

Message = dict[str, Any]
ByName = Callable[[str], ChatEncoder]
Runs = Callable[..., list[str]]


def example(messages: tuple[Message, ...], tools: tuple[Message, ...] = ()) -> Example:
    return Example("chat.jsonl, row 3", messages=messages, tools=tools)


SYSTEM = {"role": "system", "content": "Be brief."}
ONE = (user("Name a river."), assistant("The Loire."))
MULTI = (*ONE, user("Another?"), assistant("<b>Rhine</b>"))
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}
RESULT = {"role": "tool", "name": "weather", "content": "31 degrees"}
TOOL = (user("Is it warm?"), assistant("", tool_calls=[CALL]), RESULT, assistant("Yes, very."))
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string", "description": "Where."}}}
TOOLS = ({"type": "function", "function": {"name": "weather", "description": "Now.", "parameters": PARAMETERS}},)


@dataclass(frozen=True)
class Family:
    """What templates write for an answer after their generation prompt; {} is the answer."""

    names: str
    turn: str
    call: str = ""
    """The call of weather(city="Paris"); empty where the template refuses or leaves out tool calls."""
    last: str = ""
    """The answer that ends the conversation, where it is written differently."""
    system: bool = True
    ends: int = 2
    """Ends of turn that are generated in a conversation of two turns."""

    @property
    def final(self) -> str:
        return self.last or self.turn


DEEPSEEK_END = "<\uff5cend\u2581of\u2581sentence\uff5c>"
HERMES = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call><|im_end|>'
XML = "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>"
PYTHONIC = "<|tool_call_start|>[weather(city='Paris')]<|tool_call_end|><|im_end|>"
GEMMA_CALL = '<|tool_call>call:weather{city:<|"|>Paris<|"|>}<tool_call|><|tool_response>'
GPTOSS_CALL = ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Paris"}<|call|>'
LLAMA_CALL = '{"name": "weather", "parameters": {"city": "Paris"}}<|eot_id|>'
GLM_CALL = (
    "\n<think></think>\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
    "</tool_call><|observation|>"
)
ATEM_CALL = (
    ' to=weather<|message|><atem:function_calls>\n<atem:invoke name="weather">\n'
    '<atem:parameter name="city">Paris</atem:parameter>\n</atem:invoke>\n</atem:function_calls><|eot|>'
)
FINAL = "<|channel|>final<|message|>{}"
NO_THOUGHT = "\n</think>\n\n"

FAMILIES = (
    Family("cohere", "{}<|END_OF_TURN_TOKEN|>"),
    Family("cohere2", "{}<|END_RESPONSE|><|END_OF_TURN_TOKEN|>"),
    # The prompt ends in <think>, the history holds no reasoning: they share no more than the assistant's token.
    Family("deepseekv3 deepseek_r1_distill", "{}" + DEEPSEEK_END),
    Family("gemma", "{}<end_of_turn>", system=False),
    Family("gemma3", "{}<end_of_turn>"),
    Family("gemma4 gemma4_v3 gemma4_v4 gemma4_v5", "{}<turn|>", GEMMA_CALL),
    Family("gemma4_v2", "{}<turn|>", GEMMA_CALL.replace("<|tool_response>", "<turn|>")),
    # GLM writes no end of turn: generation stops at the next turn's role, and at eos.
    Family("glm4moe", "\n<think></think>\n{}<|user|>", GLM_CALL, last="\n<think></think>\n{}<|endoftext|>"),
    # gpt-oss generates <|return|>; the <|end|> that takes its place in history must not be learnt.
    Family("gptoss", FINAL, GPTOSS_CALL, last=FINAL + "<|return|>", ends=1),
    Family("lfm2", "{}<|im_end|>"),
    Family("lfm2_v2 lfm2_2_5 lfm2_2_5_v2 lfm2_2_5_vl", "{}<|im_end|>", PYTHONIC),
    Family("llama3", "{}<|eot_id|>"),
    Family("llama3_1 llama3_2", "{}<|eot_id|>", LLAMA_CALL),
    Family("muse_glimmer", " to=user<|message|>{}<|eot|>", ATEM_CALL),
    # The prompt already holds <think>.
    Family(
        "nemotron_3_nano nemotron_3_super nemotron_3_ultra nemotron_3_5_lightning",
        "</think>{}<|im_end|>",
        "</think>\n" + XML + "\n<|im_end|>",
    ),
    Family("phi3 phi3_5", "{}<|end|>"),
    Family("qwen2_5 qwen3_instruct_2507 qwen3_vl", "{}<|im_end|>", HERMES),
    Family("qwen2_5_vl", "{}<|im_end|>"),
    Family("qwen3", "{}<|im_end|>", HERMES, last="<think>\n\n</think>\n\n{}<|im_end|>"),
    Family("qwen3_5_nothink", "{}<|im_end|>", XML + "<|im_end|>"),
    Family(
        "qwen3_5_think qwen3_6",
        "{}<|im_end|>",
        NO_THOUGHT + XML + "<|im_end|>",
        last=NO_THOUGHT + "{}<|im_end|>",
    ),
    Family("qwen3_8", NO_THOUGHT + "{}<|im_end|>", NO_THOUGHT + XML + "<|im_end|>"),
)
ALL = [pytest.param(name, family, id=name) for family in FAMILIES for name in family.names.split()]
# Models that also see images: their templates look for the text in a list of parts, and would drop ours.
OF_PARTS = ("idefics3", "llava_next", "smolvlm")


@pytest.mark.parametrize(("name", "family"), ALL)
def test_one_turn(name: str, family: Family, template: ByName, runs: Runs) -> None:
    encoded = template(name).encode(example(ONE), loss_on="assistant")
    assert runs(encoded) == [family.final.format("The Loire.")]
    assert encoded.ends == 1


@pytest.mark.parametrize(("name", "family"), ALL)
@pytest.mark.parametrize("system", [False, True])
def test_several_turns(name: str, family: Family, system: bool, template: ByName, runs: Runs) -> None:
    messages = (SYSTEM, *MULTI) if system else MULTI
    if system and not family.system:
        with pytest.raises(
            DataError, match=r"chat\.jsonl, row 3: .*System role not supported(.|\n)*chat_template=FILE"
        ):
            template(name).encode(example(messages), loss_on="assistant")
        return
    encoded = template(name).encode(example(messages), loss_on="assistant")
    assert runs(encoded) == [family.turn.format("The Loire."), family.final.format("<b>Rhine</b>")]
    assert encoded.ends == family.ends
    rest = "".join(runs(encoded, supervised=False))
    assert "Loire" not in rest and "Rhine" not in rest
    assert all(text in rest for text in ("Name a river.", "Another?", *(["Be brief."] if system else [])))


@pytest.mark.parametrize(("name", "family"), ALL)
def test_tool_calls(name: str, family: Family, template: ByName, runs: Runs) -> None:
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
def test_ids_are_those_that_transformers_serves(name: str, family: Family, template: ByName, tokenizer: Any) -> None:
    messages = [dict(message) for message in MULTI]
    source = template(name).source
    served = tokenizer.apply_chat_template(messages, chat_template=source, return_dict=False)
    eos = [tokenizer.eos_token_id] if name == "glm4moe" else []
    assert template(name).encode(example(MULTI), loss_on="assistant").input_ids == served + eos
    asked = tokenizer.apply_chat_template(
        messages[:3], chat_template=source, add_generation_prompt=True, return_dict=False
    )
    assert template(name).prompt(messages[:3]) == asked


@pytest.mark.parametrize("name", OF_PARTS)
def test_templates_that_know_lists_of_parts_alone_are_given_them(name: str, templates: Path) -> None:
    tokens = AutoTokenizer.from_pretrained(FOLDER)
    source = (templates / f"{name}.jinja").read_text(encoding="utf-8")
    encoded = ChatEncoder(tokens, source).encode(example(ONE), loss_on="assistant")
    learnt = [token for token, loss in zip(encoded.input_ids, encoded.supervised, strict=True) if loss]
    assert "The Loire." in tokens.decode(learnt)
    parts = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in ONE]
    served = tokens.apply_chat_template(parts, chat_template=source, return_dict=False)
    assert encoded.input_ids[: len(served)] == served


def test_reasoning_carries_loss_after_what_the_prompt_has_written(template: ByName, runs: Runs) -> None:
    messages = example((ONE[0], assistant("The Loire.", reasoning_content="In France.")))
    harmony = "<|channel|>analysis<|message|>In France.<|end|><|start|>assistant<|channel|>final<|message|>The Loire."
    written = {
        "qwen3": "<think>\nIn France.\n</think>\n\nThe Loire.<|im_end|>",
        "qwen3_5_think": "In France.\n</think>\n\nThe Loire.<|im_end|>",
        "nemotron_3_nano": "In France.\n</think>\nThe Loire.<|im_end|>",
        "gptoss": harmony + "<|return|>",
        "glm4moe": "\n<think>In France.</think>\nThe Loire.<|endoftext|>",
    }
    assert {name: runs(template(name).encode(messages, loss_on="last")) for name in written} == {
        name: [text] for name, text in written.items()
    }


def test_an_answer_that_starts_like_the_prompt(template: ByName, runs: Runs) -> None:
    """Qwen 3.5 asks with <think>, and writes earlier answers without: their `<` is theirs."""
    messages = (*ONE[:1], assistant("<p>"), *ONE[:1], assistant("", tool_calls=[CALL]), *ONE)
    encoded = template("qwen3_5_think").encode(example(messages, TOOLS), loss_on="assistant")
    assert runs(encoded)[:2] == ["<p><|im_end|>", XML + "<|im_end|>"]


# TRL's twins of these templates, in which tags mark the answers.
TWINS = {
    *(
        "cohere",
        "cohere2",
        "deepseek_r1_distill",
        "deepseekv3",
        "diffusion_gemma",
        "gemma",
        "gemma3",
        "glm4moe",
        "gptoss",
    ),
    *("lfm2", "lfm2_v2", "llama3", "muse_glimmer", "nemotron_3_5_lightning", "nemotron_3_nano", "nemotron_3_super"),
    *("nemotron_3_ultra", "phi3", "phi3_5", "qwen2_5", "qwen2_5_vl", "qwen3", "qwen3_5_nothink", "qwen3_5_think"),
    *("qwen3_6", "qwen3_8", "qwen3_instruct_2507", "qwen3_vl"),
}
CALLING = {name for family in FAMILIES if family.call for name in family.names.split()} | {"diffusion_gemma"}
TAGGED = [*(f"{name}_training" for name in sorted(TWINS)), "lfm2_2_5", "lfm2_2_5_v2", "lfm2_2_5_vl"]
# Where our mask differs from the tags, and why ours is kept.
HEADS = {  # the tags take in what the generation prompt has already written
    **dict.fromkeys(["deepseekv3", "deepseek_r1_distill"], "<\uff5cAssistant\uff5c>"),
    **dict.fromkeys(["gptoss", "muse_glimmer"], "<|start|>assistant"),
    **dict.fromkeys([name for name in TWINS if name.startswith("nemotron")], "<think>"),
    "qwen2_5": "\n",
    "qwen3_5_nothink": "<think>\n\n</think>\n\n",
    **dict.fromkeys(["qwen3_5_think", "qwen3_6", "qwen3_8"], "<think>\n"),
}


@pytest.mark.parametrize("name", TAGGED)
def test_generation_tags_are_followed(name: str, template: ByName, runs: Runs, tokenizer: Any) -> None:
    """Equal to Transformers' own mask, but for the blank text that some templates tag after the end of a turn."""
    official = tokenizer.apply_chat_template(
        [dict(message) for message in MULTI],
        chat_template=template(name).source,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    encoded = template(name).encode(example(MULTI), loss_on="assistant")
    assert encoded.input_ids == official["input_ids"]
    expected, after_end = [], False
    for token, tagged in zip(official["input_ids"], official["assistant_masks"], strict=True):
        blank = not tokenizer.decode([token]).strip()
        expected.append(bool(tagged) and not (blank and after_end))
        after_end = token in tokenizer.all_special_ids or (after_end and blank)
    assert encoded.supervised == expected
    assert "Loire" in runs(encoded)[0] and "Rhine" in "".join(runs(encoded)[1:])
    last = "".join(runs(template(name).encode(example(MULTI), loss_on="last")))
    assert "Loire" not in last and last == "".join(runs(encoded)[1:])


@pytest.mark.parametrize(
    ("name", "tools"),
    [*((name, False) for name in sorted(TWINS)), *((name, True) for name in sorted(TWINS & CALLING))],
)
def test_masks_agree_with_the_tagged_twin(name: str, tools: bool, template: ByName, runs: Runs) -> None:
    given = example(TOOL, TOOLS) if tools else example(ONE)
    ours = runs(template(name).encode(given, loss_on="assistant"))
    twin = runs(template(f"{name}_training").encode(given, loss_on="assistant"))
    tagged = [run.removeprefix(HEADS.get(name, "")) for run in twin]
    if name == "glm4moe":  # generation stops at both; without a next turn, only eos is there
        tagged[-1] = tagged[-1].removesuffix("<|user|>") + "<|endoftext|>"
    if name.startswith("phi3"):  # generation has stopped at <|end|>, before this eos
        assert tagged.pop() == "<|endoftext|>"
    if name == "diffusion_gemma" and tools:  # after a result it asks with nothing: the model starts its own turn
        tagged = [tagged[0] + "<|tool_response>", "<|turn>model\n" + tagged[1]]
    if name == "qwen3" and tools:  # the twin writes other text: a thought that the original leaves out
        tagged[0] = tagged[0].removeprefix("<think>\n\n</think>\n\n")
    assert ours == tagged


CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
ASKED = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
# Older and hand-made styles that the wheel does not hold, each with what it writes for an answer.
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
    "a filtered loop, an inner loop and one that only looks": (
        "{% for m in messages if m.role != 'system' %}<|im_start|>{{ m.role }}\n{% for other in messages %}"
        "{% set last = other %}{% endfor %}{% for line in [m.content] %}{{ line }}{% endfor %}<|im_end|>\n{% endfor %}"
        + ASKED,
        "{}<|im_end|>",
    ),
    "the prompt depends on the question": (
        "{% set ns = namespace(end='') %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.role == 'assistant' %}{{ ns.end }}{% else %}{% set ns.end = m.content[-1] %}{% endif %}"
        "{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{{ ns.end }}{% endif %}",
        "{}<|im_end|>",
    ),
    "generation tags without a loop over the messages": (
        "{% for i in range(messages | length) %}<|im_start|>{{ messages[i].role }}\n"
        "{% if messages[i].role == 'assistant' %}{% generation %}{{ messages[i].content }}<|im_end|>{% endgeneration %}"
        "{% else %}{{ messages[i].content }}<|im_end|>{% endif %}\n{% endfor %}" + ASKED,
        "{}<|im_end|>",
    ),
}


@pytest.mark.parametrize("style", STYLES)
def test_styles(style: str, tokenizer: Any, runs: Runs) -> None:
    source, turn = STYLES[style]
    encoded = ChatEncoder(tokenizer, source).encode(example(MULTI), loss_on="assistant")
    assert runs(encoded) == [turn.format("The Loire."), turn.format("<b>Rhine</b>")]
    assert encoded.ends == 2
    assert runs(ChatEncoder(tokenizer, source).encode(example(MULTI), loss_on="last")) == [turn.format("<b>Rhine</b>")]


def test_ends_that_the_template_does_not_write(tokenizer: Any, runs: Runs) -> None:
    by_the_next_turn = ChatEncoder(
        tokenizer,
        "{% for m in messages %}{{ '<|user|>' if m.role == 'user' else '<|assistant|>' }}{{ m.content }}{% endfor %}"
        "{{ '<|assistant|>' if add_generation_prompt else eos_token }}",
    ).encode(example(MULTI), loss_on="assistant")
    assert runs(by_the_next_turn) == ["The Loire.<|user|>", "<b>Rhine</b><|endoftext|>"]
    assert by_the_next_turn.ends == 2
    words = "{% for m in messages %}{{ m.role | upper }}: {{ m.content }}\n{% endfor %}"
    asked = "{{ 'ASSISTANT:' if add_generation_prompt }}"
    added = ChatEncoder(tokenizer, words + asked).encode(example(MULTI), loss_on="assistant")
    assert runs(added) == [" The Loire.", " <b>Rhine</b>\n<|endoftext|>"]
    assert added.ends == 1
    closed = ChatEncoder(tokenizer, words + asked + "{{ '' if add_generation_prompt else 'END' }}")
    assert closed.encode(example(MULTI), loss_on="assistant").ends == 0


UNTELLABLE = {
    "no loop over messages": "{% for i in range(messages | length) %}{{ messages[i].content }}{% endfor %}",
    "joins them": "{{ messages | map(attribute='content') | join('<|im_end|>') }}",
    "writes them twice": CHATML + CHATML + ASKED,
    "cuts the whole": "{% set all %}" + CHATML + "{% endset %}{{ all[:60] }}" + ASKED,
    "measures the whole": "{% set all %}" + CHATML + "{% endset %}{{ all }}{{ all | length }}" + ASKED,
    "asks in other words": CHATML + "{% if add_generation_prompt %}Answer:{% endif %}",
    "questions inside the answer": (
        "{% for m in messages if m.role == 'assistant' %}<|im_start|>assistant\n{{ m.content }}"
        "{% for other in messages if other.role == 'user' %}{{ other.content }}{% endfor %}<|im_end|>{% endfor %}"
        + ASKED
    ),
}


@pytest.mark.parametrize("reason", UNTELLABLE)
def test_templates_whose_answers_cannot_be_told_are_refused_by_name(reason: str) -> None:
    tokens = AutoTokenizer.from_pretrained(FOLDER)
    tokens.name_or_path = "someone/odd-model"
    with pytest.raises(BackboneError, match=r"the chat template of odd-model .*(.|\n)*model\.chat_template=FILE"):
        ChatEncoder(tokens, UNTELLABLE[reason]).encode(example(MULTI), loss_on="assistant")


@pytest.mark.parametrize(
    ("name", "messages", "words"),
    [
        ("gemma", (ONE[0], *ONE), "Conversation roles must alternate"),
        ("gemma", (SYSTEM, *ONE), "System role not supported"),
        ("llama3_1", (ONE[0], assistant("", tool_calls=[CALL, CALL])), "only supports single tool-calls"),
        ("qwen3_5_think", (SYSTEM, ONE[1]), "No user query found in messages"),
        ("deepseekv3", TOOL, 'can only concatenate str \\(not "dict"\\)'),
        ("phi3", ({"role": "user"}, ONE[1]), "has no attribute 'content'"),
    ],
)
def test_what_a_template_refuses_is_told_in_its_own_words(
    name: str, messages: tuple[Message, ...], words: str, template: ByName
) -> None:
    with pytest.raises(DataError, match=rf"chat\.jsonl, row 3: .*{words}(.|\n)*on_bad_row=skip"):
        template(name).encode(example(messages), loss_on="assistant")
