"""The pixels that a backbone was trained on: size, cropping, interpolation, normalisation, read from its own files.

Legend: B or N pictures, H height, W width, 3 channels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from PIL.Image import Resampling

from workbench.data import ordered_processes
from workbench.data.images.picture_files import Pixels
from workbench.errors import BackboneError

Channels = tuple[float, float, float]
_IMAGENET: tuple[Channels, Channels] = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


@dataclass(frozen=True)
class PictureFormat:
    """How a picture becomes what a backbone reads.

    It is resized, then the middle is cut out, where it is smaller with a black border; then channels are normalised.
    """

    height: int
    width: int
    """Size of what the backbone reads, in pixels."""
    fit: Literal["stretch", "crop", "pad"]
    """`stretch`: resized to `resized`; `crop`: as little as covers `resized`; `pad`: as much as fits into it."""
    resized: tuple[int, int]
    """Height and width before the middle is cut out, in pixels."""
    resample: Resampling
    mean: Channels
    std: Channels
    """Normalised is (x / 255 - mean) / std for values x from 0 to 255."""

    @classmethod
    def read(
        cls, processor: Mapping[str, Any], hub_config: Mapping[str, Any], *, size: int | None = None
    ) -> PictureFormat:
        """The format that a backbone's files describe. Raises BackboneError: it reads other than three channels, or
        prepares pictures in a way that is not repeated here.

        Args:
            processor: Its preprocessor_config.json; empty where there is none.
            hub_config: Its config.json.
            size: Side of the square that it is to read instead of its own, in pixels; what is cut off keeps its share.
        """
        vision = hub_config.get("vision_config")
        backbone = vision if isinstance(vision, Mapping) else hub_config
        _require_colour(backbone.get("num_channels", 3))
        timm, own = hub_config.get("pretrained_cfg"), backbone.get("image_size")
        own = own if isinstance(own, int) else None
        if isinstance(timm, Mapping):
            picture_format = _of_timm(timm)
        else:
            known = _processor(processor, str(hub_config.get("model_type")))
            fit, resized, cropped = _geometry(known, (size or own))
            factor = 255 * (float(known.rescale_factor) if known.do_rescale else 1.0)
            offset = 1.0 if getattr(known, "rescale_offset", False) and known.do_rescale else 0.0
            means = _channels(known.image_mean) if known.do_normalize else (0.0, 0.0, 0.0)
            stds = _channels(known.image_std) if known.do_normalize else (1.0, 1.0, 1.0)
            again = _channels(known.image_std) if getattr(known, "include_top", False) else (1.0, 1.0, 1.0)
            mean = _each(lambda channel: (offset + means[channel]) / factor)
            std = _each(lambda channel: stds[channel] * again[channel] / factor)
            picture_format = PictureFormat(*cropped, fit, resized, Resampling(known.resample), mean, std)
            size = size or (None if processor else own)
        return picture_format if size is None else picture_format.of_size(size)

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any]) -> PictureFormat:
        """The format that `facts` were written of."""
        lists = {name: tuple(facts[name]) for name in ("resized", "mean", "std")}
        return cls(**{**facts, **lists, "resample": Resampling[facts["resample"]]})

    @property
    def facts(self) -> dict[str, Any]:
        """For a JSON file."""
        return {**asdict(self), "resample": self.resample.name}

    @property
    def processor(self) -> dict[str, Any] | None:
        """The preprocessor_config.json of a stock processor that prepares pictures so; None where there is none."""
        if self.fit == "pad" or self.resized[0] != self.resized[1]:
            return None
        config: dict[str, Any] = {
            "image_processor_type": "CLIPImageProcessor",
            "do_resize": True,
            "size": {"height": self.resized[0], "width": self.resized[1]},
            "resample": int(self.resample),
            "do_rescale": True,
            "rescale_factor": 1 / 255,
            "do_normalize": True,
            "image_mean": list(self.mean),
            "image_std": list(self.std),
        }
        if self.fit == "stretch" and self.resized == (self.height, self.width):
            return {**config, "image_processor_type": "ViTImageProcessor"}
        crop = {"do_center_crop": True, "crop_size": {"height": self.height, "width": self.width}}
        size = {"shortest_edge": self.resized[0]} if self.fit == "crop" else config["size"]
        return {**config, **crop, "size": size}

    def of_size(self, size: int) -> PictureFormat:
        """The same format for a square of another size."""
        height, width = self.resized
        resized = (round(height * size / self.height), round(width * size / self.width))
        return replace(self, height=size, width=size, resized=resized)

    def normalised(self, pixels: Sequence[Pixels] | Pixels) -> npt.NDArray[np.float32]:
        """Pictures (B, H, W, 3), at least one, as the backbone reads them, (B, 3, H, W)."""
        scale_311, shift_311 = (values_3[:, None, None] for values_3 in self.affine)
        height, width = pixels[0].shape[:2]
        inputs_B3HW = np.empty((len(pixels), 3, height, width), np.float32)

        def write(number: int) -> None:  # one at a time stays in the processor's cache
            np.multiply(pixels[number].transpose(2, 0, 1), scale_311, out=inputs_B3HW[number])
            inputs_B3HW[number] += shift_311

        ordered_processes.by_threads(write, range(len(pixels)), size=height * width)
        return inputs_B3HW

    @property
    def affine(self) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """Scale (3) and shift (3) of normalisation: values from 0 to 255, times scale, plus shift."""
        mean_3, std_3 = np.asarray(self.mean), np.asarray(self.std)
        return (1 / (255 * std_3)).astype(np.float32), (-mean_3 / std_3).astype(np.float32)


def _require_colour(channels: Any) -> None:
    if channels != 3:
        raise BackboneError(
            f"The backbone reads pictures of {channels} channel(s); the workbench gives three, red, green and blue. "
            "Name a backbone that was trained on colour; grey pictures suit it too."
        )


def _of_timm(pretrained: Mapping[str, Any]) -> PictureFormat:
    """As `timm.data.resolve_data_config` and `create_transform` read a `pretrained_cfg` for evaluation."""
    channels, height, width = pretrained.get("input_size") or (3, 224, 224)
    _require_colour(channels)
    share = pretrained.get("crop_pct") or 0.875
    mode = pretrained.get("crop_mode") or "center"
    fits: dict[str, Literal["stretch", "crop", "pad"]] = {"center": "crop", "squash": "stretch", "border": "pad"}
    if mode not in fits:
        raise BackboneError(f"config.json: pretrained_cfg.crop_mode={mode} is unknown. Known: {', '.join(fits)}.")
    resample = Resampling[str(pretrained.get("interpolation") or "bicubic").upper()]
    mean, std = (pretrained.get(key) or default for key, default in zip(("mean", "std"), _IMAGENET, strict=True))
    resized = (int(height / share), int(width / share))
    return PictureFormat(height, width, fits[mode], resized, resample, _channels(mean), _channels(std))


_REPEATED = (
    "BeitImageProcessor",
    "BitImageProcessor",
    "CLIPImageProcessor",
    "ConvNextImageProcessor",
    "DeiTImageProcessor",
    "EfficientNetImageProcessor",
    "MobileNetV1ImageProcessor",
    "MobileNetV2ImageProcessor",
    "PvtImageProcessor",
    "SegformerImageProcessor",
    "SiglipImageProcessor",
    "ViTImageProcessor",
)  # Processors of transformers whose steps are those below. Others flip channels, say, or cut pictures into patches.
_SAME = {"DINOv3ViTImageProcessor": "ViTImageProcessor"}
"""Processors that exist for torchvision only, with the same steps as another one."""


def _processor(processor: Mapping[str, Any], model: str) -> Any:
    """The processor of transformers that a file describes; it knows its defaults and older spellings."""
    import transformers
    from transformers.models.auto.image_processing_auto import (  # type: ignore[attr-defined]
        IMAGE_PROCESSOR_MAPPING_NAMES,
    )

    of_model = IMAGE_PROCESSOR_MAPPING_NAMES.get(model, {}).get("torchvision")
    named = processor.get("image_processor_type") or processor.get("feature_extractor_type") or of_model
    name = str(named or "ViTImageProcessor").replace("FeatureExtractor", "ImageProcessor")
    name = name.removesuffix("Fast").removesuffix("Pil")
    name = _SAME.get(name, name)
    if name not in _REPEATED:
        raise BackboneError(
            f"preprocessor_config.json: {name} prepares pictures in a way that the workbench does not repeat. "
            f"Name a backbone with one of {', '.join(_REPEATED)}, or one of timm."
        )
    settings = {key: value for key, value in processor.items() if key not in _ABOUT}
    try:
        return getattr(transformers, f"{name}Pil")(**settings)
    except (TypeError, ValueError) as error:
        raise BackboneError(f"preprocessor_config.json: {error}. Restore the file of the backbone.") from None


_ABOUT = {"image_processor_type", "feature_extractor_type", "processor_class", "auto_map"}
Geometry = tuple[Literal["stretch", "crop", "pad"], tuple[int, int], tuple[int, int]]
"""Fit, height and width after resizing, height and width after cropping."""


def _geometry(known: Any, own: int | None) -> Geometry:
    """Geometry of a processor. `own`: side that counts where the processor does not resize."""
    resize, crop = dict(known.size or {}), dict(known.crop_size or {})
    side = resize.get("shortest_edge")
    if type(known).__name__.startswith("ConvNext") and known.do_resize and side:
        if side >= 384:
            return "stretch", (side, side), (side, side)
        whole = int(side / known.crop_pct)
        return "crop", (whole, whole), (side, side)
    cropped = (crop["height"], crop["width"]) if known.do_center_crop and crop.get("height") else None
    if not known.do_resize:
        if own is None:
            raise BackboneError(
                "preprocessor_config.json: do_resize is false, so no size is said. Write image.size, in pixels."
            )
        return "stretch", (own, own), (own, own)
    if resize.get("height") and resize.get("width"):
        resized = (resize["height"], resize["width"])
        return "stretch", resized, cropped or resized
    if side and not resize.get("longest_edge"):
        return "crop", (side, side), cropped or (side, side)
    raise BackboneError(
        f"preprocessor_config.json: size={resize} is no size that all pictures share. Name a backbone whose size has "
        "height and width, or shortest_edge."
    )


def _each(value: Callable[[int], float]) -> Channels:
    return value(0), value(1), value(2)


def _channels(value: Any) -> Channels:
    values = [float(value)] * 3 if isinstance(value, (int, float)) else [float(each) for each in value]
    if len(values) != 3:
        raise BackboneError(f"The backbone normalises {len(values)} channel(s); pictures have three.")
    return values[0], values[1], values[2]
