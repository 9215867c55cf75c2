"""Seconds of a block and of all else in a step, timed on real models: the run's own, with fewer and narrower blocks."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from statistics import median

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from workbench.config import ModelConfig
from workbench.data.batching import Indices
from workbench.models import backbones
from workbench.planning.dry_trainings import Training
from workbench.planning.flop_counter import Operations
from workbench.planning.roofline import matmul_rate, synchronize
from workbench.runs import process_memory

SECONDS = 3.0
"""For timing one way to carry out a run, about; building its models comes on top."""
PASSES = (3, 24)
"""Micro-batches that are timed, at least and at most."""
WIDTH = 1024
"""Wider backbones are built about as narrow: their products are large enough to run at full speed."""
FILLED = 2**24
"""Elements of a tensor that get numbers; the rest of a larger one stays as the system gives it, and takes no memory."""
DEPTHS = (
    "num_hidden_layers",
    "num_layers",
    "num_decoder_layers",
    "encoder_layers",
    "decoder_layers",
    "n_layer",
    "n_layers",
)
WIDTHS = ("hidden_size", "intermediate_size", "num_attention_heads")
"""What all shrinks with a narrower block."""

Clock = Callable[[], float]


@dataclass(frozen=True)
class Small:
    """How a backbone is cut down for timing."""

    blocks: int
    """Of each stack."""
    narrower: int = 1
    """By so many times; the products of a block shrink by its square."""


Build = Callable[[Small], AbstractContextManager[Training]]
"""Gives the run's own training with real tensors, over a backbone that is cut down."""


@dataclass(frozen=True)
class Measured:
    """Seconds for each token of a micro-batch, padding included."""

    block: float
    """Of all blocks."""
    rest: float
    """Of embeddings, head and loss."""
    update: float
    """Seconds of the optimizer's step, for all parameters that train."""
    flops: float
    """Operations for each token."""
    rate: float
    """Operations that a matrix product does in a second, at best."""
    spread: float
    """Of the single micro-batches, as a share: half of them are closer to the median."""


def measure(
    build: Build,
    *,
    depth: int,
    narrower: int,
    trainable: int,
    step: int,
    dtype: torch.dtype,
    packed: bool,
    clock: Clock = time.perf_counter,
    seconds: float = SECONDS,
) -> Measured:
    """Time micro-batches of a run on one or two small models in turn.

    Args:
        depth: Blocks of each stack of the whole backbone.
        narrower: By which the built ones are narrower.
        trainable: Parameters that train in the whole model.
        step: Blocks of the smaller model; the other has twice as many.
        dtype: What matrix products run in.
        packed: Weights are unpacked in every pass, which takes as long as they are large.
    """
    process_memory.keep()
    device = backbones.device()
    rate = matmul_rate(device, dtype, clock=clock)
    counts = (depth,) if narrower == 1 and depth <= 2 * step else (step, 2 * step)
    with ExitStack() as stack, torch.random.fork_rng():
        fits = [stack.enter_context(build(Small(count, narrower))) for count in counts]
        timed = [_Timed(fit, device, clock) for fit in fits]
        points = _points(timed, rate, clock, seconds)
        taken_BM = np.array([[each[1] for each in row] for row in points])
        tokens_B = np.array([row[0][0] for row in points])
        update = median(timed[-1].update() for _ in range(3))
        update *= trainable / max(1, sum(each.numel() for each in fits[-1].masters))
        flops_M = np.array([each.flops for each in timed])
    per_BM = taken_BM / tokens_B[:, None]
    spread = float(np.median(np.abs(per_BM[:, -1] / np.median(per_BM[:, -1]) - 1)))
    if len(counts) == 1:
        whole = float(taken_BM.sum() / tokens_B.sum())
        return Measured(whole, 0.0, update, float(flops_M[0]), rate, spread)
    more = counts[1] - counts[0]
    block = max(float(np.median(per_BM[:, 1] - per_BM[:, 0])) / more, (flops_M[1] - flops_M[0]) / more / rate)
    rest = max(0.0, float(np.median(per_BM[:, 0])) - counts[0] * block)
    block_flops = (flops_M[1] - flops_M[0]) / more
    rest_flops = max(0.0, float(flops_M[0] - counts[0] * block_flops))
    return Measured(
        block=depth * _wider(block, block_flops / rate, narrower, packed=packed),
        rest=rest * narrower,
        update=update,
        flops=depth * block_flops * narrower**2 + rest_flops * narrower,
        rate=rate,
        spread=spread,
    )


def _wider(seconds: float, products: float, by: int, *, packed: bool) -> float:
    """Seconds of a block so many times wider: products, and unpacking, grow by its square, all else evenly."""
    square = seconds if packed else min(seconds, products)
    return square * by**2 + (seconds - square) * by


