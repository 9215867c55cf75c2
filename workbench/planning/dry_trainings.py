"""Trainings as a dry run sees them: of one model, or of a bank, the rows of all its members numbered through.

A few steps stand for all of a run: one of each kind of work, by what happens in it, and how many are of this kind.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

from workbench.adapters import anatomy
from workbench.config import TrainingSections
from workbench.data.batching import Indices, Weights
from workbench.data.packing import OwnerRows, RowLayout
from workbench.models import backbones
from workbench.training.adapter_trainer import AdapterTrainer
from workbench.training.bank_trainer import BankTrainer
from workbench.training.distributed.sharding import Sharded
from workbench.training.freezing.freezer import Freezer
from workbench.training.gradient_accumulation import CachedGradients
from workbench.training.master_weights import MasterWeights
from workbench.training.optim import weight_averaging
from workbench.training.sampling.loss_based import PoolSampler, Weighing
from workbench.training.trainer import Trainer

LOOKED = 16  # steps whose micro-batches are counted
LOOKED_AT = 2048  # steps of a run whose work is looked at


class Model(Protocol):
    """The model of a training, its trainable parameters, and which of them train when."""

    @property
    def model(self) -> nn.Module: ...
    @property
    def masters(self) -> MasterWeights | Sharded: ...
    @property
    def freezer(self) -> Freezer: ...


class Lengths(Protocol):
    """The rows of a training, as far as memory depends on them: tokens and weight of each; see `Sequences`."""

    @property
    def lengths(self) -> Indices: ...
    @property
    def supervised(self) -> Weights: ...


@runtime_checkable
class Sequences(Lengths, Protocol):
    """Rows of several sequences each, which the model reads one by one, such as the two answers of a pair."""

    @property
    def sequence_lengths(self) -> Indices:
        """Tokens of each sequence of each row, (rows, sequences)."""


class Averaged(NamedTuple):
    """Values whose average a training keeps."""

    values: Sequence[Tensor]
    copies: int  # that are kept of them on the device where they train, at most


class Training(Model, Protocol):
    """A training of some steps."""

    config: TrainingSections
    width: int
    compares: bool
    """Whether the loss looks at more of the model than its outputs."""

    rows: int
    """That one model learns from."""
    steps: int
    arrangement: RowLayout
    """How the rows of a micro-batch are laid out."""
    kinds: Mapping[int, float]
    """A step (from 0) of each kind, by what happens in it, and the share of steps that are of this kind."""

    @property
    def starts(self) -> Sequence[Tensor]:
        """Copies of initial values that the training keeps."""

    @property
    def averaged(self) -> Sequence[Averaged]:
        """The averages of each member."""

    @property
    def tokens(self) -> int:
        """In one forward pass, padding included if there is any; known once it is prepared."""

    @property
    def train(self) -> Lengths:
        """Lengths of its training rows."""

    def prepare(self) -> None:
        """Put the model into the state of training."""

    def choose(self) -> None:
        """Do for one row what the method does before the first step."""

    def micro_batches(self) -> Iterator[list[Indices]]:
        """Those of each step of the first epoch, in the order in which their gradients come."""

    def backward(self, rows: Indices, *, step: int) -> None:
        """Compute the gradients of a micro-batch in a step (from 0) of one of the `kinds`."""

    def update(self, rows: Indices) -> None:
        """Take the optimizer's step."""


