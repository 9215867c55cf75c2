"""Pretrained backbones and their tokenizers: where they come from, how weights are stored, what computes."""

from __future__ import annotations

import gc
import json
import logging
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import snapshot_download, try_to_load_from_cache
from safetensors import safe_open
from torch import nn
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import IMAGE_PROCESSOR_NAME, PROCESSOR_NAME, VIDEO_PROCESSOR_NAME
from transformers.utils import logging as transformers_logging
from transformers.utils.hub import cached_file
from transformers.utils.import_utils import is_flash_attn_2_available

from workbench.adapters import Full, anatomy, stock
from workbench.adapters.weights import semi_structured
from workbench.config import ModelConfig, RunConfig
from workbench.config.checks import method_checks
from workbench.config.model_heads import TEXT, ModelHead
from workbench.config.sections.distill_config import TEACHER
from workbench.data import starter
from workbench.errors import BackboneError, WorkbenchError, out_of_memory
from workbench.losses.chunked_loss import planned_bfloat16
from workbench.models import (
    arriving_weights,
    attention_backend,
    flash_kernels,
    optional_kernels,
    pictures,
    sounds,
    weight_formats,
)
from workbench.models.backbone_source import UNREACHABLE, gguf_file, require_whole, source_arguments, source_path
from workbench.runs import provenance

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
QUANTISED = weight_formats.FORMATS
FEW = 20
"""Tokens that a message writes out."""

OTHER_SHAPES = (
    "its weights do not have the shapes that its config.json asks for. Fetch weights and config.json that belong "
    "together."
)


class loading_errors:
    """Turns errors of transformers, safetensors and the hub while loading into a BackboneError that says what to do.

    Args:
        part: A word for what is loaded.
        patterns: The files of a folder that hold it; one of them is enough.
    """

    def __init__(self, config: ModelConfig, part: str, *patterns: str) -> None:
        self.id, self.part, self.patterns = config.id, part, patterns

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        # Whatever foreign code raises over foreign files, the backbone cannot be loaded.
        if isinstance(error, Exception) and not isinstance(error, WorkbenchError):
            raise BackboneError(f"model.id={self.id} cannot be loaded: {self._why(error)}") from error

    def _why(self, error: Exception) -> str:
        text = " ".join(str(error).split())
        folder = Path(starter.resolve(self.id)).expanduser()
        if isinstance(error, torch.OutOfMemoryError):
            return "it does not fit into the device's memory. Write model.weights=nf4, or take a smaller one."
        if out_of_memory(error):
            return (
                "the machine's memory is exhausted. End other programs, write model.weights=nf4, or take a smaller one."
            )
        for words, cure in (_CURES if folder.is_dir() else _CURES | _HUB_CURES).items():
            if any(word in text for word in words):
                return cure.format(id=self.id)
        if not folder.is_dir():
            return f"{type(error).__name__}: {text[:300]}"
        if not any(True for pattern in self.patterns for _ in folder.glob(pattern)):
            return f"the folder holds no {self.part} ({', '.join(self.patterns)}). Save or fetch all of it."
        return f"damaged {self.part} ({type(error).__name__}: {text[:300].rstrip('.')}). Save or fetch all of it again."


_CURES = {
    ("trust_remote_code",): "it brings its own Python code. If you trust its authors, write "
    "model.trust_remote_code=true, or --trust to read a run that had it.",
    ("does not recognize this architecture",): "this version of transformers does not know its architecture. Update "
    "transformers, or take another backbone.",
    ("ignore_mismatched_sizes",): OTHER_SHAPES,
    ("requires the timm library",): "it is a model of timm, which is not installed. Run: pip install timm, with the "
    "torchvision of this build of torch.",
    ("torchvision::nms",): "timm needs torchvision, and the one that is installed was made for another build of torch. "
    "Install that of this one.",
}


_HUB_CURES = {
    ("couldn't connect", "offline mode"): UNREACHABLE,
    ("gated", "401"): "it is gated or private: accept its terms on the hub, then run: hf auth login",
    (
        "not a valid model identifier",
        "404",
    ): "no such folder, and no such id on the hub. Check the spelling: owner/name",
}  # words of an error message, and what to do about it; the first match counts


transformers_logging.disable_progress_bar()


# Hide a table of missing tensors, which `load` checks itself.
logging.getLogger("transformers.modeling_utils").addFilter(lambda record: "LOAD REPORT" not in record.getMessage())


# Hide one line per layer and step about a cast that is intended.
logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)


