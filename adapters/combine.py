"""Arithmetic of LoRA adapters: sums, which are exact, and merges of their values, as near as a rank allows.

Legend: R rank, I inputs, O outputs.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import LoraConfig
from peft.utils import merge_utils
from peft.utils.other import get_pattern_key
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import pad

from workbench.adapters.updates.lora_start_values import leading_parts
from workbench.errors import ConfigError, FileError

PREFIX = "base_model.model."
HARMLESS = frozenset(
    {
        *("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_type", "peft_version", "revision"),
        *("task_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "fan_in_fan_out"),
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "lora_dropout"),
        *("megatron_core", "qalora_group_size", "eva_config", "ensure_weight_tying"),
    }
)
"""Settings of a LoraConfig that keep an adapter a plain sum of updates."""
LABELS = "classes.json"
"""Says what the outputs of a trained head mean."""
PLAIN_STARTS = (True, False, "gaussian", "orthogonal", "eva")
"""Values of init_lora_weights that leave the backbone's weights as they are."""


class Update(NamedTuple):
    """The update of one layer's weight (O, I): up @ down, the scale included."""

    down_RI: Tensor
    up_OR: Tensor


Updates = dict[str, Update]
"""Updates by the layer's path in the backbone."""


@dataclass(frozen=True)
class Saved:
    """A LoRA adapter in a folder."""

    folder: Path
    config: Mapping[str, Any]
    updates: Updates
    heads: Mapping[str, Tensor] = field(default_factory=dict)
    """Tensors of a trained head, by their names in the file."""


class CombinationError(NamedTuple):
    """Frobenius norm of the difference, relative to that of what was wanted."""

    overall: float
    layers: dict[str, float]


def read(folder: Path) -> Saved:
    """The updates of the adapter in `folder`.

    Raises:
        ConfigError: It is no plain LoRA, so that it is more than a sum of updates.
        FileError: A file is missing or damaged.
    """
    try:
        config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        kind = config.get("peft_type")
        if kind != "LORA":
            raise ConfigError(
                f"{folder}: a {kind} adapter is no update of weights that could be added. Combine LoRA adapters, or "
                "serve both beside each other with workbench.adapters.multi_adapter."
            )
        if config.get("trainable_token_indices"):
            raise ConfigError(
                f"{folder}: it holds rows of new tokens, which are values and no updates, so a sum of them means "
                "nothing. Combine adapters that were trained without model.new_tokens."
            )
        trained = config.get("modules_to_save") or [] if (folder / LABELS).exists() else []
        for key, value in beyond_updates(config | {"modules_to_save": None} if trained else config).items():
            raise ConfigError(
                f"{folder}: {key}={value!r} makes it more than a sum of updates, so adding it up would not be exact. "
                "Combine adapters of plain lora or rslora."
            )
        tensors = load_file(folder / "adapter_model.safetensors")
        names = [name for name in tensors if set(name.split(".")[:-1]) & set(trained)]
        heads = {name: tensors.pop(name) for name in names}
    except (OSError, ValueError, SafetensorError) as error:
        raise FileError(f"{folder}: no whole adapter ({error}). Name the folder of a saved adapter.") from None
    layers = sorted({name.removeprefix(PREFIX).partition(".lora_")[0] for name in tensors})
    expected = {f"{PREFIX}{layer}.lora_{part}.weight" for layer in layers for part in "AB"}
    if expected != tensors.keys() or any(tensor.ndim != 2 for tensor in tensors.values()):
        odd = sorted(tensors.keys() - expected) or sorted(expected - tensors.keys()) or sorted(tensors)
        raise ConfigError(
            f"{folder}: {odd[0]} is no part of an update of a linear layer. Combine adapters of linear layers only."
        )
    updates = {}
    for layer in layers:
        down, up = (tensors[f"{PREFIX}{layer}.lora_{part}.weight"].double() for part in "AB")
        updates[layer] = Update(down, up * scale(config, layer, len(down)))
    return Saved(folder, config, updates, heads)


def weighted_sum(adapters: Sequence[Saved], weights: Sequence[float]) -> Updates:
    """The exact sum of weight times update: ranks add up, and a layer that only some adapters change gets theirs.

    Raises:
        ConfigError: The adapters have different backbones.
    """
    assert len(adapters) == len(weights) > 0
    _require_one_backbone(adapters)
    total: Updates = {}
    for adapter, weight in zip(adapters, weights, strict=True):
        for layer, (down, up) in adapter.updates.items():
            if layer in total:
                down = torch.cat([total[layer].down_RI, down])
                up = torch.cat([total[layer].up_OR, up * weight], dim=1)
                total[layer] = Update(down, up)
            else:
                total[layer] = Update(down, up * weight)
    return total


