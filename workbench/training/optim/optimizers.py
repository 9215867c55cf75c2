"""Builds the optimizer that `optimizer.name` says: its parameter groups, their learning rates and weight decay."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from workbench.config import TrainingSections
from workbench.config.sections.optimizer_config import OF_INNER_MATRICES
from workbench.errors import ConfigError
from workbench.training.optim.own_optimizers import (
    AdamMini,
    Apollo,
    ApolloMini,
    GaLore,
    Shampoo,
    Sophia,
    SubspaceAdam,
    apply_largest,
    look_ahead,
)

Group = dict[str, Any]
"""Parameters (`params`) with a learning rate and weight decay of their own.

`rate_factor` times the run's rate is theirs. `layer` is set where each layer has groups of its own. `inner`, with
muon, shampoo, galore and apollo, says which are of matrices inside the blocks.
"""

_FROM_PYTORCH_OPTIMIZER = ("lion", "lamb", "lars", "soap", "schedule_free")
_FROM_BITSANDBYTES = ("adamw8bit", "paged_adamw", "paged_adamw8bit")


def require(config: TrainingSections, *, device: torch.device) -> None:
    """Raise ConfigError where the optimizer's package is not installed, or the device cannot run it."""
    name = config.optimizer.name
    if name in _FROM_PYTORCH_OPTIMIZER and importlib.util.find_spec("pytorch_optimizer") is None:
        raise ConfigError(
            f"optimizer.name={name} is in a package that is not installed. Write optimizer.name=adamw, or run: "
            "pip install 'peft-workbench[optimizers]'"
        )
    if name in _FROM_BITSANDBYTES and importlib.util.find_spec("bitsandbytes") is None:
        raise ConfigError(
            f"optimizer.name={name} needs bitsandbytes, which is not installed. Write optimizer.name=adamw, or run: "
            "pip install bitsandbytes"
        )
    if name.startswith("paged_") and device.type != "cuda":
        raise ConfigError(
            f"optimizer.name={name} moves its state between an NVIDIA GPU and the host, and this run is on "
            f"{device.type}. Write optimizer.name={name.removeprefix('paged_')}."
        )
    if name == "adamw8bit" and device.type not in ("cuda", "cpu"):
        raise ConfigError(f"optimizer.name={name} does not work on {device.type}. Write optimizer.name=adamw.")


def peak_rate(config: TrainingSections) -> float:
    """The highest learning rate of the run, scaled to its batch size; of a group with `rate_factor` 1."""
    return config.optimizer.scaled(config.train.learning_rate, batch=config.batch.size)


def groups(
    trainable: Mapping[str, nn.Parameter],
    config: TrainingSections,
    *,
    layers: Mapping[str, int],
    blocks: int,
    fresh: Collection[str],
) -> list[Group]:
    """A parameter group for each pair of learning rate and weight decay; vectors never decay.

    Args:
        layers: Layer of each parameter, by name: 0 the embeddings, 1 to `blocks` the blocks, `blocks` + 1 what comes
            after; a missing name counts as after.
        fresh: Names of the parameters of a head that starts at random.
    """
    optimizer, top = config.optimizer, blocks + 1
    layered = not config.freeze.fixed or optimizer.layer_decay < 1
    grouped: dict[tuple[float, float, int | None, bool], list[nn.Parameter]] = {}
    for name, parameter in trainable.items():
        layer = top if name in fresh else layers.get(name, top)
        factor = config.adapter.rate_factor(name) * optimizer.layer_decay ** (top - layer)
        factor *= optimizer.head_rate if name in fresh else 1.0
        decay = config.train.weight_decay if _decays(name, parameter, config) else 0.0
        inner = optimizer.name in OF_INNER_MATRICES and 0 < layer < top and is_matrix(parameter)
        grouped.setdefault((factor, decay, layer if layered else None, inner), []).append(parameter)
    return [
        {"params": group, "rate_factor": factor, "weight_decay": decay, "layer": layer, "inner": inner}
        for (factor, decay, layer, inner), group in grouped.items()
    ]


