"""The matrix: which method meets which backbone, weights, task and layout, and in which line of tests.

A line is what one command runs. Plain: `pytest`. Slow: `pytest -m slow`, what takes more than ten seconds or starts
processes. Nightly: `pytest -m nightly`, the rest of what is listed here. Tests take their cells from the functions below.

| what meets | plain | slow | nightly besides |
|---|---|---|---|
| method x backbone, float32 | a fifth of the pairs; light methods one backbone each | | all pairs |
| method x weights, over one decoder | each method once, each format by a sixth of them | | all pairs |
| method x backbone x weights | two formats of each method, over two backbones unlike each other | | bfloat16 and nf4 of all, which SUPPORT.md shows; of the other formats each method and each backbone |
| method off a backbone again | off a decoder, each third also off an encoder or a vision backbone | | all of three backbones |
| method x parameters predicted | all over Mixtral or GPT-2 | | all of four backbones |
| task x method | LoRA with every task, four others with one or two each | the same where a task writes answers | all pairs |
| layout x method, two processes | | full fine-tuning in each kind of layout | LoRA; layouts whose parts others have |
"""  # noqa: E501

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import FAMILIES, T5_SIZES
from workbench.adapters import METHODS
from workbench.adapters.method import WEIGHTS
from workbench.config import plugins

# Methods

EXAMPLE = Path(__file__).parents[1] / "scripts" / "my_method.py"
plugins.load([EXAMPLE])  # the documented example of a user's own method keeps the contract too
METHOD_NAMES = sorted(set(METHODS) - {"full"})
"""Full fine-tuning is no adapter: there is nothing to switch off."""
LIGHT = (
    *("beft", "c3a", "deft", "delora", "fourierft", "glora", "gralora", "hira", "hra", "loha", "lokr", "miss", "osf"),
    *("peanut", "psoft", "pvera", "randlora", "road", "shira", "sparse", "super", "tinylora", "trainable-tokens"),
    *("uni-lora", "vb-lora", "waveft"),
)
"""Methods that PEFT computes alone: in the plain line each meets one backbone."""
OTHERS_OF_TASKS = ("block-expansion", "full", "linear-probe", "prefix")
"""Methods that tasks meet beside LoRA in the plain line: those that differ most in what they add and save."""

# Backbones: a family, of encoders with the head.

ENCODERS = ("Bert", "Roberta", "DebertaV2")
HEADS: dict[str, dict[str, Any]] = {
    "masked": {"head": "MaskedLM"},
    "classes": {"head": "SequenceClassification", "num_labels": 3},
}
TWO_STACKS: dict[str, dict[str, Any]] = {"T5": {"head": "Seq2SeqLM", **T5_SIZES}}
PICTURES = ("Beit", "CLIP", "ConvNext", "Dinov2", "MobileNetV2", "ResNet", "Swin", "ViT")
BACKBONES = sorted([*FAMILIES, *(f"{name}-{head}" for name in ENCODERS for head in HEADS), *TWO_STACKS, *PICTURES])
UNLIKE = ("Bert-masked", "GPT2", "Qwen3", "T5")
"""An encoder, transposed layers, grouped queries, two stacks."""
FROM_WHICH_METHODS_COME_OFF = ("Llama", "Bert-classes", "ViT")
OF_PREDICTED_SIZES = ("Mixtral", "GPT2", "T5", "Bert")

# Tasks and layouts

TASKS = ("sft", "mlm", "prefer", "classify", "reward", "embed", "reinforce", "rerank", "tag")
WRITES_ANSWERS = ("reinforce",)
LAYOUTS = {
    "ddp": "{zero: 0}",
    "zero1": "{zero: 1}",
    "zero2": "{zero: 2}",
    "zero3": "{zero: 3}",
    "fsdp2_2": "{engine: fsdp2, zero: 2}",
    "fsdp2_3": "{engine: fsdp2, zero: 3}",
    "zero2_cpu": "{zero: 2, offload_optimizer: cpu}",
    "zero3_cpu": "{zero: 3, offload_optimizer: cpu, offload_parameters: cpu}",
}
"""What `distributed` says in each; `json` is a DeepSpeed JSON of one's own, and `nvme` offloads to a disk."""
FEW_TOKENS, MANY_TOKENS = 64, 160
"""Tokens in a forward pass: one row or a few, so that processes get unequal parts of a batch."""
WITH_DISK = "WORKBENCH_TEST_NVME" in os.environ

# Lines

NIGHTLY = pytest.mark.nightly
Cell = tuple[Any, ...]


def lines(cells: Iterable[Cell], plain: Callable[..., bool]) -> list[Any]:
    """Cells as pytest parametrises with them: those that are not plain are nightly."""
    return [pytest.param(*cell, marks=() if plain(*cell) else NIGHTLY) for cell in cells]


