"""Savings of a training that lets longer rows fit: MLPs in tiles."""

from __future__ import annotations

from torch import nn

from workbench.config import TrainingSections
from workbench.config.checks import long_row_checks
from workbench.models import tiled_mlp
from workbench.training.distributed import layout_settings


def tile(model: nn.Module, config: TrainingSections) -> None:
    """Let the MLPs of a model compute tiles, as `train.mlp_tile` says; `auto` leaves those that cannot."""
    how = config.distributed
    fetched = how.engine != "fsdp2" and layout_settings.cuts_weights(how)  # by layer, and not by block
    if not fetched and not any(long_row_checks.untiled(config)):
        tiled_mlp.tile(model, config.train.mlp_tile)
