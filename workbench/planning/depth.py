"""A dry run of few blocks, twice, and all others by arithmetic: blocks that are alike take alike.

Bytes at each moment of a step, and operations, grow evenly with the blocks of a backbone. So two dry runs of its first
blocks say what all take, exactly; between the two lies one period of the pattern in which its blocks repeat, such as
five with sliding attention and one with full, or a single block.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any, NamedTuple, TypeVar

from torch import nn
from transformers import PreTrainedModel

from workbench.adapters import anatomy
from workbench.config import RunConfig
from workbench.planning.dry_run import DryRun, highest
from workbench.planning.sharded_memory import Contents

N = TypeVar("N", int, float)
LEAST = 4
"""Blocks of the smaller dry run at least: the first and the last two are unlike those between them."""
_NUMBER = re.compile(r"(layer|block)_?(idx|id|index|number)")
"""Names of attributes that number the blocks."""


class Depths(NamedTuple):
    """Blocks of two smaller backbones, of which the larger has a period more."""

    shallow: int
    deeper: int
    times: int
    """Periods that the whole backbone has more than the smaller of them."""


def depths(kinds: Sequence[Hashable], *, multiple: int = 1) -> Depths | None:
    """Numbers of first blocks that say what all of these take; None where no pattern repeats, or often enough to save
    half of the work.

    Args:
        kinds: Of each block: equal where blocks take the same.
        multiple: Of which a period has to be, so that a share of the blocks is a number of them.

    Examples:
        >>> depths(["dense", *["experts"] * 47])
        Depths(shallow=5, deeper=6, times=43)
        >>> depths((["sliding"] * 5 + ["full"]) * 8, multiple=2)
        Depths(shallow=6, deeper=12, times=7)
    """
    whole = len(kinds)
    for period in range(multiple, whole // 2 + 1, multiple):
        unlike = [number for number in range(whole - period) if kinds[number] != kinds[number + period]]
        least = max(unlike[-1] + 1 + period if unlike else period, LEAST, 2 * multiple)
        shallow = least + (whole - least) % period
        if 2 * (2 * shallow + period) <= whole:
            return Depths(shallow, shallow + period, (whole - shallow) // period)
    return None


def multiple_of(config: RunConfig) -> int | None:
    """Of how many blocks a period has to be a multiple, for a run whose blocks all do the same; None where they do
    not, as they are numbered by its settings."""
    numbered = (
        config.over is not None,
        config.freeze.policy != "none",
        config.layer_drop.is_on,
        config.token_drop.is_on,
        config.grow.is_on,
        config.distributed.pipeline > 1,
    )
    if any(numbered):
        return None
    share = config.train.checkpointing
    return Fraction(share).limit_denominator(100).denominator if isinstance(share, float) else 1


def kinds(model: PreTrainedModel) -> list[Hashable]:
    """What each block of the only stack is; empty where there are several stacks."""
    stacks = anatomy.blocks(model)
    if len(stacks) != 1:
        return []
    settings = vars(model.config.get_text_config(decoder=True))
    (paths,) = stacks
    by_block = [each for each in settings.values() if isinstance(each, list) and len(each) == len(paths)]
    return [
        (tuple(_parts(model.get_submodule(path))), tuple(repr(each[number]) for each in by_block))
        for number, path in enumerate(paths)
    ]


def outside(model: PreTrainedModel) -> list[Hashable]:
    """The parameters of a backbone outside of its blocks."""
    (paths,) = anatomy.blocks(model)
    inside = tuple(f"{path}." for path in paths)
    return [(name, each.shape) for name, each in model.named_parameters() if not name.startswith(inside)]


def _parts(block: nn.Module) -> Iterator[Hashable]:
    """Classes, shapes and settings of the modules of a block."""
    for name, module in block.named_modules():
        yield name, type(module)
        yield from ((key, each.shape, each.dtype) for key, each in module.named_parameters(recurse=False))
        for key, value in vars(module).items():
            if isinstance(value, (str, int, float)) and not _NUMBER.search(key):
                yield key, value


def dry_run(shallow: DryRun, deeper: DryRun, times: int) -> DryRun:
    """Bytes and operations of a backbone so many periods deeper than the shallow one."""
    phases = {
        phase: {
            # Of a few bytes that the shallow one still holds, the deeper may hold fewer.
            name: max(0, further(peak.get(name, 0), deeper.phases[phase].get(name, 0), times))
            for name in {**peak, **deeper.phases[phase]}
        }
        for phase, peak in shallow.phases.items()
        if phase in deeper.phases
    }
    names = ("evaluation", "flops_per_token", "at_gradients", "at_recomputing", "offloaded")
    numbers: Mapping[str, Any] = {name: further(getattr(shallow, name), getattr(deeper, name), times) for name in names}
    return replace(deeper, at_peak=highest(phases), phases=phases, **numbers)


def contents(shallow: Contents, deeper: Contents, times: int) -> Contents | None:
    """Tensors of a backbone so many periods deeper; None where some have another size in a deeper one."""
    tensors: dict[str, Any] = {}
    for name in ("trained", "frozen", "blocks"):
        few, more = Counter(getattr(shallow, name)), Counter(getattr(deeper, name))
        if few - more:
            return None
        tensors[name] = tuple((few + Counter({each: count * times for each, count in (more - few).items()})).elements())
    if shallow.added_up is not None and deeper.added_up is not None:
        both = zip(shallow.added_up, deeper.added_up, strict=True)
        tensors["added_up"] = tuple(further(less, more, times) for less, more in both)
    whole = replace(deeper, whole=further(shallow.whole, deeper.whole, times), **tensors)
    states = further(shallow.optimizer * shallow.trainable, deeper.optimizer * deeper.trainable, times)
    return replace(whole, optimizer=states / max(whole.trainable, 1))


def further(less: N, more: N, times: int) -> N:
    """What grows from `less` to `more` in a period, so many periods after `less`."""
    return less + (more - less) * times
