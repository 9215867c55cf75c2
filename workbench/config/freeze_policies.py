"""Policies of freezing: which layers train at each step. `register` makes each known to `freeze.policy`."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import pairwise
from typing import Annotated, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from workbench.config.freeze_config import FreezeConfig, LayerPlan, Moment, register
from workbench.schema import Unit


def full_rate(trains: Iterable[bool]) -> LayerPlan:
    """These layers train, each at the learning rate that is configured."""
    chosen = tuple(trains)
    return LayerPlan(chosen, (1.0,) * len(chosen))


def above(frozen: int, *, blocks: int) -> LayerPlan:
    """The first `frozen` blocks are frozen, and the embeddings before them; 0: everything trains."""
    return full_rate([not frozen, *(block > frozen for block in range(1, blocks + 1)), True])


class ThawingConfig(FreezeConfig):
    """Base of policies under which a layer that was frozen may train again."""

    thaws: ClassVar[bool] = True

    @model_validator(mode="after")
    def _keeps_no_prefix(self) -> Self:
        if self.cache in ("memory", "disk"):
            raise ValueError(
                f"{self.policy} freezes no prefix whose outputs freeze.cache={self.cache} could keep. "
                "Leave freeze.cache out."
            )
        return self


@register
class AutoFreeze(FreezeConfig):
    """AutoFreeze (Liu et al. 2021, arXiv:2102.01386): gradients say which of the first blocks may freeze.

    A block's eta is the relative change | |D'| - |D| | / |D'| of the norm of its gradient, summed over an interval,
    from one interval to the next. From the first block that trains on, blocks freeze until one whose eta is not below
    the percentile of all that train, as in the authors' code: so one with the largest eta always trains. The
    embeddings, which the paper does not look at, freeze with the first block; blocks that have nothing to train stop
    nothing.
    """

    observes = "gradients"
    policy: Literal["autofreeze"] = "autofreeze"
    every: Annotated[PositiveInt, Unit("steps")] = 50
    """Optimizer steps of an interval; the paper takes a tenth to a twentieth of the run."""
    percentile: Annotated[float, Field(gt=0, le=100), Unit("percent")] = 50.0
    """Which percentile of the etas is the bound, in percent."""
    most: Annotated[float, Field(gt=0, le=1)] = 0.75
    """Largest share of the blocks that freezes; 1 is the paper's rule."""

    @property
    def interval(self) -> int:
        return self.every

    def plan(self, moment: Moment, *, blocks: int) -> LayerPlan:
        frozen = 0
        for before, after in pairwise(moment.seen):
            norms = zip(before.values[1:-1], after.values[1:-1], strict=True)
            etas = [abs(old - new) / max(old, 1e-30) for old, new in norms]  # NaN where a block does not train
            if active := [eta for eta in etas[frozen:] if not math.isnan(eta)]:
                bound, most = np.percentile(active, self.percentile), int(self.most * len(etas))
                while frozen < most and not etas[frozen] >= bound:
                    frozen += 1
        return above(frozen, blocks=blocks)


