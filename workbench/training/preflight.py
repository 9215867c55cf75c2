"""Preflight: refuses runs that would fail, before weights are read; `check` and `run` refuse the same."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any, Protocol

from transformers import PretrainedConfig, PreTrainedModel

from workbench import adapters
from workbench.adapters import Full, anatomy
from workbench.config import RunConfig, TrainingSections, model_heads
from workbench.config.model_heads import ModelHead
from workbench.config.sections.optimizer_config import OF_INNER_MATRICES
from workbench.data.batching import Examples, Indices
from workbench.data.held_out_split import Splits
from workbench.data.text import tokenized_set
from workbench.data.text.tokenized_set import TokenizedSet
from workbench.errors import ConfigError
from workbench.models import activation_recomputation, backbones
from workbench.training import (
    activation_checkpointing,
    activation_offload,
    capacity,
    kernels,
    layer_and_token_drop,
    packing,
    progressive_stacking,
)
from workbench.training.distributed import layout_checks
from workbench.training.freezing.layer_map import LayerMap, stack
from workbench.training.optim import optimizers


class MeasuredExamples(Examples, Protocol):
    """Examples whose longest sequence for one stack (encoder or decoder) of the model is known."""

    @property
    def longest_sequences(self) -> Indices:
        """Tokens of the longest sequence that one stack of the model reads, of each example."""


def require_runnable(config: RunConfig, data: Splits[TokenizedSet]) -> list[str]:
    """Refuse a run that would fail, or that would not do what its configuration says.

    Returns:
        The names of the modules that get an adapter; none for full fine-tuning.

    Raises:
        WorkbenchError: says what to change.
    """
    tokenized_set.require_teaching(data)
    if model_heads.of(config).writes_text:
        tokenized_set.require_ends(data)
    splits = list(data.named().values())
    return require_backbone(config, splits, model_heads.of(config))


def require_backbone(config: RunConfig, splits: Sequence[MeasuredExamples], task: ModelHead) -> list[str]:
    """Refuse what the backbone, the adapter, the memory budget or a missing package does not allow.

    Args:
        splits: The training rows first.

    Returns:
        The names of the modules that get an adapter; none for full fine-tuning.
    """
    for name in config.trackers:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"trackers: {name} is not installed, so nothing would be sent there. "
                f"Leave it out, or run: pip install 'peft-workbench[{name}]'"
            )
    capacity.require_longest_fits(config, splits[0])
    _require_tokens(config, splits[0])
    optimizers.require(config, device=backbones.device())
    model = backbones.skeleton(config.model, task=task, trainable=isinstance(config.adapter, Full))
    if config.media is None:
        _require_positions(config, splits, model)
    for key, require in (("packing", packing.require), ("shared_prefix", packing.require_shared_prefix)):
        if getattr(config.batch, key) is not True:
            continue
        require(packing.refusal(model.config, longest=int(splits[0].longest_sequences.max()), reads_packed=True))
    adapters.require_fit(model, config.adapter)
    activation_checkpointing.require(config, model)
    kernels.require(config, model, backbones.device())
    _require_savings(config, model)
    _require_layers(config, model)
    modules = config.adapter.modules(model)
    layout_checks.require_backbone(config, model, modules, longest=int(splits[0].lengths.max()))
    _require_matrices(config, model)
    return modules


def _require_savings(config: TrainingSections, model: PreTrainedModel) -> None:
    """Refuse savings of memory that this backbone or this device does not support."""
    tokens = config.train.mlp_tile
    reasons = (
        map(activation_recomputation.tiling_refusal, anatomy.decoder_layers(model)) if isinstance(tokens, int) else ()
    )
    if reason := next(filter(None, reasons), None):
        raise ConfigError(f"train.mlp_tile={tokens}: {reason}. Write train.mlp_tile=auto.")
    if config.train.offload_activations is True and (reason := activation_offload.refusal(backbones.device())):
        raise ConfigError(reason)


def _require_layers(config: TrainingSections, model: PreTrainedModel) -> None:
    """Refuse settings of blocks where there is no stack of blocks, no suitable block, or nothing left to train."""
    if not config.by_block:
        return
    paths = stack(model)
    if config.media:  # text backbones cannot be called without weights
        layer_and_token_drop.middle(model, [model.get_submodule(path) for path in paths], config.token_drop)
        list(layer_and_token_drop.always_computed(config, model))
    progressive_stacking.require(config.grow, [model.get_submodule(path) for path in paths])
    blocks = len(paths)
    if reason := config.token_drop.refusal(blocks) or config.freeze.refusal(blocks):
        raise ConfigError(reason)
    if config.freeze.policy == "none":
        return
    if config.freeze.never(blocks) == blocks and not (isinstance(config.adapter, Full) or anatomy.fresh_heads(model)):
        raise ConfigError(
            f"freeze.policy={config.freeze.policy} freezes all {blocks} blocks, and adapter.method="
            f"{config.adapter.method} has nothing outside of them, so that nothing would train. "
            f"Write {f'freeze.layers={blocks // 2}' if blocks > 1 else 'freeze.policy=none'}, or adapter.method=full."
        )


def _require_matrices(config: TrainingSections, model: PreTrainedModel) -> None:
    """Refuse an optimizer for matrices where AdamW would take all steps. Attaches the adapter to `model`."""
    if config.optimizer.name not in OF_INNER_MATRICES:
        return
    layers = LayerMap(tuple(stack(model)), {})
    below = config.freeze.never(len(layers.blocks))
    attached = adapters.attach(model.float(), config.adapter, seed=0, below=below)
    trained = [(name, each) for name, each in attached.named_parameters() if each.requires_grad]
    if not any(layers.of(name) > below and optimizers.is_matrix(each) for name, each in trained):
        raise ConfigError(
            f"optimizer.name={config.optimizer.name} is for matrices inside the transformer blocks, and adapter.method="
            f"{config.adapter.method} trains none there. Write optimizer.name=adamw, or adapter.method=lora."
        )


def _require_tokens(config: TrainingSections, train: MeasuredExamples) -> None:
    """Refuse a token budget that the first step uses up, as its learning rate would be that of the end."""
    budget, step = config.budget.tokens, round(config.batch.size * float(train.lengths.mean()))
    if budget is not None and budget < step:
        raise ConfigError(
            f"budget.tokens={budget} is used up within the first step, which reads about {step:,} tokens. "
            f"Write budget.tokens={100 * step} for a hundred steps, or a smaller batch.size."
        )


def longest_sequence(hub: PretrainedConfig) -> int | None:
    """Most tokens that a backbone was made for, including scaled rotary positions; None where it has no limit."""
    text: Any = anatomy.body_config(hub)
    limit: int | None = getattr(text, "max_position_embeddings", None)
    rope = getattr(text, "rope_parameters", None) or {}
    if limit is None or not rope.get("factor"):
        return limit
    return max(limit, int(rope["factor"] * rope.get("original_max_position_embeddings", limit)))


def _require_positions(config: TrainingSections, splits: Sequence[MeasuredExamples], model: PreTrainedModel) -> None:
    """Refuse rows longer than the positions that the backbone was trained with."""
    limit, virtual = longest_sequence(model.config), config.adapter.extra_positions(model)
    if limit is None:
        return
    room = limit - virtual
    if room < 1:
        raise ConfigError(
            f"adapter.virtual_tokens={virtual}: {config.model.id} was made for at most {limit} tokens, which "
            f"leaves none for a row. Write adapter.virtual_tokens={max(1, limit // 10)}."
        )
    reserved = f", {virtual} of them for virtual tokens" if virtual else ""
    for split in splits:
        if split.longest_sequences.max() <= room:
            continue
        row = int(split.longest_sequences.argmax())
        raise ConfigError(
            f"data.max_tokens: {split.place(row)} has {split.longest_sequences[row]} tokens, but {config.model.id} was "
            f"made for at most {limit}{reserved}. Write data.max_tokens={room}, which cuts longer rows, "
            "or take another backbone."
        )
