"""Backbones that are imagined wherever a run would load them, such as that of a teacher."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from workbench import backbones, heads
from workbench.backbones import Backbone
from workbench.config import ModelConfig
from workbench.heads import Head
from workbench.planning.imagined import imagine, unimagined
from workbench.planning.packed import pack
from workbench.tasks import TEXT, Task


class Asked(NamedTuple):
    """A backbone that would have been loaded."""

    backbone: Backbone
    task: Task


@contextmanager
def unread() -> Iterator[list[Asked]]:
    """Inside the block, which is inside of `imagining`, no backbone is loaded; gives those that were asked for."""
    load, find = backbones.load, heads.find
    asked: list[Asked] = []

    def imagined(
        config: ModelConfig, tokenizer: PreTrainedTokenizerBase | None, *, task: Task = TEXT, trainable: bool = False
    ) -> Backbone:
        vocabulary = 0 if tokenizer is None else len(tokenizer)
        with unimagined():
            found = backbones.blueprint(config, vocabulary=vocabulary, task=task, trainable=trainable)
        settle(found.model, found)
        asked.append(Asked(found, task))
        return found

    def known(model: nn.Module, backbone: PreTrainedModel) -> Head:
        return heads.known(backbone)  # it is found by its numbers

    backbones.load, heads.find = imagined, known
    try:
        yield asked
    finally:
        backbones.load, heads.find = load, find


def settle(model: nn.Module, blueprint: Backbone) -> None:
    """Turn a blueprint, `model` if it is with an adapter, into the imagined backbone that `backbones.load` gives."""
    imagine(model, backbones.device())
    if blueprint.weights in backbones.QUANTISED:
        pack(model, blueprint.weights, blueprint.compute)
