"""Pretrained backbones and their tokenizers: where they come from, how weights are stored, what computes."""

from __future__ import annotations

import gc
import logging
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging
from transformers.utils.import_utils import is_flash_attn_2_available

from workbench.adapters import anatomy
from workbench.adapters.weights import semi_structured
from workbench.config import ModelConfig
from workbench.config.checks import sparsity_checks
from workbench.config.model_heads import TEXT, ModelHead
from workbench.errors import BackboneError
from workbench.models import origins, packed_attention, pictures, quantisation, weight_storage

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
QUANTISED = quantisation.FORMATS

transformers_logging.disable_progress_bar()
# A table of missing tensors, which `load` judges by itself.
logging.getLogger("transformers.modeling_utils").addFilter(lambda record: "LOAD REPORT" not in record.getMessage())
# One line per layer and step about a cast that is meant.
logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)


@dataclass(frozen=True)
class Backbone:
    """A loaded backbone, and in words what was decided about it."""

    model: PreTrainedModel
    weights: str
    """How the weights are stored: float32, bfloat16, float16, int8, nf4 or fp4."""
    compute: torch.dtype
    """Type that matrix products run in."""
    weight_bytes: int
    """Bytes of all weights as stored, quantisation constants included."""
    notes: list[str] = field(default_factory=list)


class Loader(Protocol):
    """Loads backbones as `load` does, or stands in for it where no weight is to be read."""

    def __call__(
        self,
        config: ModelConfig,
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        task: ModelHead = TEXT,
        trainable: bool = False,
        waiting: bool = False,
    ) -> Backbone:
        """The backbone on this process's device, frozen, in evaluation mode."""


def device() -> torch.device:
    """The accelerator of this process, or the CPU."""
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """The backbone's tokenizer with `model.new_tokens` added.

    No pad token is needed or invented: rows are padded where nothing looks, and masks never read token ids.
    """
    with origins.loading_errors(config, "tokenizer", "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt"):
        loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            origins.path(config), **origins.arguments(config)
        )
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
    with origins.loading_errors(config, "config", "config.json"):
        backbone_config: PretrainedConfig = AutoConfig.from_pretrained(
            origins.path(config), **origins.arguments(config)
        )
    backbone_config.architectures = (
        backbone_config.architectures or []
    )  # DeiT has two classifiers, between which transformers looks there
    return backbone_config


def of_one_sequence(config: ModelConfig, *, recipe: str, take: str = "a causal backbone") -> PretrainedConfig:
    """The architecture of a backbone that reads a text as one sequence; raises BackboneError for an encoder-decoder.

    Args:
        recipe: Names what does not read those.
        take: The backbones that it reads.
    """
    hub = hub_config(config)
    if hub.is_encoder_decoder:
        raise BackboneError(
            f"model.id={config.id}: {type(hub).__name__} is an encoder-decoder, which recipe {recipe} does not read. "
            f"Take {take}."
        )
    return hub


def skeleton(config: ModelConfig, *, task: ModelHead = TEXT, trainable: bool = False) -> PreTrainedModel:
    """The backbone's modules without their weights; refuses what `load` would refuse before it reads a weight."""
    hub, target = task.configured(hub_config(config)), device()
    auto = _auto_class(config, task, hub)
    weights, compute, _ = _precision(config, hub, target, trainable=trainable)
    with origins.loading_errors(config, "config", "config.json"), torch.device("meta"):
        model: PreTrainedModel = auto.from_config(
            hub,
            attn_implementation=_attention(config, compute, target),
            trust_remote_code=config.trust_remote_code,
        )
    if config.sparsity is not None:
        semi_structured.mark(model)
    if weights in QUANTISED:
        quantisation.settings(weights, compute, model)
        quantisation.untranspose(model)
    return model


