"""Blocks that steps leave out: the law of their draws, that they are not computed, and what the others add."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conftest import T5_SIZES, tiny
from workbench.config.sections.layer_and_token_drop_config import LayerDropConfig
from workbench.errors import BackboneError
from workbench.models import forward_hooks
from workbench.training.freezing.layer_map import stack
from workbench.training.layer_and_token_drop import LayerDrop

IDS = torch.arange(3, 33).view(5, 6)
FAMILIES = {"Llama": "CausalLM", "GPT2": "CausalLM", "DebertaV2": "MaskedLM", "Bert": "MaskedLM"}


def dropping(family: str = "Llama", **settings: Any) -> tuple[Any, LayerDrop]:
    model = tiny(family, head=FAMILIES[family], num_hidden_layers=3).train()
    model.eval()  # its own dropout is another thing
    blocks = [model.get_submodule(path) for path in stack(model)]
    drop = LayerDrop(model, blocks, LayerDropConfig.model_validate({"ramp": None, **settings}), seed=0)
    drop.install()
    return model, drop


def logits(model: Any) -> Tensor:
    found: Tensor = model(input_ids=IDS).logits
    return found.detach()


def step_that(drop: LayerDrop, wanted: list[bool], config: LayerDropConfig) -> int:
    return next(step for step in range(500) if config.left_out(step, 1.0, blocks=len(wanted), seed=0) == wanted)


def test_chances_grow_with_depth_and_time_as_the_paper_says() -> None:
    config = LayerDropConfig(rate=0.4, ramp=10.0)
    for share in (0.0, 0.05, 1.0):
        theta = (1 - 0.6) * math.exp(-10 * share) + 0.6
        wanted = [(number + 1) / 4 * (1 - theta) for number in range(4)]
        assert config.chances(share, blocks=4) == pytest.approx(wanted)
    assert LayerDropConfig(rate=0.4, rates="even", ramp=None).chances(0.0, blocks=3) == [0.4] * 3


def test_blocks_are_left_out_independently_with_their_chances() -> None:
    config = LayerDropConfig(rate=0.6, ramp=None)
    drawn = [tuple(config.left_out(step, 0.5, blocks=3, seed=7)) for step in range(3000)]
    chances = config.chances(0.5, blocks=3)
    for each in product([False, True], repeat=3):
        wanted = math.prod(chance if out else 1 - chance for out, chance in zip(each, chances, strict=True))
        assert abs(drawn.count(each) / 3000 - wanted) < 4 * (wanted * (1 - wanted) / 3000) ** 0.5
    assert drawn != [tuple(config.left_out(step, 0.5, blocks=3, seed=8)) for step in range(3000)]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_block_that_is_left_out_is_not_computed_and_the_others_add_more(family: str) -> None:
    settings = {"rate": 0.6}
    model, drop = dropping(family, **settings)
    blocks = [model.get_submodule(path) for path in stack(model)]
    wanted_out = [False, True, False]
    step = step_that(drop, wanted_out, LayerDropConfig(rate=0.6, ramp=None))
    calls: list[int] = []
    handles = [
        next(block.children()).register_forward_hook(lambda *_, number=number: calls.append(number))
        for number, block in enumerate(blocks)
    ]
    with drop.during(step, 1.0, []):
        found = logits(model)
    assert calls == [0, 2]
    for handle in handles:
        handle.remove()

    def scaled(number: int) -> Any:
        def hook(block: Any, inputs: Any, named: Any, output: Any) -> Any:
            before = inputs[0] if inputs else named["hidden_states"]
            after = output[0] if isinstance(output, tuple) else output
            chance = 0.6 * (number + 1) / 3
            mixed = before if number == 1 else before + (after - before) / (1 - chance)
            return (mixed, *output[1:]) if isinstance(output, tuple) else mixed

        return hook

    for number, block in enumerate(blocks):
        block.register_forward_hook(scaled(number), with_kwargs=True)
    torch.testing.assert_close(found, logits(model))


def test_outside_of_steps_before_the_ramp_and_where_it_is_off_every_bit_is_what_it_is_without() -> None:
    wanted = logits(tiny("Llama", num_hidden_layers=3).eval())
    model, drop = dropping(rate=0.9)
    assert torch.equal(logits(model), wanted)
    model, drop = dropping(rate=0.9, ramp=5.0)
    with drop.during(3, 0.0, []):
        assert torch.equal(logits(model), wanted)
    model, drop = dropping()
    with drop.during(3, 1.0, []):
        assert torch.equal(logits(model), wanted)
    assert "forward" not in vars(model.get_submodule(stack(model)[0]))


def test_what_is_left_out_has_a_gradient_of_zero() -> None:
    model, drop = dropping(rate=0.6)
    step = step_that(drop, [False, True, False], LayerDropConfig(rate=0.6, ramp=None))
    with drop.during(step, 1.0, list(model.parameters())):
        model(input_ids=IDS).logits.sum().backward()
    norms = [
        sum(float(each.grad.abs().sum()) for each in model.get_submodule(path).parameters() if each.grad is not None)
        for path in stack(model)
    ]
    assert norms[0] > 0 and norms[1] == 0 and norms[2] > 0
    assert all(each.grad is not None for each in model.parameters())


def test_a_later_training_takes_the_place_of_an_earlier_one() -> None:
    model, _ = dropping(rate=0.9)
    block = model.get_submodule(stack(model)[0])
    drop = LayerDrop(model, [block], LayerDropConfig(rate=0.9, ramp=None), seed=1)
    drop.install()
    forward_hooks.restore(block)
    assert block.forward == type(block).forward.__get__(block)


def test_an_encoder_decoder_has_two_stacks() -> None:
    with pytest.raises(BackboneError, match="layer_drop"):
        stack(tiny("T5", head="Seq2SeqLM", **T5_SIZES))
