"""Backbones that read pictures: every family loads, with a fresh head, and no row depends on those beside it."""

from __future__ import annotations

import copy
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.modules.batchnorm import _BatchNorm
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from tests.vision_backbones import OTHERS, SIZE, VISION, pixels, save_vision, tiny_vision
from workbench.adapters import anatomy
from workbench.config import ModelConfig, model_heads
from workbench.errors import BackboneError, ConfigError
from workbench.models import attention_backend, backbones, pictures

CLASSES = model_heads.classes(["a", "b", "c", "d"], seed=3)


def load(folder: str, **settings: Any) -> PreTrainedModel:
    config = ModelConfig.model_validate({"id": folder, "weights": "float32", **settings})
    return backbones.load(config, None, task=CLASSES).model


@pytest.mark.nightly(
    but=[
        "Beit",
        "DeiTWithTeacher",
        "HGNetV2",
        "MobileNetV1",
        "Pvt",
        "SwiftFormer",
        "Swinv2",
        "CLIP",
        "ConvNext",
        "Dinov2",
        "EfficientNet",
        "ResNet",
        "Swin",
    ]
)
@pytest.mark.parametrize("name", sorted({**VISION, **OTHERS}))
def test_every_family_loads_with_a_fresh_seeded_head(name: str, tmp_path: Path) -> None:
    folder = save_vision(tmp_path, name, labels=3)  # a head for other classes
    model, again = load(folder), load(folder)
    heads = anatomy.fresh_heads(model)
    assert heads and all(any(True for _ in model.get_submodule(head).parameters()) for head in heads)
    first, second = model.state_dict(), again.state_dict()
    assert all(torch.equal(first[key], second[key]) for key in first), "the seed decides the head"
    other = tiny_vision(name)
    kept = {key: each for key, each in other.state_dict().items() if not key.startswith(tuple(heads))}
    assert kept and all(torch.equal(first[key], each) for key, each in kept.items())
    with torch.no_grad():
        together = model.train()(pixel_values=pixels(4)).logits
        assert together.shape == (4, 4) and bool((together[0] != together[1]).all()), "pictures are told apart"
        alone = torch.cat([model(pixel_values=row[None]).logits for row in pixels(4)])
        assert float((alone - together).abs().max()) <= 1e-4 * float(together.abs().max())


@pytest.mark.parametrize("name", ["ConvNext", "EfficientNet", "ResNet", "Swin", "ViT"])
def test_half_precision_reads_the_same_pictures(name: str, tmp_path: Path) -> None:
    folder = save_vision(tmp_path, name)
    whole = load(folder)(pixel_values=pixels()).logits
    for compute in ("float32", "bfloat16"):
        half = load(folder, weights="bfloat16", compute=compute)(pixel_values=pixels()).logits
        assert half.dtype == torch.float32, "heads compute in float32"
        assert float((half - whole).abs().max()) < 0.1 * float(whole.abs().max())


@pytest.mark.parametrize(
    "name", ["ConvNext", "DeiT", "Dinov2", "CLIP", "EfficientNet", "ResNet", "Siglip", "Swin", "ViT"]
)
def test_other_sizes_are_read(name: str, tmp_path: Path) -> None:
    model = load(save_vision(tmp_path, name))
    sizes = pictures.picture_sizes(model)
    assert sizes.step is not None
    pictures.require_size(model, 2 * SIZE)
    assert model(pixel_values=pixels(size=2 * SIZE)).logits.shape == (2, 4)


@pytest.mark.skipif(importlib.util.find_spec("timm") is not None, reason="timm is there")
def test_a_model_of_timm_says_that_timm_is_missing(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "timm_wrapper", "architecture": "resnet18"}))
    with pytest.raises(BackboneError, match=r"a model of timm, which is not installed\. Run: pip install timm"):
        load(str(tmp_path))


def test_positions_are_interpolated_as_transformers_does(tmp_path: Path) -> None:
    folder = save_vision(tmp_path, "ViT")
    model, large = load(folder), pixels(size=48)
    plain = backbones.load(ModelConfig(id=folder, weights="float32"), None, task=CLASSES).model
    plain.base_model._forward_pre_hooks.clear()
    wanted = plain(pixel_values=large, interpolate_pos_encoding=True).logits
    assert torch.equal(model(pixel_values=large).logits, wanted)


def test_a_size_that_is_no_multiple_of_a_patch_is_refused_with_the_nearest(tmp_path: Path) -> None:
    model = load(save_vision(tmp_path, "ViT"))
    with pytest.raises(ConfigError, match=r"image\.size=45 does not fit ViTFor.*Write image\.size=48"):
        pictures.require_size(model, 45)
    assert pictures.PictureSizes(224, None).refusal(240) == "it reads pictures of one size. Write image.size=224."


@pytest.mark.parametrize("channels", [1, 4])
def test_other_channels_are_refused(channels: int, tmp_path: Path) -> None:
    folder = save_vision(tmp_path, "ViT", num_channels=channels)
    with pytest.raises(BackboneError, match=f"reads pictures of {channels} channels?, and .* num_channels=3"):
        load(folder)


