"""The step of a run, carried out on tensors without values: the memory and the operations that it takes.

It is the loop that trains, with the run's own model, loss, optimizer and rows: the largest micro-batches
of its first epoch beside the optimizer's state, those that are not a step's first beside the gradients of earlier ones.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from workbench.adapters import anatomy
from workbench.data.batching import Examples, Indices, micro_batches
from workbench.data.packing import PADDED, RowLayout
from workbench.losses import chunked_loss
from workbench.models import attention_backend, weight_formats
from workbench.planning.counters import ACTIVATIONS, MemoryLedger, Operations
from workbench.planning.dry_trainings import Lengths, Model, Sequences, Training
from workbench.training import activation_offload
from workbench.training.distributed.sharding import Sharded

LOOKED = 256  # steps of a freezing policy that are searched for the one that trains the deepest
WEIGHTS, MASTERS, GRADIENTS, OPTIMIZER, TEACHER = "weights", "masters", "gradients", "optimizer", "teacher"
PICTURES = "outputs of pictures"
Phase = tuple[str, str, int]
"""A part of a dry run: which step and micro-batch; whether forward, backward or between; the block, from the nearer end
(-1: the last)."""


@dataclass(frozen=True)
class DryRun:
    """Bytes and floating-point operations of a run on a device."""

    at_peak: dict[str, int]
    """Bytes alive at the peak, by what they are for: weights, masters in float32, gradients, optimizer (with averages
    of the values that train), activations."""
    evaluation: int
    """The most that is alive while the held-out loss is computed."""
    micro_batches: int
    """Micro-batches of the step that has the most."""
    padded_tokens: int
    """Tokens of the largest micro-batch, padding included."""
    flops_per_token: float
    """Training operations of the micro-batch with most tokens, divided by its tokens without padding."""
    at_gradients: int = 0
    """Bytes of activations alive when a gradient of the backward pass comes, at most."""
    at_recomputing: int = 0
    """Bytes of activations alive from the moment on that the backward pass recomputes a block, at most."""
    offloaded: int = 0
    """Bytes of inputs of blocks that wait in the host's memory, at most."""
    phases: Mapping[Phase, Mapping[str, int]] = field(default_factory=dict)
    """Bytes alive at the peak of each part of these steps, by what they are for; `at_peak` is the highest."""
    decisive: frozenset[str] = frozenset()
    """Micro-batches that no other exceeds in every phase; of a backbone of more blocks, too, no other takes most."""

    @property
    def peak(self) -> int:
        """The most bytes that are alive at once."""
        return max(sum(self.at_peak.values()), self.evaluation)


