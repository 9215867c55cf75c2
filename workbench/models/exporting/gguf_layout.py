"""Names, order and settings of a backbone's tensors in GGUF, for the architectures that are known here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import gguf
import torch
from torch import Tensor
from transformers import PretrainedConfig

from workbench.errors import BackboneError

ARCHITECTURES = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2, "qwen3": gguf.MODEL_ARCH.QWEN3}
"""GGUF's architecture of each `model_type` of transformers."""
_SWITCHES = ("mlp_bias", "use_sliding_window", "quantization_config")
"""Settings of transformers that GGUF's architectures have no place for."""


class GgufLayout:
    """How the tensors of one backbone are named and ordered in GGUF.

    Raises:
        BackboneError: GGUF would compute something else.
    """

    def __init__(self, config: PretrainedConfig) -> None:
        require_known(config)
        self.config: Any = config
        self.architecture = ARCHITECTURES[config.model_type]
        self._names = gguf.get_tensor_name_map(self.architecture, self.config.num_hidden_layers)

    @property
    def name(self) -> str:
        """Architecture as GGUF writes it."""
        return gguf.MODEL_ARCH_NAMES[self.architecture]

    @property
    def head_width(self) -> int:
        """Numbers of an attention head."""
        own: int | None = getattr(self.config, "head_dim", None)
        return own or self.config.hidden_size // self.config.num_attention_heads

    def tensor_name(self, path: str) -> str:
        """The name in GGUF of a parameter of transformers; raises BackboneError where there is none."""
        gguf_name: str | None = self._names.get_name(path, try_suffixes=(".weight", ".bias"))
        if gguf_name is None:
            raise BackboneError(f"GGUF's architecture {self.name} has no place for {path}. Export --to merged.")
        return gguf_name

    def ordered(self, path: str, tensor: Tensor) -> Tensor:
        """Rows of a parameter, or of what is multiplied to it on the left, in GGUF's order."""
        return self._reordered(path, tensor, _interleaved)

    def restored(self, path: str, tensor: Tensor) -> Tensor:
        """Rows in transformers' order again."""
        return self._reordered(path, tensor, _in_halves)

    def _reordered(self, path: str, tensor: Tensor, order: Callable[[Tensor, int], Tensor]) -> Tensor:
        # llama.cpp turns neighbouring numbers of Llama's queries and keys, transformers those half a head apart.
        if self.config.model_type != "llama":
            return tensor
        if ".q_proj." in path:
            return order(tensor, self.config.num_attention_heads)
        if ".k_proj." in path:
            return order(tensor, self.config.num_key_value_heads)
        return tensor

    def write_settings(self, writer: gguf.GGUFWriter) -> None:
        """Sizes of the architecture."""
        config = self.config
        writer.add_context_length(config.max_position_embeddings)
        writer.add_embedding_length(config.hidden_size)
        writer.add_block_count(config.num_hidden_layers)
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count(config.num_attention_heads)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_key_length(self.head_width)
        writer.add_value_length(self.head_width)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_rope_dimension_count(self.head_width)
        writer.add_rope_freq_base(rope(config)["rope_theta"])
        writer.add_vocab_size(config.vocab_size)


def require_known(config: PretrainedConfig) -> None:
    """Raise BackboneError where this version writes no GGUF of an architecture, or GGUF would compute another."""
    known = ", ".join(ARCHITECTURES)
    cure = "Export --to merged and convert that with llama.cpp's own convert_hf_to_gguf.py."
    if config.model_type not in ARCHITECTURES:
        raise BackboneError(f"--to gguf writes {known}, and this backbone is {config.model_type}. {cure}")
    values: Any = config
    odd = {key: getattr(values, key) for key in _SWITCHES if getattr(values, key, None)}
    if values.hidden_act != "silu":
        odd["hidden_act"] = values.hidden_act
    if (kind := rope(config).get("rope_type", "default")) != "default":
        odd["rope_type"] = kind
    if odd:
        shown = ", ".join(f"{key}={value}" for key, value in odd.items())
        raise BackboneError(f"GGUF as --to gguf writes it has no place for {shown} of this backbone. {cure}")


def rope(config: PretrainedConfig) -> Mapping[str, Any]:
    """Settings of rotary position embeddings."""
    rope_settings: Mapping[str, Any] = config.rope_parameters
    return rope_settings


def _interleaved(tensor: Tensor, heads: int) -> Tensor:
    """Rows of each head from two halves to pairs."""
    interleaved: Tensor = tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(tensor.shape)
    return interleaved


def _in_halves(tensor: Tensor, heads: int) -> Tensor:
    reordered: Tensor = tensor.unflatten(0, (heads, -1, 2)).transpose(1, 2).reshape(tensor.shape)
    return reordered


def read_array(tensor: gguf.ReaderTensor) -> Tensor:
    """The numbers of a tensor that was read, in float32."""
    return torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
