"""Refusals of layouts of several processes or model shares, before a weight is read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING

from workbench.adapters import Full
from workbench.adapters.method import ExtraParameters, Method
from workbench.config import RunConfig, TrainingSections
from workbench.config.checks import parallelism_checks
from workbench.config.sections.distributed_config import DistributedConfig
from workbench.errors import ConfigError
from workbench.runs.ranks import Ranks
from workbench.training.distributed import zero_offload

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def require(config: RunConfig, ranks: Ranks) -> None:
    """Refuse layouts that would fail, hang or silently compute something else; raises ConfigError with the remedies."""
    zero_offload.read(config.distributed)
    refusals = [
        *_grouped(config.distributed, ranks),
        *([] if ranks.alone else _together(config)),
        *_compressed(config, ranks),
        *(_sharded_members(config) if config.distributed.sharded else []),
    ]
    if refusals:
        raise ConfigError("\n  ".join(["This run cannot be shared as it is:", *refusals]))


def require_backbone(config: TrainingSections, model: PreTrainedModel, modules: Sequence[str], *, longest: int) -> None:
    """Raise ConfigError where the blocks of a backbone, or its rows, cannot be cut or dealt to devices as is asked.

    Args:
        modules: Names of the modules that get an adapter, or their ends.
        longest: Tokens of the longest row.
    """
    section = config.distributed
    for name, refusals in {
        "sequence": _of_parts_of_rows(config, model, longest),
        "tensor": _of_cut_blocks(config, model),
        "pipeline": _of_stages(config, model, modules),
    }.items():
        if (size := getattr(section, name)) > 1 and (why := next(refusals, None)):
            raise ConfigError(f"distributed.{name}={size} {why}")


def _of_parts_of_rows(config: TrainingSections, model: PreTrainedModel, longest: int) -> Iterator[str]:
    from workbench.models import attention_backend

    known = attention_backend.FAMILIES
    if why := attention_backend.packing_refusal(model.config, longest=longest, rows="rows in parts", families=known):
        yield f"cuts rows: {why}. Write distributed.sequence=1, and distributed.zero=3 where the backbone is too large."
    yield from _of_heads(config, model, "sequence", instead="Write distributed.sequence=1.")


def _of_heads(config: TrainingSections, model: PreTrainedModel, name: str, *, instead: str) -> Iterator[str]:
    size, body = getattr(config.distributed, name), model.config.get_text_config(decoder=True)
    heads: int = body.num_attention_heads
    keys: int = getattr(body, "num_key_value_heads", None) or heads
    if heads % size or keys % size:
        able = [number for number in range(2, keys + 1) if not (heads % number or keys % number)]
        cure = f"Write distributed.{name}={'|'.join(map(str, able))}." if able else instead
        yield (
            f"gives each device an even part of the heads of attention, and model.id={config.model.id} has {heads}, "
            f"with {keys} of keys and values. {cure}"
        )


def _of_cut_blocks(config: TrainingSections, model: PreTrainedModel) -> Iterator[str]:
    from peft import LoraConfig

    from workbench.training.distributed import tensor_parallel

    styles, instead = tensor_parallel.plan(model.config), "Write distributed={zero: 3}."
    if not styles:
        yield f"needs a plan of transformers (base_model_tp_plan), and {model.config.model_type} has none. {instead}"
    if any(style.startswith(("moe", "packed", "mla")) for style in styles.values()):
        yield f"was not tried with mixtures of experts. {instead}"
    yield from _of_heads(config, model, "tensor", instead=instead)
    if isinstance(config.adapter, Full):
        return
    adapter, starts = config.adapter.to_peft(model, ExtraParameters()), type(config.adapter).initialise
    plain = type(adapter) is LoraConfig and not (adapter.use_dora or adapter.alora_invocation_tokens)
    if not plain or starts is not Method.initialise:
        yield (
            f"leaves cutting an adapter to PEFT, which cuts the two matrices of plain LoRA (peft.tuners.lora): "
            f"adapter.method={config.adapter.method} is more than these. Write adapter.method=lora, or distributed="
            "{zero: 3}."
        )


def _of_stages(config: TrainingSections, model: PreTrainedModel, modules: Sequence[str]) -> Iterator[str]:
    from workbench.adapters import anatomy
    from workbench.models import attention_backend

    section, kind = config.distributed, model.config.model_type
    if kind not in attention_backend.FAMILIES:
        yield (
            f"computes packed rows, and {kind} is none of the architectures that are known to "
            f"({', '.join(attention_backend.FAMILIES)}). Write distributed.pipeline=1, and distributed.zero=3 where "
            "the backbone is too large."
        )
        return
    (blocks,) = anatomy.blocks(model)
    each = 1 if section.schedule == "1f1b" else 2
    if len(blocks) < each * section.pipeline:
        able = f"distributed.pipeline={len(blocks) // each} or less"
        yield (
            f"needs {each * section.pipeline} blocks with schedule={section.schedule}, and model.id={config.model.id} "
            f"has {len(blocks)}. Write {able if len(blocks) >= 2 * each else 'distributed.schedule=1f1b'}."
        )
    inside, ends = tuple(f"{block}." for block in blocks), tuple(f".{name}" for name in modules)
    outside = [name for name, _ in model.named_modules() if not name.startswith(inside) and f".{name}".endswith(ends)]
    if outside:
        yield (
            f"deals adapters with their blocks, and adapter.targets names {outside[0]}, which is in none. "
            "Write adapter.targets=all-linear, or distributed.pipeline=1."
        )


def require_members(count: int, ranks: Ranks) -> None:
    """Raise ConfigError where a device would have nothing to train."""
    if count < ranks.world:
        raise ConfigError(f"{count} trainings cannot be spread over {ranks.world} devices. Write --devices {count}.")


def _grouped(section: DistributedConfig, ranks: Ranks) -> Iterator[str]:
    """Where the devices cannot be cut in groups."""
    least = section.together
    for name, size in {"sequence": section.sequence, "tensor": section.tensor, "pipeline": section.pipeline}.items():
        if ranks.world % size:
            yield (
                f"distributed.{name}={size} makes groups of {size} devices, and there {_are(ranks.world)}. "
                f"Write --devices {least} or a multiple of it, or distributed.{name}=1."
            )
    if (copies := section.replicas) > 1 and (ranks.world % copies or ranks.world == copies):
        yield (
            f"distributed.replicas={copies} shares each of {copies} copies of the weights among as many devices, two "
            f"or more, and there {_are(ranks.world)}. Write --devices {least} or a multiple of it, or "
            "distributed.replicas=1."
        )


def _are(devices: int) -> str:
    return "is one" if devices == 1 else f"are {devices}"


def _together(config: RunConfig) -> Iterator[str]:
    over = config.over
    if over is not None and over.shared and not config.distributed.sharded:
        yield (
            f"recipe {config.recipe} trains on one device, or over a backbone that devices share. Leave --devices out, "
            "or write distributed={engine: fsdp2, zero: 3}."
        )
    elif not config.task.devices:
        yield f"recipe {config.recipe} trains on one device. Leave --devices out."
    if config.optimizer.noise_scale:
        yield "optimizer.noise_scale compares gradients of one device. Leave it out, or leave --devices out."
    if config.budget.timed and over is not None and over.adapters:
        yield (
            f"budget.time ends the trainings of recipe {config.recipe} on one device only. Write train.steps or "
            "budget.tokens, or leave --devices out."
        )


def _compressed(config: RunConfig, ranks: Ranks) -> Iterator[str]:
    """Where gradients or weights cannot travel in fewer bits."""
    section = config.distributed.compression
    zero = zero_offload.own_or_written(config.distributed, trained=1)["zero_optimization"]
    for key in ("zero_quantized_weights", "zero_quantized_gradients"):
        if zero.get(key) and not _accelerated():
            name = {"zero_quantized_weights": "weights=none", "zero_quantized_gradients": "gradients=bfloat16"}[key]
            cure = f"Leave {key} out" if config.distributed.deepspeed else f"Write distributed.compression.{name}"
            yield f"distributed: {key} of ZeRO++ needs DeepSpeed's kernels, built for accelerators alone. {cure}."
    if not section.is_on:
        return
    if config.over is not None and config.over.adapters:
        yield (
            f"distributed.compression is of one training that devices share, and recipe {config.recipe} has many. "
            "Leave it out."
        )
    if ranks.alone:
        yield (
            "distributed.compression is of what travels between devices, and there is one. Write --devices 2 or more, "
            "or leave it out."
        )
    if section.gradients == "powersgd":
        yield from _low_rank(config)
    if config.distributed.sharded:
        return
    if section.gradients == "bfloat16" and not _accelerated():
        yield (
            "distributed.compression.gradients=bfloat16: DDP's hook of that name needs accelerators (NCCL). Write "
            "distributed.compression.gradients=float16."
        )
    moving = config.freeze.policy != "none" and not config.freeze.fixed
    for name, cause in ((f"freeze.policy={config.freeze.policy}", moving), ("grow", config.grow.is_on)):
        if cause:
            yield (
                f"{name} changes which parameters train, and DDP's hooks (distributed.compression) keep to those that "
                f"train first. {'Write freeze.policy=static' if moving else 'Leave grow out'}, or compression out."
            )


def _accelerated() -> bool:
    import torch

    return torch.cuda.is_available()


def _low_rank(config: RunConfig) -> Iterator[str]:
    """Where PowerSGD would never begin, or keep what one of two sums in a step leaves out."""
    warm_up, steps, optimizer = config.distributed.compression.warm_up, config.train.steps, config.optimizer
    if steps is not None and steps <= warm_up:
        yield (
            f"distributed.compression.warm_up={warm_up} is all of train.steps={steps}: nothing would be compressed. "
            f"Write distributed.compression.warm_up={max(2, steps // 10)}."
        )
    if optimizer.sam or optimizer.name == "sophia":
        what, cure = ("sam", "Leave it out") if optimizer.sam else ("name=sophia", "Write optimizer.name=adamw")
        yield (
            f"optimizer.{what} adds up gradients more than once a step, and distributed.compression.gradients=powersgd "
            f"keeps what one sum leaves out. {cure}."
        )


def _sharded_members(config: RunConfig) -> Iterator[str]:
    """Refuse what keeps a run, or a member of several, from being trained in shares."""
    yield from _sharded_student(config)
    if config.over is None or config.over.members is None or not config.has_members:
        yield from _sharded(config)
        return
    if config.over.folds:
        yield "recipe=crossval scores each member over a whole backbone. Leave section distributed out."
    alone = set(_sharded(config))
    for reason in dict.fromkeys(chain.from_iterable(map(_sharded, config.over.members(config)))):
        yield reason if reason in alone else f"{reason} Some members have that: write it there."


def _sharded_student(config: RunConfig) -> Iterator[str]:
    """Refuse students that need all of their weights at once."""
    if config.over is None or config.over.adapters or not zero_offload.cuts_weights(config.distributed):
        return
    cure, alone = _cures(config)
    if config.distill.on_policy.share:
        yield (
            "distill.on_policy writes with the whole student, and zero=3 and fsdp2 cut it. "
            f"Write {cure}, or leave distill.on_policy out."
        )
    if config.distill.peers is not None:
        engine = config.distributed.engine
        yield f"distill.peers teach each other over a whole backbone, and {engine} cuts it. Write {alone}."


WHOLE_WEIGHTS = {
    "int8": "bitsandbytes keeps 8-bit weights whole once they were used",
    "fp8": "weights in FP8 are rounded as they are read, and nothing cuts them",
}
"""Formats that are not cut, and why."""


def _cures(config: RunConfig) -> tuple[str, str]:
    """What to write for a layout that cuts the optimizer's state alone, and for one that cuts nothing."""
    if config.distributed.engine == "deepspeed" and config.distributed.deepspeed is None:
        return "distributed.zero=2", "distributed.zero=0"
    return "distributed={engine: deepspeed, zero: 2}", "distributed={}"