def test_statistics_stay_as_they_are(tmp_path: Path) -> None:
    model = load(save_vision(tmp_path, "ResNet")).train()
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    before = [norm.running_mean.clone() for norm in norms if norm.running_mean is not None]
    model(pixel_values=pixels())
    assert norms and not any(norm.training for norm in norms)
    assert all(torch.equal(each, norm.running_mean) for each, norm in zip(before, norms, strict=True))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["EfficientNet", "MobileNetV2", "ResNet"])
def test_micro_batches_change_no_gradient(name: str, tmp_path: Path) -> None:
    model = load(save_vision(tmp_path, name)).double().train().requires_grad_(True)
    model.base_model._forward_pre_hooks.clear()  # which would compute in float32
    images, labels = pixels(8).double(), torch.arange(8) % 4

    def gradients(size: int) -> dict[str, torch.Tensor]:
        model.zero_grad()
        for start in range(0, 8, size):
            rows = slice(start, start + size)
            logits = model(pixel_values=images[rows]).logits
            torch.nn.functional.cross_entropy(logits, labels[rows], reduction="sum").backward()  # type: ignore[no-untyped-call]
        return {key: each.grad.clone() for key, each in model.named_parameters() if each.grad is not None}

    whole, parts = gradients(8), gradients(2)
    scale = max(float(each.abs().max()) for each in whole.values())
    assert whole.keys() == parts.keys()
    assert max(float((whole[key] - parts[key]).abs().max()) for key in whole) <= 1e-6 * scale


@pytest.mark.parametrize("name", ["ConvNext", "EfficientNet", "MobileNetV2", "RegNet", "SwiftFormer"])
def test_the_order_of_pixels_in_memory_changes_nothing(name: str, tmp_path: Path) -> None:
    """Convolutions in groups get the channels last; outputs and gradients are those of the other order."""
    model = load(save_vision(tmp_path, name)).requires_grad_(True)
    (fit,) = anatomy.picture_tower(model)._forward_pre_hooks.values()
    assert fit.layout == torch.channels_last
    found = []
    for fit.layout in (torch.channels_last, torch.contiguous_format):
        model.zero_grad()
        logits = model(pixel_values=pixels(4)).logits
        logits.square().sum().backward()
        found.append([logits.detach(), *(each.grad for each in model.parameters() if each.grad is not None)])
    for one, other in zip(*found, strict=True):
        assert float((one - other).abs().max()) <= 1e-4 * float(other.abs().max() + 1e-3)


def test_drop_path_is_off_unless_asked_for(tmp_path: Path) -> None:
    folder = save_vision(tmp_path, "Swin", drop_path_rate=0.5)
    model = load(folder).train()
    assert torch.equal(model(pixel_values=pixels()).logits, model(pixel_values=pixels()).logits)


def test_maps_of_pictures_are_not_multiplied_in_eight_bits(tmp_path: Path) -> None:
    folder = save_vision(tmp_path, "ConvNext")
    with pytest.raises(BackboneError, match=r"Write model\.weights=nf4"):
        load(folder, weights="int8")
    folder = save_vision(tmp_path / "other", "ResNet")
    for weights in ("int8", "nf4"):
        with pytest.raises(BackboneError, match=r"hold no linear layers.*Write model\.weights=bfloat16"):
            load(folder, weights=weights)


@pytest.mark.parametrize("name", ["Beit", "CLIP", "Dinov2", "Swin", "ViT"])
def test_attention_of_few_patches_is_what_transformers_computes(name: str, tmp_path: Path) -> None:
    """In float32 bit for bit; in half precision as near to float32 as torch's own kernel."""
    whole = load(
        save_vision(tmp_path, name, image_size=64) if name in ("Dinov2", "ViT") else save_vision(tmp_path, name)
    )
    images = pixels(size=64 if name in ("Dinov2", "ViT") else SIZE)

    def outputs(kernel: Any, model: PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor]:
        AttentionInterface.register("sdpa", kernel)
        try:
            leaf = images.clone().requires_grad_()
            logits = model(pixel_values=leaf).logits.float()
            logits.square().sum().backward()
            assert leaf.grad is not None
            return logits.detach(), leaf.grad
        finally:
            attention_backend.register()

    theirs, ours = outputs(sdpa_attention_forward, whole), outputs(attention_backend.attend_short_rows, whole)
    assert all(torch.equal(*pair) for pair in zip(theirs, ours, strict=True))
    half = copy.deepcopy(whole).bfloat16()
    for module in half.modules():
        module._forward_pre_hooks.clear()
    wanted = ours
    images = images.bfloat16()
    theirs, ours = outputs(sdpa_attention_forward, half), outputs(attention_backend.attend_short_rows, half)
    for exact, their, our in zip(wanted, theirs, ours, strict=True):
        assert float((our - exact).abs().max()) <= 3 * float((their - exact).abs().max()) + 1e-2 * float(
            exact.abs().max()
        )


@pytest.mark.parametrize("name", ["DeiT", "DeiTWithTeacher"])
def test_a_configuration_that_names_no_architecture_is_read(name: str, tmp_path: Path) -> None:
    folder = Path(save_vision(tmp_path, name))
    named = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**named, "architectures": None}))
    config = ModelConfig(id=str(folder), weights="float32")
    assert backbones.skeleton(config, task=CLASSES).num_labels == len(CLASSES.labels)
    assert load(str(folder))(pixel_values=pixels()).logits.shape == (2, 4)