@dataclass(frozen=True)
class Backbone:
    """A loaded backbone, and notes on what was decided about it."""

    model: PreTrainedModel
    weights: str  # how the weights are stored: float32, bfloat16, float16, int8, nf4, fp4 or fp8
    compute: torch.dtype  # type in which matrix products are computed
    weight_bytes: int  # bytes of all weights as stored, quantisation constants included
    notes: list[str] = field(default_factory=list)


Loader = Callable[..., Backbone]  # loads backbones as `load` does, or replaces it where no weights should be read


def device() -> torch.device:
    """The accelerator of this process, or the CPU."""
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """The backbone's tokenizer with `model.new_tokens` added.

    It needs no pad token: masks come from lengths, never from token ids.

    Args:
        config: Where the backbone is; a run has it as `config.model`.

    Returns:
        A tokenizer of transformers.

    Raises:
        BackboneError: Not found, no network, gated or damaged, or a new token is known already.

    Examples:
        >>> import workbench
        >>> from workbench.config import ModelConfig, RunConfig
        >>> tokenizer = workbench.load_tokenizer(ModelConfig(id="starter", new_tokens=("<|tool|>",)))
        >>> tokenizer.decode(tokenizer("<|tool|>").input_ids)
        '<|tool|>'
    """
    with loading_errors(config, "tokenizer", "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt"):
        loaded: PreTrainedTokenizerBase = (
            AutoTokenizer.from_pretrained(source_path(config), **source_arguments(config))
            if (file := gguf_file(config)) is None
            else _gguf_backbone().tokenizer(file)
        )
    rowless = _rowless(config, loaded)
    if known := [token for token in config.new_tokens if token in loaded.get_vocab() and token not in rowless]:
        raise BackboneError(
            f"model.new_tokens: {', '.join(known)} already in the vocabulary of {config.id}. Leave them out."
        )
    if unnamed := [token for token in rowless if token not in config.new_tokens and token != loaded.pad_token]:
        tokens = json.dumps([*unnamed, *config.new_tokens], ensure_ascii=False)
        word = f"model.new_tokens='{tokens}'" if len(unnamed) <= FEW else "their names as model.new_tokens='[...]'"
        raise BackboneError(
            f"model.id={config.id}: its tokenizer has {len(rowless)} tokens for which its embedding has no rows, such "
            f"as {unnamed[0]}. Write {word}, which trains and saves their rows (recipes that predict tokens), or give "
            "the model rows of its own with transformers' resize_token_embeddings."
        )
    loaded.add_tokens([token for token in config.new_tokens if token not in rowless], special_tokens=True)
    return loaded


def _gguf_backbone() -> Any:
    from workbench.models import gguf_backbone  # few backbones need gguf

    return gguf_backbone


def _rowless(config: ModelConfig, loaded: PreTrainedTokenizerBase) -> list[str]:
    """Tokens of a backbone's tokenizer beyond the rows of its embedding; none where only the tokenizer is there."""
    source = source_path(config)
    if Path(source).is_dir() and not (Path(source) / "config.json").exists() and gguf_file(config) is None:
        return []
    rows: int | None = getattr(hub_config(config).get_text_config(), "vocab_size", None)
    if rows is None or len(loaded) <= rows:
        return []
    return [token for token, number in sorted(loaded.get_vocab().items(), key=itemgetter(1)) if number >= rows]