class SingleTraining:
    """The training of one model."""

    def __init__(self, fit: Trainer) -> None:
        self._fit = fit
        self.model, self.masters, self.freezer = fit.model, fit.masters, fit.freezer
        self.config, self.width = fit.config, fit.width
        self.train: Lengths = fit.train
        self.compares = fit.signal.auxiliary is not None
        self.rows, self.steps, self.arrangement = len(fit.train), fit.member.total, fit.arrangement
        self.kinds: Mapping[int, float] = step_kinds(fit.config, steps=self.steps, blocks=len(fit.freezer.blocks))
        order = fit.member.order
        self._looks = isinstance(order, PoolSampler | Weighing) and order.looks

    @property
    def starts(self) -> Sequence[Tensor]:
        return [*self._fit.member.start.values(), *self._fit.step_noise.mixout.start.values()]

    @property
    def averaged(self) -> Sequence[Averaged]:
        return _averaged([self._fit.member])

    @property
    def tokens(self) -> int:
        return self._fit.tokens

    def prepare(self) -> None:
        self._fit.prepare()

    def choose(self) -> None:
        rows = self._fit.choice.rows
        if len(rows):
            self._fit.choice.make(rows[[self.train.lengths[rows].argmax()]])

    def micro_batches(self) -> Iterator[list[Indices]]:
        member = self._fit.member
        for step in member.even_order.typical_steps[: member.total]:
            yield list(self.arrangement.cut(member.even_order.rows(step), self.train.lengths, tokens=self._fit.tokens))

    def backward(self, rows: Indices, *, step: int) -> None:
        if self._looks:
            # The forward passes in which a sampler looks at rows, so many for each of `rows`.
            batch = self.arrangement.batch(self._fit.train, rows, epoch=0).to(self._fit.device)
            for _ in range(self.config.data.sampling.looks):
                with torch.no_grad():
                    self._fit.forward(batch, 1.0)
        self._fit.clock.share = step / self.steps
        self._fit.gradients(rows, step=step)

    def update(self, rows: Indices) -> None:
        self._fit.member.clip(rows)
        self._fit.member.update(1.0, 1.0, rows)


def _averaged(members: Sequence[AdapterTrainer]) -> list[Averaged]:
    averaged = []
    for member in members:
        config, values = member.task.config.average, list(member.trainable.values())
        here = config.device == "same" or backbones.device().type == "cpu"
        averaged.append(Averaged(values, weight_averaging.copies(config, steps=member.total) if here else 0))
    return averaged


class UnitTraining(SingleTraining):
    """The training of one model whose loss compares rows of several units, such as texts, which it computes apart."""

    def __init__(self, fit: Trainer) -> None:
        super().__init__(fit)
        assert isinstance(fit.cached, CachedGradients)
        self._cached = fit.cached
        self._units, *_ = self._cached.pull.loss.of(fit.train, np.arange(1))
        lengths = self._units.lengths
        self.train = BankRows(lengths, np.ones(len(lengths)))

    def micro_batches(self) -> Iterator[list[Indices]]:
        member = self._fit.member
        for step in member.even_order.typical_steps[: member.total]:
            _, numbers, _ = self._cached.pull.loss.of(self._fit.train, member.even_order.rows(step))
            yield list(self.arrangement.cut(numbers, self.train.lengths, tokens=self._fit.tokens))[::-1]

    def backward(self, rows: Indices, *, step: int) -> None:
        self._cached.trial(self._units, rows, step=step, twice=self._twice)

    def update(self, rows: Indices) -> None:
        self._fit.member.clip(np.arange(1))
        self._fit.member.update(1.0, 1.0, np.arange(1))

    @cached_property
    def _twice(self) -> bool:
        """Whether a step has several micro-batches, which are computed without a graph before."""
        return any(len(each) > 1 for each in islice(self.micro_batches(), LOOKED))


@dataclass(frozen=True)
class BankRows:
    """Those of all members, or the units of rows."""

    lengths: Indices
    supervised: Weights