def build(groups: list[Group], config: TrainingSections) -> torch.optim.Optimizer:
    """The optimizer of a run over `groups`; the caller sets the `lr` of each group before each step."""
    settings = config.optimizer
    if settings.name in _COMBINED:
        optimizer = _COMBINED[settings.name](groups, config)
    else:
        optimizer = _BUILDERS[settings.name](groups, peak_rate(config), settings.given)
    if settings.gradient_share is not None:
        apply_largest(optimizer, share=settings.gradient_share)
    if settings.lookahead is not None:
        look_ahead(optimizer, every=settings.lookahead, alpha=settings.lookahead_alpha)
    return optimizer


def state_bytes(groups: Sequence[Group], config: TrainingSections) -> int:
    """Bytes of the optimizer's state after its first step, which is taken on fake tensors.

    An optimizer that reads values counts as AdamW, whose state is at least as large.
    """

    def fake(group: Group) -> Group:
        parameters = [nn.Parameter(torch.empty(each.shape, dtype=each.dtype)) for each in group["params"]]
        for each in parameters:
            each.grad = torch.empty_like(each)
        return {"params": parameters, **{key: group[key] for key in ("rate_factor", "weight_decay", "layer", "inner")}}

    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            optimizer = build([fake(group) for group in groups], config)
            optimizer.step()
            values = [value for state in optimizer.state.values() for value in state.values()]
            return sum(value.numel() * value.element_size() for value in values if isinstance(value, Tensor))
    except DataDependentOutputException:
        return sum(2 * 4 * parameter.numel() for group in groups for parameter in group["params"])


@torch.no_grad()
def penalise(trainable: Mapping[str, nn.Parameter], config: TrainingSections, start: Mapping[str, Tensor]) -> None:
    """Add the gradients of the penalties: l1 sum |w|, l2 sum w^2, and l2_start sum (w - start)^2.

    Args:
        start: From `starting_values`.
    """
    l1, l2, l2_start = config.optimizer.l1, config.optimizer.l2, config.optimizer.l2_start
    for name, parameter in trainable.items() if l1 or l2 else ():
        if parameter.grad is not None and _decays(name, parameter, config):
            parameter.grad.add_(parameter.sign(), alpha=l1).add_(parameter, alpha=2 * l2)
    for name, value in start.items():
        if (grad := trainable[name].grad) is not None:
            grad.add_(trainable[name].detach() - value, alpha=2 * l2_start)


def starting_values(trainable: Mapping[str, nn.Parameter], config: TrainingSections) -> dict[str, Tensor]:
    """Copies of the values that `optimizer.l2_start` pulls back to, before the first step; none where it is off."""
    wanted = trainable if config.optimizer.l2_start else {}
    return {name: each.detach().clone() for name, each in wanted.items() if _decays(name, each, config)}


def _decays(name: str, parameter: nn.Parameter, config: TrainingSections) -> bool:
    return parameter.ndim >= 2 and config.adapter.decays(name)


def is_matrix(parameter: nn.Parameter) -> bool:
    """Whether it has several rows and several columns."""
    return parameter.ndim == 2 and min(parameter.shape) > 1


