"""Seconds of an average step: a real block of the run's own kind is timed, and multiplied.

The run's own model is built with fewer and narrower blocks and trains on real micro-batches; what it takes for a block
and for all else adds up to a step, with an interval. No step is taken for faster than the most that this device
computes and reads, which is measured within a quarter of a second.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice, product
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING, PretrainedConfig

from workbench.adapters import anatomy
from workbench.config import ModelConfig
from workbench.data.batching import Indices
from workbench.models import backbones
from workbench.planning.cards import DeviceCard
from workbench.planning.counters import Operations
from workbench.planning.dry_trainings import Training
from workbench.runs import process_memory

SECONDS = 3.0  # time budget for timing one plan, building its models not counted; a slow plan may take longer
NARROW = (4, 2 / 3)  # depth of the deeper of two narrower models, and the part of the time budget that both get
PASSES = (3, 24)  # micro-batches that each model is timed on, at least and at most
STEPS = 64  # steps of the run from which micro-batches are taken
WIDTH = 1024  # wider backbones are built about this narrow: matrix products of this width already run at full speed
WHOLE = 400_000_000  # parameters of the largest model that is built
DEPTHS = (
    *("num_hidden_layers", "num_layers", "num_decoder_layers", "encoder_layers", "decoder_layers", "n_layer"),
    "n_layers",
)  # settings of a model's configuration that count its blocks
WIDTHS = ("hidden_size", "intermediate_size", "num_attention_heads")  # settings that shrink with a narrower block
ROOFLINE_SECONDS = 0.1  # for measuring each rate of the device, about
ROWS, MATRIX, LARGE = 256, 1024, 8192
"""Rows and width of the matrices that are multiplied, about those of a block; both of an accelerator's."""
READ, LARGE_READ = 2**27, 2**30  # bytes that are read: more than caches hold; on an accelerator
ACCELERATOR_FLOPS = 1e14  # operations a second that are assumed of an accelerator that this machine lacks
REACHED = 0.6, 0.35, 0.2
"""Shares of a card's products, as its maker states them, that a step reaches: at best, as a rule, at worst. An H100
trained models of 1 and 8 billion parameters at 31 to 62 % of the rate of its own largest product (scripts/gpu)."""
ACCELERATOR_READ = 1e12  # bytes a second that such a one reads from its memory
COUNTED_STEPS = 500  # steps whose micro-batches are counted; later ones are taken to be alike
ERROR = 0.15  # relative error of the time of a step, besides the spread of the timed micro-batches
READS = 2  # times that a micro-batch reads every weight: forward and backward

Clock = Callable[[], float]


class Roofline(NamedTuple):
    """Rates that no step exceeds."""

    flops: float  # floating-point operations a second of a matrix product
    bandwidth: float  # bytes a second that are read from memory