def new_token_ids(config: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokens whose rows train: `model.new_tokens`, and with them all others for which the embedding has no rows."""
    if not config.new_tokens:
        return []
    return [tokenizer.get_vocab()[token] for token in dict.fromkeys([*config.new_tokens, *_rowless(config, tokenizer)])]


def hub_config(config: ModelConfig) -> PretrainedConfig:
    """The backbone's architecture, without its weights."""
    require_whole(config)
    with loading_errors(config, "config", "config.json"):
        backbone_config: PretrainedConfig = (
            AutoConfig.from_pretrained(source_path(config), **source_arguments(config))
            if (file := gguf_file(config)) is None
            else _gguf_backbone().config(file)
        )
    # DeiT has two classifiers; transformers chooses by this field, which may be None.
    backbone_config.architectures = backbone_config.architectures or []
    return backbone_config


def of_one_sequence(config: ModelConfig, *, recipe: str, take: str = "a causal backbone") -> PretrainedConfig:
    """The architecture of a backbone that reads a text as one sequence; raises BackboneError for an encoder-decoder.
    `recipe`: what cannot use an encoder-decoder, for the message. `take`: what to take instead, for the message."""
    hub = hub_config(config)
    if hub.is_encoder_decoder:
        raise BackboneError(
            f"model.id={config.id}: {type(hub).__name__} is an encoder-decoder, which recipe {recipe} does not read. "
            f"Take {take}."
        )
    return hub


def skeleton(config: ModelConfig, *, task: ModelHead = TEXT, trainable: bool = False) -> PreTrainedModel:
    """The backbone's modules without weights; refuses what `load` refuses before it reads weights."""
    hub, target = task.configured(hub_config(config)), device()
    auto = _auto_class(config, task, hub)
    weights, compute, _ = _precision(config, hub, target, trainable=trainable)
    with loading_errors(config, "config", "config.json"), torch.device("meta"):
        model: PreTrainedModel = auto.from_config(
            arriving_weights.plain(hub),
            attn_implementation=_attention(config, compute, target),
            trust_remote_code=config.trust_remote_code,
        )
    if config.sparsity is not None:
        semi_structured.mark(model)
    if weights in QUANTISED:
        weight_formats.quantisation_settings(weights, compute, model)
        weight_formats.untranspose(model)
    return model


def with_arriving_weights(config: RunConfig) -> RunConfig:
    """A configuration that says in which format weights are stored, where these arrive quantised.

    Raises:
        BackboneError: Its method cannot train over them.
    """
    model = config.model
    if model.id == TEACHER or arriving_weights.of(hub_config(model), model) is None:
        return config
    method, facts = config.adapter.method, config.adapter.facts
    weights = _precision(model, hub_config(model), device(), trainable=isinstance(config.adapter, Full))[0]
    if weights not in facts.weights:
        raise BackboneError(
            f"model.id={model.id}: its weights arrive in {weights}, over which adapter.method={method} does not work: "
            f"{facts.why_weights}. Write adapter.method=lora, or take the repository that it was made from."
        )
    return config.model_copy(update={"model": model.model_copy(update={"weights": weights})})


def blueprint(config: ModelConfig, *, vocabulary: int, task: ModelHead = TEXT, trainable: bool = False) -> Backbone:
    """The backbone as `load` returns it, from its config.json alone: on the meta device, without values.

    Layers that will be quantised are bitsandbytes' layers with unpacked weights. `vocabulary`: tokens of the tokenizer;
    ignored where the backbone reads none.
    """
    hub, auto, weights, compute, stored, notes = _decided(config, task, trainable=trainable)
    with loading_errors(config, "config", "config.json"), torch.device("meta"):
        model: PreTrainedModel = auto.from_config(
            arriving_weights.plain(hub),
            dtype=stored,
            attn_implementation=_attention(config, compute, device()),
            trust_remote_code=config.trust_remote_code,
        )
    if not config.dropout:
        stock.without_dropout(model)
    if anatomy.reads_tokens(model):
        embedding = model.get_input_embeddings()
        assert isinstance(embedding, nn.Embedding)
        if config.new_tokens and vocabulary > embedding.num_embeddings:
            model.resize_token_embeddings(vocabulary, mean_resizing=False)
    if config.sparsity is not None:
        semi_structured.mark(model)
        notes.append(semi_structured.sentence(model))
    if weights in QUANTISED:
        wanted = weight_formats.quantisation_settings(weights, compute, model)
        if (arrival := arriving_weights.of(hub, config)) is not None and arrival.packed:
            arrival.describe(wanted, model)
        weight_formats.replace(model, wanted)
    notes += anatomy.about_towers(model)
    return Backbone(_prepared(model, anatomy.fresh_heads(model), stored, compute), weights, compute, 0, notes)


def load(
    config: ModelConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    task: ModelHead = TEXT,
    trainable: bool = False,
    waiting: bool = False,
) -> Backbone:
    """The backbone on this process's device, frozen, in evaluation mode. Raises BackboneError: not found, no network,
    gated, damaged, no such precision, no such head.

    Args:
        config: Its source, and how weights are stored and computed.
        tokenizer: Decides how far the vocabulary grows for `model.new_tokens`; None for a backbone that reads no text.
        task: What its head is for. A classification head that the weights lack, or have for other classes, starts at
            random; any other tensor must be there.
        trainable: Every weight will train (full fine-tuning), so half-precision storage needs units that compute it.
        waiting: Keep the weights on the host and unpacked until `bring`. In the precision of their files, which are
            memory-mapped, they take no memory.

    Returns:
        The `model`, how its `weights` are stored, the type that it computes in (`compute`), and `notes`.

    Raises:
        BackboneError: Not found, no network, gated, damaged, no such precision, no such head.

    Examples:
        >>> import torch, workbench
        >>> from workbench.config import ModelConfig, RunConfig
        >>> section = ModelConfig(id="starter", weights="float32")
        >>> tokenizer = workbench.load_tokenizer(section)
        >>> backbone = workbench.load_backbone(section, tokenizer)
        >>> backbone.model.config.model_type, backbone.weights, backbone.compute
        ('llama', 'float32', torch.float32)
    """
    gc.collect()  # an earlier model may be in reference cycles
    hub, auto, weights, compute, stored, notes = _decided(config, task, trainable=trainable)
    arrival = arriving_weights.of(hub, config)
    if waiting and arrival is not None and arrival.packed:
        raise BackboneError(
            f"model.id={config.id}: its weights arrive packed in {weights}, and devices that share weights pack them "
            "themselves. Write distributed.zero=1, or take the repository that it was made from."
        )
    quantised = None
    if arrival is not None:
        arrival.prepare(hub, compute)
    if weights in QUANTISED and not waiting and (arrival is None or not arrival.packed):
        reader = None if arrival is None else arrival.dequantiser()
        hub = arriving_weights.plain(hub)
        quantised = weight_formats.quantisation_settings(weights, compute, skeleton(config, task=task), reader)
    with loading_errors(config, "weights", "*.safetensors"), torch.random.fork_rng(devices=[]):
        torch.manual_seed(task.seed)
        file = gguf_file(config)
        # transformers takes tensors in place of files by the class itself.
        loaded: Any = (auto if file is None else type(skeleton(config, task=task))).from_pretrained(
            source_path(config) if file is None else None,
            state_dict=None if file is None else _gguf_backbone().tensors(file, hub),
            config=hub,
            dtype=stored,
            attn_implementation=_attention(config, compute, device()),
            quantization_config=quantised,
            device_map={"": torch.device("cpu") if waiting else device()},
            use_safetensors=True,
            ignore_mismatched_sizes=task.head in ("classes", "tokens"),
            output_loading_info=True,
            **source_arguments(config),
        )
    model: PreTrainedModel = loaded[0]
    model.name_or_path = model.config._name_or_path = source_path(config)  # which a GGUF file's lacks
    if arrival is not None:
        arrival.settle(model, stored)
    if not config.dropout:
        stock.without_dropout(model)
    fresh = anatomy.fresh_heads(model)
    # Nothing reads the pooler of a model without a head, and weights of a masked language model lack it.
    _require_whole(config, loaded[1], fresh if task.head != "hidden" else [*fresh, "pooler"])
    if tokenizer is not None:
        vocabulary = len(tokenizer)
        embedding = model.get_input_embeddings()
        assert isinstance(embedding, nn.Embedding)
        padding = vocabulary - 1 if tokenizer.pad_token_id == vocabulary - 1 else vocabulary  # which needs no row
        if padding > embedding.num_embeddings or (config.new_tokens and vocabulary > embedding.num_embeddings):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)  # new rows start at random values, the same in every process
                model.resize_token_embeddings(vocabulary)
    if config.sparsity is not None:
        semi_structured.prune(model)
        notes.append(semi_structured.sentence(model))
    if weights in QUANTISED:
        if waiting:
            weight_formats.put_off(model, weights, compute)
        else:
            weight_formats.settle(model, compute)
        notes += weight_formats.notes(model, weights)
    notes += anatomy.about_towers(model)
    model = _prepared(model, fresh, stored, compute)
    if model.config.get_text_config()._attn_implementation == "sdpa":
        notes += filter(None, [flash_kernels.activate(device(), compute, dropout=config.dropout)])
    notes += filter(None, [optional_kernels.advice(model, device())])
    return Backbone(model, weights, compute, weight_formats.weight_bytes(model), notes)


