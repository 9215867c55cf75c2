"""Named adapters on one backbone: each is what it would be alone, also in a batch whose rows differ."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tests.conftest import tiny
from workbench import adapters
from workbench.adapters import METHODS, multi_adapter
from workbench.errors import ConfigError

# Stock PEFT uses what transformers calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

IDS = torch.tensor([[3, 60, 5, 61], [9, 60, 7, 11], [3, 60, 5, 61], [4, 4, 8, 1]])


@torch.no_grad()
def _logits(model: nn.Module, **rows: Any) -> Tensor:
    logits: Tensor = model(input_ids=IDS, **rows).logits
    return logits


def _save(base: PreTrainedModel, folder: Path, method: str, new: tuple[int, ...] = ()) -> Path:
    config = METHODS[method].model_validate({"method": method})
    model = adapters.attach(copy.deepcopy(base), config, seed=0, new_token_ids=new)
    generator = torch.Generator().manual_seed(len(str(folder)))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
    adapters.save(model, folder)
    return folder


@pytest.fixture
def base() -> PreTrainedModel:
    return tiny("Qwen3")


def test_each_is_what_it_would_be_alone_and_rows_may_differ(base: PreTrainedModel, tmp_path: Path) -> None:
    folders = {"first": _save(base, tmp_path / "a", "lora"), "second": _save(base, tmp_path / "bb", "rslora")}
    alone = {name: _logits(adapters.load(copy.deepcopy(base), folder)) for name, folder in folders.items()}
    alone[multi_adapter.BARE] = _logits(base)
    model = multi_adapter.load(copy.deepcopy(base), folders)
    for name in ("first", "second", "first"):
        multi_adapter.use(model, name)
        assert torch.equal(_logits(model), alone[name])
    assert not any(parameter.requires_grad for parameter in model.parameters())

    names = ["second", "first", multi_adapter.BARE, "second"]
    mixed = _logits(model, **multi_adapter.rows(model, names))
    for row, name in enumerate(names):
        torch.testing.assert_close(mixed[row], alone[name][row], rtol=1e-5, atol=1e-5)
    settings: dict[str, Any] = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    written = model.generate(input_ids=IDS, **multi_adapter.rows(model, names), **settings)
    for row, name in enumerate(names[:2]):
        multi_adapter.use(model, name)
        assert torch.equal(model.generate(input_ids=IDS[row : row + 1], **settings)[0], written[row])


@pytest.mark.parametrize(
    ("method", "kind"), [("dora", "DoRA"), ("last-layers", "PARTIAL"), ("prompt", "PROMPT_TUNING")]
)
def test_what_cannot_be_mixed_can_be_switched(base: PreTrainedModel, method: str, kind: str, tmp_path: Path) -> None:
    folders = {"one": _save(base, tmp_path / "a", method), "two": _save(base, tmp_path / "bb", method)}
    model = multi_adapter.load(copy.deepcopy(base), folders)
    for name in ("two", "one"):
        multi_adapter.use(model, name)
        assert torch.equal(_logits(model), _logits(adapters.load(copy.deepcopy(base), folders[name])))
    with pytest.raises(ConfigError, match=rf"one is {kind}, of which PEFT cannot mix several in a batch.* Call use"):
        multi_adapter.rows(model, ["one", "two", "one", "two"])


def test_mistakes_are_told(base: PreTrainedModel, tmp_path: Path) -> None:
    lora, last = _save(base, tmp_path / "a", "lora"), _save(base, tmp_path / "bb", "last-layers")
    with pytest.raises(ConfigError, match=r"different kinds \(x LORA, y PARTIAL\) do not go on one backbone"):
        multi_adapter.load(copy.deepcopy(base), {"x": lora, "y": last})
    rows = _save(base, tmp_path / "ccc", "lora", new=(60, 61))
    with pytest.raises(ConfigError, match="y brings rows of new tokens, which change the vocabulary for the others"):
        multi_adapter.load(copy.deepcopy(base), {"x": lora, "y": rows})
    model = multi_adapter.load(copy.deepcopy(base), {"x": lora})
    with pytest.raises(ConfigError, match=r"No adapter is called z\. There are: x\."):
        multi_adapter.rows(model, ["x", "z", multi_adapter.BARE])
    with pytest.raises(ConfigError, match="No adapter is called z"):
        multi_adapter.use(model, "z")