def roofline(device: torch.device, dtype: torch.dtype, *, clock: Clock = time.perf_counter) -> Roofline:
    """Both rates of a device, at best."""
    many, width, read = (ROWS, MATRIX, READ) if device.type == "cpu" else (LARGE, LARGE, LARGE_READ)
    rows = torch.full((many, width), 0.5, dtype=dtype, device=device)
    matrix = torch.full((width, width), 0.5, dtype=dtype, device=device)
    numbers = torch.ones(read // 4, dtype=torch.int32, device=device)
    product = _fastest(lambda: rows @ matrix, device, clock)
    reading = _fastest(numbers.max, device, clock)
    return Roofline(2 * many * width * width / product, read / reading)


def _fastest(call: Callable[[], object], device: torch.device, clock: Clock) -> float:
    """Seconds of a call, at best."""
    call()  # the first time takes longer
    best, began = float("inf"), clock()
    while best == float("inf") or clock() < began + ROOFLINE_SECONDS:
        synchronize(device)
        start = clock()
        call()
        synchronize(device)
        best = min(best, max(clock() - start, 1e-9))
    return best


def synchronize(device: torch.device) -> None:
    """Wait until an accelerator has computed what it was asked for."""
    if device.type != "cpu":
        torch.accelerator.synchronize()


@dataclass(frozen=True)
class Small:
    """How a backbone is cut down for timing."""

    blocks: int  # blocks in each stack
    narrower: int = 1  # divisor of the widths; the matrix products of a block shrink by its square


Build = Callable[[Small], AbstractContextManager[Training]]
"""Gives the run's own training with real tensors, over a backbone that is cut down."""


@dataclass(frozen=True)
class Subject:
    """The full model and run that the small models stand for."""

    depth: int  # blocks of each stack of the backbone
    narrower: int  # divisor of the widths of the models that are built
    parameters: int
    trainable: int
    flops: float  # operations of its largest micro-batch
    dtype: torch.dtype  # type that matrix products run in
    packed: bool  # whether weights are unpacked in every pass, in time proportional to their size


@dataclass(frozen=True)
class Measured:
    """Measured seconds of one device's work in a run."""

    token: float  # seconds for each token of a micro-batch, padding included
    error: float  # standard error of these seconds
    update: float  # seconds of the optimizer's step, for all parameters that train
    flops: float  # operations for each token
    machine: Roofline


def measure(build: Build, subject: Subject, *, clock: Clock = time.perf_counter, seconds: float = SECONDS) -> Measured:
    """Time micro-batches of a run on one or two small models in turn."""
    process_memory.keep()
    device = backbones.device()
    machine = roofline(device, subject.dtype, clock=clock)
    counts = _depths(subject, machine.flops * seconds / 4)
    with ExitStack() as stack, torch.random.fork_rng():
        timed = [_Timed(stack.enter_context(build(Small(count, subject.narrower))), device, clock) for count in counts]
        update = median(timed[-1].update() for _ in range(4))
        samples = _samples(timed, machine.flops, clock, seconds * (NARROW[1] if subject.narrower > 1 else 1))
        update *= subject.trainable / max(1, timed[-1].trainable)
    flops = [each.flops for each in timed]
    rates = [_rate(each) for each in samples]
    if len(counts) == 1:
        return Measured(*rates[0], update, flops[0], machine)
    more, by = counts[1] - counts[0], subject.narrower
    block_flops = (flops[1] - flops[0]) / more
    block = max((rates[1].token - rates[0].token) / more, block_flops / machine.flops)
    # Less than nothing where the last block, of supervised tokens alone, saves more than the head takes.
    rest, rest_flops = rates[0].token - counts[0] * block, flops[0] - counts[0] * block_flops
    # A block so many times wider: products, and unpacking, grow by its square, all else evenly.
    square = block if subject.packed else min(block, block_flops / machine.flops)
    wide = square * by**2 + (block - square) * by
    return Measured(
        token=subject.depth * wide + rest * by,
        error=subject.depth / more * wide / block * math.hypot(rates[0].error, rates[1].error),
        update=update,
        flops=subject.depth * block_flops * by**2 + rest_flops * by,
        machine=machine,
    )


def _depths(subject: Subject, flops: float) -> tuple[int, ...]:
    """Blocks of the models to build: all of them where a micro-batch takes no more than so many operations.

    Otherwise two depths, as deep as that allows: what many blocks keep for the backward pass finds no room in caches.
    """
    if subject.narrower > 1:
        return 1, min(NARROW[0], subject.depth)
    share = min(flops / subject.flops, WHOLE / subject.parameters)
    deep = max(2, int(subject.depth * share))
    return (deep // 2, deep) if deep < subject.depth else (subject.depth,)


class _Timed:
    """A training whose micro-batches are timed."""

    def __init__(self, fit: Training, device: torch.device, clock: Clock) -> None:
        self._fit, self.device, self._clock = fit, device, clock
        fit.prepare()
        self._shares = (0.0,) if fit.config.freeze.fixed else (0.0, 0.999)
        self.batches = sorted(chain.from_iterable(islice(fit.micro_batches(), STEPS)), key=self.tokens)
        fit.freezer.follow(step=0, share=0.0)
        shortest = self.batches[0][:1]
        self.flops = 0.0  # floating-point operations of one token, forward and backward
        for step, part in fit.kinds.items():
            with Operations() as counted:
                fit.backward(shortest, step=step)
            self.flops += part * (counted.count / self.tokens(shortest))

    @property
    def trainable(self) -> int:
        """Parameters that train."""
        return sum(each.numel() for each in self._fit.masters)

    def tokens(self, rows: Indices) -> int:
        """Padding included, if there is any."""
        return self._fit.arrangement.tokens(self._fit.train.lengths[rows])

    def seconds(self, rows: Indices) -> float:
        """Seconds of a micro-batch, on average over the run where different layers train in it."""
        total = 0.0
        for share, (step, part) in product(self._shares, self._fit.kinds.items()):
            self._fit.freezer.follow(step=0, share=share)
            total += part * self._timed(partial(self._fit.backward, rows, step=step))
        return total / len(self._shares)

    def update(self) -> float:
        """Seconds of the optimizer's step."""
        for master in self._fit.masters:
            if master.requires_grad:
                master.grad = torch.zeros_like(master)

        def update() -> None:
            self._fit.update(self.batches[0])
            self._fit.masters.refresh()

        return self._timed(update)

    def _timed(self, call: Callable[[], object]) -> float:
        synchronize(self.device)
        began = self._clock()
        call()
        synchronize(self.device)
        return self._clock() - began


class Rate(NamedTuple):
    """Seconds for each token, with their standard error."""

    token: float
    error: float


Samples = list[tuple[int, float]]  # tokens and seconds of micro-batches


def _samples(timed: Sequence[_Timed], flops: float, clock: Clock, seconds: float) -> list[Samples]:
    """Micro-batches of all lengths that the run has, each model its own.

    A shape that was computed before takes less time, as libraries prepare their kernels for each; in a run nearly every
    micro-batch has another. So no two models are timed on the same one, but on neighbours by length.
    """
    first = timed[0]
    most = max(1, int(seconds / 8 * flops / max(1.0, sum(each.flops for each in timed))))
    # As many rows as have so many tokens, one at least.
    batches = [rows[: max(1, min(len(rows), most * len(rows) // first.tokens(rows)))] for rows in first.batches]
    samples: list[Samples] = [[] for _ in timed]
    began = clock()
    for each in timed:
        each.seconds(batches[-1])  # what is computed first takes longer
    for passed in range(PASSES[1]):
        if passed >= PASSES[0] and (clock() - began) * (passed + 2) > seconds * (passed + 1):
            break  # another pass would end too late
        at = int(_spread(passed) * len(batches))
        for number, each in enumerate(timed):
            rows = batches[(at + number) % len(batches)]
            if each.device.type != "cpu":
                each.seconds(rows)  # kernels are made once for each shape
            samples[number].append((first.tokens(rows), each.seconds(rows)))
    return samples


def _spread(number: int) -> float:
    """The numbers 0.5, 0.25, 0.75, 0.125 and so on: any count of them is even between 0 and 1 (van der Corput)."""
    fraction, step, number = 0.0, 0.5, number + 1
    while number:
        fraction, step, number = fraction + step * (number & 1), step / 2, number >> 1
    return fraction


def _rate(samples: Samples) -> Rate:
    tokens_B, seconds_B = np.array(samples, dtype=float).T
    token = float(seconds_B.sum() / tokens_B.sum())
    variance = float(((seconds_B - token * tokens_B) ** 2).sum()) * len(samples) / max(1, len(samples) - 1)
    return Rate(token, math.sqrt(variance) / float(tokens_B.sum()))


def narrowing(hub: PretrainedConfig, *, parts: int = 1) -> int:
    """By how many times a backbone is built narrower; 1 where its shape does not allow it, or it is a single block.
    `parts`: Tensor-parallel parts into which heads and features are cut."""
    text: Any = anatomy.body_config(hub)
    factor = 1
    is_grouped = isinstance(getattr(text, "num_key_value_heads", None), int)
    if not is_grouped or hub.is_encoder_decoder or depth(hub) == 1:
        return 1
    cut = WIDTHS if parts == 1 else (*WIDTHS, "num_key_value_heads")
    while text.hidden_size // (2 * factor) >= WIDTH and all(
        getattr(text, key, parts) % (2 * factor * parts) == 0 for key in cut
    ):
        factor *= 2
    return factor


def depth(hub: PretrainedConfig) -> int:
    """Blocks of a stack of the backbone; 1 where blocks in stages are unlike each other, so that it is timed whole."""
    config: Any = anatomy.body_config(hub)
    return 1 if _unlike(hub) else int(config.num_hidden_layers)


def _unlike(hub: PretrainedConfig) -> bool:
    """Whether blocks differ in width: those of all backbones for pictures that are no plain transformers."""
    body = anatomy.body_config(hub)
    plain = hasattr(body, "num_attention_heads") and getattr(body, "depths", None) is None
    return type(hub) in MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING and not plain


def smaller(model: ModelConfig, hub: PretrainedConfig, small: Small, folder: Path) -> ModelConfig:
    """The same backbone cut down, as a folder with its config.json alone."""
    hub = copy.deepcopy(hub)
    text: Any = anatomy.body_config(hub)
    for key in () if _unlike(hub) else DEPTHS:
        if isinstance(getattr(text, key, None), int):
            setattr(text, key, min(small.blocks, getattr(text, key)))
    if isinstance(getattr(text, "stage_names", None), list) and not _unlike(hub):
        text.stage_names = text.stage_names[: small.blocks + 1]
        text._out_features, text._out_indices = None, None  # which were the last blocks
    if isinstance(getattr(text, "layer_types", None), list):
        text.layer_types = text.layer_types[: small.blocks]
    if small.narrower > 1:
        text.head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        for key in WIDTHS:
            setattr(text, key, getattr(text, key) // small.narrower)
        text.num_key_value_heads = max(1, text.num_key_value_heads // small.narrower)
    hub.save_pretrained(folder)
    return model.model_copy(update={"id": str(folder)})


Measure = Callable[[Clock, float], Measured]  # measures with a clock for so many seconds


@dataclass(frozen=True)
class StepWork:
    """The micro-batches of an average step on one device, and how to time them."""

    padded: float = 0.0
    """Tokens of its micro-batches, padding included if there is any."""
    tokens: float = 0.0
    """The same without padding."""
    passes: float = 0.0
    """Its micro-batches."""
    weight_bytes: int = 0
    measure: Measure | None = None
    """None: nothing like it can be built here, and operations alone say how long it takes."""
    teacher: bool = False
    """Whether operations of a teacher come on top of those of the model that is timed."""
    forward: float = 0.0
    """Operations of a forward pass without gradients, for each token."""
    looked: float = 0.0
    """Tokens that such passes read in a step, before its gradients."""
    once: float = 0.0
    """Tokens that such passes read before the first step."""
    control: float = 0.0
    """What a step of a training takes that comes before, in as many steps, as a share of one of these."""


@dataclass(frozen=True)
class Timed:
    """The time of an average step."""

    seconds: float
    low: float
    high: float
    once: float = 0.0  # seconds before the first step, in which a model reads rows
    process: int = 0  # bytes that this process holds after it, where they were looked at
    reading: float = 0.0  # seconds of it in which each micro-batch reads the weights, where they are added to others


def work(fit: Training, **others: Any) -> StepWork:
    """The work of an average step of `fit`, which is prepared."""
    steps = list(islice(fit.micro_batches(), COUNTED_STEPS))
    lengths = fit.train.lengths
    return StepWork(
        padded=mean(sum(fit.arrangement.tokens(lengths[rows]) for rows in batches) for batches in steps),
        tokens=mean(sum(int(lengths[rows].sum()) for rows in batches) for batches in steps),
        passes=mean(len(batches) for batches in steps),
        **others,
    )


def timed(
    work: StepWork, flops_per_token: float, *, clock: Clock = time.perf_counter, seconds: float = SECONDS
) -> Timed:
    """Seconds of an average step here; never less than its products and weights take at the rates measured."""
    if work.measure is None:
        return assumed(work, flops_per_token)
    measured = work.measure(clock, seconds)
    computing, error = work.padded * measured.token, work.padded * measured.error
    if work.teacher:
        more = max(1.0, work.tokens * flops_per_token / (work.padded * measured.flops))
        computing, error = computing * more, error * more
    reading = measured.token * work.forward / measured.flops
    computing += work.looked * reading
    least = max(
        (work.padded * measured.flops + work.looked * work.forward) / measured.machine.flops,
        work.passes * READS * work.weight_bytes / measured.machine.bandwidth,
    )
    taken = max(computing + measured.update, least)
    error = ERROR * taken + 2 * error
    return Timed(taken, max(least, taken - error), taken + error, work.once * reading)


def assumed(work: StepWork, flops_per_token: float, card: DeviceCard | None = None, *, single: bool = False) -> Timed:
    """Seconds of an average step on a card that is not here; None: a usual one.

    Args:
        single: It computes in float32.
    """
    operations = work.tokens * flops_per_token + work.looked * work.forward
    reading = READS * work.weight_bytes / (ACCELERATOR_READ if card is None else card.read)
    read = work.passes * reading
    if card is None:
        least = operations / ACCELERATOR_FLOPS + read
        return Timed(least, least, 4 * least, work.once * work.forward / ACCELERATOR_FLOPS, reading=reading)
    rate = card.products(single=single)
    low, usual, high = (operations / (share * rate) + read for share in REACHED)
    return Timed(usual, low, high, work.once * work.forward / (REACHED[1] * rate), reading=reading)
