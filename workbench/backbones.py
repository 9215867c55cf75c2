"""Pretrained backbones and their tokenizers: where they come from, how weights are stored, what computes."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging
from transformers.utils.import_utils import is_flash_attn_2_available

from workbench import starter, storage
from workbench.config import ModelConfig
from workbench.errors import BackboneError, WorkbenchError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
QUANTISED = ("int8", "nf4", "fp4")

transformers_logging.disable_progress_bar()
# One line per layer and step about a cast that is meant.
logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)


@dataclass(frozen=True)
class Backbone:
    """A loaded backbone, and in words what was decided about it."""

    model: PreTrainedModel
    weights: str
    """How the weights are stored: float32, bfloat16, float16, int8, nf4 or fp4."""
    compute: torch.dtype
    """What matrix products run in."""
    weight_bytes: int
    """Bytes of all weights as stored, quantisation constants included."""
    notes: list[str] = field(default_factory=list)


def device() -> torch.device:
    """The accelerator of this process, or the CPU."""
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """The backbone's tokenizer with `model.new_tokens` added.

    No pad token is needed or invented: rows are padded where nothing looks, and masks never read token ids.
    """
    with _told(config, "tokenizer", "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt"):
        loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(_path(config), **_origin(config))
    if config.new_tokens:
        known = [token for token in config.new_tokens if token in loaded.get_vocab()]
        if known:
            raise BackboneError(
                f"model.new_tokens: {', '.join(known)} already in the vocabulary of {config.id}. Leave them out."
            )
        loaded.add_tokens(list(config.new_tokens), special_tokens=True)
    return loaded


def hub_config(config: ModelConfig) -> PretrainedConfig:
    """The backbone's architecture, without its weights."""
    with _told(config, "config", "config.json"):
        found: PretrainedConfig = AutoConfig.from_pretrained(_path(config), **_origin(config))
    return found


def skeleton(config: ModelConfig, *, trainable: bool = False) -> PreTrainedModel:
    """The backbone's modules without their weights; refuses what `load` would refuse before it reads a weight."""
    hub, target = hub_config(config), device()
    if type(hub) not in MODEL_FOR_CAUSAL_LM_MAPPING and "AutoModelForCausalLM" not in getattr(hub, "auto_map", {}):
        raise BackboneError(
            f"model.id={config.id}: {type(hub).__name__} has no causal language model. "
            "Take one that AutoModelForCausalLM loads."
        )
    _, compute, _ = _precision(config, hub, target, trainable=trainable)
    with _told(config, "config", "config.json"), torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            hub,
            attn_implementation=_attention(config, compute, target),
            trust_remote_code=config.trust_remote_code,
        )
    return model


def load(config: ModelConfig, tokenizer: PreTrainedTokenizerBase, *, trainable: bool = False) -> Backbone:
    """The backbone on this process's device, frozen, in evaluation mode.

    Args:
        config: Where from, and how weights are stored and computed.
        tokenizer: Decides whether the vocabulary must grow.
        trainable: Every weight will train (full fine-tuning), so half-precision storage needs units that compute it.

    Raises:
        BackboneError: not found, no network, gated, damaged, no such precision, not a causal language model.
    """
    target = device()
    hub = hub_config(config)
    weights, compute, notes = _precision(config, hub, target, trainable=trainable)
    with _told(config, "weights", "*.safetensors"):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            _path(config),
            dtype=DTYPES.get(weights, compute),
            attn_implementation=_attention(config, compute, target),
            quantization_config=_quantisation(weights, compute),
            device_map={"": target},
            use_safetensors=True,
            output_loading_info=True,
            **_origin(config),
        )
    model: PreTrainedModel = loaded[0]
    if missing := loaded[1]["missing_keys"]:
        raise BackboneError(
            f"model.id={config.id}: {len(missing)} of the tensors that its config.json asks for are not in its "
            f"weights, such as {min(missing)}. Fetch weights and config.json that belong together."
        )
    embedding = model.get_input_embeddings()
    assert isinstance(embedding, nn.Embedding)
    if len(tokenizer) > embedding.num_embeddings:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # new rows start at random values, which must be the same in every process
            model.resize_token_embeddings(len(tokenizer))
    if weights in ("bfloat16", "float16") and compute == torch.float32:
        storage.compute_in_float32(model)
    return Backbone(model.requires_grad_(False).eval(), weights, compute, storage.weight_bytes(model), notes)


@lru_cache
def has_bfloat16_units(target: torch.device) -> bool:
    """Whether the device multiplies bfloat16 matrices in hardware rather than by emulation."""
    if target.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if target.type == "cpu":
        flags = torch.backends.cpu.get_cpu_capability()
        cpuinfo = Path("/proc/cpuinfo")
        text = cpuinfo.read_text() if cpuinfo.exists() else ""
        return "avx512_bf16" in text or "amx_bf16" in text or (" bf16" in text and flags != "DEFAULT")
    return True


