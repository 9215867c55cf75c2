"""Answers whose steps are rated: the tokens of the whole answer, with a mark where each step ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from tests.run_files import write_lines
from workbench.config import DataConfig
from workbench.data.text import formats, tokenized
from workbench.data.text.chat import ChatEncoder
from workbench.data.text.stepwise import StepEncoder, StepSet

STEPS = ["He has 3 cats. ", " He buys 2 more.", "So he has 5 cats."]
ROWS: list[dict[str, Any]] = [
    {
        "prompt": f"There were {n % 4} dogs.\n",
        "completions": STEPS[: 1 + n % 3],
        "labels": [True, False, 0.25][: 1 + n % 3],
        "w": 1 + n,
    }
    for n in range(12)
]
CHATS = [{**row, "prompt": [{"role": "user", "content": row["prompt"]}]} for row in ROWS]


@pytest.fixture(scope="module")
def base(stories: str) -> ChatEncoder:
    return ChatEncoder(AutoTokenizer.from_pretrained(stories))


def read(folder: Path, base: ChatEncoder, rows: list[dict[str, Any]], **settings: Any) -> StepSet:
    """The rows of a file."""
    path = folder / "rows.jsonl"
    write_lines(path, rows)
    config = DataConfig(train=str(path), **settings)
    found = tokenized.read(str(path), config, base._tokenizer.tokenizer, StepEncoder(base), weighted=True)
    return StepSet(found)


@pytest.mark.parametrize("rows", [ROWS, CHATS], ids=["text", "chat"])
def test_a_step_ends_where_the_next_one_begins(tmp_path: Path, base: ChatEncoder, rows: list[dict[str, Any]]) -> None:
    found, decode = read(tmp_path, base, rows), base._tokenizer.tokenizer.decode
    assert found.steps.tolist() == [1 + n % 3 for n in range(12)]
    np.testing.assert_array_equal(found.labels, np.concatenate([row["labels"] for row in rows]))
    for number, row in enumerate(rows):
        each, steps = found.answers[number], [step.strip() for step in row["completions"]]
        whole = {"prompt": row["prompt"], "completion": "\n".join(steps)}
        example = formats.answered("", whole, prompt="prompt", answer="completion")
        assert each.input_ids.tolist() == base.encode(example, loss_on="last").input_ids
        marks = np.flatnonzero(each.supervised)
        assert marks[-1] == len(each.input_ids) - 1
        for end, step, following in zip(marks, steps, steps[1:], strict=False):
            assert str(decode(each.input_ids[: end + 1])).rstrip().endswith(step)
            assert str(decode(each.input_ids[end + 1 :])).lstrip().startswith(following[:3])


def test_a_batch_has_the_label_of_each_step_at_its_last_token(tmp_path: Path, base: ChatEncoder) -> None:
    found, rows = read(tmp_path, base, ROWS, columns={"weight": "w"}), np.asarray([5, 0, 4])
    batch = found.batch(rows)
    width = batch.inputs["input_ids"].shape[1]
    expected = [
        (row * width + int(place), label, 1.0 + number)
        for row, number in enumerate(rows)
        for place, label in zip(np.flatnonzero(found.answers[number].supervised), ROWS[number]["labels"], strict=True)
    ]
    assert batch.weights_N is not None
    told = zip(batch.positions_N.tolist(), batch.labels_N.tolist(), batch.weights_N.tolist(), strict=True)
    assert list(told) == expected
    np.testing.assert_array_equal(found.supervised, [(1 + n % 3) * (1 + n) for n in range(12)])
    np.testing.assert_array_equal(found.subset(rows).labels, found.labels[found.steps_of(rows)])


@pytest.mark.parametrize("side", ["left", "right"])
def test_cut_steps_are_dropped_and_counted(tmp_path: Path, base: ChatEncoder, side: str) -> None:
    row = {"prompt": "Once.\n", "completions": STEPS, "labels": [1, 0, 0.25]}
    whole = read(tmp_path, base, [row])
    marks = np.flatnonzero(whole.answers[0].supervised)
    most = int(marks[1]) + 2 if side == "right" else int(marks[2] - marks[0]) + 1
    found = read(tmp_path, base, [row], max_tokens=most, truncate=side)
    assert found.labels.tolist() == ([1, 0] if side == "right" else [0, 0.25])
    assert found.cut_steps == 1 and found.facts()["cut_steps"] == 1 and "cut_steps" not in whole.facts()


def test_answers_to_a_prompt_are_on_one_side(tmp_path: Path, base: ChatEncoder) -> None:
    for rows in (ROWS, CHATS):
        digests = read(tmp_path, base, rows).answers.digests
        assert [digests[n] == digests[0] for n in range(12)] == [n % 4 == 0 for n in range(12)]


def test_steps_of_generated_answers_are_never_refused(base: ChatEncoder) -> None:
    example = formats.Example("here", text=(("Why? ", False), ("a b", True)), steps=("a", "zz", "b"))
    encoded = StepEncoder(base, labelled=False).encode(example, loss_on="last")
    assert encoded.supervised[-1] and 1 <= sum(encoded.supervised) <= 2
