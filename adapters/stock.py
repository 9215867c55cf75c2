"""Whole models written as stock ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn
    from transformers import PretrainedConfig, PreTrainedModel


def save(model: nn.Module, folder: Path) -> None:
    """Write a model of transformers into `folder`, as transformers does, with the dropout rates that it came with.

    What is larger than SHARD is written shard by shard, with an index.
    """
    with own_dropout(model), _unwrapped():
        model.save_pretrained(folder, max_shard_size=SHARD)  # type: ignore[operator]


SHARD = "5GB"
"""Size of a file of weights, as on the hub: a download goes on after one, and a host reads one at a time."""


@contextmanager
def own_dropout(model: nn.Module) -> Iterator[None]:
    """Inside it, a model's configuration has the dropout rates that it came with."""
    rates: list[tuple[PretrainedConfig, dict[str, float]]] = getattr(model, _RATES, [])
    try:
        for config, own in rates:
            config.update(own)
        yield
    finally:
        for config, own in rates:
            config.update(dict.fromkeys(own, 0.0))


def without_dropout(model: PreTrainedModel) -> None:
    """Set all dropout rates of a model to 0, in its modules and in its configuration, nested ones too."""
    from torch.nn.modules.dropout import _DropoutNd

    for module in model.modules():
        rates = _rates(module) | ({"p": 0.0} if isinstance(module, _DropoutNd) else {})
        vars(module).update(dict.fromkeys(rates, 0.0))
    configs = [(config, _rates(config)) for config in _nested(model.config)]
    setattr(model, _RATES, configs)
    for config, own in configs:
        config.update(dict.fromkeys(own, 0.0))


_RATES = "_rates_of_dropout"
"""Attribute of a model with the rates that its configurations came with."""


def _rates(owner: object) -> dict[str, float]:
    """The attributes that are dropout rates: dropout, attn_pdrop, layerdrop, drop_path_rate and the like."""
    return {name: value for name, value in vars(owner).items() if "drop" in name and isinstance(value, float)}


def _nested(config: PretrainedConfig) -> Iterator[PretrainedConfig]:
    """A configuration and all inside it, such as those of encoder and decoder."""
    from transformers import PretrainedConfig

    yield config
    for value in vars(config).values():
        if isinstance(value, PretrainedConfig):
            yield from _nested(value)


@contextmanager
def _unwrapped() -> Iterator[None]:
    """Inside, accelerate does not ask whether a model is wrapped by DeepSpeed, for which it would import it.

    Nothing that is saved here is, and the import takes seconds and warns about accelerators.
    """
    from accelerate.utils import other

    module: Any = other
    before = module.is_deepspeed_available
    module.is_deepspeed_available = lambda: False
    try:
        yield
    finally:
        module.is_deepspeed_available = before