def bring(module: nn.Module) -> None:
    """Copy a module of a waiting model, without its children, to this process's device, and pack its weights."""
    weight_formats.pack(module, device())
    for tensor in chain(module.parameters(recurse=False), module.buffers(recurse=False)):
        tensor.data = tensor.data.to(device())


class _Decided(NamedTuple):
    """Decisions that precede the reading of weights."""

    hub: PretrainedConfig
    auto: Any  # transformers' class that builds it
    weights: str
    compute: torch.dtype
    stored: torch.dtype  # type of the weights that are not quantised
    notes: list[str]


def _decided(config: ModelConfig, task: ModelHead, *, trainable: bool) -> _Decided:
    attention_backend.register()
    hub = task.configured(hub_config(config))
    weights, compute, notes = _precision(config, hub, device(), trainable=trainable)
    own = getattr(hub, "dtype", None)
    # Of the unquantised layers of quantised weights: `compute`, or the files' half precision.
    beside = own if compute == torch.float32 and own in weight_formats.HALVES else compute
    stored = DTYPES.get(weights, beside)
    return _Decided(hub, _auto_class(config, task, hub), weights, compute, stored, notes)


def _auto_class(config: ModelConfig, task: ModelHead, hub: PretrainedConfig) -> Any:
    try:
        return task.auto_class(hub)
    except BackboneError as error:
        raise BackboneError(f"model.id={config.id}: {error}") from None


