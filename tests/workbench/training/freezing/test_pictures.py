"""Frozen blocks of backbones that read pictures: layers in order, and a cache that changes no bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tests.vision_backbones import OTHERS, VISION, pixels, tiny_vision
from tests.workbench.training.freezing.prefixes import freeze, installed, prefix_of, stack
from workbench import adapters
from workbench.adapters import Lora, anatomy
from workbench.models import pictures
from workbench.training.freezing import prefix_cache
from workbench.training.freezing.hidden_state_store import MemoryStore
from workbench.training.freezing.layer_map import survey

TRANSFORMERS = ["CLIP", "DeiT", "Dinov2", "Dinov2WithRegisters", "Siglip", "ViT"]


def prepared(name: str, compute: torch.dtype = torch.float32, **settings: Any) -> PreTrainedModel:
    model = tiny_vision(name, **settings).to(compute)
    pictures.prepare(model, compute)
    return model


@pytest.mark.parametrize("name", sorted({**VISION, **OTHERS}.keys() - {"Pvt"}))
def test_layers_are_in_the_order_that_they_are_computed_in(name: str) -> None:
    """Gradients tell: with everything up to a block frozen, its outputs depend on nothing that trains."""
    model = prepared(name)
    layers = survey(model)
    assert len(layers.blocks) >= 2
    named = dict(model.named_parameters())
    for depth in (1, len(layers.blocks) - 1):
        model.requires_grad_(True)
        outputs: list[Any] = []
        block = model.get_submodule(layers.blocks[depth - 1])
        handle = block.register_forward_hook(lambda _, __, output, kept=outputs: kept.append(output))
        logits = model(pixel_values=pixels()).logits
        handle.remove()
        hidden = outputs[0]
        while not isinstance(hidden, torch.Tensor):  # a tuple, in which PVT has another one
            hidden = hidden[0]
        below = torch.autograd.grad(hidden.sum(), list(named.values()), allow_unused=True, retain_graph=True)
        read = {key for key, grad in zip(named, below, strict=True) if grad is not None}
        assert read == {key for key in read if layers.of(key) <= depth}
        above = torch.autograd.grad(logits.sum(), list(named.values()), allow_unused=True)
        learns = {key for key, grad in zip(named, above, strict=True) if grad is not None}
        assert {key for key in learns - read if layers.of(key) > depth} == learns - read
    heads = tuple(f"{head}." for head in anatomy.fresh_heads(model))
    assert {layers.of(key) for key in named if key.startswith(heads)} == {len(layers.blocks) + 1}


def test_what_halves_the_resolution_belongs_to_the_stage_that_it_leads_to() -> None:
    layers = survey(prepared("Swin"))
    assert layers.of("swin.encoder.layers.0.downsample.reduction.weight") == 2
    assert layers.of("swin.embeddings.patch_embeddings.projection.weight") == 0
    assert layers.of("swin.layernorm.weight") == 4


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_kept_states_change_no_bit(name: str, compute: torch.dtype) -> None:
    model = freeze(prepared(name, compute), 1)
    for head in anatomy.fresh_heads(model):
        model.get_submodule(head).requires_grad_(True)
    images = pixels(4)
    assert prefix_cache.refusal(model, blocks=stack(model), depth=1) is None

    def learnt() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        model.zero_grad()
        logits = model(pixel_values=images).logits
        logits.float().square().sum().backward()
        return logits.detach(), {key: each.grad for key, each in model.named_parameters() if each.grad is not None}

    wanted, grads = learnt()
    with installed(prefix_of(model, 1, MemoryStore(compute))) as cached:
        for _ in range(2):
            found, found_grads = learnt()
            assert torch.equal(found, wanted)
            assert all(torch.equal(found_grads[key], grads[key]) for key in grads)
        assert cached.computed == 4 and cached.read == 8
    assert torch.equal(learnt()[0], wanted)


def test_pictures_of_another_size_have_states_of_their_own() -> None:
    model = freeze(prepared("ViT"), 1)
    large = pixels(size=48)
    wanted = model(pixel_values=large).logits
    with installed(prefix_of(model, 1)) as cached:
        model(pixel_values=pixels())
        assert torch.equal(model(pixel_values=large).logits, wanted)
        assert torch.equal(model(pixel_values=large).logits, wanted)
    assert cached.computed == 4


@pytest.mark.parametrize("name", ["ConvNext", "EfficientNet", "MobileNetV2", "ResNet"])
def test_maps_of_convolutions_are_not_kept(name: str) -> None:
    model = freeze(prepared(name), 1)
    reason = prefix_cache.refusal(model, blocks=stack(model), depth=1)
    assert reason == f"the blocks of {type(model).__name__} give no rows of patches"


def test_windows_are_kept_where_that_gives_the_same() -> None:
    model = freeze(prepared("Swin"), 2)
    reason = prefix_cache.refusal(model, blocks=stack(model), depth=2)
    if reason is None:
        wanted = model(pixel_values=pixels()).logits
        with installed(prefix_of(model, 2)) as cached:
            for _ in range(2):
                torch.testing.assert_close(model(pixel_values=pixels()).logits, wanted)
            assert cached.computed == 2
    else:
        assert "Swin" in reason


def test_no_adapter_stands_below_a_line_that_never_moves() -> None:
    model = prepared("Swin")
    adapted = adapters.attach(model, Lora(rank=2), seed=0, below=1)
    inside = [key for key, each in adapted.named_parameters() if each.requires_grad and "lora" in key]
    assert inside and not any("layers.0.blocks" in key for key in inside)
