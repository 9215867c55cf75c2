"""Packed rows against length-sorted micro-batches: padding, and processor time of forward and backward passes.

    OMP_NUM_THREADS=1 python scripts/bench/packing.py --hidden 768 --layers 4 --rounds 5
    OMP_NUM_THREADS=1 python scripts/bench/packing.py --compute bfloat16 --rounds 5

The body of a random Llama of which the embedding alone trains, so that gradients pass every layer. Lengths are drawn:
like GSM8K's, uniform, very skewed. Padded and packed rows take turns on the same global batch, at several sizes of
micro-batch; each gets its best one. `auto` says what `batch.packing=auto` takes for such rows.
"""

from __future__ import annotations

import argparse
import time
from statistics import median

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from workbench.data.arrangement import PACKED, PADDED, Arrangement
from workbench.data.batching import Indices, Row, collate
from workbench.models import packed_attention
from workbench.training import packing

VOCABULARY = 8000


def main() -> None:
    """Print a line for each distribution."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rows", type=int, default=32, help="rows of the global batch")
    parser.add_argument("--tokens", type=int, nargs="+", default=[640, 1365, 2730], help="tokens of a micro-batch")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--compute", choices=["float32", "bfloat16"], default="float32")
    options = parser.parse_args()
    torch.manual_seed(0)
    packed_attention.register()
    compute = getattr(torch, options.compute)
    model = random_llama(options.hidden, options.layers).to(compute)
    print(f"{sum(each.numel() for each in model.parameters()) / 1e6:.0f} M parameters, {options.compute}", flush=True)
    for name, lengths in distributions(options.rows).items():
        measure(model, name, lengths, options.tokens, options.rounds)


def measure(model: LlamaForCausalLM, name: str, lengths: Indices, sizes: list[int], rounds: int) -> None:
    """Time padded and packed rows of such lengths in turns, and print what came out."""
    rows = [Row(np.random.default_rng(0).integers(VOCABULARY, size=size), np.ones(size, bool)) for size in lengths]
    ways = [(way, max(size, int(lengths.max()))) for size in sizes for way in (PADDED, PACKED)]
    taken: dict[tuple[Arrangement, int], list[float]] = {way: [] for way in ways}
    for number in range(rounds + 1):
        for way in ways:
            spent = seconds(model, rows, lengths, *way)
            taken[way] += [spent] if number else []  # the first round warms up
    best = {
        kind: min((way for way in ways if way[0] is kind), key=lambda way: median(taken[way]))
        for kind in (PADDED, PACKED)
    }
    ratios = [one / other for one, other in zip(taken[best[PADDED]], taken[best[PACKED]], strict=True)]
    each = "; ".join(
        f"{size} tokens {median(taken[PADDED, size]):.3f} / {median(taken[PACKED, size]):.3f} s"
        for size in dict.fromkeys(size for _, size in ways)
    )
    padding = packing.padding([lengths], tokens=best[PADDED][1])
    auto = "packs" if packing.pays(padding, compute=model.dtype) else "pads"
    print(
        f"{name}: {lengths.sum()} tokens, padding {padding:.1%}; padded / packed: {each}; tokens/s at the best "
        f"{lengths.sum() / median(taken[best[PADDED]]):.0f} / {lengths.sum() / median(taken[best[PACKED]]):.0f}, ratio "
        f"{median(taken[best[PADDED]]) / median(taken[best[PACKED]]):.2f} (pairs {min(ratios):.2f} to "
        f"{max(ratios):.2f}); auto {auto}",
        flush=True,
    )


def seconds(model: LlamaForCausalLM, rows: list[Row], lengths: Indices, way: Arrangement, tokens: int) -> float:
    """Processor time of forward and backward passes of all rows."""
    batches = [
        way.lay(collate([rows[index] for index in cut]))
        for cut in way.cut(np.arange(len(rows)), lengths, tokens=tokens)
    ]
    start = time.process_time()
    for batch in batches:
        model.model(**batch.inputs, use_cache=False).last_hidden_state.square().sum().backward()
    return time.process_time() - start


def distributions(rows: int) -> dict[str, Indices]:
    """Lengths of `rows` rows from each distribution."""
    draw = np.random.default_rng(0)
    drawn = {
        "like GSM8K": np.clip(draw.lognormal(5.1, 0.4, rows), 40, 500),
        "uniform 8 to 64": draw.integers(8, 65, rows),
        "very skewed": np.clip(draw.lognormal(3.3, 1.1, rows), 4, 1024),
    }
    return {name: lengths.astype(np.int64) for name, lengths in drawn.items()}


def random_llama(hidden: int, layers: int) -> LlamaForCausalLM:
    """A Llama of heads of 64, whose embedding trains."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=hidden * 8 // 3,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
    )
    model = LlamaForCausalLM(config).requires_grad_(False)
    model.model.embed_tokens.weight.requires_grad_(True)
    return model


if __name__ == "__main__":
    main()
