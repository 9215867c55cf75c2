"""Training loss of a classifier, as its configuration says.

Legend: B rows, C outputs (classes, or 1 for a number).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from workbench.config.sections.classes_config import ClassesConfig
from workbench.losses import class_losses as losses

Objective = Callable[[Tensor, Tensor, float], Tensor]
"""Outputs (B, C), weights and targets (B, 1 + C) and a factor to the summed loss times that factor."""


def criterion(config: ClassesConfig, targets_NC: Tensor) -> Objective:
    """Training loss with smoothing and logit adjustment.

    Args:
        targets_NC: Targets of all training rows; logit adjustment needs the frequencies of the classes.
    """
    base = _base(config)
    log_prior_C = (targets_NC.double().sum(0) / targets_NC.double().sum()).log().float()

    def objective(outputs_BC: Tensor, labels_B: Tensor, scale: float) -> Tensor:
        weight_B, target_BC = labels_B[:, 0], labels_B[:, 1:]
        if config.smoothing:
            target_BC = _smoothed(target_BC, config)
        if config.logit_adjustment:
            log_prior = log_prior_C.to(outputs_BC.device)
            outputs_BC = losses.logit_adjusted(outputs_BC.float(), log_prior, config.logit_adjustment)
        return base(outputs_BC, target_BC, weight_B) * scale

    return objective


def _base(config: ClassesConfig) -> losses.Loss:
    if config.kind == "number":
        return losses.squared_error
    if config.kind == "several":
        return partial(losses.binary_cross_entropy, gamma=config.gamma)
    return partial(losses.cross_entropy, gamma=config.gamma)


def _smoothed(target_BC: Tensor, config: ClassesConfig) -> Tensor:
    if config.kind == "several":  # each class is a binary label
        return torch.lerp(target_BC, torch.full_like(target_BC, 0.5), config.smoothing)
    return losses.smooth(target_BC, config.smoothing)
