"""Every family of today that writes text: what a run of it learns is what others that load its files compute."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

import workbench
from tests.conftest import write_questions
from tests.text_families import FAMILIES, PICTURES, PREPARED, save
from workbench import adapters
from workbench.adapters import Lora, anatomy
from workbench.config import ModelConfig, RunConfig
from workbench.data.batching import MicroBatch, Row, collate
from workbench.data.packing import PACKED
from workbench.models import attention_backend, backbones, exported, output_heads
from workbench.runs import run_directory

RECIPE = """\
recipe: sft
model: {{id: {model}, weights: float32}}
adapter: {{method: lora, rank: 4, alpha: 8}}
data: {{train: {rows}, held_out: 0.1}}
batch: {{size: 8}}
train: {{steps: 3, learning_rate: 1.0e-2}}
evaluate: {{every: null, answers: 2, max_new_tokens: 4}}
"""
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # of stock PEFT
PLAIN, SOME = ("qwen3_5", "llava"), ("gemma4", "qwen3_vl", "glm_moe_dsa")
CARRYING = {
    *("qwen3_5", "qwen3_next", "kimi_linear", "lfm2", "granitemoehybrid", "nemotron_h", "falcon_h1"),
    *("mamba", "mamba2", "falcon_mamba"),
}
"""Families some of whose layers carry a state along the sequence."""
CHOOSING = {"glm_moe_dsa"}
"""Families whose attention reads the tokens that an indexer chooses."""
LENGTHS = (9, 4, 13, 1, 6)


def _line(name: str) -> Sequence[pytest.MarkDecorator]:
    """The line of tests that a family stands in."""
    if name in PLAIN:
        return ()
    return (pytest.mark.slow,) if name in SOME else (pytest.mark.nightly,)


class Trained(NamedTuple):
    """A family's checkpoint, and a run over it."""

    name: str
    backbone: Path
    run: Path

    @property
    def config(self) -> RunConfig:
        return run_directory.read_config(self.run)


