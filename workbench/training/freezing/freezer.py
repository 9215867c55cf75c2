"""Applies a freezing policy to a model: which of its parameters train in the next step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

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
from workbench.training.freezing.layer_map import LayerMap, survey
from workbench.training.freezing.layer_parts import survey_parts

_GRAIN = 0.01
"""Resolution of `Freezer.lasts`, as a share of the run."""


class Freezer:
    """The layers of a model that trains, of which a policy freezes some.

    Make it while all parameters that the adapter's method trains require gradients. A plan that never changes is
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
        self._parameters = {name: each for name, each in model.named_parameters() if each.requires_grad}
        self._seed = seed
        self.layers = {name: layers.of(name) for name in self._parameters}
        """Layer of each parameter that the method lets train, by name."""
        self.fresh = _fresh(backbone, self._parameters)
        """Names of those that start at random: a classification head."""
        self.seen: tuple[Observation, ...] = ()
        self.frozen: frozenset[str] = frozenset()
        """Names of the parameters that the method lets train and the policy does not, now."""
        self.parts = survey_parts(model, backbone, layers)
        """The parts of each layer, and how many of their values the method lets train."""
        self.on_plan: Callable[[int, Sequence[bool]], None] = lambda step, trains: None
        """Hears before each step, counted from 1, which layers train, where the policy is no fixed one."""
        self._now = Moment(0, 0.0, seed)
        self.plan = policy.plan(self._now, blocks=len(self.blocks))
        if policy.fixed:
            self._apply()

    @property
    def depth(self) -> int:
        """Number of first blocks in which, and before which, nothing trains now."""
        return self._depth(self.plan)

    def lasts(self) -> float:
        """Share of the whole run for which `depth` is what it is now, as far as is known; the same in a resumed run."""
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
            self._now = Moment(step, share, self._seed, self.seen)
            self.plan = self.policy.plan(self._now, blocks=len(self.blocks))
            self._apply()
            self.on_plan(step + 1, self.plan.trains)

    def _apply(self) -> None:
        self.frozen = frozenset(name for name, layer in self.layers.items() if not self.plan.trains[layer])
        for name, parameter in self._parameters.items():
            parameter.requires_grad_(name not in self.frozen)


def attach(
    backbone: PreTrainedModel,
    config: TrainingSections,
    *,
    seed: int,
    new_token_ids: Sequence[int] = (),
    sample: Sample | None = None,
) -> Freezer:
    """A bare backbone with the adapter of a run, fresh, none where the policy freezes for good; see `adapters.attach`.

    Returns:
        The freezer of the model, which it holds.
    """
    layers = layers_of(backbone, config)
    model = adapt(backbone, config, layers, seed=seed, new_token_ids=new_token_ids, sample=sample)
    return Freezer(model, backbone, layers, config.freeze, seed=seed)


def adapt(
    backbone: PreTrainedModel,
    config: TrainingSections,
    layers: LayerMap,
    *,
    seed: int,
    new_token_ids: Sequence[int] = (),
    sample: Sample | None = None,
) -> nn.Module:
    """The model of `attach`, without what freezes it."""
    return adapters.attach(
        backbone,
        config.adapter,
        seed=seed,
        new_token_ids=new_token_ids,
        sample=sample,
        below=config.freeze.never(len(layers.blocks)),
    )


def attach_bank(
    backbone: PreTrainedModel,
    config: TrainingSections,
    methods: Sequence[Method],
    *,
    seeds: Sequence[int],
    numbers: Sequence[int] | None = None,
) -> tuple[Bank, Freezer]:
    """A bare backbone with a bank of fresh adapters, none where the policy freezes for good; see `bank.attach`."""
    layers = layers_of(backbone, config)
    below = config.freeze.never(len(layers.blocks))
    together = bank.attach(backbone, methods, seeds=seeds, numbers=numbers, below=below)
    return together, Freezer(together.model, backbone, layers, config.freeze, seed=config.seed)


def layers_of(backbone: PreTrainedModel, config: TrainingSections) -> LayerMap:
    """Those of a bare backbone; raises ConfigError where the policy does not work on so many."""
    layers = survey(backbone, needed=config.by_block)
    if reason := config.freeze.refusal(len(layers.blocks)):
        raise ConfigError(reason)
    return layers


def _fresh(backbone: PreTrainedModel, parameters: Mapping[str, nn.Parameter]) -> frozenset[str]:
    heads = anatomy.fresh_heads(backbone)
    return frozenset(name for name in parameters if any(f".{head}." in f".{name}" for head in heads))
