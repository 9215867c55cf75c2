"""A teacher, rows and a folder, for tests of the cache."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from workbench.config import DataConfig, ModelConfig, RunConfig
from workbench.config.sections.distill_config import DistillConfig
from workbench.data.batching import MicroBatch
from workbench.data.text import tokenized
from workbench.data.text.row_encoder import row_encoder
from workbench.data.text.tokenized_set import TokenizedSet
from workbench.distillation import teacher_cache
from workbench.distillation.student_loss import Teacher, TeacherLogits, TeacherSignal
from workbench.distillation.teacher_cache import CachedTeacher, CacheIdentity
from workbench.distillation.teacher_sources import TeacherSource
from workbench.models import backbones, output_heads

SMALL = 150
"""Positions of a shard: several shards for 100 rows."""


class Live:
    """A backbone that teaches as it is, and remembers how many rows it was asked; may fail after some of them."""

    def __init__(self, backbone: str) -> None:
        self.tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(backbone)
        settings = ModelConfig(id=backbone, weights="float32", compute="float32")
        self.model = backbones.load(settings, self.tokenizer).model
        self.head = output_heads.find(self.model, self.model)
        self.asked = 0
        self.fails_after: int | None = None

    @torch.no_grad()
    def signal(self, batch: MicroBatch, config: DistillConfig, *, temperature: float) -> TeacherLogits:
        if self.fails_after is not None and self.asked >= self.fails_after:
            raise KeyboardInterrupt
        assert batch.rows_B is not None
        self.asked += len(batch.rows_B)
        hidden_ND = self.head.hidden(self.model, batch.inputs).flatten(0, 1)[batch.positions_N]
        return TeacherLogits([hidden_ND], [self.head.project], [self.head.vocabulary], config, temperature)


@dataclass
class Watching:
    """Listens, and may ask for an end."""

    stop: bool = False
    said: list[str] = field(default_factory=list)

    def step(self, record: dict[str, Any], *, total: int) -> None:
        raise AssertionError("nothing trains here")

    def say(self, text: str) -> None:
        self.said.append(text)

    def stop_requested(self) -> bool:
        return self.stop


class Desk:
    """A backbone that teaches 100 of the rows in `questions`, and where its cache goes."""

    def __init__(self, backbone: str, questions: Path, folder: Path) -> None:
        self.backbone, self.questions, self.folder = backbone, questions, folder
        self.live = _live(backbone)
        self.live.asked, self.live.fails_after = 0, None
        self.train = self.read().subset(np.arange(100))

    def read(self, **data: Any) -> TokenizedSet:
        """All rows, read as `data` says."""
        data = {"train": str(self.questions), **data}
        config = RunConfig.model_validate({"recipe": "sft", "model": {"id": self.backbone}, "data": data})
        written = row_encoder(config, backbones.hub_config(config.model), self.live.tokenizer)
        return tokenized.read(str(self.questions), DataConfig.model_validate(data), self.live.tokenizer, written)

    def wanted(self, config: DistillConfig) -> CacheIdentity:
        """The cache that `config` asks for."""
        source = TeacherSource("the stories", ModelConfig(id=self.backbone, weights="float32"))
        return teacher_cache.identity(config, source, self.live.tokenizer)

    def write(self, config: DistillConfig, rows: TokenizedSet | None = None, callback: Watching | None = None) -> None:
        """Make the cache of `train`, or of other rows."""
        write(self.folder, rows or self.train, self.live, config, self.wanted(config), 512, callback)

    def open(self, config: DistillConfig, rows: TokenizedSet | None = None) -> CachedTeacher:
        """The finished cache."""
        return CachedTeacher(self.folder, rows or self.train, config, self.wanted(config))

    def files(self) -> dict[str, bytes]:
        """What the folder holds."""
        return {path.name: path.read_bytes() for path in self.folder.iterdir()}


def write(
    folder: Path,
    rows: TokenizedSet,
    teacher: Teacher,
    config: DistillConfig,
    wanted: CacheIdentity,
    vocabulary: int,
    callback: Watching | None = None,
) -> None:
    """`caching.write` on the CPU, a few rows at a time."""
    questions = teacher_cache.LiveQuestions(rows, teacher, config, vocabulary, 512, torch.device("cpu"))
    teacher_cache.write(folder, rows, questions, wanted, callback=callback or Watching())  # type: ignore[arg-type]


def settings(*, temperature: float = 1.0, loss: str = "forward_kl", **cache: Any) -> DistillConfig:
    """A configuration with a cache, in float32 where nothing else is said."""
    values = {"temperature": temperature, "loss": loss, "cache": {"folder": "unused", "dtype": "float32", **cache}}
    return DistillConfig.model_validate(values)


def batch(rows: TokenizedSet, *indices: int) -> MicroBatch:
    """Some rows, padded."""
    return rows.batch(np.asarray(indices))


def taught(signal: TeacherSignal) -> tuple[float, Tensor]:
    """Loss of a student with arbitrary logits over 512 tokens, and its gradient."""
    generator = torch.Generator().manual_seed(1)
    logits = (2 * torch.randn(len(signal.tensors[0]), 512, generator=generator)).requires_grad_()
    loss = signal.loss(logits, *signal.tensors)
    (gradient,) = torch.autograd.grad(loss, logits)
    return float(loss.detach()), gradient


@lru_cache
def _live(backbone: str) -> Live:
    return Live(backbone)
