"""Stages one after another are the model; each holds its own blocks alone, and one answers for each parameter."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

from workbench.config.sections.distributed_config import DistributedConfig
from workbench.data.batching import MicroBatch
from workbench.data.packing import filled
from workbench.models.attention_backend import FAMILIES
from workbench.runs.ranks import ALONE
from workbench.training.distributed.pipeline import PLANNED, Stages

SCHEDULES = ("1f1b", "interleaved", "zero_bubble")
SIZES: dict[str, Any] = {"vocab_size": 40, "num_attention_heads": 2, "pad_token_id": 0}


def backbone(family: str, *, tied: bool, blocks: int = 5) -> nn.Module:
    wide = {"n_embd": 16} if family == "gpt2" else {"hidden_size": 16, "intermediate_size": 24, "head_dim": 8}
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        family, **SIZES, **wide, num_hidden_layers=blocks, num_key_value_heads=2, tie_word_embeddings=tied
    )
    auto = AutoModelForMaskedLM if family == "bert" else AutoModelForCausalLM
    model: nn.Module = auto.from_config(config).eval()
    return model


def in_memory(model: nn.Module) -> int:
    """Bytes of all parameters, each storage once."""
    storages = {each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in model.parameters()}
    return sum(storages.values())


def dealt(whole: nn.Module, place: int, size: int, schedule: str) -> tuple[nn.Module, Stages]:
    """A copy of a model as the process of this place has it."""
    model, section = copy.deepcopy(whole), DistributedConfig(pipeline=size, schedule=schedule)
    PLANNED.set(place)
    return model, Stages(model, section, ALONE)


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    yield
    PLANNED.set(0)


def logits(model: nn.Module, ids_BL: Tensor) -> Tensor:
    found: Tensor = model(input_ids=ids_BL).logits
    return found


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("family", FAMILIES)
def test_stages_one_after_another_are_the_model(family: str, schedule: str) -> None:
    whole, ids_BL = backbone(family, tied=family in ("gemma", "bert")), torch.arange(14).reshape(2, 7)
    with torch.no_grad():
        wanted = whole(input_ids=ids_BL).logits
        processes = [dealt(whole, place, 2, schedule) for place in range(2)]
        result: Tensor | None = None
        for stage, place in enumerate(processes[0][1].holders):
            model, own = processes[place]
            result = own.compute(stage, result, partial(logits, model, ids_BL))
    assert result is not None and torch.equal(result, wanted)


@pytest.mark.parametrize("tied", [False, True])
def test_a_stage_holds_its_own_blocks_alone(tied: bool) -> None:
    whole = backbone("llama", tied=tied)
    one_block = sum(each.nbytes for each in whole.get_submodule("model.layers.0").parameters())
    ends = whole.get_submodule("lm_head").weight.nbytes  # type: ignore[union-attr,operator]
    norm = whole.get_submodule("model.norm").weight.nbytes  # type: ignore[union-attr,operator]
    for number, blocks in enumerate((2, 2, 1)):
        model, _ = dealt(whole, number, 3, "1f1b")
        held = blocks * one_block + (norm if number == 2 else 0) + (0 if number == 1 else ends)
        assert (
            held <= in_memory(model) <= held + 4 * len(list(model.parameters()))
        )  # an element for each that is not here


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("tied", [False, True])
def test_one_process_answers_for_each_parameter(tied: bool, schedule: str) -> None:
    whole = backbone("llama", tied=tied)
    names = [name for name, _ in whole.named_parameters()]
    holders: dict[str, list[int]] = {name: [] for name in names}
    for place in range(2):
        model, own = dealt(whole, place, 2, schedule)
        trains = {name for name, each in model.named_parameters() if each.requires_grad}
        assert trains == {name for name in names if place in {own.holders[stage] for stage in own.stages_of[name]}}
        for name in trains:
            holders[name].append(place)
    for name, found in holders.items():
        apart = tied and name == "model.embed_tokens.weight" and schedule != "zero_bubble"
        assert found == ([0, 1] if apart else found[:1])
        assert found[0] == own.holders[min(own.stages_of[name])]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_stages_are_dealt_and_steps_are_filled_up(schedule: str, size: int) -> None:
    whole = backbone("llama", tied=False, blocks=2 * size)
    processes = [dealt(whole, place, size, schedule)[1] for place in range(size)]
    assert sorted(stage for each in processes for stage in each.own) == list(range(len(processes[0].holders)))
    assert processes[0].holders[-1] == (0 if schedule == "zero_bubble" else size - 1)
    for count in range(1, 20):
        step = processes[0].micro_batches(count)
        assert step >= max(count, size) and (schedule != "interleaved" or step % (step // size) == 0)


def test_micro_batches_are_filled_up_to_one_length() -> None:
    inputs = {
        "input_ids": torch.tensor([[5, 6, 7]]),
        "position_ids": torch.tensor([[0, 1, 0]]),
        "row_lengths": torch.tensor([2, 1]),
        "row_starts": torch.tensor([0, 2, 3]).int(),
    }
    batch = MicroBatch(inputs, positions_N=torch.tensor([0]), labels_N=torch.tensor([6]), tokens=3)
    assert filled(batch, 3) is batch
    found = filled(batch, 6).inputs
    assert filled(batch, 5).numbered(np.array([4, 9]), np.arange(10))[1].tolist() == [4, 9, 2]
    assert found["input_ids"].tolist() == [[5, 6, 7, 0, 0, 0]] and found["position_ids"].tolist() == [
        [0, 1, 0, 0, 1, 0]
    ]
    assert found["row_lengths"].tolist() == [2, 1, 2, 1] and found["row_starts"].tolist() == [0, 2, 3, 5, 6]
