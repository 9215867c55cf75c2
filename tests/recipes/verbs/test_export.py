"""Each target's export, loaded by its own loader, computes what the run does; what it would not is refused by name."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from huggingface_hub import ModelCard
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.run_files import read_scores
from workbench.errors import ConfigError, FileError
from workbench.models import exported
from workbench.models.exporting import card
from workbench.recipes.verbs import export as export_verb
from workbench.recipes.verbs.export import TARGETS, export
from workbench.runs import run_directory

# Stock PEFT uses what transformers calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

SaveRun = Callable[..., Path]
TEXT = "Once upon a time there was a little girl who asked what comes after 7. It is 8, said the cat."
ADAPTERS = ("peft", "gguf", "ollama", "vllm", "sglang")


@torch.no_grad()
def _logits(model: Any, ids: Tensor) -> Tensor:
    found: Tensor = model(input_ids=ids).logits.double()
    return found


def _of_run(run: Path) -> tuple[Tensor, Tensor]:
    """Ids of a text, and the run's own logits."""
    model = exported.load(run, run_directory.read_config(run))
    ids = torch.tensor([model.tokenizer(TEXT)["input_ids"]])
    return ids, _logits(model.model, ids)


def _kl(wanted: Tensor, computed: Tensor) -> float:
    log_a, log_b = wanted.log_softmax(-1), computed.log_softmax(-1)
    return float((log_a.exp() * (log_a - log_b)).sum(-1).mean())


def _from_gguf(adapter: Path, base: Any) -> Any:
    """The base model plus the adapter of a GGUF file, as llama.cpp adds it: alpha / rank, Llama's rows in pairs."""
    reader = gguf.GGUFReader(adapter)
    alpha = reader.get_field("adapter.lora.alpha").contents()
    tensors = {each.name: torch.from_numpy(each.data.copy()) for each in reader.tensors}
    model, names = copy.deepcopy(base), gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 5)
    for path, parameter in model.named_parameters():
        name = names.get_name(path, try_suffixes=(".weight",))
        if f"{name}.lora_a" not in tensors:
            continue
        down, up = tensors[f"{name}.lora_a"], tensors[f"{name}.lora_b"]
        update = alpha / len(down) * up @ down
        if ".attn_q." in name or ".attn_k." in name:
            update = update.unflatten(0, (-1, 4, 2)).transpose(1, 2).reshape(update.shape)
        parameter.data += update
    return model


@pytest.mark.nightly(but=["ollama", "vllm"])
@pytest.mark.parametrize("to", ADAPTERS)
def test_an_adapter_of_each_target_computes_what_the_run_does(
    to: str, save_run: SaveRun, short_stories: str, tmp_path: Path
) -> None:
    run = save_run()
    ids, wanted = _of_run(run)
    if to == "gguf":  # its place for the template is the base model's file
        with pytest.raises(ConfigError, match=r"an adapter in GGUF has no place for one(.|\n)*--merge"):
            export(run, to=to, out=tmp_path / "out")
        assert not (tmp_path / "out").exists()
        return
    found = export(run, to=to, out=tmp_path / "out", weights="float32")
    assert "same first choice 100.00%" in found.error and "as it was trained" in found.sentence
    base: Any = AutoModelForCausalLM.from_pretrained(short_stories)
    assert _kl(wanted, _logits(base, ids)) > 1e-2
    if to == "ollama":
        base = AutoModelForCausalLM.from_pretrained(tmp_path / "out", gguf_file="model.gguf")
        model = _from_gguf(tmp_path / "out" / "adapter.gguf", base)
    else:
        model = PeftModel.from_pretrained(base, str(tmp_path / "out"))
    assert _kl(wanted, _logits(model, ids)) < 1e-9


def test_an_adapter_in_gguf_goes_with_the_template_of_its_base(
    save_run: SaveRun, short_stories: str, tmp_path: Path
) -> None:
    run = save_run()
    tokenizer = AutoTokenizer.from_pretrained(run / "adapter")
    base = tmp_path / "base"
    AutoModelForCausalLM.from_pretrained(short_stories).save_pretrained(base)
    tokenizer.save_pretrained(base)
    config = run / "config.yaml"
    config.write_text(config.read_text().replace(short_stories, str(base)))
    ids, wanted = _of_run(run)
    assert "same first choice 100.00%" in export(run, to="gguf", out=tmp_path / "out", weights="float32").error
    model = _from_gguf(tmp_path / "out" / "adapter.gguf", AutoModelForCausalLM.from_pretrained(short_stories))
    assert _kl(wanted, _logits(model, ids)) < 1e-9


