"""An encoder-decoder goes through every verb: the recipe, and all that serves what it saved."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

import workbench
from tests.run_files import read_losses, read_scores, write_lines
from tests.stopping import stop_after
from workbench.errors import Stopped
from workbench.models import exported
from workbench.recipes.load import load
from workbench.recipes.verbs.check import check
from workbench.recipes.verbs.evaluate import evaluate
from workbench.recipes.verbs.generate import generate, predict
from workbench.recipes.verbs.merge import merge
from workbench.runs import run_directory

# Stock PEFT uses what transformers calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

Train = Callable[..., Path]
EXACT = ["model.weights=float32", "evaluate.answers=0", "evaluate.every=null", "save.every=null", "batch.size=8"]
EXACT += ["train.steps=6", "train.learning_rate=1e-2"]


def _rows(path: Path, *names: str) -> Path:
    """Short questions and answers of unequal length, as columns of these names."""
    rows = [
        (f"What comes after {n}?" + " Think about it." * (n % 5), f"{n + 1}" + " it is" * (n % 3)) for n in range(96)
    ]
    return write_lines(path, (dict(zip(names, row, strict=True)) for row in rows))


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory, encoder_decoder: str) -> Path:
    """A finished run on prompts and completions. Read only."""
    folder = tmp_path_factory.mktemp("taught")
    data = _rows(folder / "questions.jsonl", "prompt", "completion")
    words = [f"model.id={encoder_decoder}", f"data.train={data}", "data.held_out=0.1", "model.weights=float32"]
    words += ["train.steps=60", "train.learning_rate=1e-2", "batch.size=16", "evaluate.answers=5"]
    return workbench.run("sft/quickstart", words, out=folder / "run", quiet=True)


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory, encoder_decoder: str) -> Train:
    """Trains on questions and answers, the data's other form."""
    folder = tmp_path_factory.mktemp("runs")
    data = _rows(folder / "questions.jsonl", "question", "answer")

    def run(name: str, *words: str, resume: bool = False) -> Path:
        known = [f"model.id={encoder_decoder}", f"data.train={data}", "data.held_out=0.1", *EXACT]
        return workbench.run("sft/quickstart", [*known, *words], out=folder / name, resume=resume, quiet=True)

    return run


@pytest.fixture(scope="module")
def reference(train: Train) -> Path:
    """A short run in float32, in one micro-batch. Read only."""
    return train("reference", "batch.tokens_per_device=100000")


