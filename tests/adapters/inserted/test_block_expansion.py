"""Block expansion: where new blocks stand, that caches and checkpointing know them, and the deeper model of a merge."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.adapters.contract import attach, build, ids
from tests.conftest import tiny
from workbench import adapters
from workbench.adapters import BlockExpansion
from workbench.errors import ConfigError
from workbench.training import activation_checkpointing

LAYERS = {"num_hidden_layers": 3}
EVERY_TWO = BlockExpansion(every=2)


def expanded(family: str = "Llama", **sizes: Any) -> Any:
    """A model of three blocks whose new ones, behind the second and the third, do something."""
    model = attach(tiny(family, **LAYERS, **sizes), EVERY_TWO)
    torch.manual_seed(3)
    for each in model.parameters():
        if each.requires_grad and not each.any():
            torch.nn.init.normal_(each, std=0.1)
    return model.eval()


@pytest.mark.parametrize(("every", "wanted"), [(1, [0, 1, 2]), (2, [1, 2]), (3, [2]), (4, [2])])
def test_a_new_block_follows_every_few_and_the_last(every: int, wanted: list[int]) -> None:
    model = tiny("Llama", **LAYERS)
    assert BlockExpansion(every=every).modules(model) == [f"model.layers.{number}" for number in wanted]


def test_only_whole_copies_train_whose_outputs_begin_at_zero() -> None:
    model = attach(tiny("Llama", **LAYERS), EVERY_TWO)
    trained = {name for name, each in model.named_parameters() if each.requires_grad}
    inside = ".expansion.expansion_blocks.default."
    assert all(inside in name for name in trained)
    plain = dict(model.get_base_model().named_parameters())
    for name in trained:
        path = name.removeprefix("base_model.model.").replace(inside, ".")
        zero = path.endswith(("o_proj.weight", "down_proj.weight"))
        value = dict(model.named_parameters())[name]
        assert not value.any() if zero else torch.equal(value, plain[path])
    assert len(trained) == 2 * sum("model.layers.1." in path and "expansion" not in path for path in plain)


@pytest.mark.parametrize("family", ["Llama", "Gemma3Text", "GPT2"])
def test_a_merge_is_a_stock_model_with_more_blocks(family: str, tmp_path: Path) -> None:
    model = expanded(family)
    wanted = model(input_ids=ids).logits
    merged = adapters.merge(model, EVERY_TWO)
    merged.save_pretrained(tmp_path)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert stock.config.num_hidden_layers == 5
    torch.testing.assert_close(stock(input_ids=ids).logits, wanted, rtol=1e-4, atol=1e-4)
    indices = [each.layer_idx for each in stock.modules() if isinstance(getattr(each, "layer_idx", None), int)]
    assert sorted(set(indices)) == list(range(5))


@pytest.mark.parametrize("family", ["Llama", "Gemma3Text"])
def test_a_cache_of_keys_and_values_holds_those_of_new_blocks(family: str) -> None:
    model = expanded(family)
    settings = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    cached = model.generate(input_ids=ids, use_cache=True, **settings)
    assert torch.equal(cached, model.generate(input_ids=ids, use_cache=False, **settings))
    with model.disable_adapter():
        plain = tiny(family, **LAYERS).eval().generate(input_ids=ids, use_cache=True, **settings)
        assert torch.equal(model.generate(input_ids=ids, use_cache=True, **settings), plain)


def test_recomputed_activations_give_the_same_gradients() -> None:
    gradients = []
    for recomputed in (False, True):
        model = expanded().train()
        if recomputed:
            activation_checkpointing.keep(model, True)
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        gradients.append({name: each.grad for name, each in model.named_parameters() if each.requires_grad})
    for name, wanted in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], wanted)


def test_several_can_be_loaded_over_one_backbone(tmp_path: Path) -> None:
    wanted = {}
    for name in ("first", "second"):
        model = expanded()
        for each in model.parameters():
            each.data *= 1.0 if name == "first" or not each.requires_grad else 1.5
        wanted[name] = model(input_ids=ids).logits
        adapters.save(model, tmp_path / name)
    both: Any = adapters.load(tiny("Llama", **LAYERS), tmp_path / "first", name="first")
    both = adapters.load(both, tmp_path / "second", name="second")
    for name, found in wanted.items():
        both.set_adapter(name)
        torch.testing.assert_close(both(input_ids=ids).logits, found)


@pytest.mark.parametrize("kind", ["Bert-masked", "T5", "Swin", "ResNet", "Mixtral"])
def test_blocks_that_cannot_add_nothing_are_refused_with_a_cure(kind: str) -> None:
    with pytest.raises(ConfigError, match=r"Write adapter.method="):
        attach(build(kind), EVERY_TWO)


def test_a_block_that_adds_something_all_the_same_is_found_out() -> None:
    """A bias behind the output projection, which no name tells."""
    model = tiny("Llama", **LAYERS)
    for block in model.model.layers:  # type: ignore[union-attr, operator]
        block.mlp.register_forward_hook(lambda _, __, output: output + 0.1)  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match="add something even where"):
        attach(model, EVERY_TWO)
