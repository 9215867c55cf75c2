"""The shipped start of recipe reinforce/tools is small, stock PEFT, and its questions are those of the script."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from workbench.data.starter import FOLDER
from workbench.recipes.load import load
from workbench.recipes.single import start_adapter

OWN = FOLDER / "tools"
SCRIPT = Path(__file__).parents[4] / "scripts" / "make_starter_tools.py"


pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_starter_tools", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_questions_are_those_of_the_script_and_no_sum_is_on_both_sides() -> None:
    made = script()
    train, held_out = (
        [json.loads(line) for line in (OWN / f"{name}.jsonl").read_text().splitlines()]
        for name in ("train", "held_out")
    )
    assert [*train, *held_out] == list(made.sums())
    numbers = [tuple(word.strip("?.") for word in row["question"].split() if word[0].isdigit()) for row in train]
    assert all(made.FEWEST <= len(each) <= made.MOST for pair in numbers for each in pair)
    assert all(sum(map(int, pair)) == int(row["answer"]) for pair, row in zip(numbers, train, strict=True))
    assert not {row["question"] for row in train} & {row["question"] for row in held_out}


def test_the_start_is_small_and_fits_the_recipe() -> None:
    assert sum(path.stat().st_size for path in OWN.rglob("*") if path.is_file()) < 1_100_000
    config = load("reinforce/tools", [])
    start_adapter.require(config)
    assert start_adapter.folder(str(config.reinforce.start)) == OWN / "start"
    tensors = load_file(OWN / "start" / "adapter" / "adapter_model.safetensors")
    assert {each.dtype for each in tensors.values()} == {torch.bfloat16}


def test_the_start_copies_numbers_into_calls_and_does_not_call_unasked() -> None:
    """By stock PEFT, greedily."""
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    backbone = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    model = PeftModel.from_pretrained(backbone, OWN / "start" / "adapter").eval()

    def said(question: str) -> str:
        prompt = f"Tools:\nadd(a, b)\n\nUser:\n{question}\n\nAssistant:\n"
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        written = model.generate(input_ids=ids, max_new_tokens=48, do_sample=False)
        return str(tokenizer.decode(written[0, ids.shape[1] :], skip_special_tokens=True))

    assert said("Calculate 48213 + 590772.") == '{"name": "add", "parameters": {"a": 48213, "b": 590772}}'
    assert said("What is 48213 + 590772?") == "I cannot say."
