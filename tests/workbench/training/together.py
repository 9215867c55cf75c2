"""Members of a bank for tests: random texts, a callback that remembers, and a bank trained in one call."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from tests.conftest import tiny
from workbench.adapters.banks import bank as banks
from workbench.config import RunConfig
from workbench.data.batching import Indices, MicroBatch, Row, collate, encoder_inputs
from workbench.models import attention_backend
from workbench.runs import metrics_log, run_directory
from workbench.training.adapter_trainer import TrainTask
from workbench.training.bank_trainer import BankTrainer, Objective, Predict
from workbench.training.freezing import freezer as freezing


@dataclass
class Texts:
    """Random tokens of unequal length; from every row but its beginning the next token is predicted."""

    rows: int
    seed: int
    vocabulary: int = 64
    shortest: int = 4

    def __post_init__(self) -> None:
        draw = np.random.default_rng(self.seed)
        self._rows = [draw.integers(3, self.vocabulary, draw.integers(self.shortest, 15)) for _ in range(self.rows)]
        self.lengths = np.array([len(row) for row in self._rows])
        self.supervised = self.lengths - 2

    def __len__(self) -> int:
        return self.rows

    def sample(self, draws: Indices, *, epoch: int) -> Indices:
        return draws

    @property
    def difficulty(self) -> None:
        return None

    def seen(self, *, epoch: int, step: int, steps: int | None = None) -> Texts:
        return self

    def place(self, index: int) -> str:
        return f"texts:{index + 1}"

    def batch(self, indices: Indices, *, epoch: int = 0) -> MicroBatch:
        return collate([Row(self._rows[i], np.arange(self.lengths[i]) > 1) for i in indices])


class LabelledSet(Texts):
    """The same with a class for each row, that its tokens decide."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.supervised = np.ones(self.rows, dtype=np.int64)

    def batch(self, indices: Indices, *, epoch: int = 0) -> MicroBatch:
        inputs = encoder_inputs([self._rows[i] for i in indices])
        starts = torch.arange(len(indices)) * inputs["input_ids"].shape[1]
        labels = torch.tensor([int(self._rows[i].sum()) % 3 for i in indices])
        return MicroBatch(inputs, starts, labels, tokens=int(self.lengths[indices].sum()))


class Silent:
    """A callback that keeps what it is told, and may ask to stop."""

    def __init__(self, *, stop_after: int = 10**9) -> None:
        self.said: list[str] = []
        self.records: list[dict[str, Any]] = []
        self.stop_after = stop_after

    def step(self, record: dict[str, Any], *, total: int) -> None:
        self.records.append(record)

    def say(self, text: str) -> None:
        if not text.startswith("Training:"):  # every run begins so
            self.said.append(text)

    def stop_requested(self) -> bool:
        return bool(self.records) and max(record["step"] for record in self.records) >= self.stop_after


def section(**train: Any) -> RunConfig:
    """A run's configuration; what is not named is different from every default that hides a mistake."""
    adapter = {"method": "lora", **train.pop("adapter", {})}
    adapter |= {"rank": 3, "alpha": 6, **adapter} if adapter["method"] in ("lora", "rslora", "dora", "lora+") else {}
    size, seed, patience = train.pop("size", 6), train.pop("seed", 0), train.pop("patience", None)
    save = {"every": train.pop("save_every", None), "ship": "best" if patience else "last"}
    schedule = {"name": train.pop("schedule", "linear"), "warmup": 0.1}
    return RunConfig.model_validate(
        {
            "recipe": "sft",
            "seed": seed,
            "adapter": adapter,
            "data": {"train": "texts"},
            "batch": {"size": size},
            "train": {"steps": 20, "learning_rate": 3e-3, **train},
            "schedule": schedule,
            "evaluate": {"every": 2 if patience else None, "patience": patience},
            "save": save,
        }
    )


def bert() -> PreTrainedModel:
    """A classifier of three classes in float64, without the dropout that no two trainings share."""
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = tiny("Bert", head="SequenceClassification", num_labels=3, **none)
    return model.double().requires_grad_(False)


def class_outputs(model: PreTrainedModel, member: str, bank: banks.Bank) -> tuple[Predict, Objective]:
    def objective(logits_NC: Tensor, labels_N: Tensor, scale: float) -> Tensor:
        return F.cross_entropy(logits_NC, labels_N, reduction="sum") * scale

    return lambda batch: bank.model(**batch.inputs).logits, objective


@dataclass
class Trained:
    losses: list[list[float]]
    tensors: list[dict[str, Tensor]]
    callback: Silent = field(default_factory=Silent)


@dataclass
class Together:
    """Trains the members of a bank over a copy of `model`, in runs under `folder`."""

    model: PreTrainedModel
    data: Sequence[Texts]
    configs: Sequence[RunConfig]
    folder: Path
    outputs: Callable[[PreTrainedModel, str, banks.Bank], tuple[Predict, Objective]]
    compute: torch.dtype = torch.float64
    tokens: int = 40
    packed: bool = False
    prepare: Callable[[banks.Bank], object] = lambda bank: None
    during: Callable[[BankTrainer], AbstractContextManager[object]] = lambda fit: nullcontext()

    def fit(self, callback: Silent | None = None, *, resume: bool = False) -> Trained:
        attention_backend.register()
        model, packing = copy.deepcopy(self.model), {"packing": self.packed}
        configs = [each.model_copy(update={"batch": each.batch.model_copy(update=packing)}) for each in self.configs]
        bank, freezer = freezing.attach_bank(
            model,
            configs[0],
            [each.adapter for each in configs],
            seeds=[each.seed for each in configs],
        )
        self.prepare(bank)
        predict, objective = self.outputs(model, bank.members[0], bank)
        run = run_directory.start(self.folder, configs[0], resume=resume)
        members = [run.child(f"members/{number}") for number in range(len(self.data))]
        train_tasks = [
            TrainTask(data, lambda: 1.0, config, member)  # never better: patience runs out
            for data, config, member in zip(self.data, configs, members, strict=True)
        ]
        callback = callback or Silent()
        fit = BankTrainer(
            bank,
            train_tasks,
            freezer=freezer,
            objectives=[objective] * len(train_tasks),
            predict=predict,
            compute=self.compute,
            tokens=self.tokens,
            callback=callback,
            reads_packed=self.packed,
        )
        try:
            with self.during(fit):
                fit.work()
        finally:
            run.close()
        losses = [[record["loss"] for record in metrics_log.read(member.path)] for member in members]
        named = fit.masters.named()
        tensors = [
            {name.replace(member, "default"): named[name].detach() for name in bank.parameters_of(member)}
            for member in bank.members
        ]
        return Trained(losses, tensors, callback)
