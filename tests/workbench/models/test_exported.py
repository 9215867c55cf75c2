"""What a run ships is whole: a stock install reads it, and reading it back gives the model that was trained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import AutoPeftModelForCausalLM, PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from workbench.models import exported
from workbench.runs import run_directory
from workbench.training import checkpoints

# Stock PEFT uses what transformers calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

TEXT = "<|start|>user\nWhat comes after 12?<|end|>\n<|start|>assistant\nIt is 13.<|end|>\n"


def test_the_adapter_holds_the_weights_of_the_last_step(trained: Path) -> None:
    last = checkpoints.read_tensors(trained / "checkpoints" / "step-00000030", "trainable")
    saved = load_file(trained / "adapter" / "adapter_model.safetensors")
    assert all(tensor.dtype == torch.float32 for tensor in saved.values())
    plain = {name.replace(".default", "").replace("token_adapter.", ""): tensor for name, tensor in last.items()}
    assert plain.keys() == {name.replace("token_adapter.", "") for name in saved}
    for name, tensor in saved.items():
        assert torch.equal(tensor, plain[name.replace("token_adapter.", "")]), name


def test_a_stock_install_computes_the_same_logits(trained: Path, stories: str) -> None:
    ours = exported.load(trained, run_directory.read_config(trained))
    tokenizer = AutoTokenizer.from_pretrained(trained / "adapter")
    ids = tokenizer(TEXT, return_tensors="pt")["input_ids"]
    base = AutoModelForCausalLM.from_pretrained(stories)
    base.resize_token_embeddings(len(tokenizer))
    stock = PeftModel.from_pretrained(base, str(trained / "adapter")).eval()
    with torch.no_grad():
        wanted, found = ours.model(input_ids=ids).logits, stock(input_ids=ids).logits
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    assert found[0, -3].argmax() == tokenizer.convert_tokens_to_ids("<|end|>")


def test_peft_finds_the_backbone_by_itself(trained: Path) -> None:
    """AutoPeft resizes the vocabulary by the tokenizer that lies beside the adapter."""
    stock = AutoPeftModelForCausalLM.from_pretrained(str(trained / "adapter")).eval()
    ids = AutoTokenizer.from_pretrained(trained / "adapter")(TEXT, return_tensors="pt")["input_ids"]
    ours = exported.load(trained, run_directory.read_config(trained))
    with torch.no_grad():
        torch.testing.assert_close(stock(input_ids=ids).logits, ours.model(input_ids=ids).logits, rtol=1e-5, atol=1e-5)


def test_template_and_end_of_turn_travel_with_the_adapter(trained: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(trained / "adapter")
    question = [{"role": "user", "content": "Hello"}]
    text = tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=False)
    assert text == "<|start|>user\nHello<|end|>\n<|start|>assistant\n"
    assert exported.load(trained, run_directory.read_config(trained)).template.source == tokenizer.chat_template
    stops = GenerationConfig.from_pretrained(trained / "adapter").eos_token_id
    assert tokenizer.convert_ids_to_tokens(stops) == ["</s>", "<|end|>"]


def test_the_folder_holds_no_pickle_and_nothing_half_written(trained: Path) -> None:
    names = {path.name for path in (trained / "adapter").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json", "chat_template.jinja"} <= names
    assert all(name.endswith((".json", ".safetensors", ".jinja", ".md")) for name in names)
    assert not list(trained.rglob("*.unfinished")) and not list(trained.rglob("*.replaced"))
    written = json.loads((trained / "adapter" / "adapter_config.json").read_text())
    assert written["trainable_token_indices"] == {"embed_tokens": [512, 513]}
