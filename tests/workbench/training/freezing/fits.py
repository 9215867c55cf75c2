"""Whole trainings of tiny models whose layers freeze: random texts in, every loss and every value out."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from tests.conftest import tiny
from tests.run_files import read_metrics
from tests.workbench.training.freezing.prefixes import STILL
from tests.workbench.training.together import LabelledSet, Silent, Texts
from workbench.config import RunConfig
from workbench.errors import Stopped
from workbench.losses.label_losses import LabelDraws
from workbench.models import output_heads
from workbench.recipes.tasks.sft.text_run import next_token_loss
from workbench.runs import run_directory
from workbench.training.freezing import freezer as freezing
from workbench.training.freezing.cached_prefix import CachedPrefix
from workbench.training.signal import Loss, TrainingSignal
from workbench.training.trainer import Trainer

CLOCK = {"elapsed_s", "tokens_per_second", "data_wait", "peak_bytes"}
"""What no two runs have in common."""


def build(family: str, *, blocks: int = 4, **settings: Any) -> PreTrainedModel:
    """A tiny language model, of Bert a classifier of three classes, without dropout."""
    sizes = {"num_hidden_layers": blocks, **STILL, **settings}
    if family == "Bert":
        return tiny("Bert", head="SequenceClassification", num_labels=3, **sizes)
    return tiny(family, **sizes)


def configured(**sections: Any) -> RunConfig:
    """24 rows in batches of 6, twice over, with LoRA; sections add to that."""
    known: dict[str, dict[str, Any]] = {
        "model": {"weights": "float32", "compute": "float32"},
        "adapter": {"method": "lora", "rank": 3, "alpha": 6},
        "data": {"train": "texts"},
        "batch": {"size": 6, "tokens_per_device": 45},
        "train": {"epochs": 2, "learning_rate": 3e-3},
        "evaluate": {"every": 4},
        "save": {"every": None},
    }
    for name, values in sections.items():
        known[name] = values if "method" in values and name == "adapter" else {**known.get(name, {}), **values}
    return RunConfig.model_validate({"recipe": "sft", **known})


class Looking(Silent):
    """Remembers which cached prefixes there were, and looks at the training after each step."""

    def __init__(self, *, stop_after: int, look: Callable[[Trainer], None]) -> None:
        super().__init__(stop_after=stop_after)
        self.fit: Trainer | None = None
        self.prefixes: list[CachedPrefix] = []
        self._look = look

    def step(self, record: dict[str, Any], *, total: int) -> None:
        super().step(record, total=total)
        assert self.fit is not None
        cached = self.fit.prefix.cached
        if cached is not None and cached not in self.prefixes:
            self.prefixes.append(cached)
        self._look(self.fit)


@dataclass
class Trained:
    """What a training came to."""

    fit: Trainer
    records: list[dict[str, Any]]
    shipped: dict[str, Tensor]
    """Each parameter of the model that the method lets train, as it is saved."""
    callback: Looking

    @property
    def losses(self) -> list[float]:
        return [record["loss"] for record in self.records]

    @property
    def held_out(self) -> list[float]:
        return [record["held_out_loss"] for record in self.records if "held_out_loss" in record]

    @property
    def lines(self) -> list[dict[str, Any]]:
        """Of metrics.jsonl, without what a clock says."""
        return [{key: record[key] for key in record.keys() - CLOCK} for record in self.records]


def train(
    model: PreTrainedModel,
    config: RunConfig,
    folder: Path,
    *,
    resume: bool = False,
    stop_after: int = 10**9,
    compute: torch.dtype = torch.float32,
    look: Callable[[Trainer], None] = lambda _: None,
) -> Trained:
    """Train a copy of `model` as `config` says; Stopped after so many steps.

    Args:
        look: Called after each step.
    """
    model = copy.deepcopy(model)
    is_classifier = hasattr(model, "classifier")
    rows, held_out = (LabelledSet(24, 1), LabelledSet(9, 2)) if is_classifier else (Texts(24, 1), Texts(9, 2))
    run = run_directory.start(folder, config, resume=resume)
    freezer = freezing.attach(model, config, seed=config.seed)
    draws = LabelDraws()
    if is_classifier:
        loss = _class_loss(model)
    else:
        loss = next_token_loss(freezer.model, output_heads.find(freezer.model, model), draws=draws)
    callback = Looking(stop_after=stop_after, look=look)
    fit = Trainer(
        model=freezer.model,
        signal=TrainingSignal(rows, loss, draws=draws),
        freezer=freezer,
        width=32,
        held_out=[held_out],
        held_out_loss=lambda: _mean(loss, held_out),
        config=config,
        compute=compute,
        run=run,
        callback=callback,
    )
    callback.fit = fit
    try:
        fit.work()
        with fit.final_values():
            named = dict(freezer.model.named_parameters())
            shipped = {name: named[name].detach().clone() for name in freezer.layers}
    finally:
        run.close()
    records = read_metrics(folder)
    return Trained(fit, records, shipped, callback)


def interrupted(
    model: PreTrainedModel, config: RunConfig, folder: Path, *, after: int, compute: torch.dtype = torch.float32
) -> Trained:
    """The same, stopped after so many steps and resumed, to the end."""
    try:
        train(model, config, folder, stop_after=after, compute=compute)
    except Stopped:
        return train(model, config, folder, resume=True, compute=compute)
    raise AssertionError("it ended before it was to be stopped")


def assert_same_bits(trained: Trained, wanted: Trained) -> None:
    """Every line of metrics.jsonl and every value."""
    assert trained.lines == wanted.lines
    assert trained.shipped.keys() == wanted.shipped.keys()
    for name, tensor in wanted.shipped.items():
        assert torch.equal(trained.shipped[name], tensor), name


def _class_loss(model: PreTrainedModel) -> Loss:
    return lambda batch, scale: F.cross_entropy(model(**batch.inputs).logits, batch.labels_N, reduction="sum") * scale


@torch.no_grad()
def _mean(loss: Loss, rows: Texts) -> float:
    return float(loss(rows.batch(np.arange(len(rows))), 1 / int(rows.supervised.sum())))