@pytest.fixture(
    scope="module",
    params=[pytest.param(each, marks=_line(each)) for each in FAMILIES],
)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a family's tiny backbone, which has the family's name."""
    folder = tmp_path_factory.mktemp("families") / request.param
    save(request.param, folder)
    return folder


@pytest.fixture(scope="module")
def trained(checkpoint: Path) -> Trained:
    folder = checkpoint.parent
    rows = write_questions(folder / "rows.jsonl", [f"{n + 1}" + " it is" * (n % 7) for n in range(40)])
    (folder / "recipe.yaml").write_text(RECIPE.format(model=checkpoint, rows=rows))
    return Trained(checkpoint.name, checkpoint, workbench.run(folder / "recipe.yaml", out=folder / "run", quiet=True))


def _stock(trained: Trained) -> Any:
    auto: Any = AutoModelForImageTextToText if trained.name in PICTURES else AutoModelForCausalLM
    return auto.from_pretrained(trained.backbone, dtype=torch.float32)


def _logits(model: nn.Module) -> Tensor:
    model.eval()
    with torch.no_grad():
        logits: Tensor = model(input_ids=torch.arange(20, 40)[None]).logits
    return logits


@pytest.mark.slow
def test_stock_peft_over_the_stock_model_computes_what_the_run_computes(trained: Trained) -> None:
    stock = _stock(trained)
    bare = _logits(stock)
    found = _logits(PeftModel.from_pretrained(stock, str(trained.run / "adapter")))
    wanted = _logits(exported.load(trained.run, trained.config).model)
    assert float((found - wanted).abs().max()) < 1e-5 and float((found - bare).abs().max()) > 1e-2


def _tensors(folder: Path) -> dict[str, Tensor]:
    tensors = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    return tensors


@pytest.mark.slow
def test_a_merge_keeps_every_tensor_that_the_adapter_leaves_alone(trained: Trained, tmp_path: Path) -> None:
    if trained.name == "deepseek_v4":
        pytest.skip("names in its checkpoint are not those of its modules, by which changed tensors are known here")
    merged = workbench.merge(trained.run, out=tmp_path / "float32", weights="float32")
    assert merged.agreement.kl < 1e-6
    workbench.merge(trained.run, out=tmp_path / "merged")
    before, after = _tensors(trained.backbone), _tensors(tmp_path / "merged")
    with safe_open(trained.run / "adapter" / "adapter_model.safetensors", framework="pt") as opened:
        changed = {name.split(".lora_")[0].rsplit(".", 1)[-1] for name in opened.keys()}  # noqa: SIM118
    assert before.keys() == after.keys()
    same = {name for name in before if torch.equal(before[name], after[name])}
    assert {name.removesuffix(".weight").rsplit(".", 1)[-1] for name in before.keys() - same} <= changed
    assert (tmp_path / "merged" / PREPARED).exists() == (trained.name in PICTURES)


def _row_losses(model: Any, head: output_heads.Head, batch: MicroBatch) -> Tensor:
    logits_NV = head.project(head.supervised(model, batch.inputs, batch.positions_N))
    loss_N = nn.functional.cross_entropy(logits_NV, batch.labels_N, reduction="none")
    return torch.zeros(len(LENGTHS)).index_add(0, batch.row_of_label, loss_N)


@contextmanager
def _towers_forbidden(model: nn.Module) -> Iterator[None]:
    """Inside, a module that stands beside the language model must not be called."""
    inside = anatomy.language_model(model)

    def refuse(*_: object) -> None:
        raise AssertionError("rows of text run a tower")

    beside = [
        module
        for name, module in model.named_modules()
        if inside and not f"{name}.".startswith(f"{inside}.") and not inside.startswith(name) and "lm_head" not in name
    ]
    assert bool(beside) == bool(inside)
    handles = [module.register_forward_pre_hook(refuse) for module in beside]
    yield
    for handle in handles:
        handle.remove()


def test_rows_together_cost_what_each_costs_alone_and_run_no_tower(checkpoint: Path) -> None:
    section = ModelConfig(id=str(checkpoint), weights="float32")
    backbone = backbones.load(section, backbones.tokenizer(section)).model
    adapted = adapters.attach(backbone, Lora(rank=4, alpha=8), seed=0)
    assert bool(anatomy.language_model(backbone)) == (checkpoint.name in PICTURES)
    head = output_heads.find(adapted, backbone)
    adapted.train()
    draw = np.random.default_rng(0)
    rows = [Row(draw.integers(8, 6000, length), np.ones(length, dtype=bool)) for length in LENGTHS]
    with _towers_forbidden(backbone):
        alone = torch.stack([_row_losses(adapted, head, collate([row]))[0] for row in rows])
        padded = _row_losses(adapted, head, collate(rows))
        torch.testing.assert_close(padded, alone, rtol=1e-5, atol=1e-5)
        padded.sum().backward()
        why = attention_backend.packing_refusal(backbone.config, longest=max(LENGTHS))
        if checkpoint.name in CARRYING:
            assert why is not None and "carry a state along" in why
        else:
            known = backbone.config.get_text_config().model_type in attention_backend.PACKED_FAMILIES
            assert known or backbone.config._attn_implementation != "sdpa" or checkpoint.name in CHOOSING
        if why is None:
            packed = _row_losses(adapted, head, PACKED.lay(collate(rows)))
            torch.testing.assert_close(packed, alone, rtol=1e-5, atol=1e-5)
    trainable = {name: each for name, each in adapted.named_parameters() if each.requires_grad}
    # DeepSeek-V4 compresses rows of more tokens than these.
    unmoved = [name for name, each in trainable.items() if each.grad is None and "compressor" not in name]
    assert trainable and not unmoved, unmoved
    assert all("lora_" in name for name in trainable)
