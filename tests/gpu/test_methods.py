"""Every method over every format of weights on the accelerator, against the CPU in float32 over the same weights."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from torch import nn

from tests.adapters.contract import section
from tests.conftest import tiny
from tests.gpu.devices import FEW, needs, needs_device
from workbench import adapters
from workbench.adapters import METHODS
from workbench.config import ModelConfig
from workbench.models import backbones
from workbench.training.master_weights import MasterWeights

pytestmark = [needs_device, pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")]

FORMATS = {"bfloat16": 0.03, "nf4": 0.03, "int8": 0.05}
"""Formats of weights, with the share of the first loss by which losses may differ: they are computed in bfloat16."""
SOME = ("lora", "beft", "prefix", "glora", "full")
"""Methods of a short rehearsal: of layers, biases, virtual tokens, over weights of one precision, of all weights."""
IN_FLOAT32 = ("full", "glora")
"""Methods that do not compute in float32 over weights in half precision: the reference stores float32."""
CASES = [
    (name, weights)
    for name in (SOME if FEW else sorted(METHODS))
    for weights in FORMATS
    if weights in section(name).facts.weights
]
ids_BL = torch.tensor([[3, 60, 5, 61, 9, 60, 7], [4, 8, 15, 16, 23, 42, 2]])
seen_BL = torch.randint(3, 512, (8, 64), generator=torch.Generator().manual_seed(0))
"""Rows that starts of adapters are computed from: more tokens than the widest layer has inputs."""


@pytest.mark.parametrize(("name", "weights"), CASES)
def test_two_steps(
    name: str, weights: str, short_stories: str, biased: str, on_cpu: Callable[[], AbstractContextManager[None]]
) -> None:
    if weights in ("nf4", "int8"):
        needs("bitsandbytes")
    folder = biased if name in ("beft", "bitfit") else short_stories
    stored = "float32" if name in IN_FLOAT32 and weights == "bfloat16" else weights
    with on_cpu():
        reference = Steps(name, folder, stored, "float32")
    found = Steps(name, folder, weights, "bfloat16")
    found.take_values(reference.model)
    with on_cpu():
        wanted = reference.losses()
    assert found.losses() == pytest.approx(wanted, abs=FORMATS[weights] * wanted[0])


def _here(ids: torch.Tensor) -> torch.Tensor:
    return ids.to(backbones.device())


@pytest.fixture(scope="session")
def biased(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A saved backbone whose linear layers have biases, wide enough to be quantised."""
    folder = tmp_path_factory.mktemp("biased")
    tiny("Phi", vocab_size=512, hidden_size=64, intermediate_size=128).save_pretrained(folder)
    return str(folder)


class Steps:
    """A model with a fresh adapter, and two steps of AdamW on one batch."""

    def __init__(self, name: str, folder: str, weights: str, compute: str) -> None:
        self.compute = getattr(torch, compute)
        config = ModelConfig.model_validate({"id": folder, "weights": weights, "compute": compute})
        base = backbones.load(config, None, trainable=name == "full").model
        self.batch, seen = ({"input_ids": ids, "labels": ids} for ids in map(_here, (ids_BL, seen_BL)))
        self.model: nn.Module = adapters.attach(base, section(name), seed=0, sample=lambda: iter([seen] * 2))

    @torch.no_grad()
    def take_values(self, other: nn.Module) -> None:
        """Begin where `other` does: devices draw other numbers from a seed."""
        theirs = other.state_dict()
        for key, value in self.model.state_dict().items():
            if value.is_floating_point() and (like := theirs.get(key)) is not None and like.shape == value.shape:
                value.copy_(like)

    def losses(self) -> list[float]:
        masters = MasterWeights(self.model, self.compute)
        optimizer = torch.optim.AdamW(list(masters), lr=2e-3)
        found = []
        for _ in range(2):
            self.model.train()
            loss = self.model(**self.batch).loss
            masters.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            masters.refresh()
            found.append(float(loss.detach()))
        return found
