"""Weights that are pruned: the smallest of each layer, and zero until the end."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import PreTrainedModel

from tests.adapters.contract import build, inputs
from workbench import adapters
from workbench.adapters import Full
from workbench.training.optim.own_optimizers import AdamMini

PRUNED = Full(sparsity=0.4)


def test_the_smallest_weights_of_each_layer_are_zero_and_the_others_as_they_were(llama: PreTrainedModel) -> None:
    before = {name: each.detach().clone() for name, each in llama.named_parameters()}
    adapters.attach(llama, PRUNED, seed=0)
    for name, each in llama.named_parameters():
        zero = each == 0
        if "_proj" not in name:
            assert torch.equal(each, before[name])
            continue
        assert int(zero.sum()) == int(0.4 * each.numel())
        assert before[name][zero].abs().max() <= before[name][~zero].abs().min()
        assert torch.equal(each[~zero], before[name][~zero])


@pytest.mark.parametrize("name", ["AdamW", "SGD", "Adafactor", "AdamMini"])
def test_they_stay_zero_whatever_trains(name: str, llama: PreTrainedModel) -> None:
    adapters.attach(llama, PRUNED, seed=0)
    pattern = {name: each == 0 for name, each in llama.named_parameters() if "_proj" in name}
    parameters = list(llama.parameters())
    groups = [{"params": parameters, "weight_decay": 0.1}]
    optimizer = AdamMini(groups, lr=0.05) if name == "AdamMini" else getattr(torch.optim, name)(groups, lr=0.05)
    start = {name: each.detach().clone() for name, each in llama.named_parameters()}
    for _ in range(3):
        optimizer.zero_grad()
        llama(**inputs(llama)).loss.backward()
        optimizer.step()
    for name, each in llama.named_parameters():
        assert not torch.equal(each, start[name])
        if name in pattern:
            assert torch.equal(each == 0, pattern[name])


def test_without_sparsity_nothing_is_pruned(llama: PreTrainedModel) -> None:
    before = copy.deepcopy(llama.state_dict())
    adapters.attach(llama, Full(), seed=0)
    assert all(torch.equal(each, before[name]) for name, each in llama.state_dict().items())
    assert all(each.requires_grad and not each._backward_hooks for each in llama.parameters())


def test_convolutions_are_pruned_where_there_are_no_linear_layers() -> None:
    model = build("ResNet")
    adapters.attach(model, PRUNED, seed=0)
    zeros = [float((each == 0).float().mean()) for _, each in model.named_parameters() if each.ndim == 4]
    assert sum(share > 0.35 for share in zeros) > 2


def test_experts_are_refused() -> None:
    assert "Leave adapter.sparsity out" in str(PRUNED.refusal(build("Mixtral")))