@pytest.mark.nightly(but=["gguf", "merged"])
@pytest.mark.parametrize("to", ["merged", "gguf", "ollama", "vllm", "sglang"])
def test_one_whole_model_of_each_target_computes_what_the_run_does(to: str, trained: Path, tmp_path: Path) -> None:
    ids, wanted = _of_run(trained)
    out = tmp_path / "out"
    found = export(trained, to=to, out=out, whole=True, weights="float32")
    assert "same first choice 100.00%" in found.error
    file = {"gguf_file": "model.gguf"} if to in ("gguf", "ollama") else {}
    model: Any = AutoModelForCausalLM.from_pretrained(out, **file)
    assert _kl(wanted, _logits(model, ids)) < 1e-9
    tokenizer = AutoTokenizer.from_pretrained(out, **file)
    assert tokenizer(TEXT, add_special_tokens=False)["input_ids"] == ids[0, 1:].tolist()
    assert tokenizer("<|end|>", add_special_tokens=False)["input_ids"] == [513]


def test_a_fully_trained_run_is_a_whole_model_without_being_asked(save_run: SaveRun, tmp_path: Path) -> None:
    run = save_run(adapter={"method": "full"})
    ids, wanted = _of_run(run)
    found = export(run, to="gguf", out=tmp_path / "out", weights="float32")
    assert found.sentence == "Fully trained model written in float32."
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out", gguf_file="model.gguf")
    assert _kl(wanted, _logits(model, ids)) < 1e-9
    with pytest.raises(ConfigError, match=r"fully trained and has no adapter\. Write --to merged"):
        export(run, to="peft", out=tmp_path / "peft")


@pytest.mark.nightly(but=["peft"])
@pytest.mark.parametrize("to", ["peft", "ollama", "vllm", "sglang"])
def test_a_normalised_adapter_computes_what_the_run_does(
    to: str, save_run: SaveRun, short_stories: str, tmp_path: Path
) -> None:
    run = save_run(adapter={"method": "rslora", "rank": 4, "alpha": 8})
    if to in ("ollama", "sglang"):
        with pytest.raises(ConfigError, match=r"use_rslora=True: (llama\.cpp|SGLang) scales by(.|\n)*--normalise"):
            export(run, to=to, out=tmp_path / "out")
    ids, wanted = _of_run(run)
    found = export(run, to=to, out=tmp_path / "out", weights="float32", normalise=True)
    assert "same first choice 100.00%" in found.error and "plain LoRA with scale 1" in found.sentence
    base: Any = AutoModelForCausalLM.from_pretrained(short_stories)
    if to == "ollama":
        model = _from_gguf(tmp_path / "out" / "adapter.gguf", base)
    else:
        assert not json.loads((tmp_path / "out" / "adapter_config.json").read_text())["use_rslora"]
        model = PeftModel.from_pretrained(base, str(tmp_path / "out"))
    assert _kl(wanted, _logits(model, ids)) < 1e-9


@pytest.mark.nightly(but="each value once")
@pytest.mark.parametrize("method", ["dora", "ia3"])
@pytest.mark.parametrize("to", ["ollama", "vllm", "sglang"])
def test_what_a_target_does_not_read_is_refused_and_can_be_merged(
    method: str, to: str, save_run: SaveRun, tmp_path: Path
) -> None:
    run = save_run(adapter={"method": method})
    with pytest.raises(ConfigError, match=r"would not compute what was trained(.|\n)*--merge adds the adapter"):
        export(run, to=to, out=tmp_path / "out")
    with pytest.raises(ConfigError, match="--normalise"):
        export(run, to=to, out=tmp_path / "out", normalise=True)
    assert not list(tmp_path.glob("*out*"))
    assert "100.00%" in export(run, to=to, out=tmp_path / "out", whole=True, weights="float32").error


def test_an_adapter_that_stock_peft_does_not_know_is_refused(save_run: SaveRun, tmp_path: Path) -> None:
    run = save_run(adapter={"method": "houlsby"})
    with pytest.raises(ConfigError, match=r"PEFT does not load it alone: .*import workbench\.adapters"):
        export(run, to="peft", out=tmp_path / "out")