class _Timed:
    """A training whose micro-batches are timed."""

    def __init__(self, fit: Training, device: torch.device, clock: Clock) -> None:
        self._fit, self._device, self._clock = fit, device, clock
        fit.prepare()
        self._shares = (0.0,) if fit.config.freeze.fixed else (0.0, 0.999)
        self.batches = list(chain.from_iterable(islice(fit.micro_batches(), 64)))
        shortest = np.argsort(fit.train.lengths, kind="stable")[:1]
        self._follow(0.0)
        with Operations() as operations:
            fit.backward(shortest)
        self._first = shortest
        self.flops = operations.count / self.tokens(shortest)

    def tokens(self, rows: Indices) -> int:
        """Padding included."""
        return len(rows) * int(self._fit.train.lengths[rows].max())

    def seconds(self, rows: Indices) -> float:
        """Seconds of a micro-batch, on average over the run where different layers train in it."""
        found = 0.0
        for share in self._shares:
            self._follow(share)
            found += self._timed(lambda: self._fit.backward(rows))
        return found / len(self._shares)

    def update(self) -> float:
        """Seconds of the optimizer's step."""
        self._fit.backward(self._first)
        return self._timed(self._update)

    def _update(self) -> None:
        self._fit.update(self._first)
        self._fit.masters.refresh()

    def _follow(self, share: float) -> None:
        self._fit.freezer.follow(step=0, share=share)

    def _timed(self, call: Callable[[], object]) -> float:
        synchronize(self._device)
        began = self._clock()
        call()
        synchronize(self._device)
        return self._clock() - began


def _points(timed: Sequence[_Timed], rate: float, clock: Clock, seconds: float) -> list[list[tuple[int, float]]]:
    """Tokens and seconds of micro-batches of the run, as it would meet them, on each model in turn."""
    first = timed[0]
    most = max(1, int(seconds / 8 * rate / max(1.0, sum(each.flops for each in timed))))
    batches = [_cut(rows, first, most) for rows in first.batches]
    for each in timed:
        each.seconds(batches[0])
        each.update()
    found: list[list[tuple[int, float]]] = []
    began = clock()
    while len(found) < PASSES[0] or (clock() < began + seconds and len(found) < PASSES[1]):
        rows = batches[(1 + len(found)) % len(batches)]
        found.append([(first.tokens(rows), each.seconds(rows)) for each in timed])
    return found


def _cut(rows: Indices, timed: _Timed, most: int) -> Indices:
    """As many rows as have so many tokens, one at least."""
    return rows[: max(1, min(len(rows), most * len(rows) // timed.tokens(rows)))]


def narrowing(hub: PretrainedConfig) -> int:
    """By how many times a backbone is built narrower; 1 where its shape does not allow it."""
    text, found = hub.get_text_config(), 1
    if not isinstance(getattr(text, "num_key_value_heads", None), int) or hub.is_encoder_decoder:
        return 1
    while text.hidden_size // (2 * found) >= WIDTH and all(getattr(text, key, 1) % (2 * found) == 0 for key in WIDTHS):
        found *= 2
    return found


def depth(hub: PretrainedConfig) -> int:
    """Blocks of a stack of the backbone."""
    return int(hub.get_text_config().num_hidden_layers)


def smaller(model: ModelConfig, hub: PretrainedConfig, small: Small, folder: Path) -> ModelConfig:
    """The same backbone cut down, as a folder with its config.json alone."""
    hub = copy.deepcopy(hub)
    text = hub.get_text_config()
    for key in DEPTHS:
        if isinstance(getattr(text, key, None), int):
            setattr(text, key, min(small.blocks, getattr(text, key)))
    if isinstance(getattr(text, "layer_types", None), list):
        text.layer_types = text.layer_types[: small.blocks]
    if small.narrower > 1:
        text.head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        for key in WIDTHS:
            setattr(text, key, getattr(text, key) // small.narrower)
        text.num_key_value_heads = max(1, text.num_key_value_heads // small.narrower)
    hub.save_pretrained(folder)
    return model.model_copy(update={"id": str(folder)})


def materialise(model: nn.Module) -> None:
    """Give the tensors of a model small random numbers, larger ones at their beginning."""
    numbers = torch.randn(2**16) / 32
    with torch.no_grad():
        for tensor in chain(model.parameters(), model.buffers()):
            if tensor.is_floating_point():
                _fill(tensor, numbers)
            elif tensor.dtype == torch.int64:
                tensor.zero_()


def _fill(tensor: Tensor, numbers: Tensor) -> None:
    flat = tensor.detach().reshape(-1)[:FILLED]
    flat.copy_(numbers.to(tensor).repeat(-(-len(flat) // len(numbers)))[: len(flat)])
