"""The step of a run, carried out on tensors without numbers: the memory and the operations that it takes.

What is rehearsed is the loop that trains, with the run's own model, loss, optimizer and rows: the largest micro-batches
of its first epoch beside the optimizer's state, those that are not a step's first beside the gradients of earlier ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from workbench import storage
from workbench.data.batching import Examples, Indices, global_batch, micro_batches, steps_per_epoch
from workbench.engine import Fit
from workbench.planning.ledger import Ledger
from workbench.planning.operations import Operations

WEIGHTS, MASTERS, GRADIENTS, OPTIMIZER = "weights", "masters", "gradients", "optimizer"


@dataclass(frozen=True)
class Rehearsed:
    """What a run takes on a device, in bytes and floating-point operations."""

    at_peak: dict[str, int]
    """Bytes alive at the peak, by what they are for: weights, masters in float32, gradients, optimizer, activations."""
    evaluation: int
    """The most that is alive while the held-out loss is computed."""
    micro_batches: int
    """Of the step that has most of them."""
    padded_tokens: int
    """Of the largest micro-batch."""
    flops_per_token: float
    """Of training, by the tokens of the largest micro-batch without padding."""

    @property
    def peak(self) -> int:
        """The most bytes that are alive at once."""
        return max(sum(self.at_peak.values()), self.evaluation)

    @property
    def trains_at_peak(self) -> bool:
        """Whether that is in a step of training; otherwise it is in an evaluation."""
        return self.peak > self.evaluation


def rehearse(fit: Fit, held_out_loss: Callable[[], object]) -> Rehearsed:
    """Carry out the steps of `fit` that take most memory, where tensors are imagined.

    Args:
        held_out_loss: Computes what the run evaluates, on its largest micro-batch.
    """
    fit.prepare()
    epoch = list(_micro_batches(fit))
    first = _largest(fit.train, [each[0] for each in epoch])
    later = _largest(fit.train, [rows for each in epoch for rows in each[1:]])
    with Ledger() as ledger:
        hold(ledger, fit)
        _tell_gradients(fit, ledger)
        _tell_optimizer(fit, ledger)
        flops, tokens = 0, 0
        for share in _moments(fit):
            fit.freezer.follow(step=0, share=share)
            _give_gradients(fit, ledger)
            fit.member.update(1.0, first[0])  # what an optimizer keeps, it keeps from here on
            for number, rows in enumerate([*first, *later]):
                if number >= len(first):
                    _give_gradients(fit, ledger)
                with Operations() as operations:
                    fit.step(rows)
                if operations.count > flops:
                    flops, tokens = operations.count, int(fit.train.lengths[rows].sum())
        at_peak = ledger.at_peak
        ledger.peak = ledger.now
        fit.model.eval()
        with torch.no_grad():
            held_out_loss()
        evaluation = ledger.peak
    return Rehearsed(
        at_peak=at_peak,
        evaluation=evaluation,
        micro_batches=max(len(each) for each in epoch),
        padded_tokens=max(_padded(fit.train, rows) for rows in first),
        flops_per_token=flops / tokens,
    )


def hold(ledger: Ledger, fit: Fit) -> None:
    """Count what a training begins with: every parameter and buffer, and the masters."""
    ledger.hold(chain(storage.held(fit.model), fit.model.buffers()), WEIGHTS)
    ledger.hold(fit.masters, MASTERS)


def _micro_batches(fit: Fit) -> Iterator[list[Indices]]:
    """Those of each step of the first epoch."""
    train, config = fit.train, fit.config
    steps = min(steps_per_epoch(len(train), config.batch.size), fit.member.total)
    for step in range(steps):
        draws = global_batch(step, rows=len(train), size=config.batch.size, seed=config.seed)
        yield list(micro_batches(train.drawn(draws, epoch=0), train.lengths, tokens=fit.tokens))


def _largest(train: Examples, parts: list[Indices]) -> list[Indices]:
    """The micro-batches that may take most: most tokens with padding, the longest row, most supervised tokens."""
    measures: list[Callable[[Indices], float]] = [
        lambda rows: _padded(train, rows) * int(train.lengths[rows].max()),
        lambda rows: _padded(train, rows),
        lambda rows: float(train.supervised[rows].sum()),
    ]
    if not parts:
        return []
    chosen = {max(range(len(parts)), key=lambda number: measure(parts[number])) for measure in measures}
    return [parts[number] for number in sorted(chosen)]


def largest_rows(rows: Examples, *, tokens: int) -> Indices:
    """The micro-batch of a whole set that has most tokens with padding."""
    every = micro_batches(np.arange(len(rows)), rows.lengths, tokens=tokens)
    return max(every, key=lambda part: _padded(rows, part))


def _padded(train: Examples, rows: Indices) -> int:
    return len(rows) * int(train.lengths[rows].max())


def _moments(fit: Fit) -> tuple[float, ...]:
    """Shares of the run at which different layers train."""
    return (0.0,) if fit.config.freeze.fixed else (0.0, 0.999)


def _give_gradients(fit: Fit, ledger: Ledger) -> None:
    """What an earlier micro-batch leaves."""
    masters = fit.masters.named()
    with ledger.making(GRADIENTS):
        for name, parameter in fit.masters.computing().items():
            if parameter.requires_grad:
                masters[name].grad = torch.zeros_like(masters[name])


def _tell_gradients(fit: Fit, ledger: Ledger) -> None:
    """From now on the ledger knows which tensors are gradients."""
    masters = fit.masters.named()

    def tell(name: str) -> Callable[[Tensor], None]:
        def found(parameter: Tensor) -> None:
            both = (parameter.grad, masters[name].grad)
            ledger.rename([each for each in both if each is not None], GRADIENTS)

        return found

    for name, parameter in fit.masters.computing().items():
        parameter.register_post_accumulate_grad_hook(tell(name))


def _tell_optimizer(fit: Fit, ledger: Ledger) -> None:
    """From now on the ledger knows what an optimizer's step makes."""
    update = fit.member.update

    def told(loss: float, rows: Indices) -> dict[str, object] | None:
        with ledger.making(OPTIMIZER):
            return update(loss, rows)

    fit.member.update = told  # type: ignore[method-assign]
