"""Adapters on backbones that read pictures: which layers they change, and LoRA of a convolution written out."""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.vision_backbones import OTHERS, VISION, pixels, tiny_vision
from workbench import adapters
from workbench.adapters import Full, Lora, anatomy
from workbench.adapters.target_modules import matches, resolve, target_convolutions
from workbench.errors import ConfigError
from workbench.models import fused_lora, pictures
from workbench.training import activation_checkpointing

CONVOLUTIONAL = ("EfficientNet", "MobileNetV2", "ResNet")


@pytest.mark.parametrize("name", sorted(VISION))
def test_all_linear_means_convolutions_where_blocks_have_no_linear_layers(name: str) -> None:
    model = tiny_vision(name)
    chosen = target_convolutions(model, "all-linear")
    assert bool(chosen) == (name in CONVOLUTIONAL)
    assert all(layer.groups == 1 for layer in chosen.values()), "depthwise convolutions mix no channels"  # type: ignore[union-attr]
    inside = tuple(f"{block}." for stack in anatomy.blocks(model) for block in stack)
    assert all(path.startswith(inside) for path in chosen)
    stem = anatomy.picture_stem(model)
    assert not any(layer is stem for layer in chosen.values())


@pytest.mark.nightly(but=["CLIP", "ConvNext", "Dinov2", "EfficientNet", "ResNet", "Swin"])
@pytest.mark.parametrize("name", sorted(VISION))
def test_all_layers_are_those_of_the_blocks_and_what_reads_the_pixels(name: str) -> None:
    model = tiny_vision(name)
    paths = {
        path
        for path, _ in model.named_modules()
        if any(matches(path, chosen) for chosen in resolve(model, "all-layers"))
    }
    inside = {
        path
        for path, _ in model.named_modules()
        if any(matches(path, chosen) for chosen in resolve(model, "all-linear"))
    }
    assert inside | set(anatomy.convolutions(model)) < paths
    assert anatomy.picture_stem(model) in [model.get_submodule(path) for path in paths]
    assert not any(path.startswith(head) for path in paths for head in anatomy.fresh_heads(model))


@pytest.mark.nightly(but=["Bit", "FocalNet", "Hiera", "PvtV2", "Segformer"])
@pytest.mark.parametrize("name", sorted(OTHERS.keys() - {"SwiftFormer"}))
def test_lora_changes_every_family(name: str) -> None:
    model = tiny_vision(name)
    before = model(pixel_values=pixels()).logits
    heads = tuple(f"base_model.model.{head}." for head in anatomy.fresh_heads(model))
    attached = adapters.attach(model, Lora(rank=2), seed=0)
    after = attached(pixel_values=pixels()).logits
    assert float((after - before).detach().abs().max()) <= 1e-5 * float(before.detach().abs().max())
    attached(pixel_values=pixels()).logits.square().sum().backward()
    trained = {key: each for key, each in attached.named_parameters() if each.requires_grad}
    assert all("lora_" in key or key.startswith(heads) for key in trained)
    assert all(bool(each.grad.abs().sum() > 0) for key, each in trained.items() if "lora_B" in key)


def test_a_head_whose_name_layers_inside_have_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"`norm` is a part of the head of SwiftFormerFor.*adapter\.method=full"):
        adapters.attach(tiny_vision("SwiftFormer"), Lora(rank=2), seed=0)
    assert anatomy.ambiguous_head(tiny_vision("ViT")) is None


def test_roles_and_names_that_are_not_there_are_refused_with_a_cure() -> None:
    with pytest.raises(
        ConfigError, match=r"convolutions matches no convolution of ViT.* Write adapter\.targets=all-linear"
    ):
        resolve(tiny_vision("ViT"), "convolutions")
    with pytest.raises(ConfigError, match=r"is called pwconv\. Nearest: .*pwconv1"):
        resolve(tiny_vision("ConvNext"), ["pwconv"])
    assert resolve(tiny_vision("ResNet"), "convolutions") == resolve(tiny_vision("ResNet"), "all-linear")


