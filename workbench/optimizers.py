"""Optimizers by their names: their groups and rates, how they are made, and their whole state as tensors."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from workbench.config import RunConfig
from workbench.errors import ConfigError
from workbench.sharpness import FAST_STEPS, SLOW, look_ahead

Group = dict[str, Any]
"""Parameters (`params`) with a learning rate and weight decay of their own.

`rate_factor` times the run's rate is theirs. `layer` is set where each layer has groups of its own. `orthogonal`, with
muon, says whose steps are made so.
"""

_FROM_PYTORCH_OPTIMIZER = ("lion", "lamb", "lars", "soap", "schedule_free")
_FROM_BITSANDBYTES = ("adamw8bit", "paged_adamw", "paged_adamw8bit")
_COUNTED = ("step", "weight_sum", "lr_max", FAST_STEPS)
"""What groups count; all else in them is configured."""
_AVERAGED = "z"
"""Where schedule-free has the point that it steps from; only its states have one."""
_TOLD = ("weight_norm", "adam_norm", "trust_ratio")
"""What lamb notes of its last step, and never reads."""
_CODEBOOKS = ("qmap1", "qmap2")
"""What 8-bit values stand for: constants, shared by all parameters."""


def require(config: RunConfig, *, device: torch.device) -> None:
    """Refuse an optimizer whose package is not installed, or that the device cannot run; raises ConfigError."""
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


def peak_rate(config: RunConfig) -> float:
    """The highest learning rate of the run, scaled to its batch; of a group with `rate_factor` 1."""
    return config.optimizer.scaled(config.train.learning_rate, batch=config.batch.size)


def groups(
    trainable: Mapping[str, nn.Parameter],
    config: RunConfig,
    *,
    layers: Mapping[str, int],
    blocks: int,
    fresh: Collection[str],
) -> list[Group]:
    """A group for each learning rate and weight decay that the method and the optimizer ask for; vectors never decay.

    Args:
        layers: Of each parameter, by its name: 0 the embeddings, 1 to `blocks` the blocks, `blocks` + 1 what comes
            after; a name that is not there counts as after.
        fresh: Names of the parameters that start at random.
    """
    optimizer, top = config.optimizer, blocks + 1
    layered = not config.freeze.fixed or optimizer.layer_decay < 1
    found: dict[tuple[float, float, int | None, bool], list[nn.Parameter]] = {}
    for name, parameter in trainable.items():
        layer = layers.get(name, top)
        factor = config.adapter.rate_factor(name) * optimizer.layer_decay ** (top - layer)
        factor *= optimizer.head_rate if name in fresh else 1.0
        decay = config.train.weight_decay if _decays(name, parameter, config) else 0.0
        orthogonal = optimizer.name == "muon" and 0 < layer < top and _is_matrix(parameter)
        found.setdefault((factor, decay, layer if layered else None, orthogonal), []).append(parameter)
    return [
        {"params": group, "rate_factor": factor, "weight_decay": decay, "layer": layer, "orthogonal": orthogonal}
        for (factor, decay, layer, orthogonal), group in found.items()
    ]


def build(groups: list[Group], config: RunConfig) -> torch.optim.Optimizer:
    """The optimizer of a run over `groups`; who takes a step sets the `lr` of each of its groups before."""
    settings = config.optimizer
    optimizer = _BUILDERS[settings.name](groups, peak_rate(config), settings.given)
    if settings.lookahead is not None:
        look_ahead(optimizer, every=settings.lookahead, alpha=settings.lookahead_alpha)
    return optimizer


@torch.no_grad()
def penalise(trainable: Mapping[str, nn.Parameter], config: RunConfig) -> None:
    """Add the gradients of `optimizer.l1` times sum |w| and of `optimizer.l2` times sum w^2, where there are gradients."""
    l1, l2 = config.optimizer.l1, config.optimizer.l2
    if not l1 and not l2:
        return
    for name, parameter in trainable.items():
        if parameter.grad is not None and _decays(name, parameter, config):
            parameter.grad.add_(parameter.sign(), alpha=l1).add_(parameter, alpha=2 * l2)


@contextmanager
def evaluating(optimizer: torch.optim.Optimizer, *, refresh: Callable[[], None]) -> Iterator[None]:
    """Inside the block the parameters hold what is to be evaluated and shipped; after it, the same bits as before.

    That is the average of schedule-free, and the slow weights of Lookahead. Other optimizers have nothing else to show.

    Args:
        refresh: Called when the parameters have changed: copies them to where they compute.
    """
    kept: dict[nn.Parameter, Tensor] = {}
    with torch.no_grad():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                state = optimizer.state.get(parameter, {})
                if SLOW in state or _AVERAGED in state:
                    kept[parameter] = parameter.detach().clone()
                if SLOW in state:
                    parameter.copy_(state[SLOW])
                elif _AVERAGED in state:
                    # Gradients are taken at y = (1 - beta) z + beta x, where x is the average.
                    parameter.lerp_(state[_AVERAGED], 1 - 1 / group["betas"][0])
    if not kept:
        yield
        return
    try:
        refresh()
        yield
    finally:
        with torch.no_grad():
            for parameter, value in kept.items():
                parameter.copy_(value)
        refresh()


def state_tensors(optimizer: torch.optim.Optimizer, names: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Everything that decides the next step of these parameters: `name|kind`, with a `#` behind what is no tensor.

    What a group counts is `group N|kind`, where all its parameters are named.
    """
    tensors: dict[str, Tensor] = {}
    for name, parameter in names.items():
        for kind, value in optimizer.state.get(parameter, {}).items():
            if kind not in (*_TOLD, *_CODEBOOKS):
                tensors.update(_packed(f"{name}|{kind}", value))
    for number, group in enumerate(optimizer.param_groups):
        if set(group["params"]) <= set(names.values()):
            for kind in _COUNTED:
                if kind in group:
                    tensors.update(_packed(f"group {number}|{kind}", group[kind]))
    return tensors


def load_state(
    optimizer: torch.optim.Optimizer, names: Mapping[str, nn.Parameter], tensors: Mapping[str, Tensor]
) -> None:
    """Set the state of these parameters, and of the groups that are theirs alone, to what `state_tensors` gave."""
    saved: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        name, _, kind = key.rpartition("|")
        saved.setdefault(name, {})[kind] = tensor
    for number, group in enumerate(optimizer.param_groups):
        if set(group["params"]) <= set(names.values()):
            group.update(_unpacked(saved.get(f"group {number}", {}), torch.device("cpu")))
        for index, parameter in enumerate(group["params"]):
            for name in (name for name, each in names.items() if each is parameter and name in saved):
                parts = saved[name]
                optimizer.state[parameter] = _emptied(optimizer, parts, (number, index))
                _fill(optimizer.state[parameter], _unpacked(parts, parameter.device), group)


def _decays(name: str, parameter: nn.Parameter, config: RunConfig) -> bool:
    return parameter.ndim >= 2 and config.adapter.decays(name)


def _is_matrix(parameter: nn.Parameter) -> bool:
    return parameter.ndim == 2 and min(parameter.shape) > 1
