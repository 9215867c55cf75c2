"""Backbones without their weights, wherever a run would load them, such as that of a teacher."""

from __future__ import annotations

from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from transformers import PreTrainedTokenizerBase

from workbench.config import ModelConfig
from workbench.config.model_heads import TEXT, ModelHead
from workbench.models import backbones
from workbench.models.backbones import Backbone
from workbench.planning.block_time import materialise
from workbench.planning.fake_quantised import pack
from workbench.planning.fake_tensors import real_tensors, to_fake


class BlueprintLoader:
    """In place of `backbones.load`: inside `fake_tensors` backbones are fake, outside they have random values."""

    def __init__(self) -> None:
        self.loaded: list[Backbone] = []

    def __call__(
        self,
        config: ModelConfig,
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        task: ModelHead = TEXT,
        trainable: bool = False,
        waiting: bool = False,
    ) -> Backbone:
        vocabulary = 0 if tokenizer is None else len(tokenizer)
        with real_tensors():
            backbone = backbones.blueprint(config, vocabulary=vocabulary, task=task, trainable=trainable)
        settle(backbone.model, backbone)
        self.loaded.append(backbone)
        return backbone


def settle(model: nn.Module, blueprint: Backbone) -> None:
    """Turn a blueprint, `model` if it is with an adapter, into the backbone that `backbones.load` gives.

    Inside `fake_tensors` it is fake, outside it is real, with random values.
    """
    to_fake(model, backbones.device())
    if not any(isinstance(each, FakeTensor) for each in model.parameters()):
        materialise(model)
    if blueprint.weights in backbones.QUANTISED:
        pack(model, blueprint.weights, blueprint.compute)