def test_an_adapter_that_four_bits_are_part_of_is_not_served_over_others(
    save_run: SaveRun, stories: str, tmp_path: Path
) -> None:
    """What the run computed over nf4 weights, vLLM would compute over those of the hub; a merge keeps nf4's values."""
    run = save_run(model={"id": stories, "weights": "nf4", "compute": "float32"})
    with pytest.raises(ConfigError, match=r"trained over nf4 weights(.|\n)*--merge"):
        export(run, to="vllm", out=tmp_path / "out", weights="float32")
    assert not (tmp_path / "out").exists()
    found = export(run, to="vllm", out=tmp_path / "out", weights="float32", whole=True)
    assert float(found.error.split("divergence ")[1].split(" ")[0]) < 1e-8


def test_other_weights_than_those_of_training_are_told(save_run: SaveRun, tmp_path: Path) -> None:
    export(save_run(), to="vllm", out=tmp_path / "out")
    text = (tmp_path / "out" / "README.md").read_text()
    assert "Trained over float32 weights of the backbone, checked over bfloat16." in text
    assert "--chat-template" in text and "stop_token_ids=[2]" in text


def test_what_computes_something_else_is_not_kept(
    save_run: SaveRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = save_run()
    monkeypatch.setattr(export_verb, "MOST_KL", -1.0)
    with pytest.raises(ConfigError, match="computes something else than the run, and is not kept"):
        export(run, to="merged", out=tmp_path / "out")
    assert not list(tmp_path.glob("*out*"))


def test_a_card_tells_the_run(trained: Path, tmp_path: Path) -> None:
    command = f"workbench export {trained} --to peft --out out"
    export(trained, to="peft", out=tmp_path / "out", command=command)
    text = (tmp_path / "out" / "README.md").read_text()
    card = ModelCard(text)
    assert card.data.library_name == "peft" and "lora" in card.data.tags and "loss" in card.data.metrics
    scores = read_scores(trained)
    assert f"| loss | {scores['before']['loss']:.2f} | {scores['after']['loss']:.3f} (" in text
    lines = text.split("```python\n")[1].split("```")[0].replace("'out'", repr(str(tmp_path / "out")))
    loaded: dict[str, Any] = {}
    exec(lines, loaded)  # as a reader copies them
    ids, wanted = _of_run(trained)
    assert _kl(wanted, _logits(loaded["model"], ids)) < 1e-9
    facts = json.loads((trained / "manifest.json").read_text())["data"]["train"]
    assert facts["fingerprint"] in text and f"| {facts['rows']} |" in text
    assert command in text and "recipe: sft" in text and "PeftModel.from_pretrained" in text


def test_nothing_is_pushed_unless_it_is_asked_for(
    save_run: SaveRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, asked = save_run(), []
    monkeypatch.setattr(card, "push_to_hub", lambda folder, name: asked.append((folder, name)) or "https://hub/me/mine")
    assert export(run, to="peft", out=tmp_path / "kept").pushed is None and not asked
    assert export(run, to="peft", out=tmp_path / "out", push="me/mine").pushed == "https://hub/me/mine"
    assert asked == [(tmp_path / "out", "me/mine")]


def test_an_export_stays_where_the_hub_cannot_be_reached(save_run: SaveRun, tmp_path: Path) -> None:
    with pytest.raises(FileError, match="nothing was pushed"):
        export(save_run(), to="peft", out=tmp_path / "out", push="me/mine")
    assert (tmp_path / "out" / "adapter_model.safetensors").exists() and (tmp_path / "out" / "README.md").exists()


def test_every_target_is_documented() -> None:
    root = Path(__file__).parents[3]
    text = (root / "recipes" / "verbs" / "export.md").read_text()
    assert all(f"| `{name}` |" in text for name in TARGETS)


@pytest.mark.slow
def test_onnxruntime_computes_what_the_run_does(save_run: SaveRun, short_stories: str, tmp_path: Path) -> None:
    import onnxruntime

    run = save_run(model={"id": short_stories, "weights": "float32", "new_tokens": ["<|start|>", "<|end|>"]})
    ids, wanted = _of_run(run)
    export(run, to="onnx", out=tmp_path / "out")
    session = onnxruntime.InferenceSession(str(tmp_path / "out" / "model.onnx"), providers=["CPUExecutionProvider"])
    asked = {"input_ids": ids.numpy(), "attention_mask": torch.ones_like(ids).numpy()}
    (logits,) = session.run(["logits"], asked)
    assert _kl(wanted, torch.from_numpy(logits).double()) < 1e-9
    assert AutoTokenizer.from_pretrained(tmp_path / "out")(TEXT)["input_ids"] == ids[0].tolist()
