"""Which single weights train: by the formulas of FISH mask and LT-SFT, written a second time."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from workbench import adapters
from workbench.adapters import SparseTuning
from workbench.errors import BackboneError, ConfigError

# Stock PEFT uses what transformers calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

IDS = torch.tensor([[3, 60, 5, 61, 9, 60, 7], [4, 8, 15, 16, 23, 42, 2], [1, 2, 9, 9, 30, 31, 5]])
SHARE = 0.05


def _places(scores: dict[str, Tensor]) -> dict[str, set[int]]:
    return {
        path: set(score.flatten().topk(int(SHARE * score.numel())).indices.tolist()) for path, score in scores.items()
    }


def _chosen(model: Any, config: SparseTuning) -> dict[str, set[int]]:
    return {
        path.removeprefix("base_model.model."): set(places.tolist()) for path, places in config.chosen(model).items()
    }


def _gradients(model: PreTrainedModel) -> list[dict[str, Tensor]]:
    """Of each row, by the path of each linear layer in the blocks."""
    found = []
    for row in IDS:
        model.zero_grad()
        model.requires_grad_(True)(input_ids=row[None], labels=row[None]).loss.backward()
        named = dict(model.named_parameters())
        found.append(
            {
                name.removesuffix(".weight"): each.grad.clone()
                for name, each in named.items()
                if "_proj" in name and each.grad is not None
            }
        )
    return found


@pytest.mark.parametrize("by", ["fisher", "gradient"])
def test_the_weights_of_most_information_train(by: str, llama: PreTrainedModel) -> None:
    """Sung et al. 2021, equation 6: the mean over rows of the squared gradient of the row's likelihood."""
    rows = _gradients(copy.deepcopy(llama))
    scores = {
        path: sum((each[path].square() for each in rows), torch.zeros(()))
        if by == "fisher"
        else sum((each[path] for each in rows), torch.zeros(())).abs()
        for path in rows[0]
    }
    config = SparseTuning.model_validate({"method": "sparse", "by": by, "share": SHARE})
    model: Any = adapters.attach(llama.requires_grad_(False), config, seed=0)
    start = model(input_ids=IDS).logits
    config.choose(model, (model(input_ids=row[None], labels=row[None]).loss for row in IDS))
    assert _chosen(model, config) == _places(scores)
    assert torch.equal(model(input_ids=IDS).logits, start), "values are zero wherever they stand"
    trains = {name for name, each in model.named_parameters() if each.requires_grad}
    assert trains and all("supertuning_values" in name for name in trains), "the weights are frozen again"
    assert all(each.grad is None for each in model.parameters())


def test_the_largest_weights_are_those_of_super(llama: PreTrainedModel) -> None:
    config = SparseTuning.model_validate({"method": "sparse", "by": "magnitude", "share": SHARE})
    scores = {name.removesuffix(".weight"): each.abs() for name, each in llama.named_parameters() if "_proj" in name}
    assert _chosen(adapters.attach(llama, config, seed=0), config) == _places(scores)


def test_the_weights_that_moved_furthest_train(llama: PreTrainedModel, tmp_path: Path) -> None:
    """Ansell et al. 2022, section 3.1: those of the largest |w1 - w0|, and they begin at w0."""
    ends = copy.deepcopy(llama)
    generator = torch.Generator().manual_seed(5)
    ways = {}
    with torch.no_grad():
        for name, each in ends.named_parameters():
            way = torch.randn(each.shape, generator=generator)
            each += way
            if "_proj" in name:
                ways[name.removesuffix(".weight")] = (each - dict(llama.named_parameters())[name]).abs()
    ends.save_pretrained(tmp_path / "run" / "adapter")
    config = SparseTuning.model_validate(
        {"method": "sparse", "by": "movement", "share": SHARE, "trained": str(tmp_path / "run")}
    )
    before = llama(input_ids=IDS).logits
    model: Any = adapters.attach(llama, config, seed=0)
    assert _chosen(model, config) == _places(ways)
    assert torch.equal(model(input_ids=IDS).logits, before)


def test_a_model_that_is_another_or_has_not_moved_is_refused(llama: PreTrainedModel, tmp_path: Path) -> None:
    llama.save_pretrained(tmp_path / "same")
    config = SparseTuning.model_validate({"method": "sparse", "by": "movement", "trained": str(tmp_path / "same")})
    with pytest.raises(BackboneError, match=r"no weight moved .* Name a model that has trained"):
        adapters.attach(copy.deepcopy(llama), config, seed=0)
    config = SparseTuning.model_validate({"method": "sparse", "by": "movement", "trained": str(tmp_path / "none")})
    with pytest.raises(ConfigError, match=r"holds no model\. Write adapter.trained=RUN, a run of full"):
        adapters.attach(copy.deepcopy(llama), config, seed=0)


def test_a_damaged_model_is_refused(llama: PreTrainedModel, tmp_path: Path) -> None:
    llama.save_pretrained(tmp_path)
    (weights,) = tmp_path.glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-100])
    config = SparseTuning.model_validate({"method": "sparse", "by": "movement", "trained": str(tmp_path)})
    with pytest.raises(BackboneError, match="cannot be read as a LlamaForCausalLM"):
        adapters.attach(llama, config, seed=0)


def test_a_stock_peft_loads_the_chosen_places(llama: PreTrainedModel, tmp_path: Path) -> None:
    llama.save_pretrained(tmp_path / "base")
    config = SparseTuning.model_validate({"method": "sparse", "share": SHARE})
    model: Any = adapters.attach(llama, config, seed=0)
    config.choose(model, (model(input_ids=row[None], labels=row[None]).loss for row in IDS))
    with torch.no_grad():
        for each in model.parameters():
            if each.requires_grad:
                torch.nn.init.normal_(each)
    adapters.save(model, tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    stock = PeftModel.from_pretrained(base, str(tmp_path / "adapter"))
    torch.testing.assert_close(stock(input_ids=IDS).logits, model(input_ids=IDS).logits)
