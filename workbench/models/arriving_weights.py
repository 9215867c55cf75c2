"""Backbones that arrive quantised: by `quant_method` of their config.json, how they are read and what they are here.

bitsandbytes' stay packed: what this package packs itself while loading. FP8, MXFP4, compressed-tensors', torchao's,
GPTQ, AWQ, HQQ and AQLM are dequantised while they are read, which is exact: an FP8 number times its block's scale.
`model.weights=nf4` packs them again, each tensor as soon as it is dequantised. Over others nothing trains here.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING
from transformers.quantizers.base import HfQuantizer

from workbench.config import ModelConfig
from workbench.errors import BackboneError
from workbench.models import packed_integers, weight_formats
from workbench.models.weight_formats import FORMATS


class Dequantised(NamedTuple):
    """A format that is dequantised while it is read."""

    name: str
    package: str | None = None
    """Package that reads it, which is the user's to install."""
    told: bool = True
    """Whether transformers dequantises it, where it is told so; else each tensor does so itself."""
    integers: bool = False
    """Whether the reader is that of `packed_integers`; else transformers' own."""


DEQUANTISED = {
    "fp8": Dequantised("FP8"),
    "mxfp4": Dequantised("MXFP4"),
    "compressed-tensors": Dequantised("compressed-tensors", "compressed_tensors"),
    "torchao": Dequantised("torchao", "torchao", told=False),
    "gptq": Dequantised("GPTQ", integers=True),
    "awq": Dequantised("AWQ", integers=True),
    "hqq": Dequantised("HQQ", integers=True),
    "aqlm": Dequantised("AQLM", integers=True),
}
"""By `quant_method`."""
REPACKED = ("nf4", "fp4")
"""Formats that dequantised weights are packed in again."""


@dataclass(frozen=True)
class Arrival:
    """How the weights of one repository arrive."""

    method: str
    packed: str | None
    """The format that they keep: int8, nf4 or fp4; None: they are dequantised."""
    settings: Mapping[str, Any]
    """Section quantization_config of config.json."""

    def weights(self, config: ModelConfig, *, trainable: bool) -> str:
        """`model.weights` for these; raises BackboneError where something else is asked of them."""
        asked, told = config.weights, f"model.id={config.id}: its weights arrive"
        if self.packed is None:
            if asked in FORMATS and asked not in REPACKED:
                raise BackboneError(
                    f"{told} in {DEQUANTISED[self.method].name} and are dequantised while they are read; "
                    f"{' or '.join(REPACKED)} packs them again, {asked} does not. Write model.weights=nf4 or "
                    "model.weights=bfloat16, or take the repository that it was made from."
                )
            return asked
        if trainable:
            raise BackboneError(
                f"{told} packed in {self.packed}, and have no gradient: adapter.method=full trains them. Take the "
                "repository that it was made from, or write adapter.method=lora."
            )
        if asked not in ("auto", self.packed):
            raise BackboneError(
                f"{told} packed in {self.packed}, and model.weights={asked} is another format. "
                "Write model.weights=auto, or take the repository that it was made from."
            )
        return self.packed

    def prepare(self, hub: PretrainedConfig, compute: torch.dtype) -> None:
        """Tell transformers, in `hub`, to compute what stays packed in this precision, and to dequantise all else."""
        own = {"bnb_4bit_compute_dtype": str(compute).removeprefix("torch.")}
        hub.quantization_config = self._dequantised if self.packed is None else {**self.settings, **own}

    @property
    def _dequantised(self) -> dict[str, Any]:
        format = DEQUANTISED[self.method]
        if format.integers:
            return {
                "quant_method": packed_integers.METHOD,
                "layout": packed_integers.layout_of(self.method, self.settings),
            }
        return {**self.settings, "dequantize": True} if format.told else dict(self.settings)

    def dequantiser(self) -> HfQuantizer:
        """transformers' reader of the format, which dequantises."""
        method = self._dequantised["quant_method"]
        kind: Any = AUTO_QUANTIZATION_CONFIG_MAPPING[method]
        wanted = kind.from_dict(self._dequantised)
        reader: HfQuantizer = AUTO_QUANTIZER_MAPPING[method](wanted, pre_quantized=True)
        reader.validate_environment(device_map=None)
        return reader

    def settle(self, model: PreTrainedModel, stored: torch.dtype) -> None:
        """Let a model that was read be saved as a plain one, and be all of the precision `stored` if dequantised."""
        if self.packed is None and not DEQUANTISED[self.method].told:
            for module in model.modules():
                for name, weight in module.named_parameters(recurse=False):
                    if weight_formats.is_quantised(weight):
                        setattr(module, name, nn.Parameter(weight.dequantize(), requires_grad=False))
            if (reader := vars(model).pop("hf_quantizer", None)) is not None:
                reader.remove_quantization_config(model)
        vars(model).pop("_weight_conversions", None)  # by which transformers would quantise again what it saves
        if self.packed is None and stored == torch.float32:
            # transformers leaves what was not quantised in the precision of the files, and refuses to cast itself where
            # the rest was packed again, which is of integers and stays.
            nn.Module.float(model)

    def describe(self, wanted: Any, model: PreTrainedModel) -> None:
        """Say in the settings by which a model without weights is packed how these are."""
        skipped, kept = self.settings.get("llm_int8_skip_modules"), list(model._keep_in_fp32_modules or ())
        wanted.llm_int8_skip_modules = list(HfQuantizer.get_modules_to_not_convert(model, skipped, kept))
        wanted.bnb_4bit_use_double_quant = bool(self.settings.get("bnb_4bit_use_double_quant"))


def of(hub: PretrainedConfig, config: ModelConfig) -> Arrival | None:
    """How the weights of a repository arrive; None where they are plain numbers.

    Raises:
        BackboneError: In a format over which nothing trains here.
    """
    settings = getattr(hub, "quantization_config", None)
    if settings is None:
        return None
    values: dict[str, Any] = dict(settings) if isinstance(settings, Mapping) else settings.to_dict()
    method = str(values.get("quant_method") or "bitsandbytes").removesuffix("_4bit").removesuffix("_8bit")
    if method in DEQUANTISED:
        package = DEQUANTISED[method].package
        if package is not None and find_spec(package) is None:
            raise BackboneError(
                f"model.id={config.id}: its weights are quantised by {method}, whose package reads them. Write "
                f"`pip install {package.replace('_', '-')}`."
            )
        if DEQUANTISED[method].integers:
            try:
                packed_integers.layout_of(method, values)
            except ValueError as error:
                raise BackboneError(
                    f"model.id={config.id}: its weights are quantised by {method} {error}. Take the repository that it "
                    "was made from: model.weights=nf4 quantises while loading."
                ) from None
        return Arrival(method, None, values)
    if method == "bitsandbytes":
        four = values.get("load_in_4bit") or values.get("_load_in_4bit")
        return Arrival(method, str(values.get("bnb_4bit_quant_type", "fp4")) if four else "int8", values)
    raise BackboneError(
        f"model.id={config.id}: its weights are quantised already, by {method}, over which nothing trains here (only "
        f"over bitsandbytes, {', '.join(each.name for each in DEQUANTISED.values())}). Take the repository that it was "
        "made from: model.weights=nf4 quantises while loading."
    )


def plain(hub: PretrainedConfig) -> PretrainedConfig:
    """The architecture alone, of which a model without weights is built."""
    if getattr(hub, "quantization_config", None) is None:
        return hub
    hub = copy(hub)
    del hub.quantization_config
    return hub
