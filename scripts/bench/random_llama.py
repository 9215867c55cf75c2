"""Write a Llama with seeded random weights in bfloat16, beside the starter's tokenizer.

    python scripts/bench/random_llama.py 42m|100m|1b|8b|32b|70b FOLDER [cpu|cuda]

Random weights cost the same time and memory as trained ones; only the losses mean nothing.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TypedDict

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from workbench.data import starter


class Shape(TypedDict):
    """Differences between the benchmarked models."""

    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int
    tie_word_embeddings: bool


def _shape(layers: int, width: int, mlp: int, heads: int, kv_heads: int, vocabulary: int, *, tied: bool) -> Shape:
    return Shape(
        num_hidden_layers=layers,
        hidden_size=width,
        intermediate_size=mlp,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocabulary,
        tie_word_embeddings=tied,
    )


SHAPES = {
    "42m": _shape(8, 512, 1408, 8, 8, 32_000, tied=True),
    "100m": _shape(12, 768, 2048, 12, 12, 32_000, tied=True),
    "1b": _shape(16, 2048, 8192, 32, 8, 128_256, tied=True),  # Llama 3.2 1B
    "8b": _shape(32, 4096, 14_336, 32, 8, 128_256, tied=False),  # Llama 3.1 8B
    "32b": _shape(64, 5120, 27_648, 40, 8, 152_064, tied=False),  # Qwen 2.5 32B, without its biases
    "70b": _shape(80, 8192, 28_672, 64, 8, 128_256, tied=False),  # Llama 3.1 70B
}


def configuration(shape: str, folder: Path) -> LlamaConfig:
    """Write the starter's tokenizer and the config.json of a model, which is enough for a plan."""
    tokenizer = AutoTokenizer.from_pretrained(starter.FOLDER)
    config = LlamaConfig(
        **SHAPES[shape],
        max_position_embeddings=1024,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    config.dtype = torch.bfloat16
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return config


def main(shape: str, folder: Path, device: str = "cpu") -> None:
    config = configuration(shape, folder)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    print(f"{shape}: {model.num_parameters():,} parameters in {folder}")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
