"""Sizes of models: what a run's model takes, and what each method would add to a backbone, from its config.json alone.

To predict a size, the method is attached to the backbone's modules on the meta device, which have shapes and no values,
and the result is counted: what is predicted is what a run counts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import PeftModel, get_peft_model_state_dict
from pydantic import SerializeAsAny
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from workbench import adapters
from workbench.adapters import METHODS, Full, Lora, Method
from workbench.adapters.banks.bank import Bank
from workbench.adapters.peft_tuners import as_shipped
from workbench.adapters.target_modules import about_experts
from workbench.config import ModelConfig, RunConfig, model_heads, plugins
from workbench.config.checks.cross_checks import unable
from workbench.config.model_heads import TEXT, ModelHead
from workbench.config.yaml_text import override
from workbench.errors import ConfigError, WorkbenchError
from workbench.models import backbones
from workbench.models.backbones import QUANTISED, Backbone
from workbench.runs import units
from workbench.schema import Section, did_you_mean, parse


def storage_summary(backbone: Backbone, method: Method) -> str:
    """How the weights are stored, their bytes with and without quantisation, and notes on what is unusual."""
    size, plain = backbone.weight_bytes, 2 * adapters.count(backbone.model).total
    in_bfloat16 = f" ({units.size(plain)} in bfloat16)" if backbone.weights in QUANTISED else ""
    lines = [f"Weights: {backbone.weights}, {units.size(size)}{in_bfloat16}", *backbone.notes]
    return "\n  ".join([*lines, *filter(None, [about_experts(backbone.model, method)])])


def model_facts(config: RunConfig, backbone: Backbone, attached: nn.Module) -> dict[str, Any]:
    """Facts about the model and its adapter for the manifest and the report."""
    return _facts(config, backbone, *adapters.count(attached))


def member_facts(config: RunConfig, backbone: Backbone, bank: Bank, name: str) -> dict[str, Any]:
    """The same for one member of a bank."""
    total, trainable = adapters.count(bank.model)
    own = sum(each.numel() for each in bank.parameters_of(name).values())
    return _facts(config, backbone, total - trainable + own, own)


def _facts(config: RunConfig, backbone: Backbone, total: int, trainable: int) -> dict[str, Any]:
    return {
        "id": config.model.id,
        "weights": backbone.weights,
        "compute": str(backbone.compute).removeprefix("torch."),
        "attention": backbone.model.config._attn_implementation,
        "parameters": total,
        "trainable": trainable,
        "weight_bytes": backbone.weight_bytes,
        "notes": backbone.notes,
    }


class AdapterSize(NamedTuple):
    total: int  # parameters of backbone and adapter together
    trainable: int  # parameters that train
    file_bytes: int  # bytes of the safetensors file that a run saves, in float32, as one file

    @property
    def share(self) -> float:
        """Trainable parameters as a share of the total."""
        return self.trainable / self.total


@dataclass(frozen=True)
class SizeTable:
    """Size of every method on one backbone."""

    model: ModelConfig
    parameters: int
    """Parameters of the backbone alone."""
    sizes: dict[str, AdapterSize | str]
    """By method: its size, or why it does not work on this backbone and what to write instead."""


class _Question(Section):
    """The sections of a configuration that decide about sizes."""

    plugins: tuple[Path, ...] = ()
    model: ModelConfig = ModelConfig()
    adapter: SerializeAsAny[Method] = Lora()


def predict(model: ModelConfig, method: Method, *, task: ModelHead = TEXT, below: int = 0) -> AdapterSize:
    """Size of `method` on this backbone, without its first `below` blocks. Raises WorkbenchError: the method does not
    work there; the message says what does."""
    if reason := unable(model, method):
        raise ConfigError(reason)
    skeleton = backbones.skeleton(model, task=task, trainable=isinstance(method, Full))
    attached = adapters.attach(
        skeleton.float(), method, seed=0, new_token_ids=_new_tokens(model, skeleton), below=below
    )
    total, trainable = adapters.count(attached)
    return AdapterSize(total, trainable, file_bytes(_saved(attached)))


def survey(overrides: Sequence[str] = ()) -> SizeTable:
    """The size of every method on the backbone that `key=value` overrides name, or on the starter.

    An adapter setting such as `adapter.rank=8` applies to the methods that have it; `adapter.method=lora` selects one.
    Raises WorkbenchError: an override is wrong, or there is no such backbone.
    """
    given = override({}, overrides)
    plugins.load(given.get("plugins"))
    settings = given.get("adapter", {})
    everything = isinstance(settings, dict) and "method" not in settings
    asked = [_read(given | {"adapter": each}) for each in _for_each(settings)] if everything else [_read(given)]
    hub = backbones.hub_config(asked[0].model)
    if type(hub) not in MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING:
        task = TEXT
    else:
        task = model_heads.classes([str(label) for label in (hub.id2label or {}).values()], seed=0)
    alone = adapters.count(backbones.skeleton(asked[0].model, task=task)).total
    sizes: dict[str, AdapterSize | str] = {}
    for each in asked:
        try:
            sizes[each.adapter.method] = predict(each.model, each.adapter, task=task)
        except WorkbenchError as error:
            sizes[each.adapter.method] = str(error)
    return SizeTable(asked[0].model, alone, sizes)


def _read(values: dict[str, Any]) -> _Question:
    return parse(_Question, values, source="the command")


def _for_each(settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The adapter section of every method, with the settings that it has."""
    fields = {name: section.model_fields for name, section in METHODS.items()}
    known = sorted({key for keys in fields.values() for key in keys})
    for key in settings:
        if key not in known:
            raise ConfigError(f"adapter.{key}: no method has this key." + did_you_mean(key, known))
    return [
        {"method": name, **{key: value for key, value in settings.items() if key in keys}}
        for name, keys in fields.items()
    ]


