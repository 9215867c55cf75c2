"""Outputs of a frozen tower, computed once for the pictures of each row and kept while a model trains.

Transformers' models that read pictures beside text take the tower's outputs in place of pixels
(`mm_encoder_outputs`). A tower that does not train gives a row the same outputs in every epoch; so they are computed
where a row is seen first, alone, and kept in the host's memory. What does not fit there is computed again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from inspect import signature
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from transformers import PreTrainedModel

from workbench.adapters import anatomy
from workbench.data.batching import evenly_spaced
from workbench.data.text.media import NUMBERS
from workbench.data.text.tokenized_set import TokenizedSet
from workbench.models.picture_processor import PictureProcessor

ROWS = 256
"""Rows of which a plan counts the tokens of pictures."""
SHARE = 0.25
"""Share of the host's memory that is free at first, which kept outputs may take."""
_PIXELS, _OUTPUTS = "pixel_values", "mm_encoder_outputs"


def can_keep(model: nn.Module) -> bool:
    """Whether the outputs of a model's tower stay what they are, and the model reads them."""
    return not isinstance(next(model.parameters()), FakeTensor) and _stay(model)  # a plan has no values


def _stay(model: nn.Module) -> bool:
    frozen = not any(each.requires_grad for each in anatomy.towers(model))
    return frozen and _OUTPUTS in signature(model.forward).parameters


def kept_bytes(model: PreTrainedModel, sets: Sequence[object]) -> int:
    """Bytes of the host's memory that kept outputs will take, for a plan.

    Args:
        model: The backbone, on fake tensors.
        sets: The rows that it will see; others than tokenised ones have no pictures.
    """
    pictured = [each for each in sets if isinstance(each, TokenizedSet) and each.pictured]
    if not pictured or not isinstance(pictured[0].processor, PictureProcessor) or not _stay(model):
        return 0
    tokens: dict[str, int] = {}
    for rows in pictured:
        for number in evenly_spaced(len(rows), ROWS):
            row = rows[int(number)]
            tokens[row.pictures] = int((row.input_ids == model.config.image_token_id).sum())
    tokens.pop("", None)
    distinct = {key for rows in pictured for key in rows.pictures} - {""}
    layers = 1 + len(getattr(getattr(model.config, "vision_config", None), "deepstack_visual_indexes", None) or ())
    values = sum(tokens.values()) / max(1, len(tokens)) * layers * anatomy.hidden_size(model.config)
    return min(round(len(distinct) * values * model.dtype.itemsize), int(SHARE * psutil.virtual_memory().available))


@contextmanager
def kept(model: nn.Module, processors: Sequence[object]) -> Iterator[None]:
    """Inside it, a backbone is given the outputs of its tower for rows whose pictures it has seen before, where they
    stay what they are.

    Args:
        model: The backbone.
        processors: Of the rows, those of several folds too; where they read no pictures, nothing is kept.
    """
    reading = [each for each in processors if isinstance(each, PictureProcessor)]
    if not reading or not can_keep(model):
        yield
        return
    features = PictureFeatures(model, reading[0])
    for each in reading:
        each.name_rows(True)
    try:
        yield
    finally:
        for each in reading:
            each.name_rows(False)
        features.remove()


class PictureFeatures:
    """Gives a backbone the outputs of its tower for rows whose pictures it has seen before, until it is removed; their
    pixels where these outputs do not stay what they are.

    Args:
        model: The backbone; its batches may name the pictures of their rows.
        processor: Keeps the pictures of the rows.
    """

    def __init__(self, model: Any, processor: PictureProcessor) -> None:
        self._model, self._processor = model, processor
        self._kept: dict[str, Any] = {}
        self._room = int(SHARE * psutil.virtual_memory().available)
        self._keeps = can_keep(model)
        self._takes = set(signature(model.get_image_features).parameters) if self._keeps else set[str]()
        self.computed = 0
        """Rows whose pictures went through the tower."""

        self.remove = model.register_forward_pre_hook(self._given, with_kwargs=True).remove

    def _given(
        self, _: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        numbers_RN: Tensor | None = named.pop(NUMBERS, None)
        if numbers_RN is None or not self._keeps:
            return arguments, named
        keys = [bytes(row).hex() for row in numbers_RN.tolist()]
        outputs = moved(joined([self._of(key) for key in keys]), self._model.device)
        others = {name: each for name, each in named.items() if name != _PIXELS}
        return arguments, {**others, _OUTPUTS: {"image": outputs}}

    @torch.no_grad()
    def _of(self, key: str) -> Any:
        if key in self._kept:
            return self._kept[key]
        device = self._model.device
        arrays = {name: each.to(device) for name, each in self._processor.arrays([key]).items() if name in self._takes}
        outputs = moved(trimmed(self._model.get_image_features(**arrays, return_dict=True)), torch.device("cpu"))
        self.computed += 1
        size = sum(each.nbytes for each in tensors(outputs))
        if size <= self._room:
            self._room -= size
            self._kept[key] = outputs
        return outputs


_READ = ("pooler_output", "deepstack_features")
"""What the model reads of a tower's outputs."""


def trimmed(outputs: Any) -> Any:
    """Outputs of a tower without what nothing reads, such as the hidden states of its blocks."""
    kept = {name: outputs.get(name) for name in _READ if outputs.get(name) is not None}
    return type(outputs)(**kept)


def tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of outputs."""
    if isinstance(value, Tensor):
        yield value
        return
    for each in value.values() if hasattr(value, "values") else value:
        yield from tensors(each)


def moved(value: Any, device: torch.device) -> Any:
    """Outputs on a device: themselves where they are there."""
    if isinstance(value, Tensor):
        return value.to(device)
    if hasattr(value, "values"):
        return type(value)(**{name: moved(each, device) for name, each in value.items()})
    return type(value)(moved(each, device) for each in value)


def joined(outputs: Sequence[Any]) -> Any:
    """The outputs for the pictures of several rows as one, in their order."""
    fields: dict[str, Any] = {}
    for name in outputs[0]:
        values = [each[name] for each in outputs]
        # Those of layers are a list of what the tower's own outputs are: a tensor, or one for each picture.
        layers = name != "pooler_output"
        fields[name] = [_chained(layer) for layer in zip(*values, strict=True)] if layers else _chained(values)
    return type(outputs[0])(**fields)


def _chained(values: Sequence[Any]) -> Any:
    if isinstance(values[0], Tensor):
        return torch.cat(list(values))
    return [each for value in values for each in value]
