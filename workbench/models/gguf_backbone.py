"""Backbones in a GGUF file of llama.cpp: config.json, and the numbers that blocks of a few bits stand for.

Architectures are those that `exporting.gguf_files` writes. Numbers are dequantised by gguf's own formulas, each tensor
when transformers asks for it, so that `model.weights=nf4` packs one at a time.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gguf
import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.integrations.ggml import GGUF_CONFIG_MAPPING
from transformers.integrations.gguf.reader import (
    GgufHeader,
    LazyGgufTensor,
    load_gguf_state_dict,
    read_gguf_metadata,
)

from workbench.errors import BackboneError
from workbench.models.exporting.gguf_files import ARCHITECTURES, GgufLayout

CURE = "Take the repository that it was made from: model.weights=nf4 quantises while loading."


def config(path: Path) -> PretrainedConfig:
    """The architecture, by transformers' names of its settings. Raises BackboneError: one that is not read here."""
    return deepcopy(_config(path, path.stat().st_mtime))


@lru_cache(maxsize=4)
def _config(path: Path, _changed: float) -> PretrainedConfig:
    metadata, names = read_gguf_metadata(str(path))
    architecture = metadata["general.architecture"]
    known = {gguf.MODEL_ARCH_NAMES[each]: model_type for model_type, each in ARCHITECTURES.items()}
    if architecture not in known:
        raise BackboneError(
            f"{path}: of GGUF files, {', '.join(sorted(known))} are read, and not {architecture}. {CURE}"
        )
    if metadata.get("split.count", 1) > 1:
        raise BackboneError(
            f"{path}: it is one part of several. Join them: llama-gguf-split --merge {path.name} OUT.gguf"
        )
    scaled = str(metadata.get(f"{architecture}.rope.scaling.type", "none"))
    if scaled != "none" or "rope_freqs.weight" in names:
        raise BackboneError(
            f"{path}: its rotary embeddings are scaled, by settings that a GGUF file does not hold. {CURE}"
        )
    settings: Any = GGUF_CONFIG_MAPPING
    mapped = {**settings[architecture], "attention.key_length": "head_dim"}
    values = {
        name: metadata[f"{prefix}.{key}"]
        for prefix, keys in ((architecture, mapped), ("tokenizer", settings["tokenizer"]))
        for key, name in keys.items()
        if name is not None and f"{prefix}.{key}" in metadata
    }
    values |= {"vocab_size": metadata["tokenizer.ggml.tokens"], "tie_word_embeddings": "output.weight" not in names}
    hub: PretrainedConfig = AutoConfig.for_model(known[architecture], **values)
    return hub


def tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """The tokenizer that the file describes, by transformers' reader, which would mix it with files beside it."""
    with TemporaryDirectory() as alone:
        Path(alone, path.name).symlink_to(path.resolve())
        found: PreTrainedTokenizerBase = PreTrainedTokenizerFast.from_pretrained(alone, gguf_file=path.name)
    found.name_or_path = str(path)
    return found


@dataclass(frozen=True)
class Stored:
    """A tensor of the file, which is read and dequantised where it is indexed."""

    blocks: LazyGgufTensor
    layout: GgufLayout
    path: str
    """Name of the parameter."""

    def __getitem__(self, _: Any) -> Tensor:
        rows = self.blocks.data.reshape(*self.blocks.shape[:-1], -1)
        values = gguf.dequantize(rows, gguf.GGMLQuantizationType(self.blocks.ggml_type))
        return self.layout.restored(self.path, torch.tensor(values)).contiguous()


def tensors(path: Path, hub: PretrainedConfig) -> dict[str, Any]:
    """What stands for each parameter of the language model.

    Raises:
        BackboneError: The file holds other tensors, or lacks some.
    """
    layout, found = GgufLayout(hub), load_gguf_state_dict(GgufHeader.from_file(str(path)))
    with torch.device("meta"):
        wanted = list(AutoModelForCausalLM.from_config(hub).state_dict())
    if layout.config.tie_word_embeddings:
        wanted.remove("lm_head.weight")
    names = {layout.tensor_name(name): name for name in wanted}
    if odd := sorted(found.keys() ^ names.keys()):
        raise BackboneError(
            f"{path}: it lacks tensors of {hub.model_type}, or holds others: {', '.join(odd[:3])}. {CURE}"
        )
    return {name: Stored(found[key], layout, name) for key, name in names.items()}
