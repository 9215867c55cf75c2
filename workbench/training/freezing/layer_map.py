"""Which layer of a backbone a parameter belongs to.

Layers: 0 what is computed before the blocks, 1 to n the blocks, n + 1 what is computed after them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from workbench.adapters import anatomy
from workbench.errors import BackboneError


@dataclass(frozen=True)
class LayerMap:
    """The layers of a bare backbone, by the paths of its modules; an adapter's parameters follow their module."""

    blocks: tuple[str, ...]
    """Paths of the transformer blocks, in the order that they are computed in."""
    between: Mapping[str, int]
    """Layer of each module outside of the blocks that is first computed behind one of them: of the next block (what
    leads to the next resolution of a picture), or of what comes after all."""

    def of(self, parameter: str) -> int:
        """The layer of a parameter, by its name in the backbone or in what PEFT made of it.

        A tensor that is used twice, such as an embedding that is the head too, belongs to its first use, and so does
        what no module's call shows, such as tables that the blocks look into: whatever the outputs of a frozen prefix
        may depend on freezes with it.
        """
        path = parameter.removeprefix("base_model.model.")
        for number, block in enumerate(self.blocks, start=1):
            if path.startswith(f"{block}."):
                return number
        parts = path.split(".")
        leads = (".".join(parts[:end]) for end in range(1, len(parts)))
        return next((self.between[lead] for lead in leads if lead in self.between), 0)


def survey(backbone: PreTrainedModel, *, needed: bool = True) -> LayerMap:
    """The layers of a bare backbone, found by calling it once.

    Args:
        needed: Something depends on them; otherwise a backbone with two stacks of blocks, or none, counts as one layer.

    Raises:
        BackboneError: it has two stacks of blocks, or none.
    """
    if not needed and len(anatomy.blocks(backbone)) != 1:
        return LayerMap((), {})
    blocks, done, first = stack(backbone), 0, dict[str, int]()

    def computed(number: int) -> Callable[..., None]:
        def hook(*_: object) -> None:
            nonlocal done
            done = max(done, number)

        return hook

    def seen(name: str) -> Callable[..., None]:
        def hook(*_: object) -> None:
            first.setdefault(name, done)

        return hook

    inside = tuple(f"{block}." for block in blocks)
    handles = [
        module.register_forward_pre_hook(seen(name))
        for name, module in backbone.named_modules()
        if not f"{name}.".startswith(inside) and next(module.parameters(recurse=False), None) is not None
    ]
    for number, block in enumerate(blocks, start=1):
        handles.append(backbone.get_submodule(block).register_forward_hook(computed(number)))
    settings = {"use_cache": False} if backbone.can_generate() else {}
    try:
        with torch.no_grad():
            backbone(**trial_inputs(backbone), **settings)
    finally:
        for handle in handles:
            handle.remove()
    return LayerMap(tuple(blocks), {name: behind + 1 for name, behind in first.items() if behind})


def trial_inputs(backbone: PreTrainedModel) -> dict[str, Tensor]:
    """A short row, or a picture of the backbone's own size."""
    if anatomy.reads_pictures(backbone):
        blank_13HW = anatomy.blank_picture(backbone)
        return {"pixel_values": torch.linspace(-1, 1, blank_13HW.numel()).to(blank_13HW).view_as(blank_13HW)}
    tokens_BL = torch.arange(2, 9, device=backbone.device)[None] % backbone.config.get_text_config().vocab_size
    return {"input_ids": tokens_BL}


def stack(backbone: PreTrainedModel) -> list[str]:
    """Paths of the transformer blocks; raises BackboneError where there are two stacks, or none."""
    stacks = anatomy.blocks(backbone)
    if len(stacks) != 1:
        raise BackboneError(
            f"{type(backbone).__name__} has {len(stacks)} stacks of blocks; freeze, layer_drop, grow, "
            "optimizer.layer_decay, regularise.stochastic_depth and optimizer.name=muon|shampoo|galore|apollo are for "
            "one. Leave them out, or take an encoder or a causal backbone."
        )
    return stacks[0]
