"""Which modules of a backbone get an adapter: roles and names, resolved to what PEFT matches on."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from workbench.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def resolve(model: PreTrainedModel, targets: str | Sequence[str]) -> list[str]:
    """Module names for a role (`attention`, `mlp`, `all-linear`) or a list of names.

    Leaf names such as `q_proj` where they mean the same everywhere, full paths where a leaf name
    (BERT's `dense`) stands both inside and outside the role. The output head is never a target of a role.

    Raises:
        ConfigError: a name matches no linear layer (the nearest that exist are listed).
    """
    linear = linear_modules(model)
    if isinstance(targets, str):
        chosen = [name for name in linear if targets == "all-linear" or _is_attention(name) == (targets == "attention")]
        if not chosen:
            raise ConfigError(f"adapter.targets: {targets} matches no linear layer of {type(model).__name__}.")
        leaves = {_leaf(name) for name in chosen}
        others = {_leaf(name) for name in set(linear) - set(chosen)}
        return sorted(chosen) if leaves & others else sorted(leaves)
    unknown = [name for name in targets if not any(_matches(path, name) for path in linear)]
    if unknown:
        leaves = {_leaf(name) for name in linear}
        near = sorted({match for name in unknown for match in difflib.get_close_matches(name, leaves, n=3, cutoff=0.3)})
        raise ConfigError(
            f"adapter.targets: no linear layer of {type(model).__name__} is called {', '.join(unknown)}. "
            f"Nearest: {', '.join(near or sorted(leaves))}. Roles: attention, mlp, all-linear."
        )
    return list(targets)


def linear_modules(model: PreTrainedModel) -> list[str]:
    """Paths of the linear layers, quantised ones too, without the output head."""
    import torch
    from transformers.pytorch_utils import Conv1D

    head = model.get_output_embeddings()
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, (torch.nn.Linear, Conv1D)) and module is not head
    ]


def _is_attention(path: str) -> bool:
    return any("attn" in part or "attention" in part for part in path.split("."))


def _leaf(path: str) -> str:
    return path.rsplit(".", 1)[-1]


def _matches(path: str, name: str) -> bool:
    return path == name or path.endswith("." + name)
