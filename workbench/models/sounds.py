"""Backbones that hear: the length of their input, no random numbers of their own, frozen batch statistics."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from workbench.models import pictures


def prepare(model: PreTrainedModel, compute: torch.dtype) -> None:
    """Make a loaded backbone give a row the same outputs whatever is beside it, in any precision.

    Its own SpecAugment and layer drop are off, as they would draw from the process's generator: `audio.augment` and
    `layer_drop` draw from seed, epoch and row. Batch statistics stay those of pretraining. Inputs get the precision in
    which it computes.
    """
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        for name, off in (("apply_spec_augment", False), ("layerdrop", 0.0), ("encoder_layerdrop", 0.0)):
            if hasattr(config, name):
                setattr(config, name, off)
        if hasattr(module, "layerdrop"):
            vars(module)["layerdrop"] = 0.0
        if hasattr(module, "_requires_grad"):  # or the frozen feature encoder of wav2vec2 gets gradients of its input
            vars(module)["_requires_grad"] = False
    pictures.hold_batch_statistics(model)
    model.register_forward_pre_hook(_Cast(model.main_input_name, compute), with_kwargs=True)
    if model.can_generate():  # which calls the encoder alone
        model.get_encoder().register_forward_pre_hook(_Cast(model.main_input_name, compute), with_kwargs=True)


def compute_in(model: nn.Module, compute: torch.dtype) -> None:
    """Give a loaded backbone its inputs in another precision, after its weights were cast to that; nothing where it
    hears no sound."""
    for module in model.modules():
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, _Cast):
                hook.compute = compute


class _Cast:
    """A hook in front of a model: its features in the precision that it computes in."""

    def __init__(self, name: str, compute: torch.dtype) -> None:
        self.name, self.compute = name, compute

    def __call__(
        self, _: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if isinstance(features := named.get(self.name), Tensor):
            named = {**named, self.name: features.to(self.compute)}
        return arguments, named