def mean_heads(adapters: Sequence[Saved], weights: Sequence[float]) -> dict[str, Tensor]:
    """The weighted mean of trained heads whose outputs mean the same, in float32; nothing where there are none.

    Raises:
        ConfigError: The outputs mean something else, or the weights have no mean.
    """
    first, *others = adapters
    for other in others:
        if other.heads.keys() != first.heads.keys() or _labels(other) != _labels(first):
            raise ConfigError(
                f"{first.folder} and {other.folder} tell other labels ({LABELS}), so that a mean of their heads means "
                "nothing. Train both on rows with the same labels."
            )
    if not first.heads:
        return {}
    if sum(weights) <= 0:
        raise ConfigError(
            f"--weights: {', '.join(f'{each:g}' for each in weights)} have no mean, which the trained heads get. Write "
            "weights whose sum is above 0."
        )
    shares = torch.tensor(weights, dtype=torch.float64) / sum(weights)
    stacked = {name: torch.stack([each.heads[name].double() for each in adapters], -1) for name in first.heads}
    return {name: (stack @ shares).float() for name, stack in stacked.items()}


def head_name(name: str) -> str:
    """The name of a parameter of the backbone itself, by its name in a file, or in a model that carries an adapter."""
    return name.rpartition(PREFIX)[2].replace(".modules_to_save.default.", ".")


def _labels(adapter: Saved) -> bytes:
    return (adapter.folder / LABELS).read_bytes() if adapter.heads else b""


BY_VALUE = {"ties": merge_utils.ties, "dare": merge_utils.dare_linear, "dare_ties": merge_utils.dare_ties}
"""Merges of the values of whole updates, which PEFT computes."""


def along_the_arc(adapters: Sequence[Saved], weights: Sequence[float]) -> Updates:
    """The update between two, layer by layer along the arc from one to the other (SLERP, Shoemake 1985).

    It is a sum whose weights depend on the angle between both, so it is exact: ranks add up. Where only one adapter
    changes a layer, or both change it alike, it is the weighted sum.

    Args:
        adapters: Two of them.
        weights: How much of each, from 0 to 1, together 1.

    Raises:
        ConfigError: There are not two, they have different backbones, or the weights are others.
    """
    if len(adapters) != 2 or min(weights) < 0 or not math.isclose(sum(weights), 1):
        raise ConfigError(
            f"slerp goes from one adapter to another, and here are {len(adapters)} with the weights "
            f"{', '.join(f'{each:g}' for each in weights)}. Write two runs and weights that sum to 1, such as 0.5,0.5."
        )
    _require_one_backbone(adapters)
    first, second = adapters
    total: Updates = {}
    for layer in first.updates | second.updates:
        own = list(weights)
        if layer in first.updates and layer in second.updates:
            one, other = first.updates[layer], second.updates[layer]
            norms = _norm(one.down_RI, one.up_OR) * _norm(other.down_RI, other.up_OR)
            product = float(((one.up_OR.T @ other.up_OR) * (one.down_RI @ other.down_RI.T)).sum())
            angle = math.acos(max(-1.0, min(1.0, product / norms))) if norms else 0.0
            if math.sin(angle) > 1e-6:
                own = [math.sin(weight * angle) / math.sin(angle) for weight in weights]
        parts = [replace(each, updates={k: v for k, v in each.updates.items() if k == layer}) for each in adapters]
        total |= weighted_sum(parts, own)
    return total


def by_value(
    adapters: Sequence[Saved],
    weights: Sequence[float],
    way: str,
    *,
    density: float,
    rank: int | None = None,
    seed: int = 0,
) -> tuple[Updates, CombinationError]:
    """A merge of the values of whole updates, as updates of a rank, and how far these are from it.

    TIES (Yadav et al. 2023, arXiv:2306.01708) keeps the largest values of each, and adds those up that have the sign
    of most; DARE (Yu et al. 2023, arXiv:2311.03099) keeps values by chance, and scales them up; `dare_ties` does both.
    One layer (O, I) is in memory at a time.

    Args:
        adapters: Of one backbone.
        weights: A factor for each.
        way: One of BY_VALUE.
        density: Share of the values of each update that are kept, above 0 and below 1.
        rank: Most ranks of a layer; None: as many as all adapters have there together.
        seed: Which values chance keeps.

    Raises:
        ConfigError: The adapters have different backbones.
    """
    _require_one_backbone(adapters)
    merged: Updates = {}
    lost, norms = dict[str, float](), dict[str, float]()
    for number, layer in enumerate(sorted({layer for each in adapters for layer in each.updates})):
        own = [
            (each.updates[layer], weight)
            for each, weight in zip(adapters, weights, strict=True)
            if layer in each.updates
        ]
        factors = torch.tensor([weight for _, weight in own], dtype=torch.float64)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed + number)
            wanted_OI = BY_VALUE[way]([up @ down for (down, up), _ in own], factors, density)
            most = min(rank or sum(len(down) for (down, _), _ in own), *wanted_OI.shape)
            merged[layer] = Update(*leading_parts(wanted_OI, most))
        norms[layer] = float(torch.linalg.norm(wanted_OI))
        lost[layer] = float(torch.linalg.norm(wanted_OI - merged[layer].up_OR @ merged[layer].down_RI))
    layers = {layer: lost[layer] / norms[layer] if norms[layer] else 0.0 for layer in merged}
    total = math.hypot(*norms.values())
    return merged, CombinationError(math.hypot(*lost.values()) / total if total else 0.0, layers)


