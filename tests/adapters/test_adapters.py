"""The contract that every method keeps on every family, and stock PEFT reading what was saved."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from workbench import adapters
from workbench.adapters import METHODS, Full, Lora
from workbench.errors import BackboneError
from workbench.models import weight_formats

# Stock PEFT uses what transformers calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

IDS = torch.tensor([[3, 60, 5, 61, 9, 60, 7]])
NEW = [60, 61]
METHOD = pytest.mark.parametrize("method", ["lora", "rslora", "dora"])


def _attach(model: PreTrainedModel, method: str = "lora", new: list[int] | None = None) -> nn.Module:
    config = Lora.model_validate({"method": method, "rank": 3, "alpha": 6.0})
    return adapters.attach(model, config, seed=0, new_token_ids=new or [])


def _disturb(model: nn.Module) -> nn.Module:
    """Give every trainable tensor a value that it would not have at the start."""
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    return model


@torch.no_grad()
def _logits(model: nn.Module, ids: Tensor = IDS) -> Tensor:
    logits: Tensor = model.eval()(input_ids=ids).logits
    return logits.float()


def _saved(model: nn.Module, folder: Path) -> dict[str, Tensor]:
    folder.mkdir()
    adapters.save(model, folder)
    return load_file(folder / "adapter_model.safetensors")


def test_every_method_is_said_in_its_own_section() -> None:
    for name, section in METHODS.items():
        assert section.model_validate({"method": name}).method == name


@pytest.mark.nightly(but="each value once")
@METHOD
def test_the_identity_at_the_start_and_a_gradient_for_every_trainable_tensor(
    family: PreTrainedModel, method: str
) -> None:
    wanted = _logits(family)
    model = _attach(family, method)
    torch.testing.assert_close(_logits(model), wanted, rtol=1e-5, atol=1e-5)
    _disturb(model)(input_ids=IDS, labels=IDS).loss.backward()
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    assert trained and all("lora" in name for name in trained)
    for name, each in model.named_parameters():
        assert (each.grad is not None and bool(each.grad.any())) == (name in trained), name


@METHOD
def test_saved_by_us_and_loaded_by_stock_peft(family: PreTrainedModel, method: str, tmp_path: Path) -> None:
    bare = copy.deepcopy(family)
    model = _disturb(_attach(family, method))
    wanted = _logits(model)
    assert not torch.allclose(wanted, _logits(bare), atol=1e-2)
    _saved(model, tmp_path / "adapter")
    assert "More Information Needed" not in (tmp_path / "adapter" / "README.md").read_text()

    stock = PeftModel.from_pretrained(copy.deepcopy(bare), str(tmp_path / "adapter"))
    torch.testing.assert_close(_logits(stock), wanted, rtol=1e-5, atol=1e-5)
    ours = adapters.load(copy.deepcopy(bare), tmp_path / "adapter")
    torch.testing.assert_close(_logits(ours), wanted, rtol=1e-5, atol=1e-5)
    assert not any(parameter.requires_grad for parameter in ours.parameters())
    with stock.disable_adapter():
        torch.testing.assert_close(_logits(stock), _logits(bare), rtol=1e-5, atol=1e-5)

    merged = adapters.merge(ours, Lora())
    assert type(merged) is type(bare)
    assert merged.state_dict().keys() == bare.state_dict().keys()
    torch.testing.assert_close(_logits(merged), wanted, rtol=1e-4, atol=1e-4)


@METHOD
def test_parameters_are_as_many_as_the_shapes_say(family: PreTrainedModel, method: str) -> None:
    base = sum(parameter.numel() for parameter in family.parameters())
    weights = [family.get_parameter(f"{path}.weight") for path in adapters.anatomy.linear_modules(family)]
    shapes = [tuple(weight.shape) for weight in weights]
    expected = sum(3 * (rows + columns) for rows, columns in shapes)
    if method == "dora":  # one magnitude for each output; GPT-2's Conv1D stores its weights transposed
        transposed = type(family).__name__ == "GPT2LMHeadModel"
        expected += sum(columns if transposed else rows for rows, columns in shapes)
    assert adapters.count(_attach(family, method)) == (base + expected, expected)


def test_full_fine_tuning_trains_everything_and_saves_a_stock_model(llama: PreTrainedModel, tmp_path: Path) -> None:
    base = sum(parameter.numel() for parameter in llama.parameters())
    model = adapters.attach(llama.requires_grad_(False), Full(), seed=0, new_token_ids=[])
    assert adapters.count(model) == (base, base)
    wanted = _logits(_disturb(model))
    (tmp_path / "model").mkdir()
    adapters.save(model, tmp_path / "model")
    assert not adapters.is_adapter(tmp_path / "model")
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    torch.testing.assert_close(_logits(stock), wanted)
    assert adapters.merge(model, Full()) is model


def test_the_seed_alone_decides_where_training_starts(llama: PreTrainedModel) -> None:
    torch.manual_seed(5)
    first = _attach(copy.deepcopy(llama)).state_dict()
    drawn = torch.rand(1)
    torch.manual_seed(6)
    second = _attach(copy.deepcopy(llama)).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(1), drawn), "attaching must not move the global random state"
    other = adapters.attach(llama, Lora(rank=3), seed=1, new_token_ids=[]).state_dict()
    assert any(not torch.equal(first[name], other[name]) for name in first if "lora_A" in name)


def test_a_foreign_adapter_is_refused_with_the_tensors_that_do_not_fit(llama: PreTrainedModel, tmp_path: Path) -> None:
    wide = copy.deepcopy(llama)
    _saved(_attach(llama), tmp_path / "adapter")
    wide.model.layers[0].self_attn.q_proj = nn.Linear(64, 64, bias=False)
    with pytest.raises(BackboneError) as caught:
        adapters.load(wide, tmp_path / "adapter")
    assert "does not fit the backbone" in str(caught.value) and "q_proj" in str(caught.value)


# Rows of added tokens. The stock user's order is: load the backbone, resize it, load the adapter.


def _with_tokens(tied: bool, folder: Path, **settings: Any) -> tuple[PreTrainedModel, Path]:
    """A saved backbone of 60 tokens, and the same with two more."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=4, tie_word_embeddings=tied, initializer_range=0.2, **settings)
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(folder)
    model.resize_token_embeddings(62)
    return model.requires_grad_(False), folder


