"""A student and teachers of language models, for tests of who stands on whose backbone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.conftest import STORIES
from workbench import adapters
from workbench.adapters import Method
from workbench.config import RunConfig, model_heads
from workbench.config.sections.distill_config import DistillConfig
from workbench.data.batching import MicroBatch, Row, collate
from workbench.distillation import teachers
from workbench.distillation.teacher_sources import TeacherSource
from workbench.distillation.teachers import LiveTeacher
from workbench.models import backbones, output_heads
from workbench.models.backbones import Backbone

PLAIN = {"weights": "float32", "compute": "float32"}
SWITCHED: dict[str, dict[str, Any]] = {
    "lora": {"rank": 2, "dropout": 0.5},
    "dora": {"rank": 2},
    "pissa": {"rank": 2},
    "ia3": {},
    "linear-probe": {},
    "last-layers": {"layers": 1},
    "houlsby": {"width": 2},
    "oft": {"block": 4},
    "prompt": {"virtual_tokens": 3},
    "prefix": {"virtual_tokens": 3, "encoder_width": 8},
}
"""Methods of every way to be switched: layers in place of others, beside them, copies of weights, virtual tokens."""


def run(
    method: str = "lora", *, recipe: str = "sft", model: dict[str, Any] | None = None, **settings: Any
) -> RunConfig:
    """A run over stories260K in float32, its adapter as `settings` say or as small as in `SWITCHED`."""
    return RunConfig.model_validate(
        {
            "recipe": recipe,
            "model": {"id": str(STORIES), **PLAIN, **(model or {})},
            "adapter": {"method": method, **(settings or SWITCHED.get(method, {}))},
            "data": {"train": "rows.jsonl"},
        }
    )


def moved(model: nn.Module, *, seed: int) -> nn.Module:
    """Its trainable values are those of an adapter that has learnt something."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
    return model


class Student:
    """A student as a run has it in the moment when its teacher comes."""

    def __init__(self, config: RunConfig, *, seed: int = 0) -> None:
        self.config = config
        self.tokenizer = backbones.tokenizer(config.model)
        full = isinstance(config.adapter, adapters.Full)
        self.backbone: Backbone = backbones.load(
            config.model, self.tokenizer, task=model_heads.of(config), trainable=full
        )
        self.model = moved(attached(self.backbone, config.adapter), seed=seed)
        self.head = output_heads.find(self.model, self.backbone.model)

    def taught_by(self, source: TeacherSource) -> LiveTeacher:
        """The teacher beside this student, on its backbone where both fit there."""
        return teachers.load(source, self.config, self.tokenizer, model=self.model, backbone=self.backbone.model)

    def trained(self) -> dict[str, nn.Parameter]:
        """What trains, by name."""
        return {name: each for name, each in self.model.named_parameters() if each.requires_grad}

    def state(self, batch: MicroBatch) -> dict[str, Any]:
        """All that a teacher must leave as it is; in training mode, with dropout."""
        torch.manual_seed(5)
        hidden_BLD = self.head.hidden(self.model, batch.inputs)
        logits_NV = self.head.project(hidden_BLD.flatten(0, 1)[batch.positions_N])
        trained = self.trained()
        grads = torch.autograd.grad(logits_NV.square().sum(), list(trained.values()), allow_unused=True)
        return {
            "logits": logits_NV.detach(),
            "trained": [(name, id(each)) for name, each in trained.items()],
            "grads": grads,
            "saved": list(self.model.state_dict()),
            "modes": {name: module.training for name, module in self.model.named_modules()},
        }


def attached(backbone: Backbone, method: Method, *, seed: int = 0) -> nn.Module:
    """The method's adapter over the backbone."""
    return adapters.attach(backbone.model, method, seed=seed)


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Two states of a student are one; a teacher may have added modules."""
    assert torch.equal(one["logits"], other["logits"])
    assert one["trained"] == other["trained"]
    for a, b in zip(one["grads"], other["grads"], strict=True):
        assert a is b is None or torch.equal(a, b)
    assert one["saved"] == other["saved"]
    assert one["modes"].items() <= other["modes"].items()


def save(folders: pytest.TempPathFactory, method: str = "lora", *seeds: int, **settings: Any) -> TeacherSource:
    """Adapters over stories260K that have learnt something, one a seed, as a teacher."""
    config, saved = run(method, **settings), []
    for seed in seeds or (1,):
        saved.append(folders.mktemp(method))
        loaded = backbones.load(config.model, None, trainable=False)
        adapters.save(moved(attached(loaded, config.adapter, seed=seed), seed=seed), saved[-1])
    return TeacherSource(method, config.model, tuple(saved))


def three_rows() -> MicroBatch:
    """Arbitrary tokens, two thirds of them supervised."""
    chance = np.random.default_rng(0)
    return collate([Row(chance.integers(3, 500, size), np.arange(size) % 3 != 1) for size in (11, 5, 8)])


def said(teacher: LiveTeacher, batch: MicroBatch, **settings: Any) -> Tensor:
    """Log-probabilities (N, V) that the teacher gives the supervised positions."""
    spoken = teacher.signal(batch, DistillConfig.model_validate(settings), temperature=1.0)
    return spoken.log_probs(spoken.tensors, vocabulary=spoken.vocabulary)


@torch.no_grad()
def log_probs(model: nn.Module, batch: MicroBatch) -> Tensor:
    """The same of a model that is called as it is."""
    logits_BLV = model(**batch.inputs).logits[:, -batch.inputs["input_ids"].shape[1] :]
    logp_NV: Tensor = F.log_softmax(logits_BLV.flatten(0, 1)[batch.positions_N], dim=-1)
    return logp_NV
