"""Plans of backbones that read pictures: bytes and operations without a value are those of a real step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from tests.vision_backbones import pixels, save_vision, tiny_vision
from workbench import adapters
from workbench.adapters import Full, Lora, Method
from workbench.config import ModelConfig, model_heads
from workbench.models import backbones, model_sizes
from workbench.models.backbones import Backbone
from workbench.planning import step_time
from workbench.planning.counters import LiveBytes, Operations
from workbench.planning.fake_tensors import BlueprintLoader, fake_tensors
from workbench.planning.step_time import Small

CLASSES = model_heads.classes(["a", "b", "c"], seed=1)
METHODS: list[Method] = [Lora(rank=4), Full()]


def step(backbone: Backbone, method: Method) -> tuple[int, int]:
    """Peak of live bytes, and operations, of a training step on 8 pictures."""
    model = adapters.attach(backbone.model, method, seed=0).train()
    images, labels = pixels(8), torch.arange(8) % 3
    with LiveBytes() as live, Operations() as operations:
        F.cross_entropy(model(pixel_values=images).logits.float(), labels).backward()  # type: ignore[no-untyped-call]
    return live.peak, operations.count


@pytest.mark.nightly(but=["Dinov2-lora", "EfficientNet-full", "ResNet-lora", "Swin-full"])
@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.method)
@pytest.mark.parametrize("name", ["ConvNext", "Dinov2", "EfficientNet", "ResNet", "Swin", "ViT"])
def test_a_step_without_values_takes_what_a_real_one_takes(name: str, method: Method, tmp_path: Path) -> None:
    config = ModelConfig(id=save_vision(tmp_path, name), weights="float32")
    trainable = isinstance(method, Full)
    real = step(backbones.load(config, None, task=CLASSES, trainable=trainable), method)
    with fake_tensors():
        planned = step(BlueprintLoader()(config, None, task=CLASSES, trainable=trainable), method)
    assert planned[0] == pytest.approx(real[0], rel=0.03)
    assert planned[1] == real[1]


def test_a_convolution_takes_two_operations_for_each_weight_and_place() -> None:
    model: Any = tiny_vision("ResNet")
    layer = model.resnet.encoder.stages[0].layers[0].layer[0].convolution
    with Operations() as operations, torch.no_grad():
        layer(torch.zeros(2, 16, 8, 8))
    assert operations.count == 2 * layer.weight.numel() * 2 * 8 * 8


@pytest.mark.nightly(but="each value once")
@pytest.mark.parametrize("name", ["ConvNext", "EfficientNet", "MobileNetV2", "ResNet", "Swin", "ViT"])
@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.method)
def test_sizes_are_known_from_the_configuration_alone(name: str, method: Method, tmp_path: Path) -> None:
    config = ModelConfig(id=save_vision(tmp_path / "backbone", name), weights="float32")
    found = backbones.load(config, None, task=CLASSES, trainable=isinstance(method, Full))
    attached = adapters.attach(found.model, method, seed=0)
    adapters.save(attached, tmp_path / "adapter")
    (file,) = (tmp_path / "adapter").glob("*.safetensors")
    predicted = model_sizes.predict(config, method, task=CLASSES)
    assert (predicted.total, predicted.trainable) == tuple(adapters.count(attached))
    assert predicted.file_bytes == pytest.approx(file.stat().st_size, rel=0.05)


@pytest.mark.parametrize("name", ["CLIP", "ConvNext", "Dinov2", "EfficientNet", "MobileNetV2", "ResNet", "Swin", "ViT"])
def test_backbones_of_alike_blocks_are_cut_for_timing_and_others_are_whole(name: str, tmp_path: Path) -> None:
    config = ModelConfig(id=save_vision(tmp_path / "backbone", name), weights="float32")
    hub = backbones.hub_config(config)
    depth = step_time.depth(hub)
    assert depth == (2 if name in ("CLIP", "Dinov2", "ViT") else 1)
    small = step_time.smaller(config, hub, Small(1), tmp_path / "small")
    whole = backbones.skeleton(config, task=CLASSES)
    cut = backbones.skeleton(small, task=CLASSES)
    assert (adapters.count(cut).total < adapters.count(whole).total) == (depth > 1)
    assert step_time.narrowing(hub) == 1


def test_the_list_of_methods_has_sizes_and_refusals_on_pictures(tmp_path: Path) -> None:
    found = model_sizes.survey([f"model.id={save_vision(tmp_path, 'ResNet')}", "adapter.rank=4"]).sizes
    sized = {name for name, size in found.items() if not isinstance(size, str)}
    assert {"lora", "rslora", "dora", "lora+", "layernorm", "bitfit", "linear-probe", "last-layers", "full"} <= sized
    refused = {name: reason for name, reason in found.items() if isinstance(reason, str)}
    assert {"prefix", "prompt", "p-tuning", "ia3", "oft", "houlsby"} <= refused.keys()
    assert all(any(word in reason for word in ("Write", "Take", "Use")) for reason in refused.values())
