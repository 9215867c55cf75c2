"""Students of fewer layers that read pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from tests.vision_backbones import TRANSFORMER, VISION, pixels, save_vision
from tests.workbench.distillation.test_students import _config, _made, _skipping, _stock
from workbench.adapters import anatomy
from workbench.config import ModelConfig, RunConfig
from workbench.config.model_heads import ModelHead
from workbench.errors import ConfigError
from workbench.models import backbones

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")


def _of_pictures(model: str, *, teacher: str = "starter", **student: Any) -> RunConfig:
    config = _config(model, of="classify", teacher=teacher, **student)
    return config.model_copy(update={"data": config.data.model_copy(update={"format": "image"})})


@torch.no_grad()
def _seen(model: Any) -> Tensor:
    logits: Tensor = model(pixel_values=pixels(2)).logits
    return logits


@pytest.mark.nightly(but=["CLIP-kept1-2", "Dinov2-kept3-2", "ResNet-kept9-2", "Swin-kept10-2"])
@pytest.mark.parametrize(
    ("name", "kept", "left"),
    [
        *((name, [1, 2], 2) for name in ("Beit", "CLIP", "DeiT", "Dinov2", "Dinov2WithRegisters", "Siglip", "ViT")),
        *((name, [0, 2], 2) for name in ("ConvNext", "ConvNextV2")),
        *((name, [0, 1], 2) for name in ("ResNet", "Swin", "Swinv2")),
    ],
)
def test_a_student_that_reads_pictures_is_the_original_without_the_other_layers(
    name: str, kept: list[int], left: int, tmp_path: Path
) -> None:
    staged = "depths" in VISION[name]
    tower = {**TRANSFORMER, "num_hidden_layers": 3}
    sizes = {"vision_config": tower} if "vision_config" in VISION[name] else {"num_hidden_layers": 3}
    folder = save_vision(tmp_path / "original", name, **({} if staged else sizes))
    for weights in (True, False):
        _made(tmp_path / f"{weights}", _of_pictures(folder, layers=kept), weights=weights)
    made = tmp_path / "True"
    assert (made / "config.json").read_text() == (tmp_path / "False" / "config.json").read_text()
    original, student = (_stock(each, "ImageClassification") for each in (folder, made))
    (stack,) = anatomy.blocks(student)
    assert len(stack) == left
    with _skipping(original, kept) as wanted:
        torch.testing.assert_close(_seen(student), _seen(wanted), rtol=1e-5, atol=1e-5)
    assert torch.equal(
        _seen(_stock(_made(tmp_path / "all", _of_pictures(folder, layers="every-1")), "ImageClassification")),
        _seen(original),
    )


@pytest.mark.parametrize("stored", ["CLIPModel", "SiglipModel", "Dinov2Model", "SwinModel"])
def test_a_body_that_reads_pictures_gets_its_fresh_head_later(stored: str, tmp_path: Path) -> None:
    family = stored.removesuffix("Model")
    torch.manual_seed(0)
    whole = getattr(transformers, stored)(getattr(transformers, f"{family}Config")(**VISION[family]))
    whole.save_pretrained(tmp_path / "original")
    task = ModelHead("classes", ("a", "b", "c"), seed=5)
    made = _made(tmp_path / "student", _of_pictures(str(tmp_path / "original"), layers=[0, 1]))
    student, original = (
        backbones.load(ModelConfig(id=str(each), weights="float32"), None, task=task).model
        for each in (made, tmp_path / "original")
    )
    (stack,) = anatomy.blocks(student)
    assert len(stack) == 2 and student.config.num_labels == 3
    with _skipping(original, [0, 1]) as wanted:
        torch.testing.assert_close(_seen(student), _seen(wanted), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "layers", "message"),
    [
        ("ResNet", [0], r"leaves no layer in stage 1 of the backbone .*Keep one of its layers, 1, 2, too"),
        ("ConvNext", "last-2", r"leaves no layer in stage 0 .*Keep one of its layers, 0, too"),
        (
            "ResNet",
            [0, 2],
            r"convolution.weight would be \(32, 16.*, and is \(32, 32.* Write .*layers=\[0, 1\], the first",
        ),
        (
            "Swin",
            "every-2",
            r"blocks.0.shift_size would be 0 in its new place, and is 2 .*layers=\[0, 1\], the first of",
        ),
        (
            "EfficientNet",
            "first-2",
            r"EfficientNetConfig describes .*: no setting says that they are 7. Write .*layers=all",
        ),
        ("MobileNetV2", "first-2", r"no setting says that they are 16. Write distill.student.layers=all"),
        ("Dinov2", [0, 2], r"there is no layer 2; the backbone has 2"),
    ],
)
def test_layers_of_pictures_that_cannot_be_left_out_are_refused(
    name: str, layers: Any, message: str, tmp_path: Path
) -> None:
    folder = save_vision(tmp_path / "original", name)
    with pytest.raises(ConfigError, match=message):
        _made(tmp_path / "student", _of_pictures(folder, layers=layers), weights=False)
