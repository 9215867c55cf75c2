"""A merged folder is a stock model that computes what backbone and adapter compute, and the error said is the error."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from workbench.config import ModelConfig
from workbench.data.starter import FOLDER
from workbench.data.text import tokenized
from workbench.data.text.tokenized_set import TokenizedSet
from workbench.errors import ConfigError
from workbench.models import backbones, exported
from workbench.recipes.task import ROWS
from workbench.recipes.verbs.merge import as_loaded, merge
from workbench.runs import run_directory

# Stock PEFT uses what transformers calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

SaveRun = Callable[..., Path]
TEXT = "Once upon a time there was a little girl who asked what comes after 7. It is 8, said the cat."
STARTER = {"id": "starter", "weights": "bfloat16", "compute": "float32"}


@torch.no_grad()
def _logits(model: torch.nn.Module, folder: Path) -> Tensor:
    ids = AutoTokenizer.from_pretrained(folder)(TEXT, return_tensors="pt")["input_ids"]
    logits: Tensor = model.eval()(input_ids=ids).logits
    return logits.float()


def _ours(run: Path) -> Tensor:
    return _logits(exported.load(run, run_directory.read_config(run)).model, run / "adapter")


def _stock(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


def _assert_close(computed: Tensor, wanted: Tensor, *, error: float) -> None:
    """The difference as a share of how far the logits are spread."""
    spread = wanted.std()
    assert float((computed - wanted).abs().max() / spread) < error


@pytest.mark.nightly(but=["rslora", "full"])
@pytest.mark.parametrize("method", ["lora", "rslora", "dora", "full"])
def test_float32_run_as_stock_peft_and_as_merged_model(
    save_run: SaveRun, method: str, short_stories: str, tmp_path: Path
) -> None:
    run = save_run(adapter={"method": method})
    wanted = _ours(run)
    base = _stock(Path(short_stories))
    assert float((_logits(base, run / "adapter") - wanted).abs().max()) > 0.1
    if method == "full":
        stock: torch.nn.Module = _stock(run / "adapter")
    else:
        stock = PeftModel.from_pretrained(base, str(run / "adapter"))
    torch.testing.assert_close(_logits(stock, run / "adapter"), wanted, rtol=1e-5, atol=1e-5)

    found = merge(run, out=tmp_path / "merged", weights="float32")
    torch.testing.assert_close(_logits(_stock(tmp_path / "merged"), tmp_path / "merged"), wanted, rtol=1e-4, atol=1e-4)
    assert found.agreement.top1 == 1.0 and 0 <= found.agreement.kl < 1e-8
    said = "Fully trained model" if method == "full" else "Backbone plus adapter added in float32,"
    assert found.sentence == f"{said} written in float32."


@pytest.mark.nightly(but=["dora-float32", "full-bfloat16"])
@pytest.mark.parametrize(
    ("method", "compute"), [("lora", "float32"), ("dora", "float32"), ("lora", "bfloat16"), ("full", "bfloat16")]
)
def test_bfloat16_storage_as_stock_peft_and_as_merged_model(
    save_run: SaveRun, method: str, compute: str, tmp_path: Path
) -> None:
    weights = compute if method == "full" else "bfloat16"
    run = save_run(model={"id": "starter", "weights": weights, "compute": compute}, adapter={"method": method})
    wanted = _ours(run)
    dtype = getattr(torch, compute)
    base = _stock(run / "adapter" if method == "full" else FOLDER, dtype)
    stock = base if method == "full" else PeftModel.from_pretrained(base, str(run / "adapter"))
    _assert_close(_logits(stock, run / "adapter"), wanted, error=1e-4 if compute == "float32" else 0.1)

    found = merge(run, out=tmp_path / "merged", weights="bfloat16")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert merged.dtype == torch.bfloat16
    _assert_close(_logits(merged, tmp_path / "merged"), wanted, error=0.2)
    assert found.agreement.top1 > 0.9 and 0 <= found.agreement.kl < 1e-2


@pytest.mark.nightly(but=["stories"])
@pytest.mark.parametrize("model", [{}, STARTER], ids=["stories", "starter"])
def test_added_tokens_as_stock_peft_and_as_merged_model(
    save_run: SaveRun, short_stories: str, model: dict[str, Any], tmp_path: Path
) -> None:
    section = {"id": short_stories, "weights": "float32", "compute": "float32", **model}
    run = save_run(model={**section, "new_tokens": ["<|one|>", "<|two|>"]})
    folder = FOLDER if model else Path(short_stories)
    wanted = _ours(run)
    tokenizer = AutoTokenizer.from_pretrained(run / "adapter")
    assert tokenizer("<|two|>", add_special_tokens=False)["input_ids"] == [len(tokenizer) - 1]
    base = _stock(folder)
    base.resize_token_embeddings(len(tokenizer))
    stock = PeftModel.from_pretrained(base, str(run / "adapter"))
    _assert_close(_logits(stock, run / "adapter"), wanted, error=1e-4)

    merge(run, out=tmp_path / "merged", weights="float32")
    merged = _stock(tmp_path / "merged")
    _assert_close(_logits(merged, tmp_path / "merged"), wanted, error=1e-4)
    rows, old = merged.get_input_embeddings().weight, _stock(folder).get_input_embeddings().weight
    assert len(rows) == len(old) + 2 and torch.equal(rows[: len(old)], old)


@pytest.mark.nightly(but=["nf4"])
@pytest.mark.parametrize("weights", ["nf4", "int8", "fp8"])
def test_a_quantised_backbone_is_dequantised_and_the_agreement_is_right(
    save_run: SaveRun, weights: str, short_stories: str, tmp_path: Path
) -> None:
    run = save_run(model={"id": short_stories, "weights": weights, "compute": "float32"})
    found = merge(run, out=tmp_path / "merged", weights="float32")
    assert found.sentence == f"{weights} backbone, dequantised, plus adapter added in float32, written in float32."
    written = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert "quantization_config" not in written and written["dtype"] == "float32"

    unmerged = exported.load(run, run_directory.read_config(run))
    config = run_directory.read_config(run)
    held_out = tokenized.load(config.data, unmerged.tokenizer, unmerged.template, seed=config.seed).held_out
    kl, top1, positions = _compared(unmerged.model, _stock(tmp_path / "merged"), held_out)
    assert found.agreement.positions == positions
    # nf4 computes with what it dequantises. LLM.int8 also rounds activations, and that by what else is in the batch.
    exact = weights == "nf4"
    assert found.agreement.top1 == pytest.approx(top1, abs=1e-9 if exact else 2 / positions)
    assert found.agreement.kl == pytest.approx(kl, rel=1e-9 if exact else 0.2, abs=1e-9)
    assert found.agreement.kl < (1e-8 if exact else 0.02)

    unquantised = PeftModel.from_pretrained(_stock(Path(short_stories)), str(run / "adapter"))
    assert _compared(unquantised, _stock(tmp_path / "merged"), held_out)[0] > 1e-4, "nothing was quantised"


@torch.no_grad()
def _compared(a: torch.nn.Module, b: torch.nn.Module, split: TokenizedSet) -> tuple[float, float, int]:
    """KL(a || b), share of equal first choices, and positions; row by row and written out."""
    divergence, same, count = 0.0, 0, 0
    for number in range(min(ROWS, len(split))):
        row = split[number]
        ids = torch.from_numpy(row.input_ids)[None]
        marked = torch.from_numpy(row.supervised)[1:]
        log_a, log_b = (F.log_softmax(each(input_ids=ids).logits[0, :-1][marked].double(), -1) for each in (a, b))
        divergence += float((log_a.exp() * (log_a - log_b)).sum())
        same += int((log_a.argmax(-1) == log_b.argmax(-1)).sum())
        count += int(marked.sum())
    return divergence / count, same / count, count


def test_a_trained_run_merges_into_a_model_that_generates_alike(trained: Path, tmp_path: Path) -> None:
    found = merge(trained, out=tmp_path / "merged", weights="float32")
    assert found.agreement.top1 == 1.0
    unmerged = exported.load(trained, run_directory.read_config(trained))
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path / "merged")
    stock = _stock(tmp_path / "merged")
    question = [{"role": "user", "content": "What comes after 12?"}]
    asked = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    assert asked["input_ids"][0].tolist() == unmerged.template.prompt(question)
    written = stock.generate(**asked, max_new_tokens=40, do_sample=False, pad_token_id=0)
    wanted = unmerged.model.generate(  # type: ignore[operator]
        **asked, max_new_tokens=40, do_sample=False, eos_token_id=unmerged.stop, pad_token_id=0
    )
    assert torch.equal(written, wanted)
    assert written.shape[1] < asked["input_ids"].shape[1] + 40, "it must have learnt to stop"


def test_a_backbone_that_says_how_to_sample_and_does_not_can_be_merged(
    trained: Path, short_stories: str, tmp_path: Path
) -> None:
    shutil.copytree(short_stories, tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "top_p": 0.9}))
    shutil.copytree(trained, tmp_path / "run")
    config = tmp_path / "run" / "config.yaml"
    config.write_text(config.read_text().replace(short_stories, str(tmp_path / "model")))
    assert merge(tmp_path / "run", out=tmp_path / "merged", weights="float32").agreement.top1 == 1.0
    written = json.loads((tmp_path / "merged" / "generation_config.json").read_text())
    assert "top_p" not in written and written["eos_token_id"] is not None


def test_what_cannot_be_merged_is_said_before_any_work(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="exists already"):
        merge(trained, out=tmp_path, weights="float32")
    with pytest.raises(ConfigError, match=r"--weights int8: expected float32, bfloat16, float16"):
        merge(trained, out=tmp_path / "merged", weights="int8")
    with pytest.raises(ConfigError, match="not a run directory"):
        merge(tmp_path, out=tmp_path / "merged", weights="float32")
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize("units", [True, False])
def test_what_rounding_changes_is_computed_as_the_merged_model_is(
    units: bool, short_stories: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Emulated bfloat16 would round activations too, and takes minutes for a small model."""
    monkeypatch.setattr(backbones, "has_bfloat16_units", lambda _: units)
    section = ModelConfig(id=short_stories, weights="bfloat16")
    loaded = backbones.load(section, None).model
    found = as_loaded(_stock(Path(short_stories), torch.bfloat16))
    ids = torch.arange(9)[None]
    assert torch.equal(found(ids).logits.float(), loaded(ids).logits.float())