def dry_run(
    fit: Training,
    held_out_loss: Callable[[], object] | None,
    *,
    others: Sequence[nn.Module] = (),
    decisive: frozenset[str] | None = None,
    pictures: int = 0,
) -> DryRun:
    """Carry out the parts of steps of `fit` that take most memory, on fake tensors.

    Args:
        held_out_loss: Computes what the run evaluates, on its largest micro-batch; None: nothing is evaluated.
        others: Other models that are there: a teacher.
        decisive: Those of a backbone with fewer of the same blocks: no other micro-batch is carried out.
        pictures: Bytes of what a frozen tower said of pictures, which the device keeps.
    """
    fit.prepare()
    fit.freezer.follow(step=0, share=0)
    epoch, waiting = list(fit.micro_batches()), activation_offload.counted()
    with MemoryLedger(fit.freezer.backbone.device.type) as ledger:
        hold(ledger, fit, others=others)
        ledger.hold(fit.starts, MASTERS)
        with ledger.making(PICTURES):
            kept = torch.empty(pictures, dtype=torch.uint8)
        with ledger.making(OPTIMIZER):
            averages = [
                torch.empty_like(each) for values, copies in fit.averaged for each in values for _ in range(copies)
            ]
        peaks = _Peaks(ledger)
        _tell_gradients(fit, ledger, peaks.gradient)
        paths = chain.from_iterable(anatomy.blocks(fit.freezer.backbone))
        peaks.follow([fit.freezer.backbone.get_submodule(path) for path in paths])
        tried: dict[str, MicroBatchTrial] = {}
        flops, tokens = 0.0, 0
        with peaks.seen("choice"):
            fit.choose()
        for moment, (step, share) in enumerate(_moments(fit)):
            fit.freezer.follow(step=step, share=share)
            _hold_masters(ledger, fit)
            _give_gradients(fit, ledger)
            with ledger.making(OPTIMIZER):
                fit.update(epoch[0][0])  # what an optimizer keeps, it keeps from here on
            done: list[tuple[MicroBatchTrial, int]] = []
            costs = _costs(fit, alone=not others)
            for number, trial in enumerate(_trials(fit.train, epoch, fit.arrangement)):
                name = f"{moment} {number}"
                if decisive is not None and name not in decisive:
                    continue
                if decisive is None and any(trial.takes_less(than, activations, costs) for than, activations in done):
                    continue
                count, activations = 0.0, 0
                for kind, part in fit.kinds.items():
                    if trial.later:
                        _give_gradients(fit, ledger)
                    else:
                        for master in fit.masters:
                            master.grad = None
                    with Operations() as operations, peaks.seen(f"{name} {kind}"):
                        fit.backward(trial.rows, step=kind)
                    count += part * operations.count
                    activations = max(activations, peaks.last[ACTIVATIONS])
                done.append((trial, activations))
                tried[name] = trial
                if number == 0 and count > flops:
                    flops, tokens = count, int(fit.train.lengths[trial.rows].sum())
            _give_gradients(fit, ledger)
            with peaks.seen(f"{moment} update"), ledger.making(OPTIMIZER):
                fit.update(epoch[0][0])
        ledger.restart()
        fit.model.eval()
        evaluation = 0
        if held_out_loss is not None:
            with torch.no_grad():
                fit.masters.reading(held_out_loss) if isinstance(fit.masters, Sharded) else held_out_loss()
            # An evaluation of an average takes beside it the values that train, whose place it takes.
            swapped = max(min(copies, 1) * sum(each.nbytes for each in values) for values, copies in fit.averaged)
            evaluation = ledger.peak + swapped
        del averages, kept
    sequences = _sequence_lengths(fit.train)
    return DryRun(
        at_peak=highest(peaks.phases),
        evaluation=evaluation,
        micro_batches=max(len(each) for each in epoch),
        padded_tokens=max(fit.arrangement.tokens(sequences[rows].ravel()) for each in epoch for rows in each),
        flops_per_token=flops / tokens,
        at_gradients=max(peaks.at_gradients.values(), default=0),
        at_recomputing=max(peaks.at_recomputing.values(), default=0),
        offloaded=waiting.most,
        phases=peaks.phases,
        decisive=frozenset(_decisive(tried, peaks, pairs=costs.pair > MASKS)),
    )


def _decisive(tried: Mapping[str, MicroBatchTrial], peaks: _Peaks, *, pairs: bool) -> Iterator[str]:
    """Yield micro-batches that no other exceeds in all phases and in what grows with the blocks. `pairs`: whether bytes
    do with pairs of tokens."""
    sizes = {name: Counter[tuple[str, str, int]]() for name in tried}
    moments: Iterator[tuple[Phase, int]] = chain(
        ((phase, sum(held.values())) for phase, held in peaks.phases.items()),
        (((what, "gradient", 0), size) for what, size in peaks.at_gradients.items()),
        (((what, "recomputing", 0), size) for what, size in peaks.at_recomputing.items()),
    )
    for (what, part, number), size in moments:
        name, _, kind = what.rpartition(" ")
        # Near the last block all others hold their activations: there, bytes grow alike with the blocks.
        phase = (kind, "end", 0) if number < 0 or part == "head" else (kind, part, number)
        if name in sizes:
            sizes[name][phase] = max(sizes[name][phase], size)
    kept = list[str]()

    def exceeded(name: str, other: str) -> bool:
        own, than = tried[name], tried[other]
        more = own.padded > than.padded or own.later > than.later or (pairs and own.pairs > than.pairs)
        same = name.split()[0] == other.split()[0]  # moment, at which the same layers train
        return same and not more and all(size <= sizes[other][key] for key, size in sizes[name].items())

    for name in sorted(tried, key=lambda each: max(sizes[each].values(), default=0), reverse=True):
        if not any(exceeded(name, each) for each in kept):
            kept.append(name)
    yield from {*kept, *(name for name in tried if name.endswith(" 0"))}  # whose operations are counted


