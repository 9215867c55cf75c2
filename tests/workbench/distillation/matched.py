"""Rows, and pairs of models that are compared inside, for tests of matching."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.conftest import tiny
from tests.vision_backbones import SIZE, pixels, tiny_vision
from workbench.config.sections.distill_config import MatchConfig
from workbench.data.batching import MicroBatch, Row, collate, encoder_inputs
from workbench.distillation.feature_matching import FeatureMatching

chance = np.random.default_rng(0)
ROWS = [chance.integers(3, 64, size) for size in (11, 5, 8, 6)]
SUPERVISED = [np.arange(len(row)) % 3 != 1 for row in ROWS]
WHATS = ["hidden_mse", "hidden_cosine", "relation", "attention"]
LARGER = {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
Collate = Callable[[Sequence[int]], MicroBatch]


def term(what: str, **settings: Any) -> MatchConfig:
    """One term of the loss."""
    return MatchConfig.model_validate({"what": what, **settings})


def text(rows: Sequence[int]) -> MicroBatch:
    """Some of the rows, for a model of text."""
    return collate([Row(ROWS[row], SUPERVISED[row]) for row in rows])


def sources(rows: Sequence[int]) -> MicroBatch:
    """Of which an encoder reads the first three tokens."""
    return collate([Row(ROWS[row], SUPERVISED[row] & (np.arange(len(ROWS[row])) > 3), source=3) for row in rows])


def labelled(rows: Sequence[int]) -> MicroBatch:
    """Some of the rows, each with a label of its own weight."""
    weights = torch.tensor([[0.5], [2.0], [1.0], [3.0]])[list(rows)]
    labels = torch.cat((weights, torch.zeros(len(rows), 3)), dim=1)
    return MicroBatch(encoder_inputs([ROWS[row] for row in rows]), torch.arange(len(rows)), labels, 0)


def pictured(rows: Sequence[int]) -> MicroBatch:
    """Some of four pictures, each with a label of its own weight, as `PictureRows` collates them."""
    inputs = {"pixel_values": pixels(4)[list(rows)]}
    patches = (SIZE // 8) ** 2
    last_B = torch.arange(1, len(rows) + 1) * patches - 1
    return MicroBatch(inputs, last_B, labelled(rows).labels_N, len(rows) * patches)


def alone(ids: list[int]) -> MicroBatch:
    """One row of which one token is predicted."""
    inputs = {"input_ids": torch.tensor([ids])}
    return MicroBatch(inputs, torch.tensor([0]), torch.tensor([9]), 0, torch.tensor([len(ids)]))


def run(matching: FeatureMatching, student: Any, teacher: Any, batch: MicroBatch) -> Tensor:
    """The loss after both models ran."""
    with torch.no_grad(), matching.teacher():
        teacher(**batch.inputs)
    with matching.student():
        student(**batch.inputs)
    return matching.loss(batch)


def compared(terms: Sequence[MatchConfig], student: Any, teacher: Any, batch: MicroBatch) -> Tensor:
    """The loss of terms that compare two models, their projections from seed 0."""
    return run(FeatureMatching(terms, student, teacher, seed=0), student, teacher, batch)


def pair(family: str, head: str = "CausalLM", **settings: Any) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A student, and a teacher of its size that is another model."""
    return with_another(tiny(family, head=head, **settings))


def picture_pair(family: str, **settings: Any) -> tuple[PreTrainedModel, PreTrainedModel]:
    """The same of models that read pictures."""
    return with_another(tiny_vision(family, **settings))


def with_another(student: PreTrainedModel) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A student and a teacher whose values are others."""
    teacher = copy.deepcopy(student)
    generator = torch.Generator().manual_seed(1)
    for parameter in teacher.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    return student, teacher
