"""Templates tell what they write for each message; tokens know the characters that they stand for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import _compile_jinja_template

from workbench.data.text.chat_template import InstrumentedTemplate, Rendering, TokenSpans

MESSAGES = [{"role": role, "content": f"{role} {n}"} for n, role in enumerate(["system", "user", "assistant", "user"])]


def rendered(source: str) -> Rendering | None:
    return InstrumentedTemplate(source).render(MESSAGES, (), prompt=False, special_tokens={"eos_token": "</s>"})


def told(source: str) -> list[tuple[int, str]]:
    found = rendered(source)
    assert found is not None
    return [(segment.message, found.text[segment.start : segment.end]) for segment in found.segments]


BODY = "[{{ m.content }}]{{ eos_token }}"
WRITTEN = [(0, "[system 0]</s>"), (1, "[user 1]</s>"), (2, "[assistant 2]</s>"), (3, "[user 3]</s>")]


@pytest.mark.parametrize(
    ("source", "written"),
    [
        ("<<{% for m in messages %}" + BODY + "{% endfor %}>>", WRITTEN),
        ("{% set rest = messages[1:] %}{% for m in rest %}" + BODY + "{% endfor %}", WRITTEN[1:]),
        ("{% for m in messages[::-1] %}" + BODY + "{% endfor %}", WRITTEN[::-1]),
        ("{% for m in messages if m.role == 'user' %}" + BODY + "{% endfor %}", [WRITTEN[1], WRITTEN[3]]),
        ("{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}" + BODY + "{% endfor %}", WRITTEN[1:]),
        ("{% for m in messages %}" + BODY + "{% if loop.index == 2 %}{% break %}{% endif %}{% endfor %}", WRITTEN[:2]),
        ("{% for m in messages %}{% if m.role == 'x' %}{% elif not loop.first %}{% break %}{% endif %}" + BODY
         + "{% endfor %}", WRITTEN[:1]),
        ("{% for m in messages %}{% for p in [m] %}{% set p = 1 %}{% endfor %}" + BODY + "{% endfor %}", WRITTEN),
        ("{% for m in messages %} {% endfor %}{% for m in messages %}" + BODY + "{% endfor %}", WRITTEN),
        ("{% for x in [1, 2] %}{{ x }}{% endfor %}", []),
        ("{% for key, value in messages[0].items() %}{{ value }}{% endfor %}", []),
    ],
)  # fmt: skip
def test_segments(source: str, written: list[tuple[int, str]]) -> None:
    assert told(source) == written


def test_equal_messages_are_told_apart() -> None:
    same = [{"role": "user", "content": "again"}] * 3
    found = InstrumentedTemplate("{% for m in messages %}" + BODY + "{% endfor %}").render(
        same, (), prompt=False, special_tokens={}
    )
    assert found is not None
    assert [segment.message for segment in found.segments] == [0, 1, 2]


def test_generation_blocks_and_the_end_of_the_loop() -> None:
    found = rendered(
        "{% for m in messages %}{{ m.role }}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}!"
    )
    assert found is not None
    assert [found.text[start:stop] for start, stop in found.generated] == [m["content"] for m in MESSAGES]
    assert found.text[found.loop_end :] == "!"


def test_a_mark_that_the_template_cuts() -> None:
    assert rendered("{% set all %}{% for m in messages %}" + BODY + "{% endfor %}{% endset %}{{ all[1:] }}") is None


@pytest.mark.parametrize(
    ("name", "constant"),
    [
        ("qwen2_5", True),
        ("qwen3_5_think", True),
        ("llama3_1", True),
        ("gemma3", True),
        ("phi3", True),
        ("glm4moe", True),
        ("deepseekv3", False),  # depends on whether a tool has answered
        ("gemma4", False),
        ("gptoss", False),  # uses add_generation_prompt inside the loop
        ("nemotron_3_nano", False),
    ],
)
def test_where_the_generation_prompt_is_constant(name: str, constant: bool, templates: Path) -> None:
    source = (templates / f"{name}.jinja").read_text(encoding="utf-8")
    assert InstrumentedTemplate(source).constant_header == constant


@pytest.mark.parametrize(
    ("source", "captures"),
    [
        ("{% for m in messages %}" + BODY + "{% endfor %}", False),
        ("{% set name = messages[0].content ~ '!' %}{{ name }}{{ messages | map(attribute='role') | join }}", False),
        ("{% for m in messages %}" + BODY + "{% else %}none{% endfor %}{% if tools %}{{ tools }}{% endif %}", False),
        ("{% set all %}{% for m in messages %}" + BODY + "{% endfor %}{% endset %}{{ all | length }}", True),
        ("{% filter trim %}{% for m in messages %}" + BODY + "{% endfor %}{% endfilter %}", True),
        ("{% macro one(m) %}{{ m.content }}{% endmacro %}{% for m in messages %}{{ one(m) }}{% endfor %}", True),
        ("{% for m in messages recursive %}{{ m.content if m is mapping else m }}{% endfor %}", True),
        ("{% block inner %}{% for m in messages %}" + BODY + "{% endfor %}{% endblock %}{{ self.inner() }}", True),
    ],
)
def test_whether_a_template_may_read_what_it_has_written(source: str, captures: bool) -> None:
    assert InstrumentedTemplate(source).captures == captures


def test_a_mark_is_in_no_text_of_the_conversation() -> None:
    used = "".join(map(chr, range(0xE000, 0xE010)))
    messages = [{"role": "user", "content": used[:4], "more": [{used[4:8]: used[8:]}], "none": None}]
    source = "{% for m in messages %}{{ m.content }}{{ m.more }}{% endfor %}"
    found = InstrumentedTemplate(source).render(messages, (), prompt=False, special_tokens={})
    assert found is not None and found.text == used[:4] + str([{used[4:8]: used[8:]}])


@pytest.mark.parametrize("message", ["\\ue000", "'\"\ue000", "\ud800\ue000\ue001", "plain"])
def test_texts_that_hold_marks_or_look_like_them_stay_as_they_are(message: str) -> None:
    source = "{% for m in messages %}{{ m.content }}{% endfor %}{{ tools[0].name }}"
    for text in (None, 2 * message):
        found = InstrumentedTemplate(source).render(
            [{"role": "user", "content": message}], [{"name": message}], prompt=False, special_tokens={}, text=text
        )
        assert found is not None and found.text == 2 * message


def test_the_template_that_serves_knows_no_marks() -> None:
    source = "{% for m in messages %}" + BODY + "{% endfor %}{# served #}"
    served = _compile_jinja_template(source)
    before = dict(served.environment.filters)
    assert rendered(source) is not None
    assert served.environment.filters == before


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), max_size=12))
def test_a_token_starts_where_the_one_before_it_ended_or_earlier(steps: list[tuple[int, int]]) -> None:
    """Gaps belong to the token after them; of tokens that share a character each starts where it says."""
    ends = np.cumsum([right for _, right in steps], dtype=int)
    offsets = [(max(0, int(end) - left), int(end)) for end, (left, _) in zip(ends, steps, strict=True)]
    found = TokenSpans("", list(range(len(steps))), offsets)
    assert found.ends == ends.tolist()
    assert found.starts == [min(start, before) for (start, _), before in zip(offsets, [0, *ends], strict=False)]


def test_ends_never_go_back() -> None:
    found = TokenSpans("", [0, 1, 2], [(0, 4), (0, 0), (4, 6)])
    assert (found.starts, found.ends) == ([0, 0, 4], [4, 4, 6])
    assert TokenSpans("", [], []).starts == []
