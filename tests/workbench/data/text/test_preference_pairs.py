"""Judged answers in every shape of real files, and what is kept of them: prompts, masks, sides, labels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from tests.run_files import write_lines
from workbench.config import DataConfig
from workbench.data.text import formats, preference_pairs, tokenized
from workbench.data.text.chat import ChatEncoder
from workbench.data.text.formats import Example
from workbench.data.text.preference_pairs import (
    ANSWER,
    PLACE,
    PreferenceEncoder,
    PreferenceSet,
    mismatched_answers,
    preference_set,
)

FORMATS = Path(__file__).parents[3] / "files" / "formats"


@pytest.fixture(scope="module")
def encoder(stories: str) -> PreferenceEncoder:
    return PreferenceEncoder(ChatEncoder(AutoTokenizer.from_pretrained(stories)))


def examples(path: Path, **settings: Any) -> list[Example]:
    config = DataConfig(train=str(path), **settings)
    return list(formats.read(str(path), config, skipped=[], conversion=preference_pairs.convert))


def written(folder: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path = folder / "rows.jsonl"
    return write_lines(path, rows)


def texts(example: Example) -> tuple[str, str]:
    """The last turn of both answers."""
    assert example.rejected is not None
    return example.messages[-1]["content"], example.rejected.messages[-1]["content"]


@pytest.mark.parametrize("name", ["dpo_en_demo.json", "oasst_pref_pairs.jsonl"])
def test_pairs_of_real_files(name: str) -> None:
    found = examples(FORMATS / name)
    assert found
    for example in found:
        assert example.desired is True and example.rejected is not None and example.rejected.desired is False
        assert example.messages[:-1] == example.rejected.messages[:-1]
        chosen, rejected = texts(example)
        assert chosen != rejected and example.messages[-1].get("loss", True)


def test_rated_answers_of_a_real_file() -> None:
    found = examples(FORMATS / "kto_en_demo.json")
    assert {example.desired for example in found} == {True, False} and all(each.rejected is None for each in found)


TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {}}}
ASKED = [
    {"role": "user", "content": "Why?"},
    {"role": "assistant", "content": "How?"},
    {"role": "user", "content": "So."},
]
GOOD, BAD = {"role": "assistant", "content": "Because."}, {"role": "assistant", "content": "No."}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]}
SHAPES: dict[str, dict[str, Any]] = {
    "a column of messages": {"messages": ASKED, "chosen": GOOD, "rejected": BAD},
    "answers as text": {"messages": ASKED, "chosen": "Because.", "rejected": "No."},
    "lists": {"prompt": ASKED, "chosen": [GOOD], "rejected": [BAD]},
    "sharegpt": {
        "conversations": [{"from": "human", "value": "Why?"}],
        "chosen": {"from": "gpt", "value": "Because."},
        "rejected": {"from": "gpt", "value": "No."},
    },
    "an implicit prompt": {"chosen": [*ASKED, GOOD], "rejected": [*ASKED, BAD]},
    "a system prompt": {"prompt": ASKED[:1], "system": "Be brief.", "chosen": [GOOD], "rejected": [BAD]},
    "a call of a tool": {"prompt": ASKED[:1], "tools": [TOOL], "chosen": [CALL], "rejected": [BAD]},
}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes(name: str, tmp_path: Path) -> None:
    (found,) = examples(written(tmp_path, [SHAPES[name]]))
    assert found.rejected is not None and texts(found)[1] == "No."
    assert found.messages[:-1] == found.rejected.messages[:-1]
    assert [message.get("loss", True) for message in found.messages if message["role"] == "assistant"][-1]
    assert found.tools == found.rejected.tools and bool(found.tools) == ("tools" in SHAPES[name])


def test_texts_that_begin_alike_share_a_prompt(tmp_path: Path) -> None:
    asked = "\n\nHuman: What is it?\n\nAssistant:"
    (found,) = examples(written(tmp_path, [{"chosen": f"{asked} A cat.", "rejected": f"{asked} A car."}]))
    assert found.rejected is not None
    assert [message["content"] for message in found.messages] == ["What is it?", "A cat."]
    assert found.rejected.messages[-1]["content"] == "A car."  # the prompt ends where the turns part
    (found,) = examples(written(tmp_path, [{"chosen": "It is a cat.", "rejected": "It is a car."}]))
    assert found.rejected is not None
    assert found.text == (("It is a ", False), ("cat.", True)) and found.rejected.text[1] == ("car.", True)


def test_margins_are_read_where_they_are_named(tmp_path: Path) -> None:
    path = written(tmp_path, [{**SHAPES["lists"], "m": 1.5}])
    assert examples(path)[0].margin == 0 and examples(path, columns={"margin": "m"})[0].margin == 1.5


def rows(
    folder: Path, encoder: PreferenceEncoder, *, pairs: bool = True, count: int = 12, **settings: Any
) -> PreferenceSet:
    texts = [
        {
            "prompt": [{"role": "user", "content": f"Once upon a time there were {n % 5} men." * (1 + n % 3)}],
            "chosen": [{"role": "assistant", "content": f"It is {n}."}],
            "rejected": [{"role": "assistant", "content": "No." * (1 + n % 4)}],
        }
        for n in range(count)
    ]
    config = DataConfig(train=str(written(folder, texts)), held_out=0.3, **settings)
    tokenizer = encoder.base._tokenizer.tokenizer
    found = tokenized.load(config, tokenizer, encoder, seed=0)
    assert not set(found.train.digests) & set(found.held_out.digests), "a prompt is on one side"
    return preference_set(found.train, pairs=pairs)


def test_a_pair_is_one_example(tmp_path: Path, encoder: PreferenceEncoder) -> None:
    found = rows(tmp_path, encoder)
    assert found.desired.tolist() == [True, False] * len(found)
    assert found.place(0) + ", answer 2 of 2" == found.answers.place(1)
    for example in range(len(found)):
        chosen, rejected = found.answers[2 * example], found.answers[2 * example + 1]
        asked = int(chosen.supervised.argmax())
        assert chosen.input_ids[:asked].tolist() == rejected.input_ids[:asked].tolist()
    assert found.lengths.tolist() == [int(each) for each in found.answers.lengths.reshape(-1, 2).sum(1)]
    batch = found.subset(np.array([2, 0])).batch(np.array([1]))
    assert batch.labels_N[:, ANSWER].unique().tolist() == [2, 3]
    assert batch.labels_N[batch.labels_N[:, ANSWER] == 3, PLACE].tolist() == list(range(int(found.answer_tokens[1])))


@pytest.mark.parametrize("side", ["left", "right"])
def test_both_answers_are_cut_alike(tmp_path: Path, encoder: PreferenceEncoder, side: str) -> None:
    whole = rows(tmp_path, encoder)
    most = int(whole.answers.lengths.max()) - 2
    cut = rows(tmp_path, encoder, max_tokens=most, truncate=side)
    assert cut.answers.truncated and cut.answers.lengths.max() <= most
    for example in range(len(cut)):
        lost = whole.answers.lengths[2 * example : 2 * example + 2] - cut.answers.lengths[2 * example : 2 * example + 2]
        kept = cut.answer_tokens[2 * example : 2 * example + 2] == whole.answer_tokens[2 * example : 2 * example + 2]
        assert side == "right" or (lost[0] == lost[1] and kept.all())


def test_other_answers_stand_behind_each_prompt(tmp_path: Path, encoder: PreferenceEncoder) -> None:
    found = rows(tmp_path, encoder, pairs=False).answers
    others = mismatched_answers(found, DataConfig(train="rows.jsonl"))
    assert len(others) == len(found)
    for number in range(len(others)):
        own, other = found[number], others[number]
        asked = int(own.supervised.argmax())
        assert other.input_ids[:asked].tolist() == own.input_ids[:asked].tolist()
        partners = [row for row in range(len(found)) if found.digests[row] != found.digests[number]]
        answers = [found[row].input_ids[found[row].supervised].tolist() for row in partners]
        assert other.input_ids[other.supervised].tolist() in answers
    short = DataConfig(train="rows.jsonl", max_tokens=40)
    cut, begun = mismatched_answers(found, short), mismatched_answers(found, short, bos=int(found[0].input_ids[0]))
    assert cut.lengths.max() <= 40 and cut.lengths.tolist() == begun.lengths.tolist()
    assert any(cut[row].input_ids[0] != found[row].input_ids[0] for row in range(len(cut)))
    for row in range(len(begun)):  # a text that is cut on the left begins as texts do
        assert begun[row].input_ids[0] == found[row].input_ids[0]
        assert begun[row].input_ids[1:].tolist() == cut[row].input_ids[1:].tolist()
