"""The order in which the stages of a pipeline compute the micro-batches of a step, and what they send each other.

1F1B: a stage computes as many forward passes ahead as stages come after it, then a backward and a forward pass in turn.
So stage s of S keeps activations of at most S - s micro-batches, however many a step has, where GPipe (Huang et al.
2019, arXiv:1811.06965) keeps those of all; both leave the last device (S - 1) / (M + S - 1) of the time without work
(Narayanan et al. 2021, arXiv:2104.04473, section 2.2).

torch.distributed.pipelining is not used: its stages make the buffers of all micro-batches from the shapes of one
(torch 2.13, `PipelineStage._setup_forward_recv_info`), and rows here are ragged, so that no two micro-batches need have
the same shape.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple


class StagePass(NamedTuple):
    """A forward or backward pass of a stage."""

    batch: int
    """Number of the micro-batch in the step."""
    backward: bool = False


class Message(NamedTuple):
    """Hidden states of a micro-batch, or their gradients, on their way to a neighbour."""

    source: int
    """Stage that has computed them."""
    target: int
    batch: int


class StageExchange(NamedTuple):
    """Messages that a stage sends and waits for at the same time, between two passes."""

    sent: Message | None
    received: Message | None


def one_forward_one_backward(stage: int, *, stages: int, batches: int) -> list[StagePass]:
    """Passes of a stage over so many micro-batches, in order."""
    ahead = min(stages - 1 - stage, batches)
    order = [StagePass(number) for number in range(ahead)]
    for number in range(ahead, batches):
        order += [StagePass(number), StagePass(number - ahead, backward=True)]
    return order + [StagePass(number, backward=True) for number in range(batches - ahead, batches)]


def exchanges(order: Sequence[StagePass], stage: int, *, stages: int) -> list[StageExchange]:
    """Exchanges of a stage before each of its passes, and after the last one.

    The result of a pass leaves while the input of the next one arrives: where both go between the same two stages,
    these meet, so that none waits for the other's receiver, even where a sender waits for its own.
    """
    results = [None, *(_result(each, stage, stages) for each in order)]
    inputs = [*(_input(each, stage, stages) for each in order), None]
    return [StageExchange(sent, received) for sent, received in zip(results, inputs, strict=True)]


def _result(done: StagePass, stage: int, stages: int) -> Message | None:
    target = stage - 1 if done.backward else stage + 1
    return Message(stage, target, done.batch) if 0 <= target < stages else None


def _input(upcoming: StagePass, stage: int, stages: int) -> Message | None:
    source = stage + 1 if upcoming.backward else stage - 1
    return Message(source, stage, upcoming.batch) if 0 <= source < stages else None


def stretches(blocks: int, stages: int) -> list[range]:
    """The blocks of each stage, all but as many; where they do not come out even, the first stages have one more.

    The last stage has the output head besides.
    """
    ends = [-(-stage * blocks // stages) for stage in range(stages + 1)]
    return [range(start, end) for start, end in itertools.pairwise(ends)]
