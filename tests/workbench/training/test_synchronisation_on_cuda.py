"""A whole optimizer step on an accelerator waits for it once, where it reads the loss and the norm of the gradients.

Transformers looks at positions once in each forward pass, by which it knows packed rows; not so at tensors without
values, so that this read, which `test_synchronisation` knows, is not among those that are counted here.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForSequenceClassification

from tests.conftest import tiny
from tests.workbench.training.fake_cuda import CUDA, Synchronisations, fake_cuda
from tests.workbench.training.together import LabelledSet, Silent, section
from workbench.config import RunConfig
from workbench.config.model_heads import TEXT
from workbench.data.batching import MicroBatch
from workbench.data.prefetch import Prefetcher
from workbench.losses.label_losses import LabelLosses
from workbench.planning.fake_tensors import BlueprintLoader, real_tensors, to_fake
from workbench.recipes.load import load
from workbench.recipes.task import implementation
from workbench.recipes.verbs.plans import plan_parts
from workbench.runs import run_directory
from workbench.training.adapter_trainer import TrainTask
from workbench.training.bank_trainer import BankTrainer
from workbench.training.freezing import freezer as freezing
from workbench.training.trainer import Trainer

WORDS = [
    "data.limit=60",
    "data.max_tokens=64",
    "batch.tokens_per_device=512",
    "evaluate={every: null, answers: 0}",
    "save.every=null",
]
WAYS = {
    "quickstart": [],
    "dropout, without a record of rows": ["adapter.dropout=0.1", "evaluate.dynamics=false"],
    "bfloat16": ["model.weights=bfloat16", "model.compute=bfloat16"],
    "packed": ["batch.packing=true"],
    "packed, bfloat16": ["batch.packing=true", "model.weights=bfloat16", "model.compute=bfloat16"],
    "nf4": ["model.weights=nf4", "model.compute=bfloat16"],
}
STEPS = 3


@contextmanager
def training(config: RunConfig, folder: Path, patch: pytest.MonkeyPatch) -> Iterator[tuple[Trainer, Synchronisations]]:
    with plan_parts.planned_run(config, folder) as run:
        dry = implementation(config).dry(config, run)
        with fake_cuda(patch) as found:
            backbone = BlueprintLoader()(config.model, dry.single.vocabulary, task=TEXT)
            freezer = plan_parts.attached(backbone, config, dry.single.splits.train)
            live = dry.assemble(dry.single, freezer.model, backbone)
            yield dry.single.trainer(backbone, freezer, live, None), found


@pytest.mark.nightly(but=["quickstart", "packed, bfloat16"])
@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_step_reads_once(way: list[str], short_stories: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load("sft/quickstart", [*WORDS, f"model.id={short_stories}", *way])
    with training(config, tmp_path, monkeypatch) as (fit, found):
        assert fit.device == CUDA
        fit.prepare()
        fit.accumulation.ahead = Prefetcher(pin=True)
        for step in range(STEPS):
            found.places.clear()
            fit._follow_policy()
            record = fit.step(fit.member.batch())
            fit.member.finish_step(record, began=time.monotonic())
            assert len(found.places) == 1, "\n".join([f"step {step}", *found.places])
        fit.accumulation.ahead.close()


@pytest.mark.slow
def test_a_step_of_a_bank_reads_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All members' losses and norms come in one read; the losses of their rows travel beside."""
    sections = [section(size=4, adapter={"dropout": 0.1}), section(seed=1, size=6, adapter={"rank": 5})]
    config = tiny("Bert", head="SequenceClassification", num_labels=3).config
    run = run_directory.start(tmp_path / "run", sections[0], resume=False)
    with fake_cuda(monkeypatch) as found:
        with real_tensors(), torch.device("meta"):
            backbone = AutoModelForSequenceClassification.from_config(config)
        to_fake(backbone, CUDA)
        methods, seeds = [each.adapter for each in sections], [each.seed for each in sections]
        bank, freezer = freezing.attach_bank(backbone.requires_grad_(False), sections[0], methods, seeds=seeds)

        def predict(batch: MicroBatch) -> Tensor:
            logits: Tensor = bank.model(**batch.inputs).logits
            return logits

        fit = BankTrainer(
            bank,
            [
                TrainTask(LabelledSet(24, number), lambda: 1.0, each, run.child(f"members/{number}"))
                for number, each in enumerate(sections)
            ],
            freezer=freezer,
            objectives=[_cross_entropy] * len(sections),
            predict=predict,
            compute=torch.bfloat16,
            tokens=40,
            callback=Silent(),
            label_losses=_class_losses,
        )
        fit.masters.refresh()
        fit.bank.train()
        fit.ahead = Prefetcher(pin=True)
        for step in range(STEPS):
            found.places.clear()
            fit._step(fit.members, dict.fromkeys(fit.members, time.monotonic()))
            assert len(found.places) == 1, "\n".join([f"step {step}", *found.places])
        fit.ahead.close()
    run.close()
    assert len(fit.visits) == len(sections)


def _cross_entropy(logits_NC: Tensor, labels_N: Tensor, scale: float) -> Tensor:
    return F.cross_entropy(logits_NC.float(), labels_N, reduction="sum") * scale


def _class_losses(logits_NC: Tensor, labels_N: Tensor) -> LabelLosses:
    loss_N = F.cross_entropy(logits_NC.detach().float(), labels_N, reduction="none")
    return LabelLosses(loss_N, logits_NC.argmax(-1) == labels_N)
