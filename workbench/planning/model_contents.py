"""Tensors that a training keeps: from the run's own model, with values or without."""

from __future__ import annotations

from itertools import chain

import torch
from torch import Tensor, nn

from workbench.models import weight_formats
from workbench.planning.dry_trainings import Model
from workbench.planning.sharded_memory import Contents
from workbench.training.distributed.sharding import blocks_apart


def contents(fit: Model, *, optimizer: int) -> Contents:
    """The tensors of `fit`, whose optimizer keeps `optimizer` bytes of state."""
    computing = [each for each in fit.masters.computing().values() if each.requires_grad and each.numel()]
    trained = tuple(each.numel() for each in computing)
    element = max((each.element_size() for each in computing), default=4)
    frozen = {id(each): each for each in fit.model.parameters() if not each.requires_grad and _is_here(each)}
    known = {id(each) for each in chain(frozen.values(), computing)}
    rest: dict[int, Tensor] = {id(each): each for each in chain(weight_formats.held(fit.model), fit.model.buffers())}
    rest = {key: each for key, each in rest.items() if _is_here(each)}
    head = fit.freezer.backbone.get_output_embeddings()
    return Contents(
        trained=trained,
        head=sum(each.numel() for each in head.parameters() if each.requires_grad) if head is not None else 0,
        element=element,
        frozen=tuple((_elements(each, element), each.nbytes) for each in frozen.values()),
        whole=sum(each.nbytes for key, each in rest.items() if key not in known),
        optimizer=optimizer / max(sum(trained), 1),
        blocks=tuple(_of_block(block) for block in blocks_apart(fit.model)),
    )


def _of_block(block: nn.Module) -> tuple[int, int]:
    """Bytes of its weights, and elements of those that train."""
    weights = list(block.parameters())
    return sum(each.nbytes for each in weights), sum(each.numel() for each in weights if each.requires_grad)


def _is_here(tensor: Tensor) -> bool:
    """Whether it has memory for its values: what other stages of a pipeline hold has none."""
    return tensor.untyped_storage().nbytes() >= tensor.nbytes


def _elements(parameter: Tensor, element: int) -> int:
    """Elements of a tensor as it is cut: packed weights count in the precision that computes there."""
    return parameter.nbytes // element if parameter.dtype == torch.uint8 else parameter.numel()