class CombinedOptimizer(torch.optim.Optimizer):
    """Several optimizers as one: each has some of the groups, and all share one state.

    Args:
        groups: Of all parameters, in the order of `param_groups`.
        parts: Groups of each optimizer, and what makes it of them.
    """

    def __init__(self, groups: list[Group], parts: list[tuple[list[Group], Callable[[list[Group]], Any]]]) -> None:
        super().__init__(groups, {})
        self._parts: list[torch.optim.Optimizer] = [make(own) for own, make in parts if own]
        for part in self._parts:
            part.state = self.state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step of each."""
        assert closure is None
        for part in self._parts:
            part.step()


Settings = dict[str, Any]
Builder = Callable[[list[Group], float, Settings], torch.optim.Optimizer]
"""Makes an optimizer from groups, a learning rate, and those of betas, eps and momentum that are set."""
Combiner = Callable[[list[Group], TrainingSections], torch.optim.Optimizer]
"""Makes an optimizer from groups and all settings of a run."""


def _from(package: str, kind: str, **fixed: Any) -> Builder:
    """Builder of a class of a package, which is imported on use: some take a second, some are not installed."""

    def build(groups: list[Group], rate: float, given: Settings) -> torch.optim.Optimizer:
        made: torch.optim.Optimizer = getattr(importlib.import_module(package), kind)(groups, lr=rate, **fixed, **given)
        return made

    return build


_adamw = _from("torch.optim", "AdamW", fused=True)


def _split(groups: list[Group], config: TrainingSections, inner: Callable[[list[Group]], Any]) -> torch.optim.Optimizer:
    """`inner` for the matrices inside the blocks, and AdamW for the rest.

    Raises:
        ConfigError: There are no such matrices, so that AdamW would silently take all steps.
    """
    settings = config.optimizer
    if not any(group["inner"] for group in groups):
        raise ConfigError(
            f"optimizer.name={settings.name} is for matrices inside the transformer blocks, and none of them trains. "
            "Write optimizer.name=adamw, or another adapter.method."
        )
    rest = {key: value for key, value in settings.given.items() if key != "momentum"}
    matrices, others = ([group for group in groups if group["inner"] is is_inner] for is_inner in (True, False))
    return CombinedOptimizer(groups, [(matrices, inner), (others, lambda own: _adamw(own, peak_rate(config), rest))])


def _muon(groups: list[Group], config: TrainingSections) -> torch.optim.Optimizer:
    given: Settings = {"adjust_lr_fn": "match_rms_adamw", "lr": peak_rate(config)}
    given |= {key: value for key, value in config.optimizer.given.items() if key == "momentum"}
    return _split(groups, config, lambda own: torch.optim.Muon(own, **given))


def _in_subspace(kind: type[SubspaceAdam], groups: list[Group], config: TrainingSections) -> torch.optim.Optimizer:
    settings = config.optimizer
    given: Settings = {
        "lr": peak_rate(config),
        "rank": settings.subspace_rank,
        "every": settings.subspace_every,
        "scale": settings.subspace_factor,
        "seed": config.seed,
        **settings.given,
    }
    return _split(groups, config, lambda own: kind(own, **given))


def _shampoo(groups: list[Group], config: TrainingSections) -> torch.optim.Optimizer:
    rate, settings = peak_rate(config), config.optimizer
    return _split(groups, config, lambda own: Shampoo(own, lr=rate, every=settings.looks_every, **settings.given))


def _sophia(groups: list[Group], config: TrainingSections) -> torch.optim.Optimizer:
    rate, settings = peak_rate(config), config.optimizer
    return Sophia(groups, lr=rate, gamma=settings.gamma, every=settings.looks_every, **settings.given)


_COMBINED: dict[str, Combiner] = {
    "muon": _muon,
    "shampoo": _shampoo,
    "sophia": _sophia,
    "galore": partial(_in_subspace, GaLore),
    "apollo": partial(_in_subspace, Apollo),
    "apollo_mini": partial(_in_subspace, ApolloMini),
}
"""Optimizers that read more of a run's settings; most are for matrices inside the blocks, with AdamW for the rest."""
_BUILDERS: dict[str, Builder] = {
    "adamw": _adamw,
    "adamw8bit": _from("bitsandbytes.optim", "AdamW8bit"),
    "paged_adamw": _from("bitsandbytes.optim", "PagedAdamW"),
    "paged_adamw8bit": _from("bitsandbytes.optim", "PagedAdamW8bit"),
    "adafactor": _from("torch.optim", "Adafactor"),
    "lion": _from("pytorch_optimizer", "Lion"),
    "sgd": _from("torch.optim", "SGD"),
    "adam_mini": lambda groups, rate, given: AdamMini(groups, lr=rate, **given),
    # As in the paper's last version: no bias correction, and weight decay inside of what is scaled.
    "lamb": _from("pytorch_optimizer", "Lamb", adam_debias=True, weight_decouple=False),
    "lars": _from("pytorch_optimizer", "LARS"),
    "soap": _from("pytorch_optimizer", "SOAP"),
    "schedule_free": _from("pytorch_optimizer", "ScheduleFreeAdamW"),
}
