"""The values of a model that train, and where in it they belong."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from workbench.training.distributed.sharding import Sharded
from workbench.training.freezing.freezer import Freezer
from workbench.training.master_weights import MasterWeights
from workbench.training.optim.optimizer_states import LocalStep, OptimizerStep


@dataclass(frozen=True)
class TrainableValues:
    """The values that train, in float32 or wider, and where in the model they belong."""

    values: Mapping[str, nn.Parameter]
    """By name in the model."""
    layers: Mapping[str, int]
    """Layer of the backbone of each: 0 the embeddings, 1 to n the blocks, n + 1 what comes after them."""
    blocks: int
    """Transformer blocks of the backbone, n."""
    fresh: Collection[str]
    """Names of values that start at random, such as a classification head's."""
    refresh: Callable[[], None]
    """Copies the values into the parameters that compute."""
    optimizer_step: Callable[[torch.optim.Optimizer, Mapping[str, nn.Parameter]], OptimizerStep] = LocalStep
    """Takes the optimizer's steps, locally or on shards."""


def trained(masters: MasterWeights | Sharded, freezer: Freezer) -> TrainableValues:
    """The trainable values of a model, with the layer of each."""
    return TrainableValues(
        masters.named(),
        layers=freezer.layers,
        blocks=len(freezer.blocks),
        fresh=freezer.fresh,
        refresh=masters.refresh,
        optimizer_step=masters.adopt if isinstance(masters, Sharded) else LocalStep,
    )
