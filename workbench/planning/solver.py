"""The fastest way to carry out a run that fits: every setting left `auto`, decided.

Ways are compared in four levels, of which the next is looked at where nothing of the one before fits: each device holds
all; they share, by ZeRO 1, 2, 3 and FSDP2; they cut blocks (`tensor`), since all is taken to be sent while nobody
computes, and shares fetch weights ahead; the optimizer's state waits in the host's memory, weights there too, or both
on disk. Each is compared with all activations kept, with elementwise operations recomputed, with a share of the blocks,
and with all of them, with the largest micro-batch that fits. Of those that fit the fastest is taken, of equals the
first. Where none fits, inputs of blocks wait in the host's memory; weights that were left to choose are quantised
before the third and fourth level, never for speed: where shares fit, packed copies are named and not compared, and so
is pipeline parallelism. Layouts that the run would refuse are told with the reason.

A dry run is made with its largest and its smallest micro-batch, without recomputing, and with it where that could be
faster: none where the states of the model alone leave no room, or where a way that fits is faster than this one in the
fewest passes that could. Between them bytes are taken to grow evenly with tokens and with the share of the blocks, and
seconds with passes and that share, until a way is chosen and tried itself, with as many tokens as fit; the stages of
ZeRO differ by arithmetic alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from pydantic import ValidationError

from workbench.adapters import Full, Lora
from workbench.config import RunConfig
from workbench.config.checks import cross_checks
from workbench.config.checks.step_checks import unable_by_block, untiled_layout
from workbench.config.sections.basic_sections import Checkpointing
from workbench.config.sections.distributed_config import DistributedConfig
from workbench.errors import ConfigError
from workbench.planning import sharded_memory
from workbench.planning.counters import ACTIVATIONS
from workbench.planning.plan import Candidate, Plan
from workbench.planning.step_time import Timed
from workbench.runs import units
from workbench.runs.ranks import Ranks
from workbench.training.distributed import layout_checks

PlanMaker = Callable[[RunConfig], Plan]
"""From a configuration to its plan: that of recipes/verbs/plans/plan.py with devices and memory given."""
Timing = Callable[[Plan], Timed]  # from a plan to the seconds of a step on a device

PROBES, WORTH, MARGIN = 5, 1.1, 0.05
"""Micro-batch sizes that are tried at most to fill the memory, how many times larger each has to be, and which share of
the room that there seems to be the first leaves: bytes grow less evenly than is thought."""
SHARES = (0.25, 0.5, 0.75)  # shares of the blocks that are recomputed whole, besides none and all
SHORTER = (0.75, 0.5, 0.25, 0.125)  # shares of the longest row that are tried where nothing fits


@dataclass(frozen=True)
class SolverChoice:
    """The decision of the solver."""

    config: RunConfig  # with every `auto` that was decided
    plan: Plan
    cure: str | None = None  # where nothing fits, the smallest change after which something would

    def require(self) -> SolverChoice:
        """Itself; raises ConfigError where nothing fits."""
        if self.cure is not None:
            raise ConfigError(self.cure)
        return self


def choose(config: RunConfig, make_plan: PlanMaker, timing: Timing) -> SolverChoice:
    """The fastest way that fits, or the one that takes least and what would have to change. Raises WorkbenchError: the
    run would be refused, whatever the memory."""
    first: list[Plan] = []

    def steady(config: RunConfig) -> Plan:
        """Plans always with the memory of the first time: earlier dry runs are no part of a run."""
        plan = make_plan(config)
        first.append(plan)
        return replace(plan, process=first[0].process, memory=first[0].memory)

    choice = _best(config, steady, timing)
    if choice.plan.fits:
        return choice
    return replace(choice, cure=_cure(config, choice, steady, timing))


class _Way(NamedTuple):
    """A candidate: a configuration, the plan of it, and whether a dry run confirmed that."""

    config: RunConfig
    plan: Plan
    confirmed: bool
    slower: bool = False  # it fits with fewer tokens in a pass at most, and another is faster than that
    number: int = 0  # its place among all of a level

    @property
    def moments(self) -> list[tuple[int, int]]:
        """Bytes of a device at each moment: beside activations, and of these."""
        plan = self.plan
        if plan.distributed.sharded:
            moments: list[Mapping[str, int]] = [held.device for held in plan.timeline.values()]
        else:
            moments = [plan.at_peak, *plan.dry_run.phases.values()]
        rest = plan.needed - plan.peak
        split = ((sum(held.values()), held.get(ACTIVATIONS, 0)) for held in moments)
        return [(rest + held - activations, activations) for held, activations in split]

    @property
    def standing(self) -> int:
        """Bytes that a device holds beside activations, at most."""
        return max(held for held, _ in self.moments)

    @property
    def without_activations(self) -> int:
        """Bytes that a device lacks for these alone."""
        return max(0, self.standing - self.plan.memory)

    @property
    def at_least(self) -> int:
        """Bytes that a device needs with the fewest tokens in a pass, or more: activations of many tokens are at most
        in proportion to those of few."""
        share = self.plan.longest / _computed(self.plan)
        return max(held + int(activations * share) for held, activations in self.moments)

    @property
    def lacking(self) -> int:
        """Bytes that a device lacks at least, however few tokens a pass has."""
        return max(0, min(self.at_least, self.plan.needed) - self.plan.memory)

    @property
    def most_tokens(self) -> float:
        """Tokens in a pass that could fit at most."""
        room = (
            (self.plan.memory - held) / activations if activations else math.inf for held, activations in self.moments
        )
        return _computed(self.plan) * max(0.0, min(room))


def _best(config: RunConfig, make_plan: PlanMaker, timing: Timing) -> SolverChoice:
    solvers = [_Solver(_with(config, "model", weights=weights), make_plan, timing) for weights in formats(config)]
    tried: list[tuple[_Solver, _Way]] = []
    levels = [*((each, level) for each in solvers for level in (0, 1)), *((each, 2) for each in solvers)]
    for solver, level in [*levels, *((each, 3) for each in solvers)]:
        ways = solver.ways(level)
        while fitting := [way for way in ways if way.plan.fits]:
            best = min(fitting, key=lambda way: way.plan.seconds or 0.0)
            ways = solver.reconsidered(ways, best)
            if best.confirmed and best is min(filter(_fits, ways), key=lambda way: way.plan.seconds or 0.0):
                shares = best.plan.distributed.sharded or level > 0
                left_out = solver.left_out | (_LEFT_OUT if solver is not solvers[-1] else {}) if shares else {}
                if level < 2 and shares:
                    cut = [each.words for each in solver._layouts if solver._cuts(each)]
                    left_out |= {words: f"{_NOT_CUT}. Write distributed.{words} for its plan" for words in cut}
                return _chosen(best, [*(way for _, way in tried), *ways], solver.refused, left_out)
            sure = solver.confirmed(best)
            ways = [sure if way is best else way for way in ways]
        tried += [(solver, way) for way in solver.reconsidered(ways)]
    if not tried:
        raise ConfigError("\n  ".join(["This run cannot be shared as it is:", *solvers[0].refused.values()]))
    least, others = _least(tried)
    return _chosen(least, others, solvers[-1].refused, solvers[-1].left_out)


def _fits(way: _Way) -> bool:
    return way.plan.fits


def _beaten(seconds: float, ways: Iterable[_Way]) -> bool:
    """Whether one of these fits and takes no longer."""
    return any(way.plan.fits and (way.plan.seconds or 0.0) <= seconds for way in ways)


def _least(tried: Sequence[tuple[_Solver, _Way]]) -> tuple[_Way, list[_Way]]:
    """Of ways that do not fit the one that lacks least, with the fewest tokens in a pass, and all."""
    looked, left = list[_Way](), sorted(tried, key=lambda each: each[1].lacking)
    while left and not any(way.plan.missing <= left[0][1].lacking for way in looked):
        solver, way = left.pop(0)
        looked.append(solver.smaller(way))
    least = min(looked, key=lambda way: (way.plan.missing, way.plan.needed))
    return least, [*looked, *(way for _, way in left)]


_LEFT_OUT = {
    "nf4": "not compared: weights keep their precision where shares of it fit, and copies in 4 bits may be faster. "
    "Write model.weights=nf4"
}
"""Formats that are not looked at, as a more precise one fits in shares, with what to write."""
_NOT_CUT = "not compared where shares fit: how much of what these send travels meanwhile was never measured"
_TOGETHER = {
    "tensor": "what devices send each other is counted for layers that are cut by rows or columns alone",
    "pipeline": "how long devices wait for the first and the last micro-batch is not counted",
}
"""Devices of which each holds a part of the weights, and that compute the same rows, and why they are not compared
where they are not."""


def _chosen(way: _Way, tried: list[_Way], refused: Mapping[str, str], left_out: Mapping[str, str]) -> SolverChoice:
    candidates = []
    for each in tried:
        plan = each.plan
        words = [plan.weights]
        if plan.checkpointing is not False:
            words.append("checkpointing" if plan.checkpointing is True else f"checkpointing={plan.checkpointing}")
        words += ["inputs of blocks to cpu"] if plan.offloaded else []
        words += [layout.words] if (layout := plan.distributed).sharded or layout.tensor > 1 else []
        verdict = "taken" if plan is way.plan and plan.fits else "fits" if plan.fits else plan.lack
        tokens, seconds, needed = plan.tokens_per_device, plan.seconds or 0.0, plan.needed
        if each.slower:
            verdict = "slower, if it fits with fewer tokens a pass"
        elif (lacks := each.without_activations) and plan is not way.plan:
            tokens, seconds, needed = 0, 0.0, each.standing
            verdict = f"lacks {units.size(lacks)} a device without activations"
        elif (lacks := each.lacking) and plan is not way.plan:
            tokens, seconds, needed = plan.longest, 0.0, min(each.at_least, needed)
            verdict = f"lacks {units.size(lacks)} a device, or more"
        candidates.append(Candidate(", ".join(words), tokens, needed, plan.fits, seconds, verdict))
    verdicts = {**{words: f"refused: {reason}" for words, reason in refused.items()}, **left_out}
    candidates += [Candidate(words, 0, 0, False, 0.0, verdict) for words, verdict in verdicts.items()]
    return SolverChoice(way.config, replace(way.plan, tried=tuple(candidates)))


class _Solver:
    """The ways of one configuration over weights of one format."""

    def __init__(self, config: RunConfig, make_plan: PlanMaker, timing: Timing) -> None:
        self._config, self._make_plan, self._timing = config, make_plan, timing
        self._known: dict[tuple[object, ...], Plan] = {}
        self.refused: dict[str, str] = {}
        """Why the run would refuse some layouts, by their words."""
        self.left_out: dict[str, str] = {}
        """Why others are not compared, and what to write."""

    def ways(self, level: int) -> list[_Way]:
        """All of the layouts of a level that may be the fastest; only the first where that fits, as nothing can be
        faster. Level 0: each device holds all; 1: they share; 2: they cut blocks; 3: states wait outside of them."""
        found, later, tight = list[_Way](), list[_Way](), list[DistributedConfig]()
        layouts = [each for each in self._layouts if (2 if self._cuts(each) else _level(each)) == level]
        for checkpointing, offload in self._savings():
            if offload is True:
                found += self._fewer(later, found)
                if any(way.plan.fits for way in found):
                    break  # copies make nothing faster
            # With fewer passes none is faster, and computing twice is none.
            layouts = [each for each in layouts if not _beaten(self._at_best(each), found)]
            config = _with(self._config, "train", checkpointing=checkpointing, offload_activations=offload)
            for layout in tuple(layouts):
                laid_out = config.model_copy(update={"distributed": layout})
                if checkpointing not in (True, False) and any(unable_by_block(laid_out)):
                    continue
                if isinstance(config.train.mlp_tile, int) and any(untiled_layout(laid_out)):
                    continue
                if self._cuts(layout) and (why := self._not_cut(laid_out, found)):
                    layouts.remove(layout)
                    self.left_out[layout.words] = why
                    continue
                way = (self._fewest if layout in tight else self._most)(laid_out)
                way = way._replace(number=len(found) + len(later))
                if not way.lacking and self._bound(way) <= self._at_best(layout):
                    way = self.smaller(way)  # more passes take no longer, and may be faster
                if way.without_activations or (self._cuts(layout) and way.plan.fits and way.confirmed):
                    layouts.remove(layout)  # no activation that is computed again makes room enough, or any is needless
                least = way.lacking or way.plan.tokens_per_device == way.plan.longest
                if least and not way.plan.fits:
                    tight.append(layout)
                (found if way.plan.fits or least else later).append(way)
                largest = way.plan.tokens_per_device == self._first.tokens_per_device
                if [*found, *later] == [way] and way.plan.fits and way.confirmed and largest:
                    return found
        return sorted([*found, *self._fewer(later, found)], key=lambda way: way.number)

    def _not_cut(self, config: RunConfig, found: Sequence[_Way]) -> str:
        """Why cut blocks are not looked at; empty where they may be the fastest. A backbone may not allow them."""
        if _beaten(least := self._at_best(config.distributed), found):
            return f"slower: devices add up what they compute of every token, at least {least:.3g} s a step"
        try:
            self._most(config)
        except ConfigError as error:
            return f"refused: {str(error).splitlines()[-1].strip()}"
        return ""

    def _fewer(self, later: list[_Way], found: list[_Way]) -> list[_Way]:
        """Ways that need fewer tokens in a pass, with as many as fit; as they are where that cannot be the fastest."""
        fewer = list[_Way]()
        while later:
            way = min(later, key=self._bound)
            later.remove(way)
            beaten = _beaten(self._bound(way), [*found, *fewer])
            fewer.append(way._replace(slower=True) if beaten else self.smaller(way))
        return fewer

    def reconsidered(self, ways: list[_Way], best: _Way | None = None) -> list[_Way]:
        """Ways with those looked at again that `best` does not beat any more; None: all that were beaten."""
        again = [way.slower and (best is None or not _beaten(self._bound(way), [best])) for way in ways]
        return [
            self.smaller(way._replace(slower=False)) if each else way for way, each in zip(ways, again, strict=True)
        ]

    def _at_best(self, layout: DistributedConfig) -> float:
        """Seconds of a step that a layout takes at least: without recomputing, and in the fewest passes.

        Devices that compute the same rows compute as much as others that each hold all, and read parts of the weights.
        """
        first = self._first
        together = layout.rows_together // self._config.distributed.rows_together
        waits = self._waits(first, layout, first.dry_run.micro_batches, tokens=first.work.tokens * together)
        if together == 1:
            return (first.seconds or 0.0) + waits
        reading = 0.0 if first.timed is None else first.timed.reading * first.work.passes
        return waits + (((first.seconds or 0.0) - reading * (1 - 1 / together)) if reading else 0.0)

    def _bound(self, way: _Way) -> float:
        """Seconds of a step that a way takes at least with as many tokens in a pass as could fit.

        Every pass waits for what devices send it, and reads the weights again. Padding counts for nothing, as there is
        less of it in smaller micro-batches.
        """
        plan, dry_run = way.plan, way.plan.dry_run
        mean = plan.work.tokens / max(1.0, way.most_tokens)
        waited = self._waits(plan, plan.distributed, dry_run.micro_batches)
        passes = max(dry_run.micro_batches, math.ceil(mean))
        waits = self._waits(plan, plan.distributed, passes, tokens=plan.work.tokens)
        reading = 0.0 if plan.timed is None else plan.timed.reading * max(0.0, mean - plan.work.passes)
        return (plan.seconds or 0.0) - waited + waits + reading

    @cached_property
    def _layouts(self) -> list[DistributedConfig]:
        """Layouts that share the states of the model among devices, or keep them outside."""
        given, first, over = self._config.distributed, self._first, self._config.over
        if given.zero != "auto" or given.deepspeed is not None:
            return [given]
        layouts: list[DistributedConfig] = []
        alone = over is not None and over.spread  # the others would train one member after another
        written = {name: getattr(given, name) for name in given.model_fields_set - {"zero"}}
        for order in [_ORDERS[0]] if alone else _ORDERS:
            places = {order.get("offload_optimizer", "none"), order.get("offload_parameters", "none")}
            if (
                (order["zero"] and places == {"none"} and first.devices == 1)
                or ("cpu" in places and "nvme" not in places and first.device == "cpu")  # whose memory is the host's
                or ("nvme" in places and given.nvme is None)
                or any(name in written and written[name] != order.get(name, default) for name, default in _PLAIN)
            ):
                continue
            try:
                layout = DistributedConfig.model_validate({**written, **order})
            except ValidationError:
                continue
            if why := _refusal(self._config.model_copy(update={"distributed": layout}), first.devices):
                self.refused[layout.words] = why
            else:
                layouts.append(layout)
        free = first.devices > 1 and given.rows_together == 1 and not written.keys() & dict(_PLAIN).keys()
        for key, why_not in _TOGETHER.items() if free and not alone else ():
            layout = given.model_copy(update={"zero": 0, key: first.devices})
            told = f"{key}={first.devices}"
            if why := _refusal(self._config.model_copy(update={"distributed": layout}), first.devices):
                self.refused[told] = why
            elif key == "tensor" and first.contents.added_up is not None:
                layouts += self._cut_layouts
            else:
                self.left_out[told] = f"not compared: {why_not}. Write distributed.{told} for its plan"
        return layouts

    @property
    def _cut_layouts(self) -> list[DistributedConfig]:
        """Blocks cut for 2, 4, 8 and so many devices, from the fewest on that may hold their parts: more send more."""
        first, sizes = self._first, [1 << power for power in range(1, 10)]
        activations = first.dry_run.at_peak.get(ACTIVATIONS, 0)
        for size in (each for each in sizes if first.devices % each == 0):
            if first.contents.weight_bytes // size + activations <= first.memory or size == first.devices:
                return [
                    self._config.distributed.model_copy(update={"zero": 0, "tensor": each})
                    for each in sizes
                    if each >= size and first.devices % each == 0
                ]
            self.left_out[f"tensor={size}"] = (
                f"not compared: parts of weights with all activations do not fit. Write distributed.tensor={size} for "
                "its plan"
            )
        return []

    def _cuts(self, layout: DistributedConfig) -> bool:
        """Whether it cuts blocks or rows that the configuration does not."""
        return layout.rows_together > self._config.distributed.rows_together

    def _savings(self) -> Iterator[tuple[Checkpointing, bool | str]]:
        """Yield how activations are kept, those that keep most first, and whether inputs of blocks wait on the host."""
        offload, wanted = self._config.train.offload_activations, self._config.train.checkpointing
        if wanted != "auto":
            ways: list[Checkpointing] = [wanted]
        elif not self._first.recomputable:
            ways = [False]
        else:
            ways = [False, *(("elementwise", *SHARES) if self._first.by_block else ()), True]
        yield from ((each, offload) for each in ways)
        if offload == "auto" and ways[-1] is True and self._first.device != "cpu":
            yield True, True

    def confirmed(self, way: _Way) -> _Way:
        """The same after dry runs: the fastest of several micro-batches, larger where one fits, else smaller."""
        low = self._plan(way.config, way.plan.longest, tried=True)
        high = self._plan(way.config, self._config.batch.tokens_per_device)
        tokens, fitting = way.plan.tokens_per_device, [low]
        pads = high.work.padded > high.work.tokens  # less so in fewer rows: what is between may be faster than both
        for probe in range(PROBES):
            if tokens < WORTH * low.tokens_per_device:
                break
            slower = (_between(low, high, tokens).seconds or 0.0) >= (low.seconds or 0.0)
            if slower and not (pads and probe == 0):
                break
            plan = self._plan(way.config, tokens, tried=True)
            if plan.fits:
                low, most = plan, 1.0
                fitting.append(plan)
            else:
                high, most = plan, 0.5  # bytes grow less evenly than it seemed
            tokens = _fitting(low, high, most=most)
        return self._way(way.config, min(reversed(fitting), key=lambda plan: plan.seconds or 0.0), True)

    @cached_property
    def _first(self) -> Plan:
        """Plan of the configuration without anything that saves memory."""
        wanted = self._config.train.checkpointing
        config = _with(self._config, "train", checkpointing=wanted != "auto" and wanted)
        return self._dry_plan(config, self._config.batch.tokens_per_device)

    def _most(self, config: RunConfig) -> _Way:
        """With the most tokens in a forward pass that there can be."""
        sure = self._config.train.checkpointing != "auto" or config.train.checkpointing not in SHARES
        return self._way(config, self._plan(config, self._config.batch.tokens_per_device), sure)

    def _fewest(self, config: RunConfig) -> _Way:
        """With the fewest tokens in a forward pass, where those do not fit; else with the most."""
        most = self._config.batch.tokens_per_device
        sure = self._config.train.checkpointing != "auto" or config.train.checkpointing not in SHARES
        plan = self._plan(config, self._first.longest if most == "auto" else most)
        return self._most(config) if plan.fits else self._way(config, plan, sure)

    def smaller(self, way: _Way) -> _Way:
        """The same with the most tokens in a forward pass that fit, or the fewest that there can be."""
        most = way.plan
        if most.fits or self._config.batch.tokens_per_device != "auto" or most.tokens_per_device <= most.longest:
            return way
        plan, confirmed = self._plan(way.config, most.longest), way.confirmed
        if plan.fits and (tokens := _fitting(plan, most, part=1 - MARGIN)) > plan.tokens_per_device:
            plan, confirmed = _between(plan, most, tokens), False
        return self._way(way.config, plan, confirmed)._replace(number=way.number)

    def _way(self, config: RunConfig, plan: Plan, confirmed: bool) -> _Way:
        return _Way(_with(config, "batch", tokens_per_device=plan.tokens_per_device), plan, confirmed)

    def _plan(self, config: RunConfig, tokens: int | str, *, tried: bool = False) -> Plan:
        """With what devices hold and wait for in the layout of `config`. `tried`: by a dry run of its own, not between
        those of none and of all blocks."""
        between = self._config.train.checkpointing == "auto" and config.train.checkpointing in SHARES and not tried
        dry_plan = self._between_blocks(config, tokens) if between else self._dry_plan(config, tokens)
        plan = replace(dry_plan, distributed=config.distributed)
        waits = self._waits(plan, plan.distributed, plan.dry_run.micro_batches)
        return replace(plan, seconds=(plan.seconds or 0.0) + waits)

    def _waits(
        self, plan: Plan, layout: DistributedConfig, passes: int, *, tokens: float | None = None, again: bool = False
    ) -> float:
        """Seconds of a step in which devices wait for each other, for the host and for disks. `tokens`: that one device
        computes in it; None: with those that fill up blocks of rows."""
        rates = sharded_memory.CPU if plan.device == "cpu" else sharded_memory.ACCELERATOR
        rates = rates if plan.card is None else replace(rates, link=plan.card.link)
        return sharded_memory.waiting_seconds(
            plan.contents,
            layout,
            rates,
            devices=plan.devices,
            passes=passes,
            tokens=plan.work.padded if tokens is None else tokens,
            again=again or plan.checkpointing is True,
        )

    def _between_blocks(self, config: RunConfig, tokens: int | str) -> Plan:
        """Plan that recomputes a share of the blocks, interpolated: bytes and seconds grow evenly with the share."""
        share = config.train.checkpointing
        assert isinstance(share, float)
        known = self._known.get(_key(config, tokens))
        if known is not None:
            return known
        ends: list[Checkpointing] = ["elementwise", True]
        none, whole = (self._dry_plan(_with(config, "train", checkpointing=each), tokens) for each in ends)
        at_peak = {name: _mix(size, whole.dry_run.at_peak[name], share) for name, size in none.dry_run.at_peak.items()}
        gradients = _mix(none.dry_run.at_gradients, whole.dry_run.at_gradients, share)
        seconds = (1 - share) * (none.seconds or 0.0) + share * (whole.seconds or 0.0)
        dry_run = replace(none.dry_run, at_peak=at_peak, at_gradients=gradients)
        return replace(none, checkpointing=share, dry_run=dry_run, seconds=seconds)

    def _dry_plan(self, config: RunConfig, tokens: int | str) -> Plan:
        """Plan of one device that holds everything; `seconds` are those that it computes."""
        # Decided here, as the dry run knows no shares.
        if config.train.checkpointing is True and any(untiled_layout(config)):
            config = _with(config, "train", mlp_tile=None)
        key = _key(config, tokens)
        if key not in self._known:
            # Whatever is shared is arithmetic; parts of rows and of blocks are other work.
            layout = config.distributed.together_only
            alone = _with(config, "batch", tokens_per_device=tokens).model_copy(update={"distributed": layout})
            plan = self._make_plan(alone)
            timed = self._timing(plan)
            process = max(plan.process, timed.process)
            self._known[key] = replace(plan, seconds=timed.seconds, timed=timed, process=process)
        return self._known[key]


def _key(config: RunConfig, tokens: int | str) -> tuple[object, ...]:
    together = config.distributed.together_only.words
    return config.train.checkpointing, config.train.offload_activations, config.train.mlp_tile, together, tokens


def _fitting(low: Plan, high: Plan, *, most: float = 1.0, part: float = 1.0) -> int:
    """Tokens of a forward pass that would fit, between one that does and one that does not, if bytes grew evenly.
    `most`: of the way between them, as a share; `part`: of the room that there seems to be."""
    needed = _in_passes(low, high).needed
    share = min(most, part * (high.memory - low.needed) / (needed - low.needed)) if needed > high.memory else most
    return low.tokens_per_device + int(share * (_computed(high) - low.tokens_per_device))


def _computed(plan: Plan) -> int:
    """Tokens of the largest forward pass, which has no more than there are in a step; more than the longest row."""
    return max(plan.longest + 1, min(plan.tokens_per_device, plan.dry_run.padded_tokens))


def _in_passes(least: Plan, most: Plan) -> Plan:
    """The plan with most tokens in a pass as one of several passes, as `least` is: earlier ones leave gradients."""
    low, high = least.dry_run, most.dry_run
    at_peak = {**low.at_peak, ACTIVATIONS: high.at_peak[ACTIVATIONS]}
    passes = max(high.micro_batches, min(2, low.micro_batches))
    return replace(most, dry_run=replace(high, at_peak=at_peak, micro_batches=passes))


def _between(least: Plan, most: Plan, tokens: int) -> Plan:
    """Plan between two dry runs: bytes grow evenly with the tokens of a forward pass, seconds with passes."""
    most = _in_passes(least, most)
    share = (tokens - least.tokens_per_device) / (_computed(most) - least.tokens_per_device)
    low, high = least.dry_run, most.dry_run
    at_peak = {**high.at_peak, ACTIVATIONS: _mix(low.at_peak[ACTIVATIONS], high.at_peak[ACTIVATIONS], share)}
    saved, all_saved = (1 / least.tokens_per_device - 1 / more for more in (tokens, _computed(most)))
    fewer = saved / all_saved  # passes a token that are saved, as a share of the most
    passes = _mix(low.micro_batches, high.micro_batches, fewer)
    dry_run = replace(
        high,
        at_peak=at_peak,
        at_gradients=_mix(low.at_gradients, high.at_gradients, share),
        at_recomputing=_mix(low.at_recomputing, high.at_recomputing, share),
        micro_batches=passes,
        padded_tokens=tokens,
    )
    seconds = (1 - fewer) * (least.seconds or 0.0) + fewer * (most.seconds or 0.0)
    waiting = _mix(least.offloaded, most.offloaded, share)
    return replace(most, tokens_per_device=tokens, dry_run=dry_run, seconds=seconds, offloaded=waiting)


def _mix(low: int, high: int, share: float) -> int:
    return round(low + share * (high - low))


def formats(config: RunConfig) -> list[str]:
    """How weights may be stored, quantised last."""
    wanted = config.model.weights
    quantised = config.model.model_copy(update={"weights": "nf4"})
    cut = config.distributed.tensor > 1
    if wanted != "auto" or cut or isinstance(config.adapter, Full) or cross_checks.unable(quantised, config.adapter):
        return [wanted]
    return [wanted, "nf4"]


_PLAIN = [("engine", "deepspeed"), ("offload_optimizer", "none"), ("offload_parameters", "none")]
"""Settings that a layout decides, with what they are in most."""
_ORDERS: list[dict[str, Any]] = [
    *({"zero": stage} for stage in (0, 1, 2, 3)),
    *({"zero": stage, "engine": "fsdp2"} for stage in (2, 3)),
    *({"zero": stage, "offload_optimizer": "cpu"} for stage in (2, 3)),
    {"zero": 3, "offload_optimizer": "cpu", "offload_parameters": "cpu"},
    {"zero": 3, "engine": "fsdp2", "offload_optimizer": "cpu", "offload_parameters": "cpu"},
    {"zero": 3, "offload_optimizer": "nvme", "offload_parameters": "cpu"},
    {"zero": 3, "offload_optimizer": "nvme", "offload_parameters": "nvme"},
]


def _level(layout: DistributedConfig) -> int:
    if {layout.offload_optimizer, layout.offload_parameters} != {"none"}:
        return 3
    return int(layout.sharded)


def _refusal(config: RunConfig, devices: int) -> str:
    """Why a run of so many devices would be refused; empty where it would not."""
    try:
        layout_checks.require(config, Ranks(0, devices))
    except ConfigError as error:
        return str(error).splitlines()[-1].strip()
    return next(cross_checks.mistakes(config), "")


def _with(config: RunConfig, section: str, **values: object) -> RunConfig:
    return config.model_copy(update={section: getattr(config, section).model_copy(update=values)})


def _cure(config: RunConfig, least: SolverChoice, make_plan: PlanMaker, timing: Timing) -> str:
    """Setting to change, or memory to add, so that the run would fit."""
    plan = least.plan
    device = plan.device if plan.card is None else plan.card.name
    where, needed, memory = f"of each device ({device})", plan.needed, plan.memory
    if plan.host_missing and plan.host_memory is not None:
        where, needed, memory = "of the host's memory", plan.host_needed, plan.host_memory
    sentence = (
        f"The run does not fit into {units.size(memory)} {where}: the least that any way takes is "
        f"{units.size(needed)}, {units.size(needed - memory)} more."
    )
    for words, changed in _changes(config, least):
        if _best(changed, make_plan, timing).plan.fits:
            return f"{sentence}\n  The smallest change that fits: {words}."
    return f"{sentence}\n  No setting alone helps: take a smaller model.id, or as much more memory."


def _changes(config: RunConfig, least: SolverChoice) -> Iterator[tuple[str, RunConfig]]:
    """Single changes, those that lose least first."""
    if config.batch.tokens_per_device != "auto":
        yield "batch.tokens_per_device=auto", _with(config, "batch", tokens_per_device="auto")
    if config.train.checkpointing not in (True, "auto") and least.plan.recomputable:
        yield "train.checkpointing=auto", _with(config, "train", checkpointing="auto")
    if config.distributed.zero == 0 and (least.plan.devices > 1 or least.plan.device != "cpu"):
        yield "distributed.zero=auto", _with(config, "distributed", zero="auto")
    if len(formats(_with(config, "model", weights="auto"))) > 1 and config.model.weights not in ("auto", "nf4"):
        yield "model.weights=nf4", _with(config, "model", weights="nf4")
    if least.plan.peak - least.plan.dry_run.at_peak.get(ACTIVATIONS, 0) < least.plan.memory:
        for tokens in (int(share * least.plan.longest) for share in SHORTER):
            if tokens >= 8:
                whole = tokens * config.distributed.sequence
                shorter = _with(least.config, "data", max_tokens=whole)
                yield f"data.max_tokens={whole}", _with(shorter, "batch", tokens_per_device=tokens)
    if isinstance(config.adapter, Full):
        yield "adapter.method=lora", config.model_copy(update={"adapter": Lora()})
