"""Go's template writes what the Jinja template writes, by an interpreter of Go's language; others are refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.conftest import CHAT_TEMPLATE, STORIES
from workbench.data.text.chat import DEFAULT_TEMPLATE
from workbench.errors import BackboneError
from workbench.models.exporting import ollama
from workbench.models.exporting.ollama import CONVERSATIONS, Messages, TemplateParts

QWEN = (
    "{%- if messages[0].role != 'system' %}{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}{% endif %}"
    "{%- for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content }}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA = (
    "{{ bos_token }}{%- for message in messages %}"
    "{{ '<' + message.role + '>{{' + message.content + '}}' + ('</s>' if message.role == 'assistant' else '') }}"
    "{% endfor %}{%- if add_generation_prompt %}{{ '<assistant>{{' }}{% endif %}"
)
TEMPLATES = {"roles": CHAT_TEMPLATE, "default": DEFAULT_TEMPLATE, "default system": QWEN, "begin and braces": LLAMA}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(STORIES)


def _parts(tokenizer: Any, template: str, begin: str = "") -> TemplateParts:
    return ollama.take_apart(ollama.renderer(tokenizer, template), begin=begin)


def _go(template: str, messages: Messages) -> str:
    """A template of Go's language, interpreted: if, else if, else, range, end, fields, strings and eq."""
    words = re.split(r"(\{\{.*?\}\})", template)

    def value(name: str, scope: dict[str, Any]) -> Any:
        if name.startswith("eq "):
            _, field, wanted = name.split(" ")
            return scope[field] == wanted.strip('"')
        return name.strip('"') if name.startswith('"') else scope[name]

    def run(place: int, scope: dict[str, Any], writes: bool) -> tuple[str, int]:
        """Text up to the end or else of a block, and where that stands."""
        text = ""
        while place < len(words):
            word = words[place]
            action = word[2:-2].strip() if word.startswith("{{") else None
            if action is None:
                text, place = text + word * writes, place + 1
            elif action == "end" or action.startswith("else"):
                return text, place
            elif action.startswith("if "):
                done = False
                while words[place] != "{{ end }}":
                    condition = words[place][2:-2].strip().removeprefix("else").strip().removeprefix("if").strip()
                    holds = writes and not done and (condition == "" or bool(value(condition, scope)))
                    part, place = run(place + 1, scope, holds)
                    text, done = text + part, done or holds
                place += 1
            elif action.startswith("range "):
                start = place + 1
                for item in value(action[6:], scope):
                    part, place = run(start, item, writes)
                    text += part
                place = run(start, {}, False)[1] + 1
            else:
                text, place = text + (value(action, scope) if writes else ""), place + 1
        return text, place

    rows = [{".Role": role, ".Content": content} for role, content in messages]
    system = "".join(content for role, content in messages if role == "system")
    return run(0, {".System": system, ".Messages": rows}, True)[0]


@pytest.mark.parametrize("name", TEMPLATES)
def test_go_writes_what_jinja_writes(name: str, tokenizer: Any) -> None:
    begin = "<s>" if name == "begin and braces" else ""
    found = _parts(tokenizer, TEMPLATES[name], begin).in_go()
    render = ollama.renderer(tokenizer, TEMPLATES[name])
    for messages in CONVERSATIONS:
        assert begin + _go(found, messages) == render(messages, True)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (CHAT_TEMPLATE.replace("message.content", "(message.content | trim)"), "more than put text around messages"),
        (CHAT_TEMPLATE.replace("message.role +", "loop.index | string + message.role +"), "as parts"),
        (CHAT_TEMPLATE.replace("{%- for", "{{ raise_exception('no system') }}{%- for"), "as parts"),
        (QWEN.replace("messages[0].role != 'system'", "messages | length > 3"), "more than put text around messages"),
        (
            "{%- for message in messages if message.role != 'system' %}{{ message.content }}{% endfor %}",
            "does not write a system message",
        ),
    ],
    ids=["trims", "counts", "raises", "looks at all", "no system"],
)
def test_a_template_that_does_more_is_refused(template: str, words: str, tokenizer: Any) -> None:
    with pytest.raises(BackboneError, match=f"{words}.*Export --to gguf"):
        _parts(tokenizer, template)


def test_a_modelfile_names_weights_adapter_stop_words_and_decoding(tokenizer: Any) -> None:
    parts = _parts(tokenizer, CHAT_TEMPLATE)
    found = ollama.modelfile(parts, ["</s>", "<|end|>"], weights="model.gguf", adapter="adapter.gguf", tokens=512)
    assert found.startswith("FROM ./model.gguf\nADAPTER ./adapter.gguf\nTEMPLATE ")
    assert 'PARAMETER stop "</s>"\nPARAMETER stop "<|end|>"\n' in found
    assert found.endswith("PARAMETER temperature 0\nPARAMETER num_ctx 512\n")


@pytest.mark.parametrize("word", ["", "  ", 'a"b', "a\nb"])
def test_a_stop_word_that_a_modelfile_cannot_hold_is_refused(word: str, tokenizer: Any) -> None:
    with pytest.raises(BackboneError, match=r"stop word .* cannot be written"):
        ollama.modelfile(_parts(tokenizer, CHAT_TEMPLATE), [word], weights="m", adapter=None, tokens=1)


def test_a_template_that_would_end_its_own_text_is_refused(tokenizer: Any) -> None:
    parts = _parts(tokenizer, CHAT_TEMPLATE.replace("<|start|>", '"""'))
    with pytest.raises(BackboneError, match="which ends a text in a Modelfile"):
        ollama.modelfile(parts, ["</s>"], weights="m", adapter=None, tokens=1)
