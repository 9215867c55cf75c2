"""Cases of scripts/bench/gpu.py: Llamas with random weights, made where they compute, and rows of random tokens.

Legend: P parameters of the blocks' linear layers, H of the output head, S tokens of a row, d width, L blocks.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from workbench.data import starter
from workbench.data.batching import Indices, MicroBatch, Row, collate
from workbench.models import weight_formats

RANK, ALPHA = 16, 32
KEYS = 8
"""Heads of keys and values, in all shapes."""
WARM_UP, STEPS = 3, 24
"""Steps that do not count, and the most steps."""
SHAPES: dict[str, dict[str, Any]] = {
    "1b": dict(num_hidden_layers=16, hidden_size=2048, intermediate_size=8192, num_attention_heads=32),
    "3b": dict(num_hidden_layers=28, hidden_size=3072, intermediate_size=8192, num_attention_heads=24),
    "8b": dict(num_hidden_layers=32, hidden_size=4096, intermediate_size=14_336, num_attention_heads=32),
    "tiny": dict(num_hidden_layers=2, hidden_size=64, intermediate_size=128, num_attention_heads=8),
}
"""As in Llama 3.1 and 3.2; `tiny` for rehearsals."""
WEIGHTS = {"bf16": "bfloat16", "nf4": "nf4"}
LENGTHS = {"2k": (2048, 2048, 8), "ragged": (64, 512, 64), "near": (384, 512, 64), "8k": (8192, 8192, 2)}
"""Fewest and most tokens of a row, and rows of a step."""
FIRST = ["8b-nf4-2k", "8b-bf16-2k", "1b-bf16-ragged", "8b-nf4-8k", "3b-bf16-2k", "8b-nf4-ragged"]
"""Cases that a call comes to first; it has time for some."""


@dataclass(frozen=True)
class Case:
    """A model and rows."""

    name: str
    shape: str
    weights: str
    shortest: int
    longest: int
    rows: int
    """Rows of each optimizer step."""

    @property
    def config(self) -> LlamaConfig:
        """The model's architecture."""
        tiny = self.shape == "tiny"
        return LlamaConfig(
            **SHAPES[self.shape],
            num_key_value_heads=KEYS,
            vocab_size=512 if tiny else 128_256,
            tie_word_embeddings=self.shape in ("1b", "3b"),
            max_position_embeddings=8192,
            rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
        )

    @property
    def row_lengths(self) -> Indices:
        """Tokens of each row of a run."""
        draw = np.random.default_rng(0)
        found: Indices = draw.integers(self.shortest, self.longest + 1, STEPS * self.rows)
        return found


def names() -> list[str]:
    """Every case, first those that are looked at first."""
    every = [f"{shape}-{weights}-{rows}" for shape in ("8b", "3b", "1b") for weights in WEIGHTS for rows in LENGTHS]
    return list(dict.fromkeys([*FIRST, *every]))


def case(name: str, *, rehearsed: bool) -> Case:
    """The case of this name; rehearsed, with a small model and short rows."""
    shape, weights, rows = name.split("-")
    shortest, longest, count = LENGTHS[rows]
    if rehearsed:
        return Case(name, "tiny", WEIGHTS[weights], shortest // 32, longest // 32, 4)
    return Case(name, shape, WEIGHTS[weights], shortest, longest, count)


def model(case: Case, device: torch.device) -> PreTrainedModel:
    """The frozen model on its device."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        found = LlamaForCausalLM(case.config)
    torch.set_default_dtype(torch.float32)
    found.requires_grad_(False)
    if case.weights == "nf4":
        weight_formats.put_off(found, "nf4", torch.bfloat16)
        for module in found.modules():
            weight_formats.pack(module, device)
    return found


def saved(case: Case, device: torch.device) -> Path:
    """Folder of the model in bfloat16 and of the starter's tokenizer, which is written where it is not there yet."""
    folder = Path(tempfile.gettempdir()) / f"random-llama-{case.shape}"
    if not folder.exists():
        part = folder.with_suffix(".part")  # whoever is ended while it writes leaves no folder
        model(replace(case, weights="bfloat16"), device).save_pretrained(part)
        AutoTokenizer.from_pretrained(starter.FOLDER).save_pretrained(part)
        part.rename(folder)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return folder


class RandomRows:
    """Rows of random tokens, of which each but the first is predicted."""

    def __init__(self, case: Case) -> None:
        draw, vocabulary = np.random.default_rng(1), case.config.vocab_size
        self.lengths = case.row_lengths
        self.rows = [draw.integers(3, vocabulary, length) for length in self.lengths]
        self.supervised = self.lengths - 1
        self.difficulty = None

    def __len__(self) -> int:
        return len(self.rows)

    def sample(self, draws: Indices, *, epoch: int) -> Indices:
        """Each row once."""
        return draws

    def place(self, index: int) -> str:
        """Number of a row."""
        return f"row {index + 1}"

    def seen(self, *, epoch: int, step: int, steps: int | None = None) -> RandomRows:
        """The same in every step."""
        return self

    def batch(self, indices: Indices, *, epoch: int = 0) -> MicroBatch:
        """Padded rows."""
        return collate([Row(self.rows[index], np.arange(self.lengths[index]) > 0) for index in indices])

    def dataset(self) -> Dataset:
        """The rows as TRL takes them."""
        return Dataset.from_dict({"input_ids": [row.tolist() for row in self.rows]})


def flops_per_token(case: Case, lengths: Indices) -> float:
    """Operations of a step for each token, recomputing left out: forward 2 (P + H) and as much for gradients of inputs,
    6 R (in + out) for each adapted layer, causal attention 2 S d L forward and 2.5 times that backward."""
    config = case.config
    width, inner, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    keys = width * KEYS // config.num_attention_heads
    linear = [(width, width), (width, keys), (width, keys), (width, width), *[(width, inner)] * 2, (inner, width)]
    parameters = layers * sum(a * b for a, b in linear) + width * config.vocab_size
    adapters = 6 * RANK * layers * sum(a + b for a, b in linear)
    squares = float(np.square(lengths, dtype=float).sum() / np.sum(lengths))
    return 4.0 * parameters + adapters + 7.0 * squares * width * layers
