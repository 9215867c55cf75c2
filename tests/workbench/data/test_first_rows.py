"""What a method that starts from data is shown: the rows that training begins with."""

from __future__ import annotations

from pathlib import Path

import pytest

from workbench.config import DataConfig, ModelConfig
from workbench.data.batching import first_rows, global_batch
from workbench.data.text import tokenized
from workbench.data.text.chat import ChatEncoder
from workbench.data.text.tokenized_set import TokenizedSet
from workbench.models import backbones


@pytest.fixture
def train(stories: str, questions: Path) -> TokenizedSet:
    tokenizer = backbones.tokenizer(ModelConfig(id=stories))
    return tokenized.load(DataConfig(train=str(questions)), tokenizer, ChatEncoder(tokenizer), seed=0).train


def test_a_bounded_number_one_at_a_time_so_that_no_padding_counts_as_data(train: TokenizedSet) -> None:
    rows = list(first_rows(train, seed=3, count=9))
    wanted = global_batch(0, rows=len(train), size=9, seed=3)
    assert [tuple(row["input_ids"].shape) for row in rows] == [(1, int(train.lengths[row])) for row in wanted]


def test_the_seed_alone_decides_them(train: TokenizedSet) -> None:
    found = [[row["input_ids"].tolist() for row in first_rows(train, seed=seed, count=9)] for seed in (0, 0, 1)]
    assert found[0] == found[1] != found[2]
