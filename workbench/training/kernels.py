"""Kernels of a training: Liger's or PyTorch's for elementwise operations, and MLPs in tiles for longer rows."""

from __future__ import annotations

import torch
from torch import nn

from workbench.config import TrainingSections
from workbench.config.checks import step_checks
from workbench.errors import ConfigError, ResumeError
from workbench.models import activation_recomputation, liger_kernels
from workbench.runs.run_directory import Run
from workbench.training.distributed import zero_offload


def require(config: TrainingSections, model: nn.Module, device: torch.device) -> None:
    """Raise ConfigError where Liger's kernels are asked for, and this device or backbone cannot run them."""
    if config.train.kernels != "liger":
        return
    reason = liger_kernels.refusal(device)
    if reason is None and not liger_kernels.known(model):
        reason = f"model.id={config.model.id} has no norm, gate or rotation that they compute"
    if reason is not None:
        raise ConfigError(f"train.kernels=liger: {reason}. Write train.kernels=auto.")


def install(model: nn.Module, config: TrainingSections, device: torch.device, run: Run) -> None:
    """Let a model compute with the kernels of `train.kernels`; a resumed run uses those that it began with.

    Raises:
        ConfigError: They are asked for and cannot run.
        ResumeError: The run began with kernels that cannot run here.
    """
    require(config, model, device)
    if config.train.kernels == "torch":
        return
    begun, reason = run.manifest.get("kernels"), liger_kernels.refusal(device)
    if begun == "liger" and reason is not None:
        raise ResumeError(f"{run.home} began with Liger's kernels: {reason}. Go on where they run, or begin a new run.")
    asked = config.train.kernels == "liger" or begun != "torch"
    if asked and reason is None and not any(step_checks.unable_by_kernels(config)) and liger_kernels.known(model):
        liger_kernels.install(model)
        run.note(kernels="liger")
    else:
        run.note(kernels="torch")


def tile_mlps(model: nn.Module, config: TrainingSections) -> None:
    """Let the MLPs of a model compute in tiles, as `train.mlp_tile` says; `auto` leaves out those that cannot."""
    how = config.distributed
    fetched = how.engine != "fsdp2" and zero_offload.cuts_weights(how)  # weights arrive by layer, not by block
    if not fetched and not any(step_checks.untiled(config)):
        activation_recomputation.tile_mlps(model, config.train.mlp_tile)