def _new_tokens(model: ModelConfig, skeleton: PreTrainedModel) -> list[int]:
    """Ids of the new tokens, for which the vocabulary grows as in a run."""
    if not model.new_tokens:
        return []
    tokenizer = backbones.tokenizer(model)
    embedding = skeleton.get_input_embeddings()
    assert isinstance(embedding, nn.Embedding)
    if len(tokenizer) > embedding.num_embeddings:
        skeleton.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    return backbones.new_token_ids(model, tokenizer)


def _saved(model: nn.Module) -> Mapping[str, Tensor]:
    """The tensors that `adapters.save` writes."""
    if not isinstance(model, PeftModel):
        assert isinstance(model, PreTrainedModel)
        return dict(revert_weight_conversion(model, remove_tied_weights_from_state_dict(model.state_dict(), model)))
    with as_shipped(model) as tensors, _StayingOnMeta():
        adapter_tensors: dict[str, Tensor] = get_peft_model_state_dict(
            model, state_dict=tensors, save_embedding_layers=False
        )
    return adapter_tensors


class _StayingOnMeta(TorchFunctionMode):
    """Inside, `Tensor.cpu` does nothing, since tensors on the meta device have no values to move."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return args[0] if func is Tensor.cpu else func(*args, **(kwargs or {}))


def file_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Bytes of a safetensors file with these tensors: eight of length, a JSON header padded to eight, the values."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0

    # Wide numbers first, floats before integers of the same width, then by name.
    def order(item: tuple[str, Tensor]) -> tuple[int, bool, str]:
        return -item[1].itemsize, not item[1].is_floating_point(), item[0]

    for name, tensor in sorted(tensors.items(), key=order):
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    return 8 + -(-len(text) // 8) * 8 + end


_DTYPES = {torch.float32: "F32", torch.int64: "I64", torch.int32: "I32", torch.bool: "BOOL", torch.uint8: "U8"}
