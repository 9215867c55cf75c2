"""Packed rows against length-sorted micro-batches: padding, and processor time of forward and backward passes.

    OMP_NUM_THREADS=1 python scripts/bench/packing.py --hidden 768 --layers 4 --rounds 5
    OMP_NUM_THREADS=1 python scripts/bench/packing.py --compute bfloat16 --rounds 5
    OMP_NUM_THREADS=1 python scripts/bench/packing.py --of distill cached peers embed --rounds 5

The body of a random Llama of which the embedding alone trains, so that gradients pass every layer. Lengths are drawn:
like GSM8K's, uniform, very skewed. Padded and packed rows take turns on the same global batch, at several sizes of
micro-batch; each gets its best one. `auto` says what `batch.packing=auto` takes for such rows.

`--of` takes the whole step of a recipe: `distill` a student of tokens and a live teacher of the same size, both with
their heads; `cached` the student whose teacher was asked before, 64 tokens of each position; `peers` three LoRA
adapters in one bank; `embed` a BERT that pools means, without a graph first where there are several micro-batches.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

from workbench.adapters import Lora
from workbench.adapters.banks import bank
from workbench.config import ModelConfig
from workbench.config.sections.distill_config import DistillConfig
from workbench.config.sections.embed_config import EmbedConfig
from workbench.data.batching import Indices, MicroBatch, Row, collate
from workbench.data.embedding.pair_set import TextUnits
from workbench.data.packing import PACKED, PADDED, RowLayout
from workbench.distillation.student_loss import distillation_loss, mutual_loss
from workbench.distillation.teacher_cache import TopTokens
from workbench.distillation.teachers import LiveTeacher, TeacherModel
from workbench.models import attention_backend, backbones, output_heads
from workbench.models.embedder import Embedder
from workbench.training import packing
from workbench.training.signal import Loss

VOCABULARY = 8000
PEERS, KEPT = 3, 64


class Timed(NamedTuple):
    """A step of a recipe."""

    collate: Callable[[list[Row]], MicroBatch]
    step: Callable[[Sequence[MicroBatch]], None]
    """Forward and backward passes of its micro-batches."""


def main() -> None:
    """Print a line for each distribution."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rows", type=int, default=32, help="rows of the global batch")
    parser.add_argument("--tokens", type=int, nargs="+", default=[640, 1365, 2730], help="tokens of a micro-batch")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--compute", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--of", choices=list(STEPS), nargs="+", default=["body"], help="whose step")
    options = parser.parse_args()
    torch.manual_seed(0)
    attention_backend.register()
    compute = getattr(torch, options.compute)
    for recipe in options.of:
        timed = STEPS[recipe](options.hidden, options.layers, compute)
        print(f"{recipe}, {options.layers} layers of {options.hidden}, {options.compute}", flush=True)
        for name, lengths in distributions(options.rows).items():
            measure(timed, name, lengths, options.tokens, options.rounds, compute=compute)


def measure(timed: Timed, name: str, lengths: Indices, sizes: list[int], rounds: int, *, compute: torch.dtype) -> None:
    """Time padded and packed rows of such lengths in turns, and print what came out."""
    rows = [Row(np.random.default_rng(0).integers(VOCABULARY, size=size), np.ones(size, bool)) for size in lengths]
    ways = [(way, max(size, int(lengths.max()))) for size in sizes for way in (PADDED, PACKED)]
    taken: dict[tuple[RowLayout, int], list[float]] = {way: [] for way in ways}
    for number in range(rounds + 1):
        for way in ways:
            spent = seconds(timed, rows, lengths, *way)
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
    auto = "packs" if packing.pays(padding, compute=compute, at_once=False) else "pads"
    print(
        f"{name}: {lengths.sum()} tokens, padding {padding:.1%}; padded / packed: {each}; tokens/s at the best "
        f"{lengths.sum() / median(taken[best[PADDED]]):.0f} / {lengths.sum() / median(taken[best[PACKED]]):.0f}, ratio "
        f"{median(taken[best[PADDED]]) / median(taken[best[PACKED]]):.2f} (pairs {min(ratios):.2f} to "
        f"{max(ratios):.2f}); auto {auto}",
        flush=True,
    )


def seconds(timed: Timed, rows: list[Row], lengths: Indices, way: RowLayout, tokens: int) -> float:
    """Processor time of forward and backward passes of all rows."""
    batches = [
        way.lay(timed.collate([rows[index] for index in cut]))
        for cut in way.cut(np.arange(len(rows)), lengths, tokens=tokens)
    ]
    start = time.process_time()
    timed.step(batches)
    return time.process_time() - start


