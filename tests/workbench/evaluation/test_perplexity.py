"""Scores of rows are those of transformers' own loss, row by row, whatever the micro-batches."""

from __future__ import annotations

import math
import sys
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from workbench.data.text.tokenized_set import TokenizedSet
from workbench.evaluation.forward_passes import ResultStore
from workbench.evaluation.perplexity import AnswersAlone, Floats, agreement, hidden_states, row_scores
from workbench.models import output_heads
from workbench.models.output_heads import Head
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


def _head(weight: torch.Tensor) -> Head:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    linear.weight.data = weight
    return Head(linear, vocabulary=weight.shape[0], width=weight.shape[1], softcap=None, multiplier=1.0)


@torch.no_grad()
def test_equals_the_divergence_written_out(monkeypatch: pytest.MonkeyPatch) -> None:
    # Several pieces, the last one smaller.
    monkeypatch.setattr(sys.modules["workbench.losses.chunked_loss"], "CHUNK_ELEMENTS", 4 * 7 * 3)
    torch.manual_seed(0)
    a, b = _head(torch.randn(7, 4)), _head(torch.randn(7, 4))
    hidden_a, hidden_b = torch.randn(11, 4), torch.randn(11, 4)
    found = agreement(a, hidden_a, b, hidden_b)
    p, q = a.project(hidden_a).double().softmax(-1), b.project(hidden_b).double().softmax(-1)
    assert found.kl == pytest.approx(float((p * (p / q).log()).sum(-1).mean()))
    assert found.top1 == pytest.approx(float((p.argmax(-1) == q.argmax(-1)).double().mean()))
    assert found.positions == 11 and 0 < found.top1 < 1
    assert agreement(b, hidden_b, a, hidden_a).kl != pytest.approx(found.kl)


def test_a_known_pair() -> None:
    """KL of (1/2, 1/2) from (1/4, 3/4): ln 2 - ln(3) / 2."""
    even, uneven = _head(torch.zeros(2, 1)), _head(torch.tensor([[0.0], [math.log(3)]]))
    found = agreement(even, torch.ones(1, 1), uneven, torch.ones(1, 1))
    assert found.kl == pytest.approx(math.log(2) - math.log(3) / 2)


def test_a_model_agrees_with_itself_and_nothing_is_below_zero() -> None:
    torch.manual_seed(0)
    head, hidden = _head(torch.randn(500, 16)), torch.randn(40, 16)
    same = agreement(head, hidden, head, hidden)
    assert (same.kl, same.top1) == (0.0, 1.0)
    nearly = agreement(head, hidden, head, hidden + 1e-6 * torch.randn(40, 16))
    assert 0 < nearly.kl < 1e-9 and nearly.top1 == 1.0


@pytest.mark.parametrize("tokens", [16, 4096])
def test_hidden_states_are_those_in_front_of_supervised_tokens_in_order(
    llama: PreTrainedModel, rows: TokenizedSet, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capacity, "FORWARD_TOKENS", tokens)
    head = output_heads.find(llama, llama)
    found = hidden_states(llama, head, rows, rows=3)
    wanted = []
    for row in (rows[number] for number in range(3)):
        states = head.hidden(llama, {"input_ids": torch.from_numpy(row.input_ids)[None]})[0]
        wanted.append(states[:-1][torch.from_numpy(row.supervised)[1:]])
    torch.testing.assert_close(found, torch.cat(wanted).detach(), rtol=1e-5, atol=1e-5)
    assert len(found) == rows.supervised[:3].sum()
    assert len(hidden_states(llama, head, rows, rows=99)) == rows.supervised.sum()