@register
class Badam(ThawingConfig):
    """BAdam (Luo et al. 2024, arXiv:2404.02827, algorithm 1): block coordinate descent, each block by Adam.

    Every block trains once before any trains again. When the next one begins, the moments of the last are dropped, so
    that no more of them are held than those of a block. The embeddings never train; what comes after the blocks always
    does, as a head that starts at random must.
    """

    forgets: ClassVar[bool] = True
    policy: Literal["badam"] = "badam"
    every: Annotated[PositiveInt, Unit("steps")] = 50
    """Optimizer steps of a block, until the next one trains."""
    order: Literal["random", "ascending", "descending"] = "random"
    """In which order the blocks of a round train; `random`: drawn anew for each round."""

    def plan(self, moment: Moment, *, blocks: int) -> LayerPlan:
        done, place = divmod(moment.step // self.every, blocks)
        order = np.arange(blocks) if self.order == "ascending" else np.arange(blocks)[::-1]
        if self.order == "random":
            order = np.random.default_rng([moment.seed, done]).permutation(blocks)
        active = order.tolist()[place]
        return full_rate([False, *(block == active for block in range(blocks)), True])


@register
class Egeria(FreezeConfig):
    """After Egeria (Wang et al. 2023, arXiv:2201.06227): the plasticity of the frontmost block says when it freezes.

    A block's plasticity is the similarity-preserving loss between its outputs now and an interval ago. The frontmost
    block that trains freezes, and the next one is looked at, when a line through the last `window` plasticities since
    it is the frontmost is flat. The embeddings freeze with the first block; the last block that trains never does.

    It is not the paper's system. There the reference is an int8 copy of a recent snapshot, which runs on the host
    beside training and is replaced now and then, so that each block is compared with a slightly older self; here a
    block is compared with itself exactly an interval ago, on the same rows, which needs no second model. Padding is
    left out, one line decides, and nothing thaws.
    """

    observes = "activations"
    policy: Literal["egeria"] = "egeria"
    every: Annotated[PositiveInt, Unit("steps")] = 20
    """Optimizer steps between measurements; each runs a micro-batch forward once."""
    window: Annotated[int, Field(ge=2), Unit("measurements")] = 5
    """Measurements that a block is judged by."""
    tolerance: PositiveFloat = 0.05
    """Steepest line that counts as flat: the change from one measurement to the next, as a share of their mean."""

    @property
    def interval(self) -> int:
        return self.every

    @property
    def judges(self) -> int:
        return self.window

    def plan(self, moment: Moment, *, blocks: int) -> LayerPlan:
        frozen, history = 0, list[float]()
        for observation in moment.seen:
            plasticity = observation.values[1:-1]
            active = [block for block in range(frozen, blocks) if not math.isnan(plasticity[block])]
            if len(active) < 2:
                break
            history.append(plasticity[active[0]])
            if len(history) >= self.window:
                latest = np.asarray(history[-self.window :])
                times = np.arange(self.window) - (self.window - 1) / 2
                slope = times @ latest / (times @ times)  # of the least-squares line
                if abs(slope) <= self.tolerance * np.mean(latest):
                    frozen, history = active[1], []
        return above(frozen, blocks=blocks)


@register
class FreezeOut(FreezeConfig):
    """FreezeOut (Brock et al. 2017, arXiv:1706.04983): layer i anneals by half a cosine, and freezes at its time t_i.

    t_i rises evenly from `first` for the embeddings to 1 for the last block, which what comes after it shares. The
    factor (1 + cos(pi share / t_i)) / 2 multiplies the run's own schedule: the paper's rule is `schedule.name=constant`
    with `schedule.warmup=0`.
    """

    policy: Literal["freezeout"] = "freezeout"
    first: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """t_0, the share of the run after which the embeddings are frozen; where `spacing` is cubic, before it is cubed."""
    spacing: Literal["linear", "cubic"] = "linear"
    """`cubic` takes the cube of every t_i, which freezes sooner; the authors then take first=0.8 and scaled=true."""
    scaled: bool = False
    """Divide a layer's rate by its t_i, so that all layers would travel equally far."""

    def plan(self, moment: Moment, *, blocks: int) -> LayerPlan:
        times = self.times(blocks)
        rates = ((1 + math.cos(math.pi * min(moment.share / time, 1))) / 2 for time in times)
        scaled = (rate / time if self.scaled else rate for rate, time in zip(rates, times, strict=True))
        return LayerPlan(tuple(moment.share < time for time in times), tuple(scaled))

    def times(self, blocks: int) -> list[float]:
        """t_i: the share of the run at which each layer freezes."""
        power = {"linear": 1, "cubic": 3}[self.spacing]
        return [(self.first + (1 - self.first) * min(layer / blocks, 1)) ** power for layer in range(blocks + 2)]


@register
class Gradual(FreezeConfig):
    """Gradual unfreezing (ULMFiT, Howard & Ruder 2018, arXiv:1801.06146).

    The paper thaws a layer in each epoch; here block i of n thaws at the share until (n - i) / n of the run, and the
    embeddings at `until`. The last block trains from the beginning, with what comes after it: over an adapter, which
    has nothing there, nothing would train otherwise.
    """

    policy: Literal["gradual"] = "gradual"
    until: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of the run after which everything trains."""

    def plan(self, moment: Moment, *, blocks: int) -> LayerPlan:
        thawed = (moment.share >= self.until * ((blocks - layer) / blocks) for layer in range(blocks + 1))
        return full_rate([*thawed, True])


@register
class Lisa(ThawingConfig):
    """LISA (Pan et al. 2024, arXiv:2403.17919): layerwise importance sampled AdamW.

    The embeddings and what comes after the blocks always train. Which blocks do is a function of the run's seed and
    of the step; every block is drawn equally often.
    """

    policy: Literal["lisa"] = "lisa"
    active: Annotated[PositiveInt, Unit("blocks")] = 2
    """Blocks that train at a time."""
    every: Annotated[PositiveInt, Unit("steps")] = 20
    """Optimizer steps until other blocks are drawn."""

    def refusal(self, blocks: int) -> str | None:
        if self.active <= blocks:
            return None
        return (
            f"freeze.active={self.active} is more than the {blocks} blocks of this backbone. "
            f"Write freeze.active={blocks} or less."
        )

    def plan(self, moment: Moment, *, blocks: int) -> LayerPlan:
        generator = np.random.default_rng([moment.seed, moment.step // self.every])
        drawn = set(generator.choice(blocks, size=self.active, replace=False).tolist())
        return full_rate([True, *(block in drawn for block in range(blocks)), True])


@register
class Static(FreezeConfig):
    """The embeddings and the first blocks keep the values that they came with."""

    policy: Literal["static"] = "static"
    layers: Annotated[PositiveInt | Annotated[float, Field(gt=0, lt=1)], Unit("blocks, or their share")] = 0.5
    """Blocks that are frozen, counted from the first: their number, or their share, which is at least one block."""

    @property
    def fixed(self) -> bool:
        return True

    def refusal(self, blocks: int) -> str | None:
        if self.layers <= blocks:
            return None
        return (
            f"freeze.layers={self.layers} is more than the {blocks} blocks of this backbone. "
            f"Write a number below {blocks}, or a share such as freeze.layers=0.5."
        )

    def plan(self, moment: Moment, *, blocks: int) -> LayerPlan:
        layers = self.layers
        return above(layers if isinstance(layers, int) else max(1, round(layers * blocks)), blocks=blocks)