def _sharded(config: RunConfig) -> Iterator[str]:
    section = config.distributed
    cure, alone = _cures(config)
    for name, write in parallelism_checks.whole_steps(config):
        yield f"{name} goes with whole weights and gradients, and ZeRO cuts them. Write {write}, or {alone}."
    if config.adapter.looks or type(config.adapter).train_hook is not Method.train_hook:
        yield f"adapter.method={config.adapter.method} looks at gradients, and ZeRO cuts them. Write {alone}."
    if isinstance(config.adapter, Full) and config.adapter.sparsity is not None:
        yield f"adapter.sparsity keeps single weights at zero, and ZeRO cuts them. Leave it out, or write {alone}."
    if config.adapter.method == "alora":
        yield f"adapter.method=alora was not tried with ZeRO. Write adapter.method=lora, or {alone}."
    whole = not zero_offload.cuts_weights(section)
    if not whole and (why := config.task.cut(config)):
        yield f"recipe={config.recipe} {why}. Write {cure}, which cuts the optimizer's state alone."
    if not whole and config.adapter.method == "vb-lora":
        yield f"adapter.method=vb-lora has one bank of vectors for all blocks, and these are cut apart. Write {cure}."
    packed = config.model.weights in ("nf4", "fp4")
    if not whole and section.engine == "deepspeed" and packed and config.adapter.method == "dora":
        yield (
            f"model.weights={config.model.weights}: adapter.method=dora takes norms of weights past their layers, "
            f"where DeepSpeed gathers none. Write distributed={{engine: fsdp2, zero: 3}}, or {cure}."
        )
    if not whole and section.engine == "deepspeed" and getattr(config.adapter, "experts", False):
        yield (
            "adapter.experts computes past the layers that hold its updates, where DeepSpeed gathers no weights. Write "
            "distributed={engine: fsdp2, zero: 3}, or " + cure + "."
        )
    if not whole and config.crossvalidates and config.correction.is_on:
        yield (
            "correction reads rows by a backbone that is whole in each process, and ZeRO cuts it. Leave section "
            "correction out, or section distributed."
        )
    if config.freeze.policy != "none" and not (whole and config.freeze.fixed):
        yield (
            f"freeze.policy={config.freeze.policy} takes weights away from {section.engine} while it holds them. "
            f"Write freeze.policy=static with {cure}, or {alone}."
        )
    if not whole and config.freeze.cache in ("memory", "disk"):
        yield (
            f"freeze.cache={config.freeze.cache} runs frozen blocks by themselves, and their weights are cut. "
            "Write freeze.cache=off."
        )
    if config.model.compute == "float16":
        yield "model.compute=float16 with ZeRO would need loss scaling. Write model.compute=bfloat16."
    if not whole and config.model.sparsity is not None:
        yield (
            "model.sparsity with zero=3 or fsdp2 would copy all weights into the memory of each process to prune them. "
            f"Leave it out, or write {cure}."
        )
    if not whole and (why := WHOLE_WEIGHTS.get(config.model.weights)):
        yield (
            f"model.weights={config.model.weights} with zero=3 or fsdp2: {why}. "
            f"Write model.weights=nf4, which can be cut, or {cure}, which cuts the optimizer's state alone."
        )
    if section.nvme is not None and not section.nvme.is_dir():
        yield f"distributed.nvme={section.nvme}: no such folder. Make it, on a fast disk."
