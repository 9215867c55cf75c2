"""The contract: what every method keeps on every family of backbones and every weight format, or refuses to promise.

A fresh adapter changes nothing, or says why; every trainable tensor learns and nothing else moves; what is saved
gives the same logits in another process; switched off, the backbone is back bit for bit; merged, nothing changes, or
the merge is refused; and the parameters are as many as predicted.
"""

from __future__ import annotations

import copy
import subprocess
from collections.abc import Callable
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from tests import forked, matrix
from tests.adapters.contract import Contract, attach, bare, build, ids, logits, section
from tests.conftest import Records, record_cell, tiny
from tests.matrix import EXAMPLE, PICTURES
from workbench import adapters
from workbench.adapters import Full
from workbench.adapters.method import HALF_OR_FULL
from workbench.adapters.updates.lora_starts import QUANTISED
from workbench.config import ModelConfig, RunConfig, model_heads
from workbench.errors import BackboneError, ConfigError
from workbench.models import backbones
from workbench.schema import parse

# Stock PEFT uses what transformers calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")


CELLS: dict[str, tuple[str, Callable[[], list[Any]]]] = {
    "test_every_method_on_every_family": ("family, name", matrix.method_on_backbone),
    "test_every_method_over_every_weight_format": ("weights, name", matrix.method_over_weights),
    "test_every_method_on_every_family_over_weight_formats": (
        "family, weights, name",
        matrix.method_on_backbone_over_weights,
    ),
    "test_every_method_comes_off_without_a_trace": ("family, name", matrix.method_off_a_backbone),
}
"""Parameters of the tests, and where their cells are listed."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make nightly cells only where they are asked for: making thousands takes every worker seconds."""
    if metafunc.function.__name__ in CELLS:
        names, cells = CELLS[metafunc.function.__name__]
        whole = "nightly" in metafunc.config.option.markexpr
        metafunc.parametrize(names, [cell for cell in cells() if whole or not cell.marks])


def test_every_method_on_every_family(family: str, name: str, tmp_path: Path, record_property: Records) -> None:
    record_cell(record_property, method=name, family=family, weights="float32")
    base, config = copy.deepcopy(bare(family)), section(name)
    if reason := config.refusal(base):
        record_property("refused", reason)
        with pytest.raises(ConfigError) as caught:
            attach(base, config)
        assert str(caught.value) == f"adapter.method={name}: {reason}"
        assert any(word in reason for word in ("Write", "Take", "Use")), "a refusal names a cure"
        return
    before, fresh = logits(base), lambda: copy.deepcopy(bare(family))
    deep = 5 if (family, name) == ("MobileNetV2", "hra") else 1  # it multiplies the weights of 52 layers in a row
    Contract(attach(base, config), config, before, fresh, tmp_path, tolerance=deep * 1e-6).check()


def test_every_method_comes_off_without_a_trace(family: str, name: str, tmp_path: Path) -> None:
    base, config = copy.deepcopy(bare(family)), section(name)
    if config.refusal(base):
        pytest.skip("refused: the method on this family")
    before, found = logits(base), traces(base)
    model = attach(base, config)
    start = logits(model)
    Contract(model, config, before, lambda: base, tmp_path).learns()
    detached = adapters.detach(model)
    assert detached is base
    assert traces(base) == found
    assert torch.equal(logits(base), before)
    assert torch.equal(logits(attach(base, config)), start), "the next one starts as the first did"


def traces(model: PreTrainedModel) -> dict[str, Any]:
    """All that an adapter might leave on a backbone."""
    return {
        "configuration": model.config.to_dict(),
        "attributes": set(vars(model)),
        "modules": {path: type(module) for path, module in model.named_modules()},
        "children": {path: list(module._modules) for path, module in model.named_modules()},
        "hooks": [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()],
        "backward hooks": [len(module._backward_hooks or ()) for module in model.modules()],
        "parameters": {key: (each.dtype, each.requires_grad) for key, each in model.named_parameters()},
        "values": {key: each.tolist() for key, each in model.state_dict().items()},
        "training": [module.training for module in model.modules()],
    }


def test_a_backbone_that_trained_itself_does_not_come_off() -> None:
    assert adapters.detach(attach(copy.deepcopy(bare("Llama")), Full())) is None


