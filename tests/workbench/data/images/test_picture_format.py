"""Formats read from a backbone's files give the pixel values that its own processor gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import transformers
from PIL import Image
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES

from tests.workbench.data.images.pictures import photograph
from workbench.config.sections.image_config import PrepareConfig
from workbench.data.images.picture_format import PictureFormat
from workbench.data.images.preparation import prepare
from workbench.errors import BackboneError

HALF = [0.5, 0.5, 0.5]
PROCESSORS: dict[str, dict[str, Any]] = {
    "ViT": {"image_processor_type": "ViTImageProcessor", "size": {"height": 64, "width": 64}},
    "ViT of old files": {
        "feature_extractor_type": "ViTFeatureExtractor",
        "size": 64,
        "resample": 2,
        "image_mean": HALF,
    },
    "Swin, bicubic": {
        "image_processor_type": "ViTImageProcessorFast",
        "size": {"height": 48, "width": 48},
        "resample": 3,
    },
    "not square": {"image_processor_type": "ViTImageProcessor", "size": {"height": 32, "width": 56}},
    "DeiT": {"image_processor_type": "DeiTImageProcessor", "size": {"height": 64, "width": 64}, "crop_size": 56},
    "BEiT": {"image_processor_type": "BeitImageProcessor", "size": {"height": 64, "width": 64}},
    "BEiT, cropped": {
        "image_processor_type": "BeitImageProcessor",
        "size": 70,
        "crop_size": 64,
        "do_center_crop": True,
    },
    "DINOv2": {"image_processor_type": "BitImageProcessor", "size": {"shortest_edge": 73}, "crop_size": 64},
    "CLIP": {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 64}, "crop_size": 64},
    "CLIP, cropped larger": {"image_processor_type": "CLIPImageProcessor", "size": 50, "crop_size": 64},
    "SigLIP": {"image_processor_type": "SiglipImageProcessor", "size": {"height": 64, "width": 64}, "image_mean": HALF},
    "ConvNeXT": {"image_processor_type": "ConvNextImageProcessor", "size": {"shortest_edge": 64}, "crop_pct": 0.875},
    "ConvNeXT, other share": {"image_processor_type": "ConvNextImageProcessor", "size": 60, "crop_pct": 0.95},
    "ConvNeXT of 384": {"image_processor_type": "ConvNextImageProcessor", "size": {"shortest_edge": 384}},
    "MobileNetV2": {
        "image_processor_type": "MobileNetV2ImageProcessor",
        "size": {"shortest_edge": 73},
        "crop_size": 64,
    },
    "EfficientNet": {"image_processor_type": "EfficientNetImageProcessor", "size": {"height": 64, "width": 64}},
    "EfficientNet, offset": {
        "image_processor_type": "EfficientNetImageProcessor",
        "size": {"height": 64, "width": 64},
        "rescale_factor": 1 / 127.5,
        "rescale_offset": True,
        "include_top": False,
        "resample": 0,
    },
    "not normalised": {"image_processor_type": "ViTImageProcessor", "size": 64, "do_normalize": False},
    "not rescaled": {"image_processor_type": "ViTImageProcessor", "size": 64, "do_rescale": False},
    "values 0 to 255": {
        "image_processor_type": "ViTImageProcessor",
        "size": 64,
        "do_rescale": False,
        "do_normalize": False,
    },
}


def own_values(settings: dict[str, Any], picture: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """What the processor of transformers makes of a picture, (3, H, W)."""
    name = next(settings[key] for key in ("image_processor_type", "feature_extractor_type") if key in settings)
    name = name.replace("FeatureExtractor", "ImageProcessor").removesuffix("Fast") + "Pil"
    processor = getattr(transformers, name)(**settings)
    values: np.ndarray[Any, Any] = processor(Image.fromarray(picture), return_tensors="np")["pixel_values"][0]
    return values


@pytest.mark.parametrize("shape", [(90, 120), (131, 77), (40, 40), (64, 64)])
@pytest.mark.parametrize("family", PROCESSORS)
def test_prepared_and_normalised_is_what_the_processor_gives(family: str, shape: tuple[int, int]) -> None:
    settings, picture = PROCESSORS[family], photograph(*shape)
    expected = own_values(settings, picture)
    found = PictureFormat.read(settings, {})
    ours = found.normalised(prepare(picture, PrepareConfig(), found)[None])[0]
    assert ours.shape == expected.shape and ours.dtype == np.float32
    level = 1 / (255 * min(found.std))  # one of 256 levels, by which resizing may round otherwise
    np.testing.assert_allclose(ours, expected, atol=1e-3 * level)


@pytest.mark.parametrize(
    "model", ["vit", "deit", "beit", "dinov2", "swin", "convnext", "clip", "siglip", "efficientnet"]
)
def test_without_a_file_the_familys_processor_is_meant_at_the_backbones_size(model: str) -> None:
    own = transformers.AutoConfig.for_model(model).to_dict()
    backbone = own.get("vision_config", own) | {"image_size": 96}
    found = PictureFormat.read({}, own | ({"vision_config": backbone} if "vision_config" in own else backbone))
    assert (found.height, found.width) == (96, 96)
    name = IMAGE_PROCESSOR_MAPPING_NAMES[model]["pil"]
    assert found.mean == tuple(getattr(transformers, name).image_mean)


@pytest.mark.parametrize("family", PROCESSORS)
def test_another_size_keeps_the_share_that_is_cropped(family: str) -> None:
    own, other = (PictureFormat.read(PROCESSORS[family], {}, size=size) for size in (None, 128))
    assert (other.height, other.width) == (128, 128)
    assert (other.mean, other.std, other.resample, other.fit) == (own.mean, own.std, own.resample, own.fit)
    assert other.resized[0] / 128 == pytest.approx(own.resized[0] / own.height, abs=1 / 128)


TIMM = {
    "input_size": [3, 224, 224],
    "interpolation": "bicubic",
    "crop_pct": 0.875,
    "crop_mode": "center",
    "mean": [0.485, 0.456, 0.406],
    "std": [0.229, 0.224, 0.225],
}


def test_a_timm_backbone_says_its_format_in_config_json() -> None:
    found = PictureFormat.read({}, {"model_type": "timm_wrapper", "pretrained_cfg": TIMM})
    assert (found.height, found.width, found.fit, found.resized) == (224, 224, "crop", (256, 256))
    assert found.resample == Image.Resampling.BICUBIC and found.mean == (0.485, 0.456, 0.406)
    assert PictureFormat.read({}, {"pretrained_cfg": {**TIMM, "crop_mode": "squash"}}).fit == "stretch"


@pytest.mark.parametrize(
    ("processor", "hub_config", "says"),
    [
        ({}, {"model_type": "vit", "num_channels": 1}, "1 channel"),
        ({}, {"pretrained_cfg": {**TIMM, "input_size": [1, 28, 28]}}, "1 channel"),
        ({"image_processor_type": "ImageGPTImageProcessor"}, {}, "ImageGPTImageProcessor"),
        ({"image_processor_type": "MobileViTImageProcessor"}, {}, "MobileViTImageProcessor"),
        ({"image_processor_type": "ViTImageProcessor", "do_resize": False}, {}, "image.size"),
        ({"image_processor_type": "ViTImageProcessor", "size": {"longest_edge": 5}}, {}, "longest_edge"),
        ({"image_processor_type": "ViTImageProcessor", "image_mean": [0.5]}, {}, "1 channel"),
        ({}, {"pretrained_cfg": {**TIMM, "crop_mode": "odd"}}, "crop_mode=odd"),
    ],
)
def test_what_is_not_repeated_is_refused(processor: dict[str, Any], hub_config: dict[str, Any], says: str) -> None:
    with pytest.raises(BackboneError, match=says):
        PictureFormat.read(processor, hub_config)