def blueprint(config: ModelConfig, *, vocabulary: int, task: ModelHead = TEXT, trainable: bool = False) -> Backbone:
    """The backbone as `load` leaves it, from its config.json alone: on the meta device, without numbers.

    Layers that will be quantised are bitsandbytes' already, and their weights not packed yet.

    Args:
        vocabulary: Tokens of the tokenizer; of no account where the backbone reads pictures.
    """
    hub, auto, weights, compute, stored, notes = _decided(config, task, trainable=trainable)
    hub.update({} if config.dropout else dict.fromkeys(_dropouts(hub), 0.0))
    with origins.loading_errors(config, "config", "config.json"), torch.device("meta"):
        model: PreTrainedModel = auto.from_config(
            hub,
            dtype=stored,
            attn_implementation=_attention(config, compute, device()),
            trust_remote_code=config.trust_remote_code,
        )
    if not anatomy.reads_pictures(model):
        embedding = model.get_input_embeddings()
        assert isinstance(embedding, nn.Embedding)
        if vocabulary > embedding.num_embeddings:
            model.resize_token_embeddings(vocabulary, mean_resizing=False)
    if config.sparsity is not None:
        semi_structured.mark(model)
        notes.append(semi_structured.sentence(model))
    if weights in QUANTISED:
        quantisation.replace(model, weights, compute)
    if stored != compute:
        _keep_precise(model, anatomy.fresh_heads(model), compute)
        weight_storage.compute_in(model, compute)
    if anatomy.reads_pictures(model):
        pictures.prepare(model, compute)
    return Backbone(model.requires_grad_(False).eval(), weights, compute, 0, notes)


def load(
    config: ModelConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    task: ModelHead = TEXT,
    trainable: bool = False,
    waiting: bool = False,
) -> Backbone:
    """The backbone on this process's device, frozen, in evaluation mode.

    Args:
        config: Where from, and how weights are stored and computed.
        tokenizer: Decides whether the vocabulary must grow; None for a backbone that reads no text.
        task: What its head is for. A classification head that the weights lack, or have for other classes, starts at
            random; any other tensor must be there.
        trainable: Every weight will train (full fine-tuning), so half-precision storage needs units that compute it.
        waiting: Until `bring` its weights are on the host and not packed. In the precision of their files they take no
            memory, as these are mapped.

    Raises:
        BackboneError: not found, no network, gated, damaged, no such precision, no such head.
    """
    if waiting:
        gc.collect()  # a model that was cut before is in cycles
    hub, auto, weights, compute, stored, notes = _decided(config, task, trainable=trainable)
    packed = weights in QUANTISED and not waiting
    quantised = quantisation.settings(weights, compute, skeleton(config, task=task)) if packed else None
    dropouts = {} if config.dropout else _dropouts(hub)
    hub.update(dict.fromkeys(dropouts, 0.0))
    with origins.loading_errors(config, "weights", "*.safetensors"), torch.random.fork_rng(devices=[]):
        torch.manual_seed(task.seed)
        loaded: Any = auto.from_pretrained(
            origins.path(config),
            config=hub,
            dtype=stored,
            attn_implementation=_attention(config, compute, device()),
            quantization_config=quantised,
            device_map={"": torch.device("cpu") if waiting else device()},
            use_safetensors=True,
            ignore_mismatched_sizes=task.head == "classes",
            output_loading_info=True,
            **origins.arguments(config),
        )
    model: PreTrainedModel = loaded[0]
    model.config.update(dropouts)  # what is saved is configured as it came
    fresh = anatomy.fresh_heads(model)
    # Nothing reads the pooler of a model without a head, and files of a masked language model have none.
    _require_whole(config, loaded[1], fresh if task.head != "hidden" else [*fresh, "pooler"])
    if tokenizer is not None:
        _grow(model, len(tokenizer))
    if config.sparsity is not None:
        semi_structured.prune(model)
        notes.append(semi_structured.sentence(model))
    notes += _packing(model, weights, compute, waiting=waiting) if weights in QUANTISED else []
    if stored != compute:
        _keep_precise(model, fresh, compute)
        weight_storage.compute_in(model, compute)
    if anatomy.reads_pictures(model):
        pictures.prepare(model, compute)
    return Backbone(model.requires_grad_(False).eval(), weights, compute, weight_storage.weight_bytes(model), notes)


def _packing(model: PreTrainedModel, weights: str, compute: torch.dtype, *, waiting: bool) -> list[str]:
    """Finish weights that are packed, or put it off until `bring`; returns sentences on layers that are not."""
    if waiting:
        quantisation.put_off(model, weights, compute)
    else:
        quantisation.settle(model, compute)
    return quantisation.notes(model, weights)