@pytest.mark.nightly(but="each value once")
@pytest.mark.parametrize("method", ["lora", "rslora", "dora"])
@pytest.mark.parametrize("name", [*CONVOLUTIONAL, "ViT"])
def test_merged_convolutions_give_the_same(name: str, method: str) -> None:
    base, images = tiny_vision(name).double().requires_grad_(False), pixels().double()
    config = Lora.model_validate({"method": method, "rank": 3, "alpha": 6, "targets": "all-layers"})
    model: Any = adapters.attach(copy.deepcopy(base), config, seed=0).eval()
    for key, each in model.named_parameters():
        if "lora_B" in key:
            each.data.normal_(std=0.1, generator=torch.Generator().manual_seed(len(key)))
    with torch.no_grad():
        wanted = model(pixel_values=images).logits
        merged = adapters.merge(model, config)
        assert float((wanted - base(pixel_values=images).logits).abs().max()) > 1e-3
        torch.testing.assert_close(merged(pixel_values=images).logits, wanted, rtol=1e-5, atol=1e-5)


def test_lora_of_a_convolution_is_the_product_of_two() -> None:
    """W + scale * B A, with A (R, I, k, k) and B (O, R)."""
    base: Any = tiny_vision("ResNet").requires_grad_(False)
    model: Any = adapters.attach(copy.deepcopy(base), Lora(rank=3, alpha=6), seed=0).eval()
    layer = model.get_base_model().resnet.encoder.stages[1].layers[0].layer[0].convolution
    down_RIkk, up_OR = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    up_OR.data.normal_()
    weight = layer.get_base_layer().weight + 2 * torch.einsum("or,rikl->oikl", up_OR[..., 0, 0], down_RIkk)
    images = torch.randn(2, 16, 8, 8)
    wanted = torch.nn.functional.conv2d(images, weight, stride=2, padding=1)
    torch.testing.assert_close(layer(images), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["EfficientNet", "ResNet"])
def test_statistics_of_batch_normalisation_stay_whatever_trains(name: str) -> None:
    for config in (Full(), Lora(rank=2)):
        model = tiny_vision(name)
        pictures.prepare(model, torch.float32)
        model.requires_grad_(False)
        before = {key: each.clone() for key, each in model.named_buffers()}
        trained = adapters.attach(model, config, seed=0).train()
        trained(pixel_values=pixels()).logits.sum().backward()
        assert all(torch.equal(each, before[key]) for key, each in model.named_buffers() if key in before)
        affine = [
            each.grad is not None for key, each in trained.named_parameters() if "norm" in key and "weight" in key
        ]
        assert any(affine) == isinstance(config, Full)


@pytest.mark.skipif(importlib.util.find_spec("timm") is None, reason="timm is optional")
@pytest.mark.parametrize("name", ["convnext_atto", "resnet18", "vit_tiny_patch16_224"])
def test_models_of_timm_have_blocks_and_a_head(name: str, tmp_path: Path) -> None:
    from transformers import TimmWrapperConfig, TimmWrapperForImageClassification

    base = TimmWrapperForImageClassification(TimmWrapperConfig(architecture=name, num_labels=3))
    (stack,), (head,) = anatomy.blocks(base), anatomy.fresh_heads(base)
    assert len(stack) >= 8 and not any(block.startswith(head) for block in stack)
    model = adapters.attach(base.requires_grad_(False), Lora(rank=2), seed=0).eval()
    images = pixels(size=224)
    adapters.save(model, tmp_path)
    with torch.no_grad():
        wanted = model(pixel_values=images).logits
        again = adapters.load(adapters.detach(model), tmp_path)  # type: ignore[arg-type]
        assert torch.equal(again(pixel_values=images).logits, wanted)


@pytest.mark.nightly(but=["CLIP", "ConvNext", "Dinov2", "EfficientNet", "ResNet", "Swin"])
@pytest.mark.parametrize("name", sorted(VISION))
def test_fused_layers_and_recomputed_activations_change_nothing(name: str) -> None:
    model = tiny_vision(name)
    pictures.prepare(model, torch.float32)
    adapted = adapters.attach(model.requires_grad_(False), Lora(rank=2), seed=0).train()
    for key, each in adapted.named_parameters():
        if "lora_B" in key:
            each.data.normal_(std=0.1, generator=torch.Generator().manual_seed(len(key)))

    def step() -> list[torch.Tensor]:
        adapted.zero_grad()
        logits = adapted(pixel_values=pixels()).logits
        logits.square().sum().backward()
        return [logits.detach(), *(each.grad for each in adapted.parameters() if each.grad is not None)]

    wanted = step()
    fused_lora.fuse(adapted)
    found = [step()]
    if model.supports_gradient_checkpointing:
        activation_checkpointing.keep(model, True)
        found.append(step())
    scale = max(float(each.abs().max()) for each in wanted)
    for each in found:
        assert all(float((a - b).abs().max()) <= 1e-5 * scale for a, b in zip(each, wanted, strict=True))
