"""Members of unlike methods in one bank: each computes, learns, and is saved and loaded as if it were alone."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file

from tests.adapters.banks.test_bank import (
    all_logits,
    disturbed,
    double,
    gradients,
    ids,
    plain,
    require_alone,
    routed,
    trainable,
)
from workbench import adapters
from workbench.adapters import METHODS
from workbench.adapters.banks import bank, bank_methods
from workbench.adapters.banks.bank_layers import MemberRows
from workbench.adapters.row_dropout import RowDraw, drawing
from workbench.config import ModelConfig
from workbench.errors import ConfigError
from workbench.models import backbones

# Stock PEFT uses what transformers calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

SMALL = {
    "lora": {"rank": 3, "alpha": 6},
    "dora": {"rank": 2, "alpha": 3},
    **{key: {"activation": "gelu", "width": 5} for key in ("houlsby", "pfeiffer", "parallel")},
    **{key: {"block": 4} for key in ("oft", "boft", "c3a")},
    **{key: {"rank": 4} for key in ("vera", "miss", "pvera")},
    **{key: {"coefficients": 100} for key in ("fourierft", "waveft")},
}
"""Settings of tiny adapters, without units that are off."""
COMMON = ("lora", "dora", "ia3", "houlsby", "lora", "pfeiffer", "parallel", "layernorm", "oft")


def method(name: str, **settings: Any) -> Any:
    return METHODS[name].model_validate({"method": name, **SMALL.get(name, {}), **settings})


@pytest.mark.nightly(but=["CausalLM-Llama", "SequenceClassification-Bert"])
@pytest.mark.parametrize(
    ("head", "name"), [("CausalLM", "Llama"), ("CausalLM", "GPT2"), ("SequenceClassification", "Bert")]
)
def test_each_of_many_methods_is_what_it_is_alone(head: str, name: str) -> None:
    """All pairs in one pass: each has the logits and gradients of an adapter of its own backbone."""
    names = [each for each in COMMON if name != "GPT2" or each != "oft"] + ["bitfit"] * (name != "Llama")
    require_alone(double(head, name), [method(each) for each in names], [1, 2] * 4 + [1] * (len(names) - 8))


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["Llama", "Bert"])
@pytest.mark.parametrize("name", bank_methods.OWN_LAYERS)
def test_every_method_beside_lora(name: str, family: str) -> None:
    base = double("CausalLM" if family == "Llama" else "SequenceClassification", family)
    if (family == "Llama" and name in ("bitfit", "beft")) or name == "pvera":
        pytest.skip("no biases; its noise is drawn by row, which the test of noise has")
    require_alone(base, [method("lora"), method(name), method("lora")], (2, 1, 2), silent=True)


def test_without_lora_and_with_one_member(tmp_path: Path) -> None:
    """The names of parameters, by which checkpoints know them, depend on no other member."""
    base = double("SequenceClassification", "Bert")
    require_alone(base, [method("ia3"), method("houlsby")], (2, 3))
    pair = bank.attach(copy.deepcopy(base), [method("lora"), method("ia3")], seeds=[0, 1])
    single = bank.attach(copy.deepcopy(base), [method("ia3")], seeds=[1], numbers=[1])
    assert pair.parameters_of("member0001").keys() == single.parameters_of("member0001").keys()


def test_noise_of_each_row_is_what_it_is_alone() -> None:
    """Dropout of inputs, outputs and rotations, and drawn noise: functions of each member's own seed, step and rows."""
    base = double("CausalLM", "Llama").float()
    names = ("lora", "dora", "pvera", "houlsby", "boft")
    configs = [method(name, dropout=0.4) for name in names]
    seeds, shares = range(4, 9), (1, 2, 1, 3, 1)
    wanted, made = plain(base, configs, list(seeds)), bank.attach(copy.deepcopy(base), configs, seeds=seeds)
    made.train()
    for member, model in zip(made.members, wanted, strict=True):
        disturbed(made.parameters_alone(member)), disturbed(trainable(model))
    rows = ids.repeat(2, 1)[: sum(shares)]
    starts = [sum(shares[:number]) for number in range(5)]
    draws = [
        RowDraw(seed, 3 + seed, torch.arange(start, start + share).numpy())
        for seed, start, share in zip(seeds, starts, shares, strict=True)
    ]
    with routed(made, rows, shares), drawing(draws, rows.device):
        logits = made.model(input_ids=rows).logits
    for model, draw, start, share in zip(wanted, draws, starts, shares, strict=True):
        with drawing([draw], rows.device):
            own = model.train()(input_ids=rows[start : start + share]).logits
        torch.testing.assert_close(logits[start : start + share], own, rtol=1e-5, atol=1e-5)
        with drawing([draw._replace(step=99)], rows.device):
            assert not torch.allclose(model(input_ids=rows[start : start + share]).logits, own)


