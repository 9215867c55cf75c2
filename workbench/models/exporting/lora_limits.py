"""What programs that load LoRA adapters can read: what one would silently ignore, or fail at, is refused by name."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import safe_open

from workbench.adapters import METHODS, Method, combine, model_card
from workbench.errors import ConfigError, FileError

NORMALISE = "--normalise writes plain LoRA of one rank with the scale folded in, which is exact"
MERGE = "--merge adds the adapter into the backbone and exports one whole model"
VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # values that vLLM's --max-lora-rank may have
SGLANG_LAYERS = frozenset({"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"})


@dataclass(frozen=True)
class LoraLimits:
    """Features of a LoRA adapter that a program reads."""

    program: str
    rslora: bool  # whether it scales by alpha / sqrt(rank) where use_rslora says so
    ranks: bool  # whether layers may have different ranks
    layers: frozenset[str] | None = None  # leaf names of the layers that it changes; None for all
    max_rank: int | None = None


LLAMA_CPP = LoraLimits("llama.cpp", rslora=False, ranks=True)
"""It reads ranks from the tensors and one alpha from the file."""


class Fault(NamedTuple):
    """A setting of an adapter that a program ignores."""

    setting: str
    why: str
    cure: str


def settings(adapter: Path) -> dict[str, Any]:
    """The PEFT configuration in the folder of an adapter."""
    path = adapter / "adapter_config.json"
    try:
        peft_config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return {"peft_type": peft_config["peft_type"], **peft_config}
    except (ValueError, KeyError, TypeError) as error:
        raise FileError(f"{path}: damaged ({error}). Restore it, or train again.") from None


def require(adapter: Path, method: Method, limits: LoraLimits) -> None:
    """Raise ConfigError, with each fault and its cure, where a program would ignore a part of the adapter."""
    faults = [*_faults(adapter, settings(adapter), limits)]
    if not faults:
        return
    reason = METHODS[method.method].about[method.method].no_merge if method.method in METHODS else ""
    cures = {fault.cure for fault in faults}
    cure = NORMALISE if cures == {NORMALISE} else f"{MERGE}" if not reason else ""
    advice = f"{cure}." if cure else f"adapter.method={method.method} cannot be merged either: {reason}."
    lines = [f"{fault.setting}: {fault.why}." for fault in faults]
    raise ConfigError("\n  ".join([f"{adapter}: {limits.program} would not compute what was trained.", *lines, advice]))


def _faults(adapter: Path, values: Mapping[str, Any], limits: LoraLimits) -> Iterator[Fault]:
    program = limits.program
    if (kind := values["peft_type"]) != "LORA":
        yield Fault(f"peft_type={kind}", f"{program} loads LoRA and no other adapter", MERGE)
        return
    for key, value in _more_than_updates(values).items():
        yield Fault(f"{key}={_short(value)}", f"{program} reads updates of linear layers and nothing else", MERGE)
    if values.get("use_rslora") and not limits.rslora:
        yield Fault("use_rslora=True", f"{program} scales by alpha / rank, not by alpha / sqrt(rank)", NORMALISE)
    if values.get("alpha_pattern"):
        yield Fault(
            f"alpha_pattern={_short(values['alpha_pattern'])}", f"{program} reads one alpha for all layers", NORMALISE
        )
    if values.get("rank_pattern") and not limits.ranks:
        yield Fault(
            f"rank_pattern={_short(values['rank_pattern'])}", f"{program} reads one rank for all layers", NORMALISE
        )
    with safe_open(adapter / "adapter_model.safetensors", "pt") as tensors:
        names = list(tensors.keys())
        rank = max((tensors.get_slice(name).get_shape()[0] for name in names if ".lora_A." in name), default=0)
    leaves = {name.partition(".lora_")[0].rsplit(".", 1)[-1] for name in names if ".lora_" in name}
    if limits.layers is not None and (odd := sorted(leaves - limits.layers)):
        yield Fault(f"layers {', '.join(odd)}", f"{program} changes {', '.join(sorted(limits.layers))} only", MERGE)
    if limits.max_rank is not None and rank > limits.max_rank:
        yield Fault(f"rank {rank}", f"{program} takes ranks up to {limits.max_rank}", MERGE)


def require_plain(adapter: Path) -> None:
    """Raise ConfigError where an adapter cannot be written as plain LoRA without changing what it computes."""
    peft_config = settings(adapter)
    if peft_config["peft_type"] != "LORA":
        raise ConfigError(f"{adapter}: --normalise: a {peft_config['peft_type']} adapter is no LoRA. {MERGE}.")
    for key, value in _more_than_updates(peft_config).items():
        raise ConfigError(
            f"{adapter}: --normalise: {key}={_short(value)} is no update of a linear layer, so plain LoRA would not "
            f"compute what was trained. {MERGE}."
        )


def normalise(adapter: Path, folder: Path) -> None:
    """Write the adapter in a folder as plain LoRA of one rank and scale 1 into another folder."""
    require_plain(adapter)
    saved = combine.read(adapter)
    combine.write(combine.one_rank(saved.updates), folder, like=saved)


def _more_than_updates(values: Mapping[str, Any]) -> dict[str, Any]:
    more = combine.beyond_updates(values)
    if rows := values.get("trainable_token_indices"):
        more["trainable_token_indices"] = rows
    return more


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def require_known_to_peft(adapter: Path) -> None:
    """Raise ConfigError where stock PEFT cannot load the adapter in a folder."""
    if needed := model_card.needed(settings(adapter)):
        raise ConfigError(
            f"{adapter}: PEFT does not load it alone: its reader needs `{needed}`, as {adapter}/README.md says. Take "
            "that folder as it is, or write --to merged."
        )


VLLM = LoraLimits("vLLM", rslora=True, ranks=False, max_rank=VLLM_RANKS[-1])


def vllm_adapter_command(base: str, *, rank: int) -> str:
    """The command that serves an adapter over its base model as the model `tuned`."""
    most = next(each for each in VLLM_RANKS if each >= rank)
    return f"vllm serve {base} --enable-lora --max-lora-rank {most} --lora-modules tuned=DIR"


SGLANG = LoraLimits("SGLang", rslora=False, ranks=False, layers=SGLANG_LAYERS)


def sglang_adapter_command(base: str, *, rank: int) -> str:
    """The command that serves an adapter over its base model as the model `tuned`."""
    start = f"python -m sglang.launch_server --model-path {base} --enable-lora"
    return f"{start} --lora-paths tuned=DIR --max-lora-rank {rank}"