def highest(phases: Mapping[Phase, Mapping[str, int]]) -> dict[str, int]:
    """That of several peaks in which most bytes are alive, by what they are for."""
    return dict(phases[max(phases, key=lambda phase: sum(phases[phase].values()))])


class _Peaks:
    """The peak of each part of what is done, by the block that computes."""

    def __init__(self, ledger: MemoryLedger) -> None:
        self._ledger = ledger
        self.last: Mapping[str, int] = {}
        """The highest of what was seen last."""
        self.phases: dict[Phase, dict[str, int]] = {}
        self.at_gradients, self.at_recomputing = Counter[str](), Counter[str]()
        """Activations alive when a gradient comes, and from a recomputed block on, at most, by what was done."""
        self._phase: Phase = ("", "", 0)
        self._recomputes = self._watching = False

    def gradient(self) -> None:
        """A gradient came."""
        name = self._phase[0]
        self.at_gradients[name] = max(self.at_gradients[name], self._ledger.alive(ACTIVATIONS))

    def follow(self, blocks: Sequence[nn.Module]) -> None:
        """Tell apart what each of these blocks computes, and what comes after the last."""

        def backward(number: int) -> None:
            self._enter("backward", number)

        def called(number: int) -> None:
            self._enter("forward" if torch.is_grad_enabled() else "reading", number)

        def left(number: int, output: Any) -> None:
            if output is None:  # an error passes through
                return
            hidden = output if isinstance(output, Tensor) else output[0]
            if isinstance(hidden, Tensor) and hidden.requires_grad:
                hidden.register_hook(lambda _: backward(number))
            if number == -1 and torch._C._current_graph_task_id() == -1:
                self._enter("head", 0)

        for index, block in enumerate(blocks):
            # By their distance from the nearer end.
            number = index if index < -(-len(blocks) // 2) else index - len(blocks)
            block.register_forward_pre_hook(lambda *_, number=number: called(number))
            # One that is always called only looks, and does not keep the last block from computing fewer positions.
            block.register_forward_hook(lambda *given, number=number: left(number, given[-1]), always_call=True)
            for submodule in block.children():  # in the forward pass, or again in the backward pass
                submodule.register_forward_pre_hook(lambda *_: self._recomputing())

    @contextmanager
    def seen(self, name: str) -> Iterator[None]:
        """The peaks of what is done inside the block count."""
        self._ledger.restart()
        self.last, self._phase, self._recomputes, self._watching = {}, (name, "", 0), False, True
        yield
        self._take()
        self._watching = False

    def _enter(self, part: str, number: int) -> None:
        if not self._watching:  # an evaluation, whose peak is another's
            return
        part = part if torch._C._current_graph_task_id() == -1 else "backward"
        self._take()
        self._ledger.restart()
        self._phase = (self._phase[0], part, number)

    def _recomputing(self) -> None:
        """A block computes, maybe once more: what is alive from then on is also counted by itself."""
        if torch._C._current_graph_task_id() != -1 and not self._recomputes:
            self._take()
            self._ledger.restart()
            self._recomputes = True

    def _take(self) -> None:
        """Compare the peak since the last look with that of its phase, and with the last."""
        peak = self._ledger.at_peak
        if self._recomputes:
            name = self._phase[0]
            self.at_recomputing[name] = max(self.at_recomputing[name], peak.get(ACTIVATIONS, 0))
        size = sum(peak.values())
        if size > sum(self.last.values()):
            self.last = peak
        if size > sum(self.phases.get(self._phase, {}).values()):
            self.phases[self._phase] = peak


MASKS = 4.0 * 4
"""Bytes of the masks of a pair of tokens, which all blocks share, at most."""


class Costs(NamedTuple):
    """Bytes of a micro-batch that do not grow with its tokens alone."""

    position: int  # bytes for each supervised position
    pair: float  # bytes for each pair of tokens in a row
    gradients: int  # bytes of the gradients that earlier micro-batches left
    logits: int = 0  # bytes of a supervised position's logits, which exist for so many positions at once
    at_once: float = math.inf

    def of(self, supervised: float) -> float:
        """Bytes of so many supervised positions."""
        return self.position * supervised + self.logits * min(supervised, self.at_once)


class MicroBatchTrial(NamedTuple):
    """A micro-batch that may take most."""

    rows: Indices
    later: bool  # whether others of its step have left gradients
    padded: int
    pairs: int  # pairs of tokens in a row, or in a block of short packed rows, padding included if there is any
    supervised: float

    def takes_less(self, than: MicroBatchTrial, activations: int, costs: Costs) -> bool:
        """Whether it cannot take more than another, which was carried out: its fewer tokens weigh more than all else.
        `activations`: at the peak of the other. Half of them are taken to be those of its tokens."""
        token = max(0.0, activations - costs.of(than.supervised)) / 2 / than.padded
        spare = token * (than.padded - self.padded) + costs.gradients * (than.later - self.later)
        pairs = max(0, self.pairs - than.pairs)
        more = max(0.0, costs.of(self.supervised) - costs.of(than.supervised)) + (costs.pair * pairs if pairs else 0)
        return self.padded <= than.padded and more <= spare


def _costs(fit: Training, *, alone: bool) -> Costs:
    """Bounds from above. `alone`: whether no teacher's logits stand beside those of the model."""
    backbone, float32 = fit.freezer.backbone, torch.float32.itemsize
    pictures = not (anatomy.reads_tokens(backbone) or backbone.can_generate())
    # The configuration of the blocks that predict.
    body: Any = anatomy.body_config(backbone.config) if pictures else backbone.config.get_text_config(decoder=True)
    if body._attn_implementation == "eager" or fit.compares:
        pair = math.inf  # what computes attention's scores itself, or compares them, holds as much as it wants
    elif fit.arrangement.packed and not fit.arrangement.prefix and not attention_backend.on_cpu(backbone.device):
        pair = 0.0  # the kernel of packed rows keeps neither masks nor scores
    else:
        pair = MASKS  # and on CPUs the weights that attention keeps
        if attention_backend.on_cpu(backbone.device):
            counts = getattr(body, "num_attention_heads", None) or getattr(body, "num_heads", None) or 0
            heads: int = counts if isinstance(counts, int) else max(counts)  # of the stage that has most
            pair += heads * (2 * len(fit.freezer.blocks) + 3 * float32)
    outputs, passes = 0 if pictures else body.vocab_size, 2 if fit.config.regularise.r_drop else 1
    position, gradients = 8 * float32 * passes, sum(master.nbytes for master in fit.masters)
    if not outputs or not alone:
        return Costs(position * (outputs + fit.width), pair, gradients)
    at_once = chunked_loss.chunk_positions(outputs, backbone.device)
    return Costs(position * fit.width, pair, gradients, logits=position * outputs, at_once=at_once)


def hold(ledger: MemoryLedger, fit: Model, *, others: Iterable[nn.Module] = ()) -> None:
    """Count what a training begins with: every parameter and buffer, and the masters. `others`: other models that are
    there."""
    ledger.hold(fit.masters.computing().values(), WEIGHTS)
    _hold_masters(ledger, fit)
    ledger.hold(chain(weight_formats.held(fit.model), fit.model.buffers()), WEIGHTS)
    for model in others:
        ledger.hold(chain(weight_formats.held(model), model.buffers()), TEACHER)


def _hold_masters(ledger: MemoryLedger, fit: Model) -> None:
    """Count the masters of what trains now; others are in no memory."""
    masters = fit.masters.named()
    ledger.hold([masters[name] for name, each in fit.masters.computing().items() if each.requires_grad], MASTERS)


def _trials(
    train: Lengths, epoch: list[list[Indices]], arrangement: RowLayout, *, positions: float = math.inf
) -> list[MicroBatchTrial]:
    """The micro-batches that may take most, likeliest first: most tokens with padding, pairs, supervised tokens.
    `positions`: token count above which peak memory no longer grows with supervised tokens."""
    longest, sequences = int(train.lengths.max()), _sequence_lengths(train)
    measures: list[Callable[[MicroBatchTrial], Any]] = [
        lambda trial: trial.pairs,
        lambda trial: arrangement.pairs(sequences[trial.rows].ravel()),
        lambda trial: trial.padded,
        lambda trial: trial.padded + trial.pairs / longest,
        lambda trial: (min(trial.supervised, positions), trial.padded),
    ]
    trials: dict[int, MicroBatchTrial] = {}
    for parts in ([each[0] for each in epoch], [rows for each in epoch for rows in each[1:]]):
        every = []
        for rows in parts:
            lengths = sequences[rows].ravel()
            tokens, pairs = arrangement.tokens(lengths), arrangement.pairs(lengths)
            if arrangement.packed and not arrangement.prefix:  # in half precision; in float32 each row is alone
                pairs = max(pairs, attention_backend.pairs_in_blocks(lengths.tolist()))
            every.append(MicroBatchTrial(rows, bool(trials), tokens, pairs, float(train.supervised[rows].sum())))
        trials |= {id(most): most for most in (max(every, key=measure) for measure in measures if every)}
    return sorted(trials.values(), key=lambda trial: (trial.padded, trial.later, trial.supervised), reverse=True)


def _sequence_lengths(train: Lengths) -> Indices:
    """Tokens of each sequence of each row, (rows, sequences) or (rows,)."""
    return train.sequence_lengths if isinstance(train, Sequences) else train.lengths


def largest_rows(rows: Examples, *, tokens: int, positions: float = math.inf) -> list[Indices]:
    """The micro-batches of a whole set that may take most. `positions`: of which logits are in memory at once, if they
    are; what is computed of others is small."""
    every = [[part] for part in micro_batches(np.arange(len(rows)), rows.lengths, tokens=tokens)]
    return [trial.rows for trial in _trials(rows, every, PADDED, positions=positions)]


def _moments(fit: Training) -> tuple[tuple[int, float], ...]:
    """Steps, and shares of the run, at which different layers train: the first, the deepest of the next, the last."""
    if fit.config.freeze.fixed:
        return ((0, 0.0),)

    def depth(step: int) -> int:
        fit.freezer.follow(step=step, share=0)
        return fit.freezer.depth

    deepest = min(range(max(1, min(fit.steps, LOOKED))), key=depth)
    return tuple(dict.fromkeys([(0, 0.0), (deepest, 0.0), (0, 0.999)]))


def _give_gradients(fit: Model, ledger: MemoryLedger) -> None:
    """Add the gradients that an earlier micro-batch leaves, where they are not there yet."""
    masters = fit.masters.named()
    for name, parameter in fit.masters.computing().items():
        if parameter.requires_grad and masters[name].grad is None:
            with ledger.making(GRADIENTS):
                masters[name].grad = torch.zeros_like(masters[name])


def _tell_gradients(fit: Model, ledger: MemoryLedger, came: Callable[[], None]) -> None:
    """Book each gradient in the ledger as soon as it is there, and call `came`."""
    masters = fit.masters.named()

    def tell(name: str) -> Callable[[Tensor], None]:
        def hook(parameter: Tensor) -> None:
            both = (parameter.grad, masters[name].grad)
            ledger.rename([each for each in both if each is not None], GRADIENTS)
            came()

        return hook

    for name, parameter in fit.masters.computing().items():
        trains = parameter.requires_grad  # it may be frozen at the first step, and train at others
        parameter.requires_grad_().register_post_accumulate_grad_hook(tell(name))
        parameter.requires_grad_(trains)