@pytest.mark.nightly(but=["nf4"])
@pytest.mark.parametrize("weights", ["nf4", "int8", "bfloat16"])
def test_over_every_kind_of_stored_weight(weights: str, stories: str) -> None:
    config = ModelConfig.model_validate({"id": stories, "weights": weights, "compute": "float32"})
    base = backbones.load(config, backbones.tokenizer(config)).model
    configs = [method(name) for name in ("lora", "dora", "ia3", "houlsby", "layernorm")]
    seeds, shares = range(5), (1, 1, 1, 1, 1)
    wanted, made = plain(base, configs, list(seeds)), bank.attach(base, configs, seeds=seeds)
    made.train()
    for member, model in zip(made.members, wanted, strict=True):
        disturbed(made.parameters_alone(member)), disturbed(trainable(model))
    with routed(made, ids, shares):
        logits = made.model(input_ids=ids).logits
        logits.logsumexp(-1).sum().backward()
    for number, (member, model) in enumerate(zip(made.members, wanted, strict=True)):
        own_logits = model.train()(input_ids=ids[number : number + 1]).logits
        own_logits.logsumexp(-1).sum().backward()
        torch.testing.assert_close(logits[number : number + 1], own_logits, rtol=1e-4, atol=1e-4)
        found = gradients(made.parameters_alone(member))
        own = gradients(trainable(model))
        assert (found - own).norm() <= 1e-4 * own.norm()


@pytest.mark.filterwarnings("ignore:Unsupported layer type:UserWarning")
def test_saved_as_adapters_that_are_alone_and_loaded_back(tmp_path: Path) -> None:
    """The same files, which stock PEFT loads where it knows the method; loaded together, and one that joins later."""
    base = double("SequenceClassification", "Bert")
    configs = [method(name) for name in ("lora", "dora", "ia3", "houlsby", "layernorm")]
    made = bank.attach(copy.deepcopy(base), configs, seeds=range(5))
    folders = [tmp_path / config.method for config in configs]
    for member, folder, model in zip(made.members, folders, plain(base, configs, range(5)), strict=True):
        disturbed(made.parameters_alone(member)), disturbed(trainable(model))
        made.save(member, folder)
        adapters.save(model, tmp_path / "alone")
        own = load_file(tmp_path / "alone" / "adapter_model.safetensors")
        found = load_file(folder / "adapter_model.safetensors")
        assert found.keys() == own.keys() and all(torch.equal(found[key], own[key]) for key in own)
        assert {path.name for path in folder.iterdir()} == {path.name for path in (tmp_path / "alone").iterdir()}
    stock = [PeftModel.from_pretrained(copy.deepcopy(base), str(folder)).eval() for folder in folders]
    wanted = torch.stack([each(input_ids=ids).logits for each in stock])
    loaded = bank.load(copy.deepcopy(base), folders)
    assert not trainable(loaded.model)
    torch.testing.assert_close(all_logits(loaded, {"input_ids": ids}), wanted, rtol=1e-10, atol=1e-12)
    with loaded.only(loaded.members[2]):
        torch.testing.assert_close(loaded.model(input_ids=ids).logits, wanted[2], rtol=1e-10, atol=1e-12)

    joined = bank.load(copy.deepcopy(base), folders[1:4])
    name = joined.join(folders[0])
    joined.leave(joined.members[1])
    assert joined.members == ("member0000", "member0002", name)
    torch.testing.assert_close(all_logits(joined, {"input_ids": ids}), wanted[[1, 3, 0]], rtol=1e-10, atol=1e-12)
    with joined.route([MemberRows("nobody", 5)], length=5):
        torch.testing.assert_close(joined.model(input_ids=ids).logits, base(input_ids=ids).logits)


def test_every_method_is_held_or_refused_by_name() -> None:
    plain_lora = {"lora", "rslora", "lora+"}
    ours = {name for name in METHODS if METHODS[name].__module__.startswith("workbench.adapters.")}
    assert {*bank_methods.OWN_LAYERS, *plain_lora} | bank_methods.WHY.keys() == ours
    assert not ({*bank_methods.OWN_LAYERS, *plain_lora} & bank_methods.WHY.keys())


def test_a_bank_of_lora_alone_takes_plain_lora(tmp_path: Path) -> None:
    base = double("CausalLM", "Llama")
    for name in ("lora", "ia3"):
        adapters.save(adapters.attach(copy.deepcopy(base), method(name), seed=0), tmp_path / name)
    made = bank.load(base, [tmp_path / "lora"])
    with pytest.raises(ConfigError, match="ia3: no plain LoRA adapter"):
        made.join(tmp_path / "ia3")
    assert made.members == ("member0000",)
