"""Scores of a model are those of a plain loop over rows with a stock model."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow
import pytest
import torch
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from workbench import evaluation
from workbench.data.text.tokenized_set import TokenizedSet, TokenTable
from workbench.evaluation import GeneratedAnswer, Likelihood
from workbench.models import output_heads
from workbench.training import capacity


@pytest.fixture
def tokenizer(stories: str) -> PreTrainedTokenizerBase:
    found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(stories)
    return found


@pytest.mark.parametrize("budget", [1, 20, 4096])
@torch.no_grad()
def test_likelihood_is_the_labelled_loss_of_each_row(
    llama: PreTrainedModel, rows: TokenizedSet, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capacity, "FORWARD_TOKENS", budget)
    found = evaluation.likelihood(llama, output_heads.find(llama, llama), rows)
    total, hits, count = 0.0, 0, 0
    for number in range(len(rows)):
        row = rows[number]
        ids = torch.from_numpy(row.input_ids)[None]
        labels = torch.where(torch.from_numpy(row.supervised)[None], ids, -100)
        output = llama(input_ids=ids, labels=labels)
        supervised = int(row.supervised[1:].sum())
        total += float(output.loss) * supervised
        hits += int(((output.logits[0, :-1].argmax(-1) == ids[0, 1:]) & (labels[0, 1:] != -100)).sum())
        count += supervised
    assert count == rows.supervised.sum()
    assert found.loss == pytest.approx(total / count, rel=1e-6)
    assert found.token_accuracy == pytest.approx(hits / count)
    assert found.perplexity == pytest.approx(math.exp(total / count), rel=1e-5)


def test_perplexity_of_a_hopeless_model_is_infinite() -> None:
    assert Likelihood(1000.0, 0.0).perplexity == math.inf


def test_answers_ask_for_the_last_turn_of_evenly_spaced_rows(
    llama: PreTrainedModel, rows: TokenizedSet, tokenizer: PreTrainedTokenizerBase
) -> None:
    found = evaluation.answers(llama, rows, tokenizer, count=99, max_new_tokens=3)
    # Rows 2, 4 and 5 carry loss from their second token on or earlier: nothing asks for them.
    assert [answer.place for answer in found] == ["rows.jsonl, row 1", "rows.jsonl, row 3"]
    first = rows[0].input_ids
    assert found[0].prompt == tokenizer.decode(first[:6], skip_special_tokens=True)
    assert found[0].reference == str(tokenizer.decode(first[6:], skip_special_tokens=True)).strip()
    assert evaluation.answers(llama, rows, tokenizer, count=0, max_new_tokens=3) == []


@torch.no_grad()
def test_completions_in_batches_are_those_of_each_prompt_alone(
    llama: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = np.random.default_rng(1)
    prompts = [chance.integers(3, 64, size) for size in (2, 9, 5, 9, 1, 30)]
    stop = int(llama(input_ids=torch.from_numpy(prompts[0])[None]).logits[0, -1].argmax())
    tokenizer.add_special_tokens({"additional_special_tokens": [str(tokenizer.convert_ids_to_tokens(stop))]})
    found = evaluation.complete(llama, prompts, tokenizer, stop=[stop], max_new_tokens=8)
    for prompt, text in zip(prompts, found, strict=True):
        ids = torch.from_numpy(prompt)[None]
        for _ in range(8):
            ids = torch.cat([ids, llama(input_ids=ids).logits[:, -1].argmax(-1, keepdim=True)], dim=1)
            if ids[0, -1] == stop:
                break
        written = [int(token) for token in ids[0, len(prompt) :] if token != stop]
        assert text == str(tokenizer.decode(written, skip_special_tokens=True)).strip()
    assert found[0] == "" and any(found)
    monkeypatch.setattr(capacity, "FORWARD_TOKENS", 20)
    assert evaluation.complete(llama, prompts, tokenizer, stop=[stop], max_new_tokens=8) == found


def test_generation_stops_at_eos_and_at_what_ends_a_turn(
    rows: TokenizedSet, tokenizer: PreTrainedTokenizerBase
) -> None:
    assert evaluation.stop_tokens(tokenizer, rows) == [2]
    end, plain = int(rows[1].input_ids[-1]), int(rows[3].input_ids[-1])
    tokenizer.add_special_tokens({"additional_special_tokens": [str(tokenizer.convert_ids_to_tokens(end))]})
    assert evaluation.stop_tokens(tokenizer, rows) == sorted({2, end})
    assert plain not in evaluation.stop_tokens(tokenizer, rows), "an ordinary word ends no turn"


def test_an_end_of_turn_that_was_added_as_a_special_token_stops_generation(
    rows: TokenizedSet, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Such tokens are special, but `all_special_ids` does not list them."""
    tokenizer.add_tokens(["<|end|>"], special_tokens=True)
    number = tokenizer.get_vocab()["<|end|>"]
    assert number not in tokenizer.all_special_ids
    written = [row | {"input_ids": [*row["input_ids"][:-1], number]} for row in rows.table.data.to_pylist()]
    ended = replace(rows, table=TokenTable(pyarrow.Table.from_pylist(written)))
    assert evaluation.stop_tokens(tokenizer, ended) == [2, number]


def test_summary_rounds_and_leaves_out_what_was_not_measured() -> None:
    found = Likelihood(1 / 3, 0.25)
    assert evaluation.summary(found, []) == {"loss": 0.333333, "perplexity": 1.395612, "token_accuracy": 0.25}
    answers = [GeneratedAnswer("a", "p", "a cat", "cat"), GeneratedAnswer("b", "p", "a dog", "cat")]
    assert evaluation.summary(found, answers)["f1"] == evaluation.summary(found, answers)["rouge_l"] == 0.5


def test_predictions_hold_both_answers_and_their_scores(tmp_path: Path) -> None:
    answers = [GeneratedAnswer("x, row 1", "Who?", "the cat", "cat"), GeneratedAnswer("x, row 2", "What?", "猫", "犬")]
    evaluation.write_predictions(
        tmp_path / "new" / "predictions.parquet", answers, before={"x, row 2": "猫", "x, row 1": "dog"}
    )
    table = pd.read_parquet(tmp_path / "new" / "predictions.parquet")
    assert list(table["row"]) == ["x, row 1", "x, row 2"]
    assert list(table["before"]) == ["dog", "猫"] and list(table["after"]) == ["cat", "犬"]
    for score in ("f1", "rouge_l"):
        assert list(table[f"{score}_before"]) == [0.0, 1.0] and list(table[f"{score}_after"]) == [1.0, 0.0]
