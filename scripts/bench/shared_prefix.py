"""Rows with one system prompt, which is computed once, against the same rows computed each by itself.

    OMP_NUM_THREADS=1 python scripts/bench/shared_prefix.py --rows 200 --prefix 400 --rest 100 --rounds 2

A random Llama under LoRA on all linear layers; every row begins with the same tokens, and half of its rest carries
loss. A step is all rows, in micro-batches as `batch.tokens_per_device=auto` cuts them. The two sides take turns in one
process; the processor time of forward and backward passes counts, and losses and gradients of both are compared.
"""

from __future__ import annotations

import argparse
import math
import time
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from workbench import losses
from workbench.data.batching import MicroBatch, Row, collate
from workbench.data.packing import PACKED, PADDED, RowLayout, SharedPrefix
from workbench.models import attention_backend, fused_lora, output_heads
from workbench.training.capacity import CPU_ELEMENTS, CPU_TOKENS

VOCABULARY = 8000


class Step(NamedTuple):
    """One step of all rows."""

    seconds: float
    """Processor time."""
    loss: float
    """Mean over supervised tokens."""
    gradients: list[Tensor]


def main() -> None:
    """Print a line for each side and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rows", type=int, default=200)
    parser.add_argument("--prefix", type=int, nargs="+", default=[400], help="tokens that all rows begin with")
    parser.add_argument("--rest", type=int, default=100, help="mean tokens of a row after them; 0.5 to 1.5 times that")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--compute", choices=["float32", "bfloat16"], default="float32")
    options = parser.parse_args()
    model = random_lora(options.hidden, options.layers, getattr(torch, options.compute))
    for prefix in options.prefix:
        measure(model, rows_of(options.rows, prefix, options.rest), prefix, options.rounds, width=options.hidden)


def measure(model: PeftModel, rows: list[Row], prefix: int, rounds: int, *, width: int) -> None:
    """Time both sides in turns, and print what came out."""
    lengths = np.array([len(row.input_ids) for row in rows])
    tokens = max(int(lengths.max()), CPU_TOKENS, CPU_ELEMENTS // width)
    apart = PACKED if next(model.parameters()).dtype == torch.float32 else PADDED
    ways: dict[str, tuple[RowLayout, int]] = {
        "apart": (apart, tokens),
        "shared": (SharedPrefix(prefix), SharedPrefix(prefix).worth(tokens)),
    }
    taken: dict[str, list[float]] = {name: [] for name in ways}
    steps: dict[str, Step] = {}
    for number in range(rounds + 1):
        for name, (way, room) in ways.items():
            cuts = list(way.cut(np.arange(len(rows)), lengths, tokens=room))
            steps[name] = step(model, [way.lay(collate([rows[index] for index in cut])) for cut in cuts])
            taken[name] += [steps[name].seconds] if number else []  # the first round warms up
    ratios = [one / other for one, other in zip(taken["apart"], taken["shared"], strict=True)]
    computed = {
        name: sum(way.tokens(lengths[cut]) for cut in way.cut(np.arange(len(rows)), lengths, tokens=room))
        for name, (way, room) in ways.items()
    }
    print(
        f"{len(rows)} rows of {lengths.mean():.0f} tokens, {prefix} of them shared ({model.dtype}): {lengths.sum():,} "
        f"tokens, computed {computed['apart']:,} / {computed['shared']:,} (saved "
        f"{1 - computed['shared'] / computed['apart']:.0%}); {median(taken['apart']):.2f} / "
        f"{median(taken['shared']):.2f} s, {median(ratios):.2f} times as fast (pairs {min(ratios):.2f} to "
        f"{max(ratios):.2f}); losses differ by {abs(steps['apart'].loss - steps['shared'].loss):.1e}, gradients by "
        f"{distance(steps['apart'].gradients, steps['shared'].gradients):.1e} of their norm",
        flush=True,
    )


def step(model: PeftModel, batches: list[MicroBatch]) -> Step:
    """Forward and backward passes of micro-batches."""
    backbone: Any = model.get_base_model()
    head = output_heads.known(backbone)
    model.zero_grad()
    supervised, total = sum(len(batch.labels_N) for batch in batches), 0.0
    start = time.process_time()
    for batch in batches:
        hidden_ND = head.hidden(model, batch.inputs).flatten(0, 1)[batch.positions_N]
        loss = losses.next_token(
            hidden_ND, batch.labels_N, head.project, vocabulary=VOCABULARY, weights=[], scale=1 / supervised
        )
        loss.backward()
        total += float(loss.detach())
    seconds = time.process_time() - start
    return Step(seconds, total, [each.grad.clone() for each in model.parameters() if each.grad is not None])


def distance(one: list[Tensor], other: list[Tensor]) -> float:
    """Norm of the difference, as a share of the norm."""
    apart = math.sqrt(sum(float((a - b).double().square().sum()) for a, b in zip(one, other, strict=True)))
    return apart / math.sqrt(sum(float(a.double().square().sum()) for a in one))


def rows_of(count: int, prefix: int, rest: int) -> list[Row]:
    """Rows that begin alike; the second half of what follows carries loss."""
    draw = np.random.default_rng(0)
    first, found = draw.integers(VOCABULARY, size=prefix), []
    for length in draw.integers(rest // 2, rest * 3 // 2 + 1, count):
        supervised = np.arange(prefix + length) >= prefix + length // 2
        found.append(Row(np.concatenate([first, draw.integers(VOCABULARY, size=length)]), supervised))
    return found


def random_lora(hidden: int, layers: int, compute: torch.dtype) -> PeftModel:
    """A Llama of heads of 64 under LoRA, whose B is no zero."""
    torch.manual_seed(0)
    attention_backend.register()
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=hidden * 8 // 3,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
    )
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", init_lora_weights=False)
    llama = LlamaForCausalLM(config).to(compute)  # type: ignore[arg-type]
    model = get_peft_model(llama, lora, autocast_adapter_dtype=False)
    fused_lora.fuse(model)
    found: PeftModel = model.train()
    return found


if __name__ == "__main__":
    main()
