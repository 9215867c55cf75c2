"""2:4 sparsity: its law, the frozen backbone under an adapter, what a stock install reloads, and what is left alone."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from tests.adapters.contract import attach, build, inputs, logits, section
from tests.conftest import tiny
from workbench import adapters
from workbench.adapters import Lora, anatomy
from workbench.adapters.weights import semi_structured
from workbench.config import ModelConfig
from workbench.errors import BackboneError
from workbench.models import backbones

# Stock PEFT uses what transformers calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")


def pruned_by_hand(weight_OI: Tensor) -> Tensor:
    """The mask written a second time, number by number."""
    rows = weight_OI.bfloat16().float().abs().tolist()
    wanted = torch.zeros_like(weight_OI)
    for output, row in enumerate(rows):
        for first in range(0, len(row), 4):
            group = range(first, first + 4)
            for kept in sorted(group, key=lambda place: (-row[place], place))[:2]:
                wanted[output, kept] = weight_OI[output, kept]
    return wanted


def load(folder: str | Path, **settings: Any) -> PreTrainedModel:
    return backbones.load(ModelConfig(id=str(folder), **settings), None).model


def weights(model: nn.Module) -> dict[str, Tensor]:
    """The weights of the linear layers in the blocks, outputs by inputs, by path."""
    return {path: anatomy.dense_weight(model.get_submodule(path)) for path in anatomy.linear_modules(model)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_of_four_inputs_the_two_largest_stay_and_of_equal_ones_the_first(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight_OI = torch.randn(8, 32).round(decimals=1).to(dtype)  # in tenths there are many ties
    weight_OI[0] = 0.5
    wanted = pruned_by_hand(weight_OI)
    semi_structured.drop_smaller(weight_OI)
    assert torch.equal(weight_OI, wanted)
    assert weight_OI[0].tolist() == [0.5, 0.5, 0.0, 0.0] * 8
    semi_structured.drop_smaller(weight_OI)
    assert torch.equal(weight_OI, wanted)  # a backbone that is sparse already stays as it is


def test_a_checkpoint_in_float32_and_its_copy_in_bfloat16_lose_the_same_weights() -> None:
    torch.manual_seed(0)
    whole_OI = torch.randn(64, 64)
    rounded_OI = whole_OI.bfloat16()
    semi_structured.drop_smaller(whole_OI)
    semi_structured.drop_smaller(rounded_OI)
    assert torch.equal(whole_OI == 0, rounded_OI == 0)


@pytest.mark.parametrize("kind", ["Llama", "GPT2", "Bert", "T5", "ViT"])
def test_the_layers_of_the_blocks_are_pruned_and_nothing_else(kind: str) -> None:
    model = build(kind)
    before = {name: each.clone() for name, each in model.state_dict().items()}
    layers = weights(model)
    wanted = {path: pruned_by_hand(each) for path, each in layers.items()}
    semi_structured.prune(model)
    for path, weight_OI in weights(model).items():
        assert torch.equal(weight_OI, wanted[path])
    for name, each in model.state_dict().items():
        if name.removesuffix(".weight") not in layers:
            assert torch.equal(each, before[name])
    named = semi_structured.pattern(model)
    assert named is not None
    assert [path for path, _ in model.named_modules() if re.fullmatch(named, path)] == list(layers)


def test_left_out_it_is_the_backbone_bit_for_bit_and_its_files_stay(stories: str) -> None:
    from transformers import AutoModelForCausalLM

    stock = AutoModelForCausalLM.from_pretrained(stories)
    files = {path.name: path.read_bytes() for path in Path(stories).iterdir() if path.is_file()}
    pruned = backbones.load(ModelConfig(id=stories, weights="float32", sparsity="2:4"), None)
    assert "saves neither time nor memory" in " ".join(pruned.notes)
    assert not torch.equal(pruned.model.model.layers[0].mlp.up_proj.weight, stock.model.layers[0].mlp.up_proj.weight)
    assert files == {path.name: path.read_bytes() for path in Path(stories).iterdir() if path.is_file()}
    plain = load(stories, weights="float32")
    assert semi_structured.pattern(plain) is None
    assert all(torch.equal(each, stock.state_dict()[name]) for name, each in plain.state_dict().items())


@pytest.mark.parametrize("method", ["lora", "dora", "pissa", "oft", "ia3", "houlsby"])
def test_the_backbone_stays_sparse_and_frozen_under_an_adapter(method: str) -> None:
    model = build("Llama")
    semi_structured.prune(model)
    layers = {path: model.get_submodule(path).get_parameter("weight") for path in anatomy.linear_modules(model)}
    before = {path: each.detach().clone() for path, each in layers.items()}
    attached = attach(model, section(method))
    trained = [each for each in attached.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.01, weight_decay=0.1)
    attached.train()(**inputs(model)).loss.backward()
    optimizer.step()
    for path, each in layers.items():
        assert not each.requires_grad and each.grad is None and torch.equal(each, before[path])


@pytest.mark.parametrize("name", ["Llama", "GPT2"])
def test_the_lines_of_the_card_load_the_adapter_over_the_same_backbone(name: str, tmp_path: Path) -> None:
    tiny(name).save_pretrained(tmp_path / "base")
    attached = adapters.attach(load(tmp_path / "base", weights="float32", sparsity="2:4"), Lora(rank=2), seed=0)
    with torch.no_grad():
        for each in attached.parameters():
            if each.requires_grad:
                each.add_(0.1)
    adapters.save(attached, tmp_path / "adapter")
    card = (tmp_path / "adapter" / "README.md").read_text()
    assert "pruned to 2:4 sparsity" in card
    (code,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    names: dict[str, Any] = {}
    exec(code.replace('"folder"', repr(str(tmp_path / "adapter"))), names)
    stock: PeftModel = names["model"]
    torch.testing.assert_close(logits(stock), logits(attached), rtol=1e-5, atol=1e-5)
    ours = adapters.load(load(tmp_path / "base", weights="float32", sparsity="2:4"), tmp_path / "adapter")
    torch.testing.assert_close(logits(ours), logits(attached), rtol=0, atol=0)
    dense = adapters.load(load(tmp_path / "base", weights="float32"), tmp_path / "adapter")
    assert (logits(dense) - logits(attached)).abs().max() > 1e-3


def test_of_a_transposed_layer_the_inputs_are_grouped() -> None:
    model = build("GPT2")
    semi_structured.prune(model)
    layer: Any = model.get_submodule(anatomy.linear_modules(model)[0])
    assert isinstance(layer, Conv1D)
    assert int((layer.weight.view(-1, 4, layer.nf) != 0).sum(1).max()) == 2


@pytest.mark.parametrize(
    ("kind", "sizes", "said"),
    [
        ("Mixtral", {}, "take a dense backbone"),
        ("ResNet", {}, "no linear layers"),
        ("Llama", {"intermediate_size": 30}, "has 30 inputs, which is no multiple of 4"),
    ],
)
def test_what_cannot_be_pruned_is_refused(kind: str, sizes: dict[str, int], said: str) -> None:
    model = build(kind, **sizes)
    before = {name: each.clone() for name, each in model.state_dict().items()}
    with pytest.raises(BackboneError, match=said):
        semi_structured.prune(model)
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())
