"""The modules of a backbone that get an adapter: roles and names, resolved to what PEFT matches on."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from workbench.adapters.anatomy import fused_experts, is_attention, is_linear, linear_modules
from workbench.adapters.method import Method
from workbench.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

Targets = Literal["attention", "mlp", "all-linear"] | Annotated[tuple[str, ...], Field(min_length=1)]
"""A role, or module names such as [q_proj, v_proj]."""


class OnLinear(Method):
    """Base of the methods that change linear layers."""

    targets: Targets = "all-linear"
    """Linear layers that are changed: a role, or a list of module names such as [q_proj, v_proj]."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Share of the adapter's inputs that is dropped while training."""

    @property
    def noise(self) -> float:
        return self.dropout

    def modules(self, model: PreTrainedModel) -> list[str]:
        """Names of the linear layers that are changed."""
        return resolve(model, self.targets)


def resolve(model: PreTrainedModel, targets: str | Sequence[str]) -> list[str]:
    """Module names for a role (`attention`, `mlp`, `all-linear`) or a list of names.

    Leaf names such as `q_proj` where they mean the same everywhere, full paths where a leaf name
    (BERT's `dense`) stands both inside and outside the role. A role never names what is outside the blocks.

    Raises:
        ConfigError: a name matches no linear layer (the nearest that exist are listed).
    """
    head = model.get_output_embeddings()
    everywhere = [name for name, module in model.named_modules() if is_linear(module) and module is not head]
    if isinstance(targets, str):
        linear = linear_modules(model)
        chosen = [name for name in linear if targets == "all-linear" or is_attention(name) == (targets == "attention")]
        if not chosen and (experts := fused_experts(model)):
            raise ConfigError(
                f"adapter.targets: the MLPs of {type(model).__name__} are experts, whose matrices stand in one "
                f"parameter ({_leaf(next(iter(experts)))}), which no adapter reaches yet. "
                "Write adapter.targets=attention, or adapter.method=full."
            )
        if not chosen:
            raise ConfigError(f"adapter.targets: {targets} matches no linear layer of {type(model).__name__}.")
        return short_names(model, chosen)
    unknown = [name for name in targets if not any(matches(path, name) for path in everywhere)]
    if unknown:
        leaves = {_leaf(name) for name in everywhere}
        near = sorted({match for name in unknown for match in difflib.get_close_matches(name, leaves, n=3, cutoff=0.3)})
        raise ConfigError(
            f"adapter.targets: no linear layer of {type(model).__name__} is called {', '.join(unknown)}. "
            f"Nearest: {', '.join(near or sorted(leaves))}. Roles: attention, mlp, all-linear."
        )
    return list(targets)


def unreached(model: PreTrainedModel, method: Method) -> str | None:
    """Sentence on experts that a method on linear layers leaves frozen; None where there are none."""
    experts = fused_experts(model)
    if not experts or not isinstance(method, OnLinear):
        return None
    share = sum(each.numel() for each in experts.values()) / sum(each.numel() for each in model.parameters())
    return (
        f"Mixture of experts: {share:.0%} of the weights are experts, whose matrices stand in one "
        f"parameter ({', '.join(sorted({_leaf(name) for name in experts}))}); "
        f"adapter.method={method.method} does not reach them, and they stay frozen."
    )


def linear_layers(model: PreTrainedModel, targets: str | Sequence[str]) -> dict[str, nn.Module]:
    """The linear layers that `targets` names, by path; raises as `resolve` does."""
    names = resolve(model, targets)
    return {
        path: module
        for path, module in model.named_modules()
        if is_linear(module) and any(matches(path, name) for name in names)
    }


def short_names(model: PreTrainedModel, paths: Collection[str]) -> list[str]:
    """Leaf names where they mean the modules at `paths` and no others; otherwise the paths."""
    leaves = {_leaf(path) for path in paths}
    others = {_leaf(name) for name, _ in model.named_modules() if name not in set(paths)}
    return sorted(paths) if leaves & others else sorted(leaves)


def matches(path: str, name: str) -> bool:
    """Whether a module at `path` is meant by `name`, a leaf name or the end of a path."""
    return path == name or path.endswith("." + name)


def _leaf(path: str) -> str:
    return path.rsplit(".", 1)[-1]
