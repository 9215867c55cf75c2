"""Applies a freezing policy to a model, and logs which of its layers train."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
from torch import nn
from transformers import PreTrainedModel

from workbench import adapters
from workbench.adapters import Method, anatomy
from workbench.adapters.banks import bank
from workbench.adapters.banks.bank import Bank
from workbench.adapters.method import Sample
from workbench.config import TrainingSections
from workbench.config.freeze_config import FreezeConfig, LayerPlan, Moment, Observation
from workbench.errors import ConfigError
from workbench.runs import files, metrics_log
from workbench.runs.run_directory import Run
from workbench.training.freezing.layer_map import LayerMap, survey, survey_parts

_GRAIN = 0.01
"""Resolution of `Freezer.lasts`, as a share of the run."""


class Freezer:
    """The layers of a model, some of which a policy freezes.

    Create it while all parameters that the adapter's method trains require gradients. A plan that never changes is
    applied at once, any other before each step.

    Args:
        model: The backbone with its adapter.
        backbone: The same without the adapter around it.
        layers: Of the bare backbone.
        seed: Of the run.
    """

    def __init__(
        self, model: nn.Module, backbone: PreTrainedModel, layers: LayerMap, policy: FreezeConfig, *, seed: int
    ) -> None:
        self.model, self.backbone, self.policy = model, backbone, policy
        self.blocks = [backbone.get_submodule(path) for path in layers.blocks]
        self._seed = seed
        self.layers = {name: layers.of(name) for name, each in model.named_parameters() if each.requires_grad}
        """Layer of each parameter that the method lets train, by name."""
        heads = anatomy.fresh_heads(backbone)
        self.fresh = frozenset(name for name in self.layers if any(f".{head}." in f".{name}" for head in heads))
        """Names of those that start at random: a classification head."""
        self.seen: tuple[Observation, ...] = ()
        self.frozen: frozenset[str] = frozenset()
        """Names of the parameters that the method lets train and the policy does not, now."""
        self.parts = survey_parts(model, backbone, layers)
        """The parts of each layer, and how many of their values the method lets train."""
        self.on_plan: Callable[[int, Sequence[bool]], None] = lambda step, trains: None
        """Called before each step (from 1) with the layers that train, unless the policy is a fixed one."""
        self._now = Moment(0, 0.0, seed)
        self.plan = policy.plan(self._now, blocks=len(self.blocks))
        if policy.fixed:
            self._apply()

    @property
    def depth(self) -> int:
        """Number of first blocks that are frozen now, with everything before them."""
        return self._depth(self.plan)

    def lasts(self) -> float:
        """Share of the run for which `depth` is as now, as far as is known; the same in a resumed run."""
        step, share = self._now.step, self._now.share
        same = 0
        for when in np.arange(0, 1, _GRAIN).tolist():
            seen = tuple(each for each in self.seen if not share or each.step <= step * when / share)
            plan = self.policy.plan(Moment(0, when, self._seed, seen), blocks=len(self.blocks))
            same += self._depth(plan) == self.depth
        return same * _GRAIN

    def _depth(self, plan: LayerPlan) -> int:
        live = (layer for layer in self.layers.values() if plan.trains[layer])
        return max(0, min(live, default=len(self.blocks) + 1) - 1)

    def follow(self, *, step: int, share: float) -> None:
        """Switch gradients as the policy says for the next step.

        Args:
            step: Optimizer steps done.
            share: Share of the run that is done.
        """
        if not self.policy.fixed:
            known = self.policy.observes is not None and self.seen is self._now.seen  # nothing was measured since
            self._now = Moment(step, share, self._seed, self.seen)
            if not known:
                self.plan = self.policy.plan(self._now, blocks=len(self.blocks))
            self._apply()
            self.on_plan(step + 1, self.plan.trains)

    def _apply(self) -> None:
        self.frozen = frozenset(name for name, layer in self.layers.items() if not self.plan.trains[layer])
        for name, weight in self.model.named_parameters():  # asked each time: layouts that cut weights replace them
            if name in self.layers:
                weight.requires_grad_(name not in self.frozen)


def attach(
    backbone: PreTrainedModel,
    config: TrainingSections,
    *,
    seed: int,
    new_token_ids: Sequence[int] = (),
    sample: Sample | None = None,
) -> Freezer:
    """Attach the fresh adapter of a run to a bare backbone, but not to blocks that the policy always freezes.

    Args:
        seed: Of the run.
        new_token_ids: See `adapters.attach`, as for `sample`.

    Returns:
        The freezer of the model, which it holds.
    """
    layers = layers_of(backbone, config)
    below = config.freeze.never(len(layers.blocks))
    model = adapters.attach(
        backbone, config.adapter, seed=seed, new_token_ids=new_token_ids, sample=sample, below=below
    )
    return Freezer(model, backbone, layers, config.freeze, seed=seed)


def attach_bank(
    backbone: PreTrainedModel,
    config: TrainingSections,
    methods: Sequence[Method],
    *,
    seeds: Sequence[int],
    numbers: Sequence[int] | None = None,
) -> tuple[Bank, Freezer]:
    """Attach a bank of fresh adapters to a bare backbone, but not to blocks that the policy always freezes."""
    layers = layers_of(backbone, config)
    below = config.freeze.never(len(layers.blocks))
    together = bank.attach(backbone, methods, seeds=seeds, numbers=numbers, below=below)
    return together, Freezer(together.model, backbone, layers, config.freeze, seed=config.seed)


def layers_of(backbone: PreTrainedModel, config: TrainingSections) -> LayerMap:
    """The layers of a bare backbone; raises ConfigError where the policy does not work on so many blocks."""
    layers = survey(backbone, needed=config.by_block)
    if reason := config.freeze.refusal(len(layers.blocks)):
        raise ConfigError(reason)
    return layers


FILE = "layers.jsonl"


class LayerLog:
    """Writes which layers of a run train, step by step, to layers.jsonl of its directory.

    The first line has the parts of each layer; each further one the step from which other layers train.
    """

    def __init__(self, run: Run, freezer: Freezer) -> None:
        self._run, self._freezer = run, freezer
        self._last: str | None = None
        """Layers that trained last, as written; None until the first step of this process."""
        if not _has_table(run.path / FILE):
            self._begin()
        freezer.on_plan = self._log

    def _begin(self) -> str:
        trains, parts = _written(self._freezer.plan.trains), [asdict(each) for each in self._freezer.parts]
        metrics_log.append(self._run.path / FILE, [{"step": 0, "trains": trains, "layers": parts}])
        return trains

    def _log(self, step: int, trains: Sequence[bool]) -> None:
        now = _written(trains)
        if self._last is None:
            lines = files.json_lines((self._run.path / FILE).read_text(encoding="utf-8"))
            self._last = lines[-1]["trains"] if lines else self._begin()
        if now != self._last:
            metrics_log.append(self._run.path / FILE, [{"step": step, "trains": now}])
            self._last = now


def _has_table(path: Path) -> bool:
    """Whether the first line is complete: a process may have been killed while it wrote it."""
    if path.exists():
        with path.open("rb") as file:
            if file.readline().endswith(b"\n"):
                return True
        path.unlink()
    return False


def _written(trains: Sequence[bool]) -> str:
    """A digit for each layer: 1 where it trains."""
    return "".join("1" if each else "0" for each in trains)