def body(hidden: int, layers: int, compute: torch.dtype) -> Timed:
    """The body of a causal model alone."""
    model = random_llama(hidden, layers, compute)

    def loss(batch: MicroBatch, scale: float) -> Tensor:
        output: Tensor = model.model(**batch.inputs, use_cache=False).last_hidden_state
        return output.square().sum() * scale

    return Timed(collate, _passes(loss))


def distill(hidden: int, layers: int, compute: torch.dtype) -> Timed:
    """A student beside a live teacher."""
    student, taught_by = (random_llama(hidden, layers, compute) for _ in range(2))
    model = TeacherModel(taught_by, output_heads.known(taught_by), _without_graph)
    teacher = LiveTeacher([model], taught_by, shared=False)
    head = output_heads.known(student)
    return Timed(collate, _passes(distillation_loss(DistillConfig(), student, head, teacher, None, lambda: 0.0)))


def cached(hidden: int, layers: int, compute: torch.dtype) -> Timed:
    """A student whose teacher was asked before."""
    student = random_llama(hidden, layers, compute)
    head = output_heads.known(student)
    return Timed(collate, _passes(distillation_loss(DistillConfig(), student, head, Said(), None, lambda: 0.0)))


def peers(hidden: int, layers: int, compute: torch.dtype) -> Timed:
    """Adapters that teach each other."""
    model = random_llama(hidden, layers, compute).requires_grad_(False)
    together = bank.attach(model, [Lora()] * PEERS, seeds=range(PEERS))
    together.train()
    head = output_heads.known(model)
    return Timed(collate, _passes(mutual_loss(DistillConfig(peers=PEERS), together, head, lambda: 0.0)))


def embed(hidden: int, layers: int, compute: torch.dtype) -> Timed:
    """Texts of an encoder, whose gradients are cached where there are several micro-batches."""
    model = BertModel(
        BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=hidden,
            intermediate_size=hidden * 4,
            num_hidden_layers=layers,
            num_attention_heads=hidden // 64,
            max_position_embeddings=1024,
        )
    )
    nn.Module.to(model, compute)
    model.requires_grad_(False).eval()
    model.embeddings.word_embeddings.weight.requires_grad_(True)
    embedder = Embedder(model, model, backbones.tokenizer(ModelConfig(id="starter")), EmbedConfig())

    def texts(rows: list[Row]) -> MicroBatch:
        ids = tuple(row.input_ids for row in rows)
        return TextUnits(("",) * len(ids), ids, (False,) * len(ids)).batch(np.arange(len(ids)))

    def step(batches: Sequence[MicroBatch]) -> None:
        with torch.no_grad():
            for batch in batches[:-1]:
                embedder.pooled(batch)
        for batch in reversed(batches):
            embedder.pooled(batch).square().sum().backward()

    return Timed(texts, step)


STEPS = {each.__name__: each for each in (body, distill, cached, peers, embed)}


@dataclass(frozen=True)
class Said:
    """A teacher that names the same tokens everywhere."""

    def signal(self, batch: MicroBatch, config: DistillConfig, *, temperature: float) -> TopTokens:
        """Its likeliest tokens, all equally likely."""
        many = len(batch.labels_N)
        log_probs = torch.full((many, KEPT + 1), -float(np.log(KEPT + 1)))
        return TopTokens([torch.arange(KEPT).expand(many, -1), log_probs], VOCABULARY, config, temperature)


def _passes(loss: Loss) -> Callable[[Sequence[MicroBatch]], None]:
    def step(batches: Sequence[MicroBatch]) -> None:
        for batch in batches:
            loss(batch, 1.0).backward()

    return step


@contextmanager
def _without_graph() -> Iterator[None]:
    with torch.no_grad():
        yield


def distributions(rows: int) -> dict[str, Indices]:
    """Lengths of `rows` rows from each distribution."""
    draw = np.random.default_rng(0)
    drawn = {
        "like GSM8K": np.clip(draw.lognormal(5.1, 0.4, rows), 40, 500),
        "uniform 8 to 64": draw.integers(8, 65, rows),
        "very skewed": np.clip(draw.lognormal(3.3, 1.1, rows), 4, 1024),
    }
    return {name: lengths.astype(np.int64) for name, lengths in drawn.items()}


def random_llama(hidden: int, layers: int, compute: torch.dtype) -> LlamaForCausalLM:
    """A Llama of heads of 64, whose embedding trains."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=hidden * 8 // 3,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
    )
    model = LlamaForCausalLM(config).requires_grad_(False)
    nn.Module.to(model, compute)
    model.model.embed_tokens.weight.requires_grad_(True)
    return model


if __name__ == "__main__":
    main()
