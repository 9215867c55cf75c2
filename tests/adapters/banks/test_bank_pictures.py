"""A bank over backbones that read pictures: rows of all members in one pass give what each member gives alone."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.adapters.banks.test_bank import all_logits, disturbed
from tests.vision_backbones import pixels, tiny_vision
from workbench import adapters
from workbench.adapters import Lora
from workbench.adapters.banks import bank
from workbench.adapters.banks.bank_layers import MemberRows
from workbench.adapters.row_dropout import RowDraw, drawing
from workbench.models import pictures

SEEDS = (4, 5, 6)
SHARES = (2, 1, 2)
"""Rows that each member has."""
IMAGES = pixels(5).double()
FAMILIES = ["ConvNext", "Dinov2", "EfficientNet", "MobileNetV2", "ResNet", "Swin", "ViT"]


def double(name: str) -> Any:
    model = tiny_vision(name).double().requires_grad_(False)
    pictures.prepare(model, torch.float64)
    return model


def configs(dropout: float) -> list[Lora]:
    return [
        Lora(rank=3, alpha=6, dropout=dropout),
        Lora(rank=5, alpha=2, method="rslora", dropout=dropout),
        Lora(rank=2, alpha=9, dropout=dropout),
    ]


def draw(rows: slice) -> RowDraw:
    return RowDraw(seed=1, step=2, rows=torch.arange(5)[rows].numpy())


@pytest.mark.nightly(but=["ConvNext-0.25", "ViT-0.25", "ResNet-0.0"])
@pytest.mark.parametrize(("name", "dropout"), [*((name, 0.25) for name in FAMILIES), ("ViT", 0.0), ("ResNet", 0.0)])
def test_each_member_is_what_it_is_alone(name: str, dropout: float, tmp_path: Path) -> None:
    model = double(name)
    settings = configs(dropout)
    made = bank.attach(copy.deepcopy(model), settings, seeds=SEEDS)
    alone = [
        adapters.attach(copy.deepcopy(model), config, seed=seed) for config, seed in zip(settings, SEEDS, strict=True)
    ]
    starts = [0, 2, 3, 5]
    parts = [slice(start, stop) for start, stop in itertools.pairwise(starts)]
    made.train()
    shares = [MemberRows(member, count) for member, count in zip(made.members, SHARES, strict=True)]
    for member in made.members:
        disturbed({key.replace(member, "default"): each for key, each in made.parameters_of(member).items()})
    draws = [draw(part) for part in parts]
    with made.route(shares, length=3), drawing(draws, IMAGES.device):
        together: Tensor = made.model(pixel_values=IMAGES).logits
        (together.square().sum()).backward()
    for number, (single, part) in enumerate(zip(alone, parts, strict=True)):
        mine = {key: each for key, each in single.named_parameters() if each.requires_grad}
        disturbed(mine)
        single.train()
        with drawing([draw(part)], IMAGES.device):
            logits = single(pixel_values=IMAGES[part]).logits
            logits.square().sum().backward()
        torch.testing.assert_close(together[part], logits, rtol=1e-9, atol=1e-9)
        member = made.members[number]
        theirs = {key.replace(member, "default"): each for key, each in made.parameters_of(member).items()}
        assert theirs.keys() == mine.keys()
        for key, each in mine.items():
            torch.testing.assert_close(theirs[key].grad, each.grad, rtol=1e-8, atol=1e-8)
        made.save(member, tmp_path / str(number))
        single.eval()
        with made.only(member), torch.no_grad():
            torch.testing.assert_close(made.model(pixel_values=IMAGES).logits, single(pixel_values=IMAGES).logits)
    loaded = bank.load(copy.deepcopy(model), [tmp_path / str(number) for number in range(3)])
    found = all_logits(loaded, {"pixel_values": IMAGES})
    with torch.no_grad():
        wanted = torch.stack([single(pixel_values=IMAGES).logits for single in alone])
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