@pytest.fixture(scope="session")
def biased(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A saved backbone whose linear layers have biases, wide enough to be quantised."""
    folder = tmp_path_factory.mktemp("biased")
    tiny("Phi", vocab_size=512, hidden_size=64, intermediate_size=128).save_pretrained(folder)
    return str(folder)


@lru_cache(maxsize=4)
def stored(folder: str, weights: str, compute: str, task: model_heads.ModelHead = model_heads.TEXT) -> PreTrainedModel:
    """A backbone as this format stores it, frozen. Read only."""
    config = ModelConfig.model_validate({"id": folder, "weights": weights, "compute": compute})
    return backbones.load(config, None, task=task).model


def test_every_method_over_every_weight_format(
    weights: str, name: str, short_stories: str, biased: str, tmp_path: Path, record_property: Records
) -> None:
    config, has_biases = section(name), name in ("beft", "bitfit")
    record_cell(record_property, method=name, family="Phi" if has_biases else "Llama", weights=weights)
    if weights not in config.facts.weights:
        record_property("refused", config.facts.why_weights)
        with pytest.raises(ConfigError, match=f"does not work over {weights} weights: {config.facts.why_weights}"):
            parse(RunConfig, {**RECIPE, "model": {"weights": weights}, "adapter": config.model_dump()}, source="here")
        return
    compute = "float32" if weights in ("float32", "float16") else "bfloat16"
    fresh = lambda: copy.deepcopy(stored(biased if has_biases else short_stories, weights, compute))  # noqa: E731
    base = fresh()
    before, dtype = logits(base), getattr(torch, compute)
    # What rounds is what is stored as much as what is computed.
    tolerance = {"float32": 1e-6, "float16": 2e-4}.get(weights, 5e-3)
    if name == "dora" and weights != "float32":
        tolerance *= 4  # it divides by the norm of what is stored, in half precision
    Contract(
        attach(base, config), config, before, fresh, tmp_path, dtype, tolerance, merges=weights in HALF_OR_FULL
    ).check()


WIDE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128}
WIDE_AS: dict[str, dict[str, Any]] = {
    "GPT2": {"n_embd": 64, "n_inner": 128},
    "Mixtral": {**WIDE, "num_experts_per_tok": 4},  # all of them compute: rounding would choose others
    "Dinov2": {"hidden_size": 64},
    "ViT": WIDE,
    "OPT": {"hidden_size": 64, "ffn_dim": 128, "word_embed_proj_dim": 64},
    "T5": {"d_model": 64, "d_ff": 128},
}
"""Sizes for blocks of 64 where WIDE does not say them."""


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Gives the folder of a wide backbone of a kind."""

    @cache
    def save(kind: str) -> str:
        folder = str(tmp_path_factory.mktemp(kind))
        build(kind, **WIDE_AS.get(kind, {} if kind in PICTURES else WIDE)).save_pretrained(folder)
        return folder

    return save


def test_every_method_on_every_family_over_weight_formats(
    family: str, weights: str, name: str, saved: Callable[[str], str], tmp_path: Path, record_property: Records
) -> None:
    record_cell(record_property, method=name, family=family, weights=weights)
    config, compute = section(name), "float32" if weights == "float16" else "bfloat16"
    if weights not in config.facts.weights or (family == "Falcon" and weights in QUANTISED):
        record_property(
            "refused", config.facts.why_weights or "transformers does not quantise Falcon's own linear layers"
        )
        pytest.skip("refused: the method on this format, or the format on this family")
    classes = model_heads.classes(["a", "b", "c"], seed=0)
    heads = {"masked": model_heads.MASKED, "classes": classes, **dict.fromkeys(PICTURES, classes)}
    task = heads.get(family.rpartition("-")[2], model_heads.TEXT)
    fresh = lambda: copy.deepcopy(stored(saved(family), weights, compute, task))  # noqa: E731
    try:
        base = fresh()
    except BackboneError as refusal:
        assert "Write model.weights=" in str(refusal)
        record_property("refused", str(refusal))
        pytest.skip("refused: the format on this family")
    if reason := config.refusal(base):
        record_property("refused", reason)
        pytest.skip("refused: the method on this family")
    before, merges, dtype = logits(base), weights in HALF_OR_FULL, getattr(torch, compute)
    tolerance = (2e-3 if weights == "float16" else 2e-2) * (2 if name == "dora" else 1)
    if (family, name) == ("MobileNetV2", "dora"):
        tolerance *= 10  # half a unit of bfloat16 in its random weights moves its outputs by 0.42 of the largest
    Contract(attach(base, config), config, before, fresh, tmp_path, dtype, tolerance, merges=merges).check()


RECIPE: dict[str, Any] = {"recipe": "sft", "data": {"train": "rows.jsonl"}}


@pytest.mark.parametrize("names", matrix.methods_in_a_new_process())
def test_every_adapter_gives_the_same_logits_in_a_new_process(names: set[str], tmp_path: Path) -> None:
    base = copy.deepcopy(bare("Llama"))
    base.save_pretrained(tmp_path / "base")
    wanted = {}
    for name in sorted(names):
        config = section(name)
        if config.refusal(base):
            continue
        model = attach(copy.deepcopy(base), config)
        Contract(model, config, logits(base), lambda: base, tmp_path).learns()
        adapters.save(model, tmp_path / name)
        wanted[name] = logits(model).contiguous()
    assert len(wanted) >= 0.7 * len(names)
    save_file({**wanted, "ids": ids}, tmp_path / "wanted.safetensors")
    (tmp_path / "reload.py").write_text(RELOAD)
    command = [forked.python(), str(tmp_path / "reload.py"), str(tmp_path), str(EXAMPLE)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = dict(line.split() for line in done.stdout.splitlines())
    assert found.keys() == wanted.keys()
    assert max(map(float, found.values())) <= 1e-5 * float(logits(base).abs().max()), found


RELOAD = """
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from workbench import adapters
from workbench.config import plugins

folder = Path(sys.argv[1])
plugins.load([sys.argv[2]])
wanted = load_file(folder / "wanted.safetensors")
ids = wanted.pop("ids")
for name, logits in wanted.items():
    model = adapters.load(AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32), folder / name)
    with torch.no_grad():
        found = model(input_ids=ids).logits[:, -ids.shape[1]:]
    print(name, float((found - logits).abs().max()))
"""
