"""Scores of rows are those of transformers' own loss, row by row, whatever the micro-batches."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from workbench.data.text.tokenized_set import TokenizedSet
from workbench.evaluation.result_store import ResultStore
from workbench.evaluation.row_scores import AnswersAlone, Floats, row_scores
from workbench.models import output_heads
from workbench.training import capacity

START = 1


def scored(by: Literal["perplexity", "ifd"], model: PreTrainedModel, rows: TokenizedSet) -> Floats:
    store = ResultStore(None, lambda: False)
    return row_scores(by, model, output_heads.find(model, model), rows, start=START, scoring=store.by)


@torch.no_grad()
def own_loss(model: PreTrainedModel, ids: Any, labels: Any) -> float:
    return float(model(input_ids=torch.tensor(ids)[None], labels=torch.tensor(labels)[None]).loss)


@pytest.mark.parametrize("budget", [1, 4096])
def test_they_are_the_models_own_losses(
    llama: PreTrainedModel, rows: TokenizedSet, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capacity, "FORWARD_TOKENS", budget)
    loss_N, difficulty_N = scored("perplexity", llama, rows), scored("ifd", llama, rows)
    for number in range(len(rows)):
        row = rows[number]
        labels = np.where(row.supervised, row.input_ids, -100)
        labels[0] = -100
        given = own_loss(llama, row.input_ids, labels)
        answer = labels[labels >= 0].tolist()
        alone = own_loss(llama, [START, *answer], [-100, *answer])
        assert loss_N[number] == pytest.approx(given, rel=1e-4)
        assert difficulty_N[number] == pytest.approx(given / alone, rel=1e-4)


def test_answers_alone_are_the_tokens_that_carry_loss(rows: TokenizedSet) -> None:
    alone = AnswersAlone(rows, START)
    assert [len(alone[number].input_ids) for number in range(len(rows))] == alone.lengths.tolist()
    batch = alone.batch(np.arange(len(rows)))
    assert batch.labels_N.tolist() == rows.batch(np.arange(len(rows))).labels_N.tolist()