def method_on_backbone() -> list[Any]:
    """(backbone, method), in float32."""

    def plain(backbone: str, name: str) -> bool:
        if name in LIGHT:
            alone = ("Llama", "T5")[LIGHT.index(name) % 2] if name != "beft" else "Bert-classes"
            return backbone == alone
        return (BACKBONES.index(backbone) + METHOD_NAMES.index(name)) % 5 == 0

    return lines(itertools.product(BACKBONES, METHOD_NAMES), plain)


def method_over_weights() -> list[Any]:
    """(weights, method), over one decoder."""
    heavy = [name for name in METHOD_NAMES if name not in LIGHT]
    plain = {(WEIGHTS[number % len(WEIGHTS)], name) for number, name in enumerate(heavy)}
    return lines(itertools.product(WEIGHTS, METHOD_NAMES), lambda *cell: cell in plain)


def method_on_backbone_over_weights() -> list[Any]:
    """(backbone, weights, method), of all formats but float32."""
    formats, heavy = ("bfloat16", "int8", "nf4"), [name for name in METHOD_NAMES if name not in LIGHT]
    plain: set[Cell] = {
        (UNLIKE[(number + place) % 4], formats[(number // 4 + place) % 3], name)
        for number, name in enumerate(heavy)
        for place in range(2)
    }
    plain |= {
        ("GPTNeoX", "float16", "adalora"),  # biases beside weights that are stored in half precision
        ("ConvNext", "nf4", "lora"),
        ("ResNet", "bfloat16", "lora"),
        ("Swin", "int8", "lora"),
        ("Swin", "nf4", "parallel"),
        ("ViT", "nf4", "lora"),
        ("ViT", "int8", "lora"),
        ("Dinov2", "nf4", "prompt"),
        ("ViT", "nf4", "loftq"),  # a checkpoint whose names are not those of the modules
    }
    nightly: set[Cell] = set(itertools.product(BACKBONES, ("bfloat16", "nf4"), METHOD_NAMES))
    for shift, weights in enumerate(("float16", "int8", "fp4")):  # each method, and each backbone, at least once
        for number, name in enumerate(METHOD_NAMES):
            nightly.add((BACKBONES[(number + 11 * shift) % len(BACKBONES)], weights, name))
    return lines(sorted(plain | nightly), lambda *cell: cell in plain)


def method_off_a_backbone() -> list[Any]:
    """(backbone, method): taken off, it leaves no trace."""

    def plain(backbone: str, name: str) -> bool:
        third = {"Bert-classes": 0, "ViT": 1}.get(backbone)
        return name not in LIGHT and (third is None or METHOD_NAMES.index(name) % 3 == third)

    return lines(itertools.product(FROM_WHICH_METHODS_COME_OFF, METHOD_NAMES), plain)


def methods_in_a_new_process() -> list[Any]:
    """Sets of methods that another process reads back."""
    return [
        pytest.param(set(METHOD_NAMES) - set(LIGHT), marks=pytest.mark.slow, id="usual"),
        pytest.param(set(LIGHT), marks=NIGHTLY, id="light"),
    ]


def method_of_predicted_size() -> list[Any]:
    """(family, method), whose parameters are predicted; full fine-tuning too."""
    names = sorted(METHODS)

    def plain(family: str, name: str) -> bool:
        return family == ("GPT2" if name not in LIGHT and names.index(name) % 2 else "Mixtral")

    return lines(itertools.product(OF_PREDICTED_SIZES, names), plain)


def task_with_method() -> list[Any]:
    """(task, method); full fine-tuning too."""
    found = []
    for task, name in itertools.product(TASKS, sorted({*METHOD_NAMES, "full"})):
        met = name == "lora" or (
            name in OTHERS_OF_TASKS and (TASKS.index(task) - OTHERS_OF_TASKS.index(name)) % len(OTHERS_OF_TASKS) == 0
        )
        mark = NIGHTLY if not met else pytest.mark.slow if task in WRITES_ANSWERS else None
        found.append(pytest.param(task, name, marks=[mark] if mark else [], id=f"{task}-{name}"))
    return found


def layout_with_method() -> list[Any]:
    """(layout, method, tokens in a forward pass), sft in two processes against one; all in files that are slow.

    Each two of method, tokens and layout meet once or more. Full fine-tuning over few tokens is what other layouts go
    on with (test_layouts.py), so that most layouts have it.
    """
    small, large = ("full", FEW_TOKENS), ("full", MANY_TOKENS)
    slow = {"ddp": small, "zero2": small, "zero3": small, "fsdp2_2": small, "fsdp2_3": small}
    slow |= {"zero3_cpu": large, "json": large, "nvme": large}
    found = []
    for name in (*LAYOUTS, "json", "nvme"):
        full = slow.get(name, large if name == "zero2_cpu" else small)
        lora = ("lora", MANY_TOKENS if full == small else FEW_TOKENS)
        disk = [needs_disk] if name == "nvme" else []
        for cell in (full, lora):
            found.append(pytest.param(name, *cell, marks=disk if slow.get(name) == cell else [*disk, NIGHTLY]))
    return found


needs_disk = pytest.mark.skipif(not WITH_DISK, reason="needs libaio-dev, minutes of compiling, WORKBENCH_TEST_NVME=1")
