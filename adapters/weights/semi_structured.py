"""2:4 sparsity of a frozen backbone: of four consecutive inputs of an output, the two largest weights stay.

After Mishra et al. 2021 (arXiv:2104.08378): pruned once, by magnitude, in the linear layers inside the blocks. The
weights remain dense tensors, half of whose values are zero.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from workbench.adapters import anatomy
from workbench.errors import BackboneError

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedModel

GROUP = 4
"""Consecutive inputs of an output; half of their weights stay."""


def mark(model: PreTrainedModel) -> None:
    """Record in a backbone, also on the meta device, which of its layers are pruned; `pattern` reads it.

    Raises:
        BackboneError: It has no such layers, or one whose inputs are no multiple of four.
    """
    if anatomy.fused_experts(model):
        raise BackboneError(
            f"model.sparsity=2:4 prunes layers, and the experts of {type(model).__name__} stand in one parameter. "
            "Leave model.sparsity out, or take a dense backbone."
        )
    layers = anatomy.linear_modules(model)
    if not layers:
        raise BackboneError(
            f"model.sparsity=2:4 finds no linear layers in the blocks of {type(model).__name__}. Leave it out."
        )
    for path in layers:
        inputs, _ = anatomy.features(model.get_submodule(path))
        if inputs % GROUP:
            raise BackboneError(
                f"model.sparsity=2:4: {path} has {inputs} inputs, which is no multiple of {GROUP}. "
                "Leave model.sparsity out, or take another backbone."
            )
    escaped = (path.replace(".", r"\.") for path in layers)
    numberless = (re.sub(r"(?<=\.)\d+(?=\\|$)", lambda _: r"\d+", path) for path in escaped)
    model.pruned_layers = "|".join(dict.fromkeys(numberless))  # type: ignore[assignment]  # nn.Module takes any


def pattern(model: nn.Module) -> str | None:
    """A regular expression that matches the whole paths of the pruned layers and no others; None without any."""
    paths: str | None = getattr(model, "pruned_layers", None)
    return paths


def prune(model: PreTrainedModel) -> None:
    """Set half of the weights of the linear layers in the blocks to zero, and `mark` the backbone.

    Raises:
        BackboneError: As `mark`.
    """
    mark(model)
    for path in anatomy.linear_modules(model):
        drop_smaller(anatomy.dense_weight(model.get_submodule(path)))


def drop_smaller(weight_OI: Tensor) -> None:
    """Set the two smaller magnitudes of four consecutive inputs to zero in place; of equal ones the later.

    Magnitudes are compared in bfloat16, so that a float32 checkpoint and its bfloat16 copy lose the same weights:
    values that differ by less than 2^-8 of their size may count as equal.

    Args:
        weight_OI: Outputs by inputs, these a multiple of four.
    """
    groups = weight_OI.unflatten(1, (-1, GROUP))
    smaller = groups.abs().bfloat16().argsort(dim=-1, descending=True, stable=True)[..., GROUP // 2 :]
    groups.scatter_(-1, smaller, 0.0)


def sentence(model: PreTrainedModel) -> str:
    """The pruned layers in words."""
    layers = anatomy.linear_modules(model)
    count = sum(
        inputs * outputs for inputs, outputs in (anatomy.features(model.get_submodule(path)) for path in layers)
    )
    return (
        f"2:4 sparsity: half of the {count:,} weights of {len(layers)} linear layers are zero. They are stored and "
        "multiplied dense, so that this saves neither time nor memory here."
    )


def reloading(model: PreTrainedModel) -> list[str]:
    """Lines of Python that prune `backbone` in the same way with torch alone; none where no layers are pruned."""
    if (layers := pattern(model)) is None:
        return []
    return [
        "# Trained over a 2:4 backbone: of four consecutive inputs the two largest weights stay.",
        "for name, layer in backbone.named_modules():",
        f'    if re.fullmatch(r"{layers}", name):',
        "        weight = layer.weight.data if isinstance(layer, torch.nn.Linear) else layer.weight.data.T",
        f"        groups = weight.unflatten(1, (-1, {GROUP}))",
        "        order = groups.abs().bfloat16().argsort(dim=-1, descending=True, stable=True)",
        f"        groups.scatter_(-1, order[..., {GROUP // 2}:], 0.0)",
    ]
