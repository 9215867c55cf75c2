"""Reasoning is learnt as it is generated: after what the prompt supplies, in every turn, whatever a template drops.

The templates are those of TRL's wheel; what they write is written out here by hand.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase

from workbench.config import DataConfig
from workbench.data.text import tokenized
from workbench.data.text.chat import ChatEncoder
from workbench.data.text.formats import Example
from workbench.data.text.preference_pairs import PreferenceEncoder
from workbench.errors import DataError

Message = dict[str, Any]
ByName = Callable[[str], ChatEncoder]
Runs = Callable[..., list[str]]

THOUGHTS = ("In France.", "In Germany.")
ANSWERS = ("The Loire.", "The Rhine.")


def _talk(form: str) -> tuple[Message, ...]:
    """Two turns with reasoning, in a field of its own or in front of the answer."""
    messages: list[Message] = []
    for thought, answer in zip(THOUGHTS, ANSWERS, strict=True):
        inline = {"content": f"<think>\n{thought}\n</think>\n\n{answer}"}
        own = {"content": answer, "reasoning_content": thought}
        messages += [
            {"role": "user", "content": "A river?"},
            {"role": "assistant", **(own if form == "field" else inline)},
        ]
    return tuple(messages)


CHATML = "{}\n</think>\n\n{}<|im_end|>"
HARMONY = "<|channel|>analysis<|message|>{}<|end|><|start|>assistant<|channel|>final<|message|>{}<|return|>"
GEMMA = "<|channel>thought\n{}\n<channel|>{}<turn|>"
DEEPSEEK = "{}\n</think>\n\n{}<\uff5cend\u2581of\u2581sentence\uff5c>"
DROPPING = {
    "qwen3": "<think>\n" + CHATML,
    "qwen3_5_think": CHATML,  # the prompt supplies <think>
    "qwen3_6": CHATML,
    "nemotron_3_ultra": "{}</think>{}<|im_end|>",
    "gptoss": HARMONY,
    "gemma4_v5": GEMMA,
    "glm4moe": "\n<think>{}</think>\n{}<|endoftext|>",
    "deepseekv3": DEEPSEEK,  # drops the reasoning of the last turn too, and asks for it
    "deepseek_r1_distill": DEEPSEEK,
}
"""Templates that write the reasoning of no turn but the last, and what each turn is to learn."""
INLINE = {"nemotron_3_ultra": "{}\n</think>\n\n{}<|im_end|>"}
"""What differs where reasoning stands in front of the answer: this template copies it as it is."""
KEEPING = {"qwen3_8": CHATML}


@pytest.mark.parametrize("form", ["field", "inline"])
@pytest.mark.parametrize("name", DROPPING)
def test_each_turn_becomes_a_row_where_earlier_reasoning_is_dropped(
    name: str, form: str, template: ByName, runs: Runs
) -> None:
    writer, whole = template(name), Example("row 3", messages=_talk(form))
    rows = writer.expanded(whole, loss_on="assistant")
    wanted = (INLINE if form == "inline" else {}).get(name, DROPPING[name])
    assert [runs(writer.encode(row, loss_on="assistant")) for row in rows] == [
        [wanted.format(thought, answer)] for thought, answer in zip(THOUGHTS, ANSWERS, strict=True)
    ]
    assert [row.place for row in rows] == ["row 3, answer 1 of 2", "row 3, answer 2 of 2"]


@pytest.mark.parametrize("form", ["field", "inline"])
@pytest.mark.parametrize("name", [*DROPPING, *KEEPING])
def test_what_is_learnt_goes_on_from_the_prompt_that_is_served(name: str, form: str, template: ByName) -> None:
    """Of each turn: the ids before the first supervised one are those that generation starts from."""
    writer = template(name)
    for row in writer.expanded(Example("row 3", messages=_talk(form)), loss_on="assistant"):
        encoded = writer.encode(row, loss_on="last")
        assert encoded.input_ids[: encoded.supervised.index(True)] == writer.prompt(row.messages[:-1])


def test_a_judged_answer_of_which_a_template_drops_reasoning_is_refused(template: ByName) -> None:
    asked, first, _, second = _talk("field")
    example = Example("row 3", messages=(asked, first, second), desired=True)
    with pytest.raises(DataError, match="row 3: an answer of several messages has reasoning"):
        PreferenceEncoder(template("deepseekv3")).expanded(example, loss_on="assistant")
    (row,) = PreferenceEncoder(template("deepseekv3")).expanded(
        replace(example, messages=(asked, second)), loss_on="assistant"
    )
    assert row.place == "row 3"


@pytest.mark.parametrize("form", ["field", "inline"])
@pytest.mark.parametrize("name", KEEPING)
def test_reasoning_that_a_template_keeps_is_learnt_in_one_row(
    name: str, form: str, template: ByName, runs: Runs
) -> None:
    writer = template(name)
    (row,) = writer.expanded(Example("row 3", messages=_talk(form)), loss_on="assistant")
    assert runs(writer.encode(row, loss_on="assistant")) == [
        KEEPING[name].format(thought, answer) for thought, answer in zip(THOUGHTS, ANSWERS, strict=True)
    ]


@pytest.mark.parametrize("name", [*DROPPING, *KEEPING])
def test_a_row_without_reasoning_and_a_row_of_one_turn_stay_as_they_are(name: str, template: ByName) -> None:
    plain = Example("row 3", messages=tuple({**each, "content": "A."} for each in _talk("inline")))
    once = Example("row 3", messages=_talk("field")[:2])
    for example in (plain, once):
        (row,) = template(name).expanded(example, loss_on="assistant")
        assert row.messages[-1]["content"] == example.messages[-1]["content"]
    whole = Example("row 3", messages=_talk("field"))
    assert template(name).expanded(whole, loss_on="last") == [whole]


@pytest.mark.parametrize(
    ("name", "form", "reason"),
    [
        ("llama3", "field", "leaves out the reasoning of message 2"),
        ("qwen2_5", "field", "leaves out the reasoning of message 2"),
        ("gemma4", "field", "leaves out the reasoning of message 2"),
        ("qwen3_5_nothink", "inline", "message 2 has reasoning, but the chat template of"),
    ],
)
def test_reasoning_that_would_not_be_learnt_is_refused(name: str, form: str, reason: str, template: ByName) -> None:
    writer = template(name)
    (row, *_) = writer.expanded(Example("row 3", messages=_talk(form)), loss_on="assistant")
    with pytest.raises(DataError, match=rf"{reason}(.|\n)*model\.chat_template=FILE(.|\n)*data\.on_bad_row=skip"):
        writer.encode(replace(row, messages=row.messages[:2]), loss_on="assistant")


def test_rows_of_one_conversation_are_held_out_together(
    tmp_path: Path, template: ByName, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path / "cache"))
    talks = [[{**each, "content": f"{number}. {each['content']}"} for each in _talk("field")] for number in range(20)]
    path = tmp_path / "talks.jsonl"
    path.write_text("".join(_line(messages) for messages in talks))
    config = DataConfig(train=str(path), held_out=0.3)
    data = tokenized.load(config, tokenizer, template("qwen3"), seed=0)
    sides = [{split.place(n).split(", answer")[0] for n in range(len(split))} for split in (data.train, data.held_out)]
    assert len(data.train) + len(data.held_out) == 40 and len(data.held_out) == 12
    assert not sides[0] & sides[1]


@pytest.mark.parametrize(("side", "needed"), [("right", "first"), ("left", "last")])
def test_rows_that_a_cut_leaves_without_loss_are_refused_with_their_share(
    side: str, needed: str, tmp_path: Path, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the number of tokens that the message names is the fewest that keep every row."""
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path / "cache"))
    long, short = "word " * 90, "Why?"
    rows = [
        [
            {"role": "user", "content": asked},
            {"role": "assistant", "content": "So."},
            {"role": "user", "content": after},
        ]
        for asked, after in [(short, short)] * 6 + [(long, short) if side == "right" else (short, long)] * 2
    ]
    path = tmp_path / "talks.jsonl"
    path.write_text("".join(_line(messages) for messages in rows))
    writer = ChatEncoder(tokenizer)
    config = DataConfig(train=str(path), max_tokens=40, truncate=side)  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"row 7(.|\n)*2 of 8 examples \(25%\)") as caught:
        tokenized.read(config.train, config, tokenizer, writer)
    fewest = int(str(caught.value).partition("data.max_tokens=40")[2].partition("data.max_tokens=")[2].split()[0])
    kept = tokenized.read(config.train, config.model_copy(update={"max_tokens": fewest}), tokenizer, writer)
    assert len(kept) == 8 and np.all(kept.supervised > 0)
    with pytest.raises(DataError, match="no supervised token is left"):
        tokenized.read(config.train, config.model_copy(update={"max_tokens": fewest - 1}), tokenizer, writer)
    skipping = config.model_copy(update={"on_bad_row": "skip"})
    assert len(tokenized.read(config.train, skipping, tokenizer, writer)) == 6


def _line(messages: list[Message]) -> str:
    return json.dumps({"messages": messages}) + "\n"