def bring(module: nn.Module) -> None:
    """Copy a module of a waiting model, without its children, to this process's device; pack what is to be packed."""
    quantisation.pack(module, device())
    for tensor in chain(module.parameters(recurse=False), module.buffers(recurse=False)):
        tensor.data = tensor.data.to(device())


class _Decided(NamedTuple):
    """Decisions that are taken before a weight is read."""

    hub: PretrainedConfig
    auto: Any
    """The class of transformers that builds it."""
    weights: str
    compute: torch.dtype
    stored: torch.dtype
    """Type of the weights that are not quantised."""
    notes: list[str]


def _decided(config: ModelConfig, task: ModelHead, *, trainable: bool) -> _Decided:
    packed_attention.register()
    hub = task.configured(hub_config(config))
    weights, compute, notes = _precision(config, hub, device(), trainable=trainable)
    stored = DTYPES.get(weights) or _stored_beside(hub, compute)
    return _Decided(hub, _auto_class(config, task, hub), weights, compute, stored, notes)


def _auto_class(config: ModelConfig, task: ModelHead, hub: PretrainedConfig) -> Any:
    try:
        return task.auto_class(hub)
    except BackboneError as error:
        raise BackboneError(f"model.id={config.id}: {error}") from None


def _require_whole(config: ModelConfig, report: dict[str, Any], fresh: list[str]) -> None:
    """Raise BackboneError where weights are missing, or of another size, that are not those of a `fresh` head."""
    heads = tuple(f"{name}." for name in fresh)
    if missing := sorted(key for key in report["missing_keys"] if not key.startswith(heads)):
        raise BackboneError(
            f"model.id={config.id}: {len(missing)} of the tensors that its config.json asks for are not in its "
            f"weights, such as {missing[0]}. Fetch weights and config.json that belong together."
        )
    if any(not key.startswith(heads) for key, *_ in report["mismatched_keys"]):
        raise BackboneError(f"model.id={config.id} cannot be loaded: {origins.OTHER_SHAPES}")


def _grow(model: PreTrainedModel, vocabulary: int) -> None:
    embedding = model.get_input_embeddings()
    assert isinstance(embedding, nn.Embedding)
    if vocabulary > embedding.num_embeddings:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # new rows start at random values, which must be the same in every process
            model.resize_token_embeddings(vocabulary)


def _dropouts(hub: PretrainedConfig) -> dict[str, float]:
    """Every share of an architecture's own dropout, by its name in the configuration."""
    values = hub.to_dict().items()
    names = ("dropout", "_pdrop", "layerdrop", "drop_path", "drop_connect")
    return {key: value for key, value in values if any(name in key for name in names) and isinstance(value, float)}


def _keep_precise(model: PreTrainedModel, fresh: list[str], compute: torch.dtype) -> None:
    """Store in `compute` what trains from random values, and what casts its inputs to its weight's precision (T5)."""
    kept = {*fresh, *(model._keep_in_fp32_modules or ())}
    for name, module in model.named_modules():
        if name in kept or name.rsplit(".", 1)[-1] in kept:
            module.to(compute)


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
    if getattr(hub, "quantization_config", None) is not None:
        raise BackboneError(
            f"model.id={config.id}: its weights are quantised already. Take the repository that it was made from: "
            "model.weights=nf4 quantises while loading."
        )
    if reason := sparsity_checks.packed(config):
        raise BackboneError(reason)
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
    if compute == "float16":
        slow = "float16 products are slow on a CPU, and " if target.type == "cpu" else "in float16 "
        notes.append(f"{slow}gradients below 6e-8 vanish: model.compute=float32 is safer")
    return weights, DTYPES[compute], notes


_NO_UNITS = ": this device has no bfloat16 units, and emulating them is about three times slower"


def _stored_beside(hub: Any, compute: torch.dtype) -> torch.dtype:
    """Precision of unquantised layers: that of computing, or half precision under float32."""
    own = getattr(hub, "dtype", None)
    return own if compute == torch.float32 and own in weight_storage.HALVES else compute


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