def _precision(
    config: ModelConfig, hub: Any, target: torch.device, *, trainable: bool
) -> tuple[str, torch.dtype, list[str]]:
    native = has_bfloat16_units(target)
    notes = []
    weights: str = config.weights
    if weights == "auto":
        stored = str(getattr(hub, "dtype", None) or torch.float32).removeprefix("torch.")
        half = native or (stored != "float32" and not trainable)
        weights = (stored if stored == "float16" and not native else "bfloat16") if half else "float32"
    compute = config.compute
    if compute == "auto":
        compute = "float32" if weights == "float32" or not native else "bfloat16"
    if weights == "float32" and compute != "float32":
        raise BackboneError(
            f"model.compute={compute} with model.weights=float32: write model.weights={compute} as well; "
            "trainable parts keep float32 masters anyway."
        )
    if trainable and weights != compute:
        raise BackboneError(
            f"adapter.method=full cannot train {weights} weights that are computed in {compute}: "
            f"write model.weights={compute}."
        )
    if weights != compute and weights in DTYPES:
        notes.append(f"weights stored in {weights}, computed in {compute}" + ("" if native else _NO_UNITS))
    elif compute == "bfloat16" and not native:
        notes.append("bfloat16 products are emulated on this device and slow; model.compute=float32 is faster")
    return weights, DTYPES[compute], notes


_NO_UNITS = ": this device has no bfloat16 units, and emulating them is about three times slower"


def _quantisation(weights: str, compute: torch.dtype) -> BitsAndBytesConfig | None:
    if weights not in QUANTISED:
        return None
    if weights == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=weights,
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=compute,
    )


def _attention(config: ModelConfig, compute: torch.dtype, target: torch.device) -> str | None:
    """The kernel to ask for; None lets transformers take sdpa where the family has it, eager otherwise."""
    flash = target.type == "cuda" and compute != torch.float32 and is_flash_attn_2_available()
    if config.attention == "flash_attention_2" and not flash:
        raise BackboneError(
            "model.attention=flash_attention_2 needs a CUDA device, half precision and the package flash-attn. "
            "Write model.attention=auto."
        )
    if config.attention == "flex_attention" and target.type == "cpu":
        raise BackboneError("model.attention=flex_attention has no gradients on a CPU. Write model.attention=auto.")
    if config.attention != "auto":
        return config.attention
    return "flash_attention_2" if flash else None


def _path(config: ModelConfig) -> str:
    path = starter.resolve(config.id)
    looks_local = path.startswith((".", "/", "~")) or path.count("/") > 1
    if looks_local and not Path(path).expanduser().is_dir():
        raise BackboneError(
            f"model.id: no folder {config.id}. Write an existing folder, a hub id such as "
            "Qwen/Qwen3-0.6B, or `starter`."
        )
    if config.revision is not None and Path(path).expanduser().is_dir():
        raise BackboneError(
            f"model.revision={config.revision} names a branch, tag or commit on the hub, but model.id={config.id} is a "
            "folder. Leave model.revision out."
        )
    return str(Path(path).expanduser()) if looks_local else path


def _origin(config: ModelConfig) -> dict[str, Any]:
    return {"revision": config.revision or "main", "trust_remote_code": config.trust_remote_code}


class _told:
    """Turns what transformers, safetensors and the hub raise while loading into a BackboneError that says what to do.

    Args:
        part: What is loaded, in a word.
        patterns: The files of a folder that hold it; one of them is enough.
    """

    def __init__(self, config: ModelConfig, part: str, *patterns: str) -> None:
        self.id = config.id
        self.part = part
        self.patterns = patterns

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        # Foreign code over foreign files: whatever it raises, the backbone cannot be loaded.
        if isinstance(error, Exception) and not isinstance(error, WorkbenchError):
            raise BackboneError(f"model.id={self.id} cannot be loaded: {self._why(error)}") from error

    def _why(self, error: Exception) -> str:
        text = " ".join(str(error).split())
        folder = Path(starter.resolve(self.id)).expanduser()
        if isinstance(error, torch.OutOfMemoryError):
            return "it does not fit into the device's memory. Write model.weights=nf4, or take a smaller one."
        for words, cure in (_CURES if folder.is_dir() else _CURES | _HUB_CURES).items():
            if any(word in text for word in words):
                return cure.format(id=self.id)
        if not folder.is_dir():
            return f"{type(error).__name__}: {text[:300]}"
        if not any(path for pattern in self.patterns for path in folder.glob(pattern)):
            return f"the folder holds no {self.part} ({', '.join(self.patterns)}). Save or fetch all of it."
        return f"damaged {self.part} ({type(error).__name__}: {text[:300].rstrip('.')}). Save or fetch all of it again."


_CURES = {
    ("trust_remote_code",): "it brings its own Python code. If you trust its authors, write "
    "model.trust_remote_code=true.",
    ("does not recognize this architecture",): "this version of transformers does not know its architecture. Update "
    "transformers, or take another backbone.",
    ("ignore_mismatched_sizes",): "its weights do not have the shapes that its config.json asks for. Fetch "
    "weights and config.json that belong together.",
}
_HUB_CURES = {
    ("couldn't connect", "offline mode"): "the hub cannot be reached and the files are not cached. Write a folder as "
    "model.id, use the shipped `starter`, or fetch it where there is a network: hf download {id}",
    ("gated", "401"): "it is gated or private: accept its terms on the hub, then run: hf auth login",
    (
        "not a valid model identifier",
        "404",
    ): "no such folder, and no such id on the hub. Check the spelling: owner/name",
}
"""Words of an error message to what a person should do about it; the first that fits is told."""
