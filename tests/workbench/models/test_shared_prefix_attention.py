"""Rows whose beginning is computed once give the losses and gradients that each row gives alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PreTrainedModel

from tests.conftest import tiny
from tests.workbench.models.test_attention_backend import SHAPES, STILL, row_losses
from workbench.data.batching import Row, collate
from workbench.data.packing import SharedPrefix
from workbench.models import attention_backend
from workbench.models.attention_backend import FAMILIES
from workbench.training import activation_checkpointing

PREFIX = 9
OWN = (12, 11, 7, 1, 1)


@pytest.fixture(params=[family for family in FAMILIES if family != "bert"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    """A tiny causal model in training, without dropout."""
    attention_backend.register()
    name, shape = SHAPES[request.param]
    return tiny(name, **{**shape, "sliding_window": None}, **dict.fromkeys(STILL, 0.0)).train()


def _rows(prefix: int = PREFIX) -> list[Row]:
    """Rows that begin alike and in which all tokens carry loss, those of the beginning too."""
    draw = np.random.default_rng(0)
    first = draw.integers(3, 64, prefix)
    ids = [np.concatenate([first, draw.integers(3, 64, length)]) for length in OWN]
    return [Row(each, np.ones(len(each), dtype=bool)) for each in ids]


def _gradients(model: PreTrainedModel, losses_B: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(losses_B.sum(), list(model.parameters()), materialize_grads=True)


def test_losses_and_gradients_are_those_of_one_row_at_a_time(model: PreTrainedModel) -> None:
    rows = _rows()
    alone = torch.cat([row_losses(model, collate([row]), 1) for row in rows])
    wanted = _gradients(model, alone)
    found = row_losses(model, SharedPrefix(PREFIX).lay(collate(rows)), len(rows))
    torch.testing.assert_close(found, alone, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(_gradients(model, found), wanted, rtol=1e-4, atol=2e-5)


def test_another_row_beside_it_changes_no_bit_of_a_row(model: PreTrainedModel) -> None:
    """The rests of other rows are others; places and lengths are the same."""
    rows = _rows()
    others = [rows[0], *(row._replace(input_ids=row.input_ids.copy()) for row in rows[1:])]
    for row in others[1:]:
        row.input_ids[PREFIX:] = row.input_ids[PREFIX:] % 61 + 3
    found, wanted = (
        model(**SharedPrefix(PREFIX).lay(collate(each)).inputs).logits[0, : PREFIX + OWN[0]] for each in (others, rows)
    )
    assert torch.equal(found, wanted)


def test_recomputed_activations_give_the_same_gradients(model: PreTrainedModel) -> None:
    batch = SharedPrefix(PREFIX).lay(collate(_rows()))
    wanted = _gradients(model, row_losses(model, batch, len(OWN)))
    activation_checkpointing.keep(model, True)
    torch.testing.assert_close(_gradients(model, row_losses(model, batch, len(OWN))), wanted, rtol=0, atol=0)


def test_half_precision_rounds_little(model: PreTrainedModel) -> None:
    batch = SharedPrefix(PREFIX).lay(collate(_rows()))
    with torch.no_grad():
        exact = model(**batch.inputs).logits
        half = model.bfloat16()(**batch.inputs).logits.float()
    assert float((half - exact).norm() / exact.norm()) < 0.03


def test_it_is_planned_without_values() -> None:
    lengths_B, shared = torch.tensor(OWN), torch.tensor([PREFIX])
    with FakeTensorMode():
        rows = [torch.empty(1, 2, PREFIX + sum(OWN), 8, dtype=torch.bfloat16) for _ in range(3)]
        attended, _ = attention_backend.attend(
            nn.Identity(), *rows, None, row_lengths=lengths_B, prefix_tokens=shared, is_causal=True
        )
    assert attended.shape == (1, PREFIX + sum(OWN), 2, 8)
