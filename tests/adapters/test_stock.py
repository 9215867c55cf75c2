"""A whole model is written without what it does not need."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import other
from transformers import AutoModelForCausalLM, ConvNextConfig, ConvNextForImageClassification, PreTrainedModel

from workbench.adapters import stock


class Watched:
    """Sees what is asked for among packages."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def find_spec(self, name: str, *_: Any) -> None:
        self.asked.append(name.partition(".")[0])


def test_saving_a_model_asks_for_no_deepspeed(
    llama: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched, before = Watched(), other.is_deepspeed_available
    for name in [name for name in sys.modules if name.partition(".")[0] == "deepspeed"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [watched, *sys.meta_path])
    stock.save(llama, tmp_path)
    assert "deepspeed" not in watched.asked and other.is_deepspeed_available is before
    found = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all(found[name].equal(tensor) for name, tensor in llama.state_dict().items())


def test_dropped_paths_of_pictures_are_off_and_saved_as_they_came(tmp_path: Path) -> None:
    config = ConvNextConfig(hidden_sizes=[4, 4, 4, 4], depths=[1, 1, 1, 1], drop_path_rate=0.9)
    model, pixels = ConvNextForImageClassification(config).train(), torch.randn(8, 3, 32, 32)
    assert not model(pixels).logits.equal(model(pixels).logits)
    stock.without_dropout(model)
    assert model(pixels).logits.equal(model(pixels).logits)
    stock.save(model, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["drop_path_rate"] == 0.9
