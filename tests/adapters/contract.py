"""The contract that tests/adapters/test_contract.py holds every method to, and the backbones that it is tried on.

A fresh adapter changes nothing, or says why; every trainable tensor learns and nothing else moves; a row's outputs do
not depend on the rows beside it; what is saved is read back; switched off, the backbone is back bit for bit; merged,
nothing changes, or the merge is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tests.conftest import tiny
from tests.matrix import HEADS, PICTURES, TWO_STACKS
from tests.vision_backbones import pixels, tiny_vision
from workbench import adapters
from workbench.adapters import METHODS, Method, anatomy
from workbench.errors import ConfigError
from workbench.models import pictures
from workbench.training.master_weights import MasterWeights

SMALL: dict[str, Any] = {
    **{"rank": 4, "width": 4, "reduction": None, "virtual_tokens": 3, "layers": 1, "block": 2},
    **{
        "coefficients": 20,
        "share": 0.05,
        "numbers": 16,
        "vectors": 12,
        "clusters": 2,
        "initial": 0.1,
        "tokens": (5, 60),
        "invocation": (60, 5),
    },
}
"""Settings of the methods, for models that are 32 wide; each method takes those that it has."""
MULTIPLIES = ("boft", "hra", "osf")
"""Methods that multiply a weight with what is the identity at first, or sum its singular parts, which rounds."""
DEEPENS = ("block-expansion",)
"""Methods whose merged model has more blocks than the backbone."""
ids = torch.tensor([[3, 60, 5, 61, 9, 60, 7], [4, 8, 15, 16, 23, 42, 2]])


def section(name: str) -> Method:
    """The method with small settings."""
    known = METHODS[name].model_fields
    settings = {key: value for key, value in SMALL.items() if key in known and value is not None}
    return METHODS[name].model_validate({"method": name, **settings})


def build(kind: str, **sizes: Any) -> PreTrainedModel:
    """A tiny model of one of the matrix's backbones."""
    if kind in PICTURES:
        pictures.prepare(found := tiny_vision(kind, **sizes), torch.float32)
        return with_biases(found)
    name, _, head = kind.partition("-")
    return with_biases(tiny(name, **{**TWO_STACKS.get(name, {}), **HEADS.get(head, {}), **sizes}))


@torch.no_grad()
def with_biases(model: PreTrainedModel) -> PreTrainedModel:
    """The model with biases that are not zero, as trained ones are: scales of them have gradients."""
    torch.manual_seed(1)
    for name, each in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(each, std=0.1)
    return model


def inputs(model: nn.Module) -> dict[str, Tensor]:
    """What this kind of model reads, and labels for a loss."""
    config: Any = model.config
    if anatomy.reads_pictures(model):
        return {"pixel_values": pixels(), "labels": torch.tensor([0, 2])}
    if config.num_labels == 3:
        return {"input_ids": ids, "labels": torch.tensor([0, 2])}
    return {"input_ids": ids, "labels": ids}


@torch.no_grad()
def logits(model: nn.Module, *, rows: slice = slice(None)) -> Tensor:
    """Logits of some rows, without those of virtual tokens."""
    chosen = {name: each[rows] for name, each in inputs(model).items()}
    found: Tensor = model.eval()(**chosen).logits.float()
    return found if found.ndim == 2 else found[:, -ids.shape[1] :]


@cache
def bare(name: str) -> PreTrainedModel:
    return build(name).requires_grad_(False)


def attach(model: PreTrainedModel, config: Method) -> Any:
    attached: Any = adapters.attach(model, config, seed=0, sample=lambda: iter([inputs(model)] * 2))
    if config.looks:
        config.choose(attached.eval(), (attached(**inputs(model)).loss for _ in range(2)))
    return attached


@dataclass
class Contract:
    """Everything that is promised about a backbone with a fresh adapter, in the order of its life."""

    model: Any
    config: Method
    before: Tensor
    """Logits of the bare backbone."""
    fresh: Callable[[], PreTrainedModel]
    folder: Path
    compute: torch.dtype = torch.float32
    tolerance: float = 1e-6
    """Rounding, relative to the largest logit."""
    merges: bool = True
    """Whether this weight format takes an update as it is; a quantised backbone is dequantised by `merge` first."""

    def check(self) -> None:
        start = logits(self.model)
        if not self.config.facts.starts_elsewhere:
            self.close(start, self.before, 2 if self.config.method in MULTIPLIES else 1)
        self.learns()
        after = logits(self.model)
        self.close(logits(self.model, rows=slice(0, 1)), after[:1], 10)
        assert float((after - start).abs().max()) > 1e-4 * self.scale, "two steps change something"
        adapters.save(self.model, self.folder)
        loaded = adapters.load(self.fresh(), self.folder)
        assert not any(each.requires_grad for each in loaded.parameters())
        self.close(logits(loaded), after, 10)
        with self.model.disable_adapter():
            assert torch.equal(logits(self.model), self.before), "switched off, the backbone is back bit for bit"
        if self.config.facts.no_merge:
            with pytest.raises(ConfigError, match="cannot be merged"):
                adapters.merge(loaded, self.config)
        elif self.merges:
            merged = adapters.merge(loaded, self.config)
            found, wanted = merged.state_dict().keys(), self.fresh().state_dict().keys()
            assert found > wanted if self.config.method in DEEPENS else found == wanted
            self.close(logits(merged), after, 100)
        assert torch.equal(logits(adapters.detach(self.model)), self.before), "taken off, it leaves nothing"

    def learns(self) -> None:
        """Two steps of AdamW: every trainable tensor has a gradient in one of them, and nothing else moves."""
        named = self.model.named_parameters(remove_duplicate=False)  # what layers share has several names
        trains = {name for name, each in named if each.requires_grad}
        frozen = {key: each.clone() for key, each in self.model.state_dict().items() if key not in trains}
        masters = MasterWeights(self.model, self.compute)
        optimizer = torch.optim.AdamW(list(masters), lr=0.02)
        silent = set(masters.named())
        assert silent
        for _ in range(2):
            self.model.train()
            self.model(**inputs(self.model)).loss.backward()
            silent -= {name for name, each in masters.named().items() if each.grad is not None and each.grad.any()}
            optimizer.step()
            optimizer.zero_grad()
            masters.refresh()
        assert not silent, f"no gradient: {sorted(silent)}"
        moved = [key for key, each in self.model.state_dict().items() if key in frozen and not each.equal(frozen[key])]
        assert not moved, f"not trainable, and moved: {moved}"

    def close(self, computed: Tensor, wanted: Tensor, factor: float) -> None:
        assert float((computed - wanted).abs().max()) <= factor * self.tolerance * self.scale

    @property
    def scale(self) -> float:
        return float(self.before.abs().max())