def nearest(updates: Updates, rank: int) -> Updates:
    """For each update the nearest one of at most this rank, by singular values (Eckart & Young 1936).

    Both factors carry the roots of the singular values. The (O, I) product is never computed.
    """
    truncated = {}
    for layer, (down, up) in updates.items():
        left, right_up = torch.linalg.qr(up)
        right, right_down = torch.linalg.qr(down.T)
        U, S, V = torch.linalg.svd(right_up @ right_down.T)
        kept = min(rank, len(S))
        root = S[:kept].sqrt()
        truncated[layer] = Update(root[:, None] * (V[:kept] @ right.T), (left @ U[:, :kept]) * root)
    return truncated


def one_rank(updates: Updates) -> Updates:
    """The same updates with equal ranks, padded with zeros."""
    rank = max(len(down) for down, _ in updates.values())
    padded = {}
    for layer, (down, up) in updates.items():
        missing = rank - len(down)
        padded[layer] = Update(pad(down, (0, 0, 0, missing)), pad(up, (0, missing)))
    return padded


def error(updates: Updates, wanted: Updates) -> CombinationError:
    """Relative distance of `updates` from `wanted`, for each layer and over all of them."""
    differences, norms = {}, {}
    for layer, (down, up) in wanted.items():
        other = updates[layer]
        differences[layer] = _norm(torch.cat([down, other.down_RI.double()]), torch.cat([up, -other.up_OR], dim=1))
        norms[layer] = _norm(down, up)
    layers = {layer: differences[layer] / norms[layer] if norms[layer] else 0.0 for layer in wanted}
    total = math.hypot(*norms.values())
    return CombinationError(math.hypot(*differences.values()) / total if total else 0.0, layers)


def write(updates: Updates, folder: Path, *, like: Saved, heads: Mapping[str, Tensor] | None = None) -> Updates:
    """Write a plain PEFT LoRA with scale 1 for the backbone of `like`, and trained `heads` as `Saved` has them; returns
    what was written of the updates, in float32."""
    ranks = {layer: len(down) for layer, (down, _) in updates.items()}
    usual = Counter(ranks.values()).most_common(1)[0][0]
    others = {layer: rank for layer, rank in ranks.items() if rank != usual}
    config = LoraConfig(
        task_type=like.config.get("task_type"),
        r=usual,
        lora_alpha=usual,
        target_modules=sorted(updates),
        modules_to_save=like.config.get("modules_to_save") if heads else None,
        rank_pattern=others,
        alpha_pattern=dict(others),
        fan_in_fan_out=like.config.get("fan_in_fan_out", False),
        base_model_name_or_path=like.config.get("base_model_name_or_path"),
        revision=like.config.get("revision"),
        inference_mode=True,
    )
    config.save_pretrained(str(folder))
    written = {layer: Update(*(each.float().contiguous() for each in update)) for layer, update in updates.items()}
    tensors = {
        f"{PREFIX}{layer}.lora_{part}.weight": tensor
        for layer, update in written.items()
        for part, tensor in zip("AB", update, strict=True)
    }
    save_file(tensors | dict(heads or {}), folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return written


def beyond_updates(config: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a LoraConfig that make an adapter more than a sum of updates."""
    off: tuple[object, ...] = (None, False, "none", {}, [])
    known = {*HARMLESS, "init_lora_weights"}
    settings = {key: value for key, value in config.items() if key not in known and value not in off}
    start = config.get("init_lora_weights", True)
    return settings if start in PLAIN_STARTS else {**settings, "init_lora_weights": start}


def _require_one_backbone(adapters: Sequence[Saved]) -> None:
    first, *others = adapters
    for other in others:
        for key in ("base_model_name_or_path", "revision"):
            if other.config.get(key) != first.config.get(key):
                raise ConfigError(
                    f"{first.folder} stands on {key}={first.config.get(key)!r}, {other.folder} on "
                    f"{other.config.get(key)!r}. Combine adapters of one backbone."
                )
        for layer in sorted(first.updates.keys() & other.updates.keys()):
            sizes = [(len(each.updates[layer].up_OR), each.updates[layer].down_RI.shape[1]) for each in (first, other)]
            if sizes[0] != sizes[1]:
                raise ConfigError(
                    f"{layer} has {sizes[0][1]} inputs and {sizes[0][0]} outputs in {first.folder}, {sizes[1][1]} and "
                    f"{sizes[1][0]} in {other.folder}. Combine adapters of one backbone."
                )


def scale(config: Mapping[str, Any], layer: str, rank: int) -> float:
    """Factor of a layer's B A in PEFT."""
    patterns: dict[str, float] = config.get("alpha_pattern") or {}
    alpha: float = patterns.get(get_pattern_key(list(patterns), layer)) or config["lora_alpha"]
    return alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank


def _norm(down_RI: Tensor, up_OR: Tensor) -> float:
    """Frobenius norm of up @ down."""
    _, right_up = torch.linalg.qr(up_OR)
    _, right_down = torch.linalg.qr(down_RI.T)
    return float(torch.linalg.norm(right_up @ right_down.T))
