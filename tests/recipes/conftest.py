"""Run directories without the training: what a verb reads of a run is its configuration, data and adapter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import ViTImageProcessorPil

from tests.recipes.drawings import draw
from tests.vision_backbones import SIZE, save_vision
from workbench import adapters, evaluation
from workbench.adapters import Full
from workbench.config import RunConfig
from workbench.data.text import tokenized
from workbench.data.text.chat import ChatEncoder
from workbench.models import backbones, exported
from workbench.runs import run_directory

SaveRun = Callable[..., Path]


@pytest.fixture
def save_run(tmp_path: Path, short_stories: str, questions: Path) -> SaveRun:
    """Makes a run whose adapter holds random values; takes sections of its configuration."""

    def save(**sections: Any) -> Path:
        base: dict[str, Any] = {
            "recipe": "sft",
            "model": {"id": short_stories, "weights": "float32", "compute": "float32"},
            "adapter": {"method": "lora", "rank": 4, "alpha": 8},
            "data": {"train": str(questions), "held_out": 0.1},
            "evaluate": {"every": None, "answers": 4, "max_new_tokens": 8},
        }
        config = RunConfig.model_validate({**base, **sections})
        run = run_directory.start(tmp_path / "run", config, resume=False)
        tokenizer = backbones.tokenizer(config.model)
        template = ChatEncoder(tokenizer)
        backbone = backbones.load(config.model, tokenizer, trainable=isinstance(config.adapter, Full))
        new = [tokenizer.get_vocab()[token] for token in config.model.new_tokens]
        model = adapters.attach(backbone.model, config.adapter, seed=0, new_token_ids=new)
        generator = torch.Generator().manual_seed(1)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data += 0.02 * torch.randn(parameter.shape, generator=generator)
        data = tokenized.load(config.data, tokenizer, template, seed=config.seed)
        run.note(data={"train": data.train.facts()})
        exported.save(model, run.adapter, tokenizer, template, evaluation.stop_tokens(tokenizer, data.train))
        run.close()
        return run.path

    return save


@pytest.fixture(scope="session")
def vit(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("vit")
    found = save_vision(folder, "ViT")
    ViTImageProcessorPil(size={"height": SIZE, "width": SIZE}).save_pretrained(found)
    return str(found)


@pytest.fixture(scope="session")
def drawings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw(tmp_path_factory.mktemp("drawings"), 90)