@pytest.mark.parametrize("tied", [True, False])
def test_only_the_new_rows_are_trained_and_saved(tied: bool, tmp_path: Path) -> None:
    base, folder = _with_tokens(tied, tmp_path / "base")
    model = _attach(base, new=NEW)
    rows = [each for name, each in model.named_parameters() if each.requires_grad and "token" in name]
    assert [tuple(each.shape) for each in rows] == [(2, 32)] * (1 if tied else 2)
    _disturb(model)
    wanted = _logits(model)

    tensors = _saved(model, tmp_path / "adapter")
    others = {name: tensor for name, tensor in tensors.items() if "lora_" not in name}
    assert {tuple(tensor.shape) for tensor in others.values()} == {(2, 32)}
    assert len(others) == (1 if tied else 2)
    size = (tmp_path / "adapter" / "adapter_model.safetensors").stat().st_size
    assert size < sum(tensor.nbytes for tensor in tensors.values()) + 8192

    resized = AutoModelForCausalLM.from_pretrained(folder)
    resized.resize_token_embeddings(62)
    stock: Any = PeftModel.from_pretrained(resized, str(tmp_path / "adapter"))
    torch.testing.assert_close(_logits(stock), wanted, rtol=1e-5, atol=1e-5)

    merged = stock.merge_and_unload()
    original = AutoModelForCausalLM.from_pretrained(folder)
    for module in ("get_input_embeddings", "get_output_embeddings"):
        found, old = (getattr(each, module)().weight for each in (merged, original))
        assert torch.equal(found[:60], old)
    delta = next(tensor for name, tensor in others.items() if "embed_tokens" in name)
    assert torch.equal(merged.get_input_embeddings().weight[60:], delta)


@pytest.mark.parametrize("tied", [True, False])
def test_new_rows_over_half_precision_weights_computed_in_float32(tied: bool, tmp_path: Path) -> None:
    base, _ = _with_tokens(tied, tmp_path / "base")
    reference = _attach(copy.deepcopy(base).bfloat16().float(), new=NEW)
    stored = base.bfloat16()
    weight_formats.compute_in(stored, torch.float32)
    bare = copy.deepcopy(stored)
    model = _attach(stored, new=NEW)
    torch.testing.assert_close(_logits(model), _logits(reference))
    _disturb(model)(input_ids=IDS, labels=IDS).loss.backward()
    rows = [each for name, each in model.named_parameters() if each.requires_grad and "token" in name]
    assert all(each.dtype == torch.float32 and each.grad is not None and each.grad.any() for each in rows)
    _saved(model, tmp_path / "adapter")
    torch.testing.assert_close(_logits(adapters.load(bare, tmp_path / "adapter")), _logits(model))


def test_new_rows_of_a_head_with_a_bias_are_refused(family: PreTrainedModel) -> None:
    if type(family).__name__ == "PhiForCausalLM":
        with pytest.raises(BackboneError, match=r"model.new_tokens: the output head of PhiForCausalLM has a bias"):
            _attach(family, new=NEW)
        return
    wanted = _logits(family)
    torch.testing.assert_close(_logits(_attach(family, new=NEW)), wanted, rtol=1e-5, atol=1e-5)


def test_the_saved_configuration_names_what_stock_peft_needs(llama: PreTrainedModel, tmp_path: Path) -> None:
    _saved(_attach(llama, "rslora"), tmp_path / "adapter")
    written = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (written["peft_type"], written["task_type"], written["r"]) == ("LORA", "CAUSAL_LM", 3)
    assert written["use_rslora"] and not written["use_dora"] and written["lora_alpha"] == 6
    assert adapters.is_adapter(tmp_path / "adapter")
