"""Prompts of several sources: exact counts, and a number of its own for each draw of a prompt in an epoch."""

from __future__ import annotations

import numpy as np
import pytest
from transformers import AutoTokenizer

from tests.run_files import write_lines
from workbench.config import DataConfig
from workbench.data.text import tokenized
from workbench.data.text.chat import ChatEncoder
from workbench.data.text.mixed_prompts import MixedPrompts
from workbench.data.text.prompt_encoder import PromptEncoder
from workbench.data.text.tokenized_set import TokenizedSet

DRAWS = 30


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory, stories: str) -> TokenizedSet:
    """Prompts of two sources, of which the second has columns of its own and no answers."""
    folder, tokenizer = tmp_path_factory.mktemp("prompts"), AutoTokenizer.from_pretrained(stories)
    for name, key, size in (("sums", "question", 20), ("tales", "ask", 4)):
        rows = [{key: f"{name} {n}?" + " Please." * n} for n in range(size)]
        write_lines(folder / f"{name}.jsonl", rows)
    sources = {
        "sums": {"path": str(folder / "sums.jsonl")},
        "tales": {"path": str(folder / "tales.jsonl"), "columns": {"question": "ask"}},
    }
    config = DataConfig.model_validate({"sources": sources, "held_out": str(folder / "sums.jsonl"), "overlap": "drop"})
    encoder = PromptEncoder(ChatEncoder(tokenizer))
    files = config.training_files
    return tokenized.together({name: tokenized.read(own.train, own, tokenizer, encoder) for name, own in files.items()})


def test_each_draw_of_a_prompt_in_an_epoch_has_a_number_that_is_the_prompt(prompts: TokenizedSet) -> None:
    mixed = MixedPrompts(prompts, np.asarray([0.2, 0.8]), DRAWS, 7)
    seen = np.zeros(len(prompts), dtype=np.int64)
    for epoch in range(4):
        numbers = mixed.sample(np.arange(DRAWS), epoch=epoch)
        assert len(set(numbers.tolist())) == DRAWS
        rows = numbers % len(prompts)
        assert np.bincount(prompts.source_N[rows]).tolist() == [6, 24]
        assert [mixed.numbered.place(int(each)) for each in numbers] == [prompts.place(int(row)) for row in rows]
        assert (mixed.numbered.lengths[numbers] == prompts.lengths[rows]).all()
        seen += np.bincount(rows, minlength=len(prompts))
    assert np.ptp(seen[:20]) <= 1 and np.ptp(seen[20:]) == 0


def test_a_prompt_of_a_source_is_read_as_its_columns_say(prompts: TokenizedSet, stories: str) -> None:
    text = AutoTokenizer.from_pretrained(stories).decode(prompts[21].input_ids[:-1])
    assert "tales 1?" in text and "sums" not in text
