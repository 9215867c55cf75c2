"""Runs over one backbone, each with an adapter of random values that changes its answers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from workbench import adapters
from workbench.config import ModelConfig, RunConfig
from workbench.data.text.chat import ChatEncoder
from workbench.evaluation.serving.app import Server, ServerLimits
from workbench.evaluation.serving.served_models import ServedModel, TextModel
from workbench.models import backbones, exported
from workbench.recipes.verbs import serving
from workbench.recipes.verbs.serving import ServeSettings
from workbench.runs import run_directory
from workbench.runs.http_server import Address

SETTINGS = ServeSettings(Address(), ServerLimits(), rows=8, queue=4, context=None, grace=5)
Serve = Callable[..., list[TextModel]]


def save_runs(folder: Path, model: str, methods: list[dict[str, Any]], *, weights: str = "float32") -> list[Path]:
    """A run for each section `adapter`, called run0, run1, ..."""
    section = ModelConfig.model_validate({"id": model, "weights": weights, "compute": weights})
    backbone = backbones.load(section, None).model
    return [_save(folder / f"run{seed}", backbone, section, method, seed) for seed, method in enumerate(methods)]


def _save(path: Path, backbone: PreTrainedModel, section: ModelConfig, method: dict[str, Any], seed: int) -> Path:
    config = RunConfig.model_validate(
        {"recipe": "sft", "model": section, "adapter": method, "data": {"train": "rows.jsonl"}}
    )
    run = run_directory.start(path, config, resume=False)
    tokenizer = backbones.tokenizer(config.model)
    attached = adapters.attach(copy.deepcopy(backbone), config.adapter, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    for parameter in attached.parameters():
        if parameter.requires_grad:
            parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
    template = ChatEncoder(tokenizer)
    exported.save(attached, run.adapter, tokenizer, template, template.stops())
    run.close()
    return path


@pytest.fixture(scope="session")
def lora_runs(tmp_path_factory: pytest.TempPathFactory, stories: str) -> list[Path]:
    """Three runs with LoRA of different ranks over stories260K. Read only."""
    ranks = [{"method": "lora", "rank": rank, "alpha": 8} for rank in (2, 4, 4)]
    return save_runs(tmp_path_factory.mktemp("lora"), stories, ranks)


def load(runs: list[Path], **changes: Any) -> list[ServedModel]:
    """Their models, for a test to close."""
    return serving.load(serving.named([str(run) for run in runs], trust=False), replace(SETTINGS, **changes))


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Loads the models of runs, with changed settings; their engines end with the test."""
    loaded: list[TextModel] = []

    def opened(runs: list[Path], **changes: Any) -> list[TextModel]:
        found = [model for model in load(runs, **changes) if isinstance(model, TextModel)]
        loaded.extend(found)
        return found

    yield opened
    for model in loaded:
        model.scheduler.close()


@pytest.fixture(scope="module")
def server(lora_runs: list[Path]) -> Iterator[Server]:
    """A server of `lora_runs` whose prompts and answers have at most 96 tokens."""
    models = load(lora_runs, context=96)
    yield Server(models, ServerLimits(body_bytes=20_000))
    for model in models:
        assert isinstance(model, TextModel)
        model.scheduler.close()