class BankTraining:
    """The training of a bank."""

    def __init__(self, fit: BankTrainer) -> None:
        self._fit = fit
        self._members: list[AdapterTrainer] = list(fit.members.values())
        train_tasks = [each.task for each in self._members]
        self.held_out_loss = train_tasks[0].held_out_loss
        self.model, self.masters, self.freezer = fit.model, fit.masters, fit.freezer
        self.config = train_tasks[0].config
        self.width: int = anatomy.hidden_size(fit.freezer.backbone.config)
        self.compares, self.arrangement = False, fit.arrangement
        self.kinds: Mapping[int, float] = {0: 1.0}
        self.rows = max(len(each.train) for each in train_tasks)
        self.steps = max(each.total for each in self._members)
        self._starts = np.cumsum([0, *(len(each.train.lengths) for each in train_tasks[:-1])])
        self.train = BankRows(
            np.concatenate([each.train.lengths for each in train_tasks]),
            np.concatenate([each.train.supervised for each in train_tasks]),
        )

    @property
    def starts(self) -> Sequence[Tensor]:
        return [each for member in self._members for each in member.start.values()]

    @property
    def averaged(self) -> Sequence[Averaged]:
        return _averaged(self._members)

    @property
    def tokens(self) -> int:
        return self._fit.tokens

    def prepare(self) -> None:
        self._fit.prepare()

    def choose(self) -> None:
        """Do nothing: no method that chooses trains in a bank."""

    def micro_batches(self) -> Iterator[list[Indices]]:
        first = self._members[0]
        for step in first.even_order.typical_steps[: first.total]:
            own = [each.even_order.rows(step) for each in self._members]
            rows = np.concatenate([start + each for start, each in zip(self._starts, own, strict=True)])
            yield list(self.arrangement.cut(rows, self.train.lengths, tokens=self._fit.tokens))

    def backward(self, rows: Indices, *, step: int) -> None:
        owners = np.searchsorted(self._starts, rows, side="right") - 1
        parts = [OwnerRows(int(owner), rows[owners == owner] - self._starts[owner]) for owner in np.unique(owners)]
        self._fit.backward(self._fit.members, parts, [1.0] * len(parts))

    def update(self, rows: Indices) -> None:
        for member in self._members:
            member.clip(member.batch())
            member.update(1.0, 1.0, member.batch())


def step_kinds(config: TrainingSections, *, steps: int, blocks: int) -> dict[int, float]:
    """A step (from 0) of each kind, and the share of steps that it stands for; the shares add up to 1.

    Steps differ by whether SAM, the estimate of noise and Sophia's of curvature are due, and by the share of the
    blocks' work that they do. Of the steps in which the same is due, the one with the most work and the one with the
    least stand for all, with shares that make their mean right; so the largest is among them, and what grows evenly
    with the work is exact.

    Args:
        steps: Of the run.
        blocks: Of the backbone.
    """
    optimizer = config.optimizer
    looks = optimizer.looks_every if optimizer.name == "sophia" else 1
    every = (optimizer.sam_every, optimizer.noise_scale or 1, looks)
    looked = list(range(max(1, steps)))
    if steps > LOOKED_AT:  # so many that are sampled from them; the first is there
        looked = sorted({0, *np.random.default_rng(0).choice(steps, LOOKED_AT, replace=False).tolist()})
    due = [tuple(step % each == 0 for each in every) for step in looked]
    drop, tokens, grow = config.layer_drop, config.token_drop, config.grow

    def work(step: int) -> float:
        """Share of the blocks' work that a step does."""
        if tokens.is_on:
            return tokens.work(step / steps, blocks=blocks)
        if grow.is_on and blocks:
            return grow.depth(step, step / steps, blocks=blocks) / blocks
        if not drop.is_on or not blocks:
            return 1.0
        return 1 - float(np.mean(drop.left_out(step, step / steps, blocks=blocks, seed=config.seed)))

    share_by_step: dict[int, float] = {}
    for kind in dict.fromkeys(due):
        own = [step for step, each in zip(looked, due, strict=True) if each == kind]
        of_each = np.array([work(step) for step in own])
        least, most = int(of_each.argmin()), int(of_each.argmax())
        share, spread = len(own) / len(looked), float(of_each[most] - of_each[least])
        upper = float(of_each.mean() - of_each[least]) / spread if spread else 1.0
        share_by_step[own[most]] = share * upper
        if spread:
            share_by_step[own[least]] = share * (1 - upper)
    return share_by_step