def _require_whole(config: ModelConfig, report: dict[str, Any], fresh: list[str]) -> None:
    """Raise BackboneError where weights outside of a `fresh` head are missing or of another size."""
    heads = tuple(f"{name}." for name in fresh)
    if missing := sorted(key for key in report["missing_keys"] if not key.startswith(heads)):
        raise BackboneError(
            f"model.id={config.id}: {len(missing)} of the tensors that its config.json asks for are not in its "
            f"weights, such as {missing[0]}. Fetch weights and config.json that belong together."
        )
    if any(not key.startswith(heads) for key, *_ in report["mismatched_keys"]):
        raise BackboneError(f"model.id={config.id} cannot be loaded: {OTHER_SHAPES}")


def _prepared(model: PreTrainedModel, fresh: list[str], stored: torch.dtype, compute: torch.dtype) -> PreTrainedModel:
    """The model frozen, in evaluation mode, computing in `compute`.

    Stored in `compute` are `fresh` heads, and layers that cast inputs to the precision of their weights (T5). The last
    layer of the heads gives its outputs in float32.
    """
    if stored != compute:
        kept = {*fresh, *(model._keep_in_fp32_modules or ())}
        for name, module in model.named_modules():
            if name in kept or name.rsplit(".", 1)[-1] in kept:
                module.to(compute)
        weight_formats.compute_in(model, compute)
    if anatomy.reads_pictures(model):
        pictures.prepare(model, compute)
    if anatomy.reads_sound(model):
        sounds.prepare(model, compute)
    layers = [module for name in fresh for module in model.get_submodule(name).modules() if type(module) is nn.Linear]
    if layers and compute in weight_formats.HALVES:
        layers[-1].__class__ = weight_formats.OutputLinear
    model.requires_grad_(False).eval()
    return model


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


def emulates(model: PreTrainedModel) -> bool:
    """Whether the device of a model emulates products in the precision of its weights, so that float32 is faster."""
    return model.dtype != torch.float32 and not has_bfloat16_units(model.device)


def stored_weights(config: ModelConfig) -> str:
    """How the weights of a backbone that does not train are stored here."""
    return _precision(config, hub_config(config), device(), trainable=False)[0]


def _precision(
    config: ModelConfig, hub: Any, target: torch.device, *, trainable: bool
) -> tuple[str, torch.dtype, list[str]]:
    if (arrival := arriving_weights.of(hub, config)) is not None:
        config = config.model_copy(update={"weights": arrival.weights(config, trainable=trainable)})
    if reason := method_checks.packed(config):
        raise BackboneError(reason)
    planned = planned_bfloat16()
    native = has_bfloat16_units(target) if planned is None else planned
    notes = []
    weights: str = config.weights
    if weights == "auto":
        stored = str(getattr(hub, "dtype", None) or torch.float32).removeprefix("torch.")
        half = native or config.compute == "bfloat16" or (stored != "float32" and not trainable)
        weights = (stored if stored == "float16" and not native else "bfloat16") if half else "float32"
    compute = config.compute
    if compute == "auto":
        asked = trainable and weights == "bfloat16"  # weights that train have the precision of their products
        compute = "bfloat16" if weights != "float32" and (native or asked) else "float32"
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
        slow = "" if native else ": this device has no bfloat16 units, and emulating them is several times slower"
        notes.append(f"weights stored in {weights}, computed in {compute}{slow}")
    elif compute == "bfloat16" and not native:
        notes.append("bfloat16 products are emulated on this device and slow; model.compute=float32 is faster")
    if compute == "float16":
        slow = "float16 products are slow on a CPU, and " if target.type == "cpu" else "in float16 "
        notes.append(f"{slow}gradients below 6e-8 vanish: model.compute=float32 is safer")
    return weights, DTYPES[compute], notes