@torch.no_grad()
def _logits(model: Any, folder: Path) -> Tensor:
    """What a stock model says of an answer to a question."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    read, written = (tokenizer(text, return_tensors="pt")["input_ids"] for text in ("What comes after 7?", "8 it is"))
    logits: Tensor = model.eval()(input_ids=read, labels=written).logits
    return logits


def test_held_out_loss_falls_and_the_answers_are_those_of_the_decoder(taught: Path) -> None:
    scores = read_scores(taught)
    assert scores["after"]["loss"] < 0.5 * scores["before"]["loss"]
    answers = pd.read_parquet(taught / "predictions.parquet")
    assert len(answers) == 5 and all(answers["prompt"].str.startswith("What comes after"))
    assert all(answers["reference"].str.match(r"\d+( it is)*$")) and "What" not in " ".join(answers["after"])
    assert all(answers["after"].str.endswith("it is")) and not any(answers["before"].str.contains("it is"))
    assert (taught / "report.html").exists()


def test_what_was_saved_is_a_stock_adapter(taught: Path, encoder_decoder: str) -> None:
    ours = exported.load(taught, run_directory.read_config(taught)).model
    base = AutoModelForSeq2SeqLM.from_pretrained(encoder_decoder)
    untrained = _logits(base, taught / "adapter")
    stock = PeftModel.from_pretrained(base, str(taught / "adapter"))
    wanted = _logits(ours, taught / "adapter")
    torch.testing.assert_close(_logits(stock, taught / "adapter"), wanted, rtol=1e-5, atol=1e-5)
    assert float((wanted - untrained).abs().max()) > 0.1
    assert json.loads((taught / "adapter" / "adapter_config.json").read_text())["task_type"] == "SEQ_2_SEQ_LM"


def test_evaluate_and_merge_agree_with_the_run(taught: Path, tmp_path: Path) -> None:
    assert evaluate(taught, []) == read_scores(taught)["after"]
    found = merge(taught, out=tmp_path / "merged", weights="float32")
    assert found.agreement.top1 == 1.0 and 0 <= found.agreement.kl < 1e-8 and found.agreement.positions > 50
    merged = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "merged")
    wanted = _logits(exported.load(taught, run_directory.read_config(taught)).model, taught / "adapter")
    torch.testing.assert_close(_logits(merged, tmp_path / "merged"), wanted, rtol=1e-4, atol=1e-4)


def test_predict_and_generate_answer_as_a_stock_model_does(taught: Path, tmp_path: Path) -> None:
    """Prompts of unequal length in one batch, and each alone without padding."""
    asked = [f"What comes after {n}?" + " Think about it." * (3 * n % 4) for n in range(5)]
    rows = tmp_path / "asked.jsonl"
    write_lines(rows, ({"prompt": prompt} for prompt in asked))
    assert predict(taught, str(rows), out=tmp_path / "out.parquet", max_new_tokens=12).rows == 5
    written = pd.read_parquet(tmp_path / "out.parquet")
    assert list(written["prompt"]) == asked

    model = exported.load(taught, run_directory.read_config(taught))
    stock: Any = model.model
    for prompt, answer in zip(asked, written["answer"], strict=True):
        read = model.tokenizer(prompt, return_tensors="pt")["input_ids"]
        ids = stock.generate(input_ids=read, max_new_tokens=12, do_sample=False, eos_token_id=model.stop)
        assert answer == model.tokenizer.decode(ids[0], skip_special_tokens=True).strip() != ""
    assert generate(taught, asked[3], max_new_tokens=12).strip() == written["answer"][3]


@pytest.mark.slow
def test_same_curve_for_any_micro_batch_and_with_checkpointing(train: Train, reference: Path) -> None:
    longest = int(json.loads((reference / "manifest.json").read_text())["data"]["train"]["lengths"][-1])
    assert read_losses(reference)[-1] < 0.9 * read_losses(reference)[0]
    for name, words in {"one": [], "recomputed": ["train.checkpointing=true"]}.items():
        run = train(name, f"batch.tokens_per_device={longest}", *words)
        assert read_losses(run) == pytest.approx(read_losses(reference), rel=1e-5)
        found, wanted = (load_file(each / "adapter" / "adapter_model.safetensors") for each in (run, reference))
        assert all((found[key] - each).norm() <= 1e-4 * each.norm() for key, each in wanted.items())


def test_a_stopped_run_resumes_to_the_same_bits(train: Train, reference: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["batch.tokens_per_device=100000"]
    with monkeypatch.context() as patch:
        stop_after(patch)
        with pytest.raises(Stopped, match="after step 1 of 6"):
            train("broken", *words)
    broken = train("broken", *words, resume=True)
    assert read_losses(broken) == read_losses(reference) and read_scores(broken) == read_scores(reference)


def test_every_weight_trains(train: Train) -> None:
    run = train("full", "adapter={method: full}", "evaluate.answers=3", "evaluate.max_new_tokens=8")
    assert read_scores(run)["after"]["loss"] < read_scores(run)["before"]["loss"]
    wanted = _logits(exported.load(run, run_directory.read_config(run)).model, run / "adapter")
    stock = AutoModelForSeq2SeqLM.from_pretrained(run / "adapter")
    torch.testing.assert_close(_logits(stock, run / "adapter"), wanted, rtol=1e-5, atol=1e-5)
    asked = AutoTokenizer.from_pretrained(run / "adapter")("What comes after 7?", return_tensors="pt")["input_ids"]
    assert stock.generate(input_ids=asked, max_new_tokens=4)[0, 0] == stock.config.decoder_start_token_id


@pytest.mark.nightly(but=["nf4"])
@pytest.mark.parametrize("weights", ["bfloat16", "int8", "nf4"])
def test_other_weight_formats_train_alike(train: Train, reference: Path, weights: str) -> None:
    run = train(weights, f"model.weights={weights}", "model.compute=float32")
    assert read_losses(run) == pytest.approx(read_losses(reference), rel=0.05 if weights == "nf4" else 0.01)
    assert read_losses(run) != pytest.approx(read_losses(reference), rel=1e-6)


@pytest.mark.nightly(but=["attention"])
@pytest.mark.parametrize("targets", ["attention", "mlp"])
def test_roles_are_found_in_both_stacks(train: Train, targets: str) -> None:
    run = train(targets, f"adapter.targets={targets}", "train.steps=1")
    tensors = load_file(run / "adapter" / "adapter_model.safetensors")
    named = {name.removeprefix("base_model.model.").split(".lora")[0] for name in tensors}
    assert {name.split(".")[0] for name in named} == {"encoder", "decoder"}
    assert len(named) == (2 * 4 + 2 * 8 if targets == "attention" else 2 * 2 + 2 * 2)
    assert all(("Attention" in name) == (targets == "attention") for name in named)


def test_new_tokens_train_in_both_stacks_and_ship(train: Train) -> None:
    run = train("tokens", "model.new_tokens=[<one>, <two>]")
    stock = exported.load(run, run_directory.read_config(run))
    assert stock.tokenizer("<two>", add_special_tokens=False)["input_ids"][-1] == 513
    assert read_scores(run)["after"]["loss"] < read_scores(run)["before"]["loss"]


def test_check_shows_both_sides(encoder_decoder: str, tmp_path: Path) -> None:
    data = _rows(tmp_path / "questions.jsonl", "question", "answer")
    words = [f"model.id={encoder_decoder}", f"data.train={data}", "data.max_tokens=40"]
    found = check(load("sft/quickstart", words))
    place, pieces = found.examples[0]
    assert place == "questions.jsonl, row 1" and found.targets == ["k", "o", "q", "v", "wi", "wo"]
    assert pieces == [("<s> What comes after 0?<unk>", False), ("<s> 1</s>", True)]
    assert found.data.train.truncated > 0 and found.data.train.ends.min() == 1, "an answer keeps its end"
