"""A model that a student and its teachers share, each with its own adapter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft import PeftConfig, PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn

SWITCHED = (BaseTunerLayer, AuxiliaryTrainingWrapper)
"""Modules by which PEFT replaces a layer, or which it puts into one."""


class SharedModel:
    """A model that a student and its teachers share.

    Its modules are listed once, as PEFT walks through all of them several times at each switch, which can take longer
    than computing them (LoRA on 28 layers, one slow core: 70 to 100 ms, against 35 to 45 ms from the list).
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = list(model.modules())
        self._parameters = list(model.parameters())
        self._layers: list[Any] = [module for module in self._modules if isinstance(module, SWITCHED)]

    @contextmanager
    def inference(self) -> Iterator[None]:
        """Inside: no gradients, evaluation mode; afterwards modes and `requires_grad` are as before, despite PEFT."""
        training = [module for module in self._modules if module.training]
        trains = [parameter.requires_grad for parameter in self._parameters]
        for module in training:
            module.training = False
        try:
            with torch.no_grad():
                yield
        finally:
            for parameter, before in zip(self._parameters, trains, strict=True):
                if parameter.requires_grad != before:
                    parameter.requires_grad_(before)
            for module in training:
                module.training = True

    @contextmanager
    def without_adapters(self) -> Iterator[None]:
        """Inside: the backbone without adapters (virtual tokens come from outside, so it has none)."""
        switched_on = [layer for layer in self._layers if not layer.disable_adapters]
        with self.inference():
            try:
                for layer in switched_on:
                    layer.enable_adapters(False)
                yield
            finally:
                for layer in switched_on:
                    layer.enable_adapters(True)

    @contextmanager
    def with_adapter(self, name: str) -> Iterator[None]:
        """Inside: the backbone with the adapter `name`."""
        active = [layer.active_adapters for layer in self._layers]
        with self.inference():
            try:
                for layer in self._layers:
                    layer.set_adapter(name, inference_mode=True)
                yield
            finally:
                for layer, before in zip(self._layers, active, strict=True):
                    layer.set_adapter(before)

    @contextmanager
    def with_virtual_tokens(self, model: PeftModel, name: str, config: PeftConfig) -> Iterator[None]:
        """Inside: `model` with the virtual tokens `name`, whose configuration it looks up in each forward pass."""
        active, known = model.active_adapter, name in model.peft_config
        with self.inference():
            try:
                model.peft_config[name], model.active_adapter = config, name
                yield
            finally:
                model.active_adapter = active
                if not known:
                    del model.peft_config[name]
