"""Backbones that are imagined wherever a run would load them, such as that of a teacher."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

from peft import peft_model
from peft.utils import load_peft_weights
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from workbench.config import ModelConfig
from workbench.config.tasks import TEXT, Task
from workbench.models import backbones, output_heads
from workbench.models.backbones import Backbone
from workbench.models.output_heads import Head
from workbench.planning.block_time import materialise
from workbench.planning.fake_quantised import pack
from workbench.planning.fake_tensors import real_tensors, to_fake


class RequestedBackbone(NamedTuple):
    """A backbone that would have been loaded."""

    backbone: Backbone
    task: Task


@contextmanager
def fake_loading() -> Iterator[list[RequestedBackbone]]:
    """Inside the block, which is inside of `imagining`, no backbone is loaded; gives those that were asked for.

    Adapters are read, as they are small and say themselves what they are.
    """
    asked: list[RequestedBackbone] = []

    def imagined(
        config: ModelConfig,
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        task: Task = TEXT,
        trainable: bool = False,
        waiting: bool = False,
    ) -> Backbone:
        vocabulary = 0 if tokenizer is None else len(tokenizer)
        with real_tensors():
            found = backbones.blueprint(config, vocabulary=vocabulary, task=task, trainable=trainable)
        settle(found.model, found)
        asked.append(RequestedBackbone(found, task))
        return found

    def known(model: nn.Module, backbone: PreTrainedModel) -> Head:
        return output_heads.known(backbone)  # it is found by its numbers

    def read(*args: Any, **kwargs: Any) -> Any:
        with real_tensors():
            return load_peft_weights(*args, **kwargs)

    with (
        patch.object(backbones, "load", imagined),
        patch.object(output_heads, "find", known),
        patch.object(peft_model, "load_peft_weights", read),
    ):
        yield asked


def settle(model: nn.Module, blueprint: Backbone) -> None:
    """Turn a blueprint, `model` if it is with an adapter, into the backbone that `backbones.load` gives.

    Inside `imagining` it is imagined, outside it is real, with random numbers.
    """
    to_fake(model, backbones.device())
    if not any(isinstance(each, FakeTensor) for each in model.parameters()):
        materialise(model)
    if blueprint.weights in backbones.QUANTISED:
        pack(model, blueprint.weights, blueprint.compute)