def _attention(config: ModelConfig, compute: torch.dtype, target: torch.device) -> str | None:
    """The attention backend to request; None: transformers takes sdpa where the family has it, else eager."""
    usable = target.type == "cuda" and compute != torch.float32 and is_flash_attn_2_available()
    if config.attention == "flash_attention_2" and not usable:
        raise BackboneError(
            "model.attention=flash_attention_2 needs a CUDA device, half precision and the package flash-attn. "
            "Write model.attention=auto."
        )
    if config.attention == "flex_attention" and target.type == "cpu":
        raise BackboneError("model.attention=flex_attention has no gradients on a CPU. Write model.attention=auto.")
    return None if config.attention == "auto" else config.attention


def file_digests(model: ModelConfig) -> dict[str, str]:
    """Digests of a folder's files, or the commit of a model on the hub."""
    folder = Path(source_path(model))
    if folder.is_dir():
        file = gguf_file(model)
        return provenance.digests(folder, title=model.id) if file is None else {model.id: provenance.digest(file)}
    return {model.id: str(getattr(hub_config(model), "_commit_hash", None) or model.revision or "main")}


_PICKLES = {
    "pytorch_model": "Take a copy with model.safetensors, or, if you trust its authors, load it with transformers and "
    "write it with save_pretrained.",
    "qmodel.pt": "It is HQQ's own format. Take the repository that it was made from: model.weights=nf4 quantises while "
    "loading.",
}
"""By the first letters of a file of pickled weights, what to take in its place."""


def require_weights(config: ModelConfig) -> None:
    """Refuse a folder whose weights cannot be read, as loading would; raises BackboneError. Reads headers alone."""
    folder = Path(source_path(config))
    if not folder.is_dir() or gguf_file(config) is not None:
        return
    if not any(folder.glob("*.safetensors")):
        for start, cure in _PICKLES.items():
            for file in folder.glob(f"{start}*"):
                raise BackboneError(
                    f"model.id={config.id}: its weights are {file.name}, a pickle, which can execute code when it is "
                    f"read. {cure}"
                )
    with loading_errors(config, "weights", "*.safetensors"):
        names = {"model.safetensors"}
        if (index := folder / "model.safetensors.index.json").exists() and not (folder / "model.safetensors").exists():
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        for name in sorted(names):
            safe_open(folder / name, framework="pt")


def save_processors(config: ModelConfig, folder: Path) -> None:
    """Copy how a backbone prepares pictures and sound into the `folder` of a model made of it; nothing where it reads
    text alone."""
    for name in (PROCESSOR_NAME, IMAGE_PROCESSOR_NAME, VIDEO_PROCESSOR_NAME):
        found = cached_file(
            source_path(config), name, _raise_exceptions_for_missing_entries=False, **source_arguments(config)
        )
        if found is not None and not (folder / name).exists():
            shutil.copyfile(found, folder / name)


def folder_of(model: ModelConfig, *, more: str | None = None) -> Path:
    """Where the files of a model stand on this machine; of a hub id in the hub's cache. Raises BackboneError. `more`:
    a pattern of files that are fetched, too."""
    location = source_path(model)
    if Path(location).is_dir():
        return Path(location)
    hub_config(model)  # which puts config.json there
    if more is not None:
        asked = source_arguments(model)
        known: dict[str, Any] = {name: asked[name] for name in ("revision", "local_files_only")}
        with loading_errors(model, "config", more):
            return Path(snapshot_download(location, allow_patterns=more, **known))
    return Path(str(try_to_load_from_cache(location, "config.json", revision=model.revision))).parent


def weight_files(folder: Path) -> list[Path]:
    """The files of a folder that hold weights."""
    kinds = ("*.safetensors", "pytorch_model*.bin", "*.gguf")
    return next((found for kind in kinds if (found := sorted(folder.glob(kind)))), [])


def weights_are_local(model: ModelConfig) -> bool:
    """Whether its weights are on this machine."""
    location = source_path(model)
    if Path(location).is_dir():
        return any(Path(location).glob("*.safetensors")) or gguf_file(model) is not None
    names = ("model.safetensors", "model.safetensors.index.json")
    return any(isinstance(try_to_load_from_cache(location, name, revision=model.revision), str) for name in names)
