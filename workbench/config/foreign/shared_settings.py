"""Settings that Axolotl and LLaMA-Factory name alike, for both end in the arguments of transformers' Trainer."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from math import prod
from typing import Any, get_args

from workbench.config.foreign.translation import Translation
from workbench.config.run_sections import Tracker

OPTIMIZERS: Mapping[str, str] = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused"), "adamw"),
    **dict.fromkeys(("adamw_bnb_8bit", "adamw_8bit", "adamw_torch_8bit"), "adamw8bit"),
    **dict.fromkeys(("paged_adamw_8bit", "paged_adamw8bit"), "paged_adamw8bit"),
    **dict.fromkeys(("paged_adamw_32bit", "paged_adamw"), "paged_adamw"),
    **dict.fromkeys(("lion_pytorch", "lion_32bit"), "lion"),
    **{name: name for name in ("adafactor", "sgd", "muon", "galore", "apollo", "adam_mini")},
    **dict.fromkeys(("schedule_free_adamw",), "schedule_free"),
}
"""Optimizers of transformers' Trainer."""
SCHEDULES: Mapping[str, str] = {
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "cosine_with_restarts": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
    "polynomial": "polynomial",
    "inverse_sqrt": "inverse_sqrt",
    "reduce_lr_on_plateau": "plateau",
    "warmup_stable_decay": "wsd",
    "one_cycle": "one_cycle",
    "rex": "rex",
}
PLACEHOLDER = "FILE_OR_HUB_ID"
"""A data source of which the file says only a name."""
IDLE = (
    *("logging_steps", "output_dir", "overwrite_output_dir", "resume_from_checkpoint", "ddp_timeout", "tf32", "debug"),
    *("save_only_model", "save_strategy", "eval_strategy", "save_safetensors", "dataloader_num_workers", "strict"),
    *("gradient_checkpointing", "gradient_checkpointing_kwargs", "ddp_find_unused_parameters", "remove_unused_columns"),
    *("torch_compile", "dataloader_prefetch_factor", "dataloader_pin_memory", "eval_batch_size", "run_name"),
    *("per_device_eval_batch_size", "group_by_length", "include_tokens_per_second", "save_first_step"),
)
"""Settings without effect on what is learnt, or which are decided by themselves here."""


def length_and_rate(found: Translation, *, epochs: float) -> None:
    """Length of the run, learning rate, its course, decay and clipping.

    Args:
        epochs: Passes where the file names neither these nor steps.
    """
    steps = found.whole("max_steps")
    passes = found.number("num_epochs", found.number("num_train_epochs", epochs))
    if steps is not None and steps > 0:
        found.give("train.steps", steps)
    else:
        found.give("train.epochs", passes)
    found.move("learning_rate", "train.learning_rate", found.number)
    found.move("weight_decay", "train.weight_decay", found.number)
    found.move("max_grad_norm", "train.max_grad_norm", found.number)
    found.move("seed", "seed", found.whole)
    _warm_up(found, steps)
    found.move("early_stopping_patience", "evaluate.patience", found.whole)
    best = bool(found.take("load_best_model_at_end")) or "patience" in found.recipe.get("evaluate", {})
    found.give("save.ship", "best" if best else None)


def _warm_up(found: Translation, steps: int | None) -> None:
    share, first = found.number("warmup_ratio"), found.number("warmup_steps")
    if first is not None and first < 1 and share is None:  # transformers 5 takes a share there
        share, first = first, None
    if first and steps:
        share = first / steps
    elif first:
        found.look(
            f"warmup_steps={first:g}: schedule.warmup is a share of the run, here 0.05. Write {first:g} / the number "
            "of steps, which `workbench check` says."
        )
    found.give("schedule.warmup", None if first and not steps else share or 0.0)


def schedule(found: Translation, key: str) -> None:
    """The course of the learning rate."""
    found.choose(key, SCHEDULES, "schedule.name")
    name = found.recipe.get("schedule", {}).get("name")
    if name == "cosine":
        found.move("cosine_min_lr_ratio", "schedule.floor", found.number)
    extra = found.take("lr_scheduler_kwargs")
    if extra:
        found.look(f"{key}'s own settings {extra}: look at the section schedule (`workbench explain schedule.name`).")


def optimizer(found: Translation, key: str) -> None:
    """The optimizer, and its memory."""
    found.choose(key, OPTIMIZERS, "optimizer.name")
    first, second = found.number("adam_beta1"), found.number("adam_beta2")
    if first is not None or second is not None:
        found.give("optimizer.betas", [0.9 if first is None else first, 0.999 if second is None else second])
    found.move("adam_epsilon", "optimizer.eps", found.number)
    found.move("neftune_noise_alpha", "regularise.neftune", found.number)
    found.move("label_smoothing_factor", "regularise.label_smoothing", found.number)


def batch(found: Translation, micro: str, *, packed: bool) -> None:
    """Rows of a step, on one device."""
    parts = found.whole(micro), found.whole("gradient_accumulation_steps")
    rows = prod(part for part in parts if part is not None)
    found.give("batch.size", rows)
    found.look(
        f"batch.size={rows} are the rows of a step on one device there. Here it is the global batch, the same on any "
        "number of devices: multiply it by how many you had."
    )
    if packed:
        found.look(
            f"Packing: there a row of the batch is a sequence filled with several examples; here batch.size counts "
            f"examples, and they are packed where that is faster. Write {rows} times the examples that fill a sequence "
            "(`workbench check` says the mean length)."
        )


def often(found: Translation, place: str, *, steps: str, per_epoch: str) -> None:
    """Steps, or times in an epoch, between evaluations or checkpoints."""
    every, times = found.number(steps), found.number(per_epoch)
    epochs = found.recipe.get("train", {}).get("epochs")
    if every:
        found.give(place, every if every < 1 else int(every))
    elif times and epochs:
        found.give(place, round(min(1.0, 1 / (times * epochs)), 6))


def sharing(found: Translation, *, deepspeed: Any, fsdp: Any, offload: bool) -> None:
    """Layout of several devices; a DeepSpeed file is told by its name."""
    if (deepspeed or fsdp) and found.recipe["recipe"] != "sft":
        found.look(
            f"Sharing by {deepspeed or 'FSDP'}: recipe {found.recipe['recipe']} keeps whole models on each device."
        )
    elif deepspeed:
        stage = re.search(r"z(?:ero)?_?([0-3])", str(deepspeed).lower())
        if stage is None:
            found.look(
                f"deepspeed: {deepspeed}: write its stage to distributed.zero, or the file to distributed.deepspeed."
            )
            return
        section: dict[str, Any] = {"zero": int(stage[1])}
        if "offload" in str(deepspeed).lower():
            section["offload_optimizer"] = "cpu"
            section |= {"offload_parameters": "cpu"} if section["zero"] == 3 else {}
        found.give("distributed", section)
        found.look(
            f"deepspeed: {deepspeed} is told by its name: look at the section distributed, and start with --devices N."
        )
    elif fsdp:
        found.give("distributed", {"engine": "fsdp2", "zero": 3})
        found.look("FSDP: written as distributed={engine: fsdp2, zero: 3}. Start with --devices N.")
        if offload:
            found.look(
                "FSDP's offload of weights: distributed={zero: 3, offload_parameters: cpu} does it, by DeepSpeed."
            )


def trust(found: Translation) -> None:
    """Code that comes with a backbone, which runs only where a person says so here."""
    if found.take("trust_remote_code"):
        found.look(
            "trust_remote_code is not taken over: write model.trust_remote_code=true where you trust the authors."
        )


def sources(found: Translation, named: Mapping[str, Mapping[str, Any]]) -> None:
    """One source as data.train, several as data.sources; one that is named twice gets twice the weight."""
    merged: dict[str, dict[str, Any]] = {}
    for name, source in named.items():
        same = next((each for each in merged.values() if each["path"] == source["path"]), None)
        if same is None:
            merged[name] = {key: value for key, value in source.items() if value}
        else:
            same["weight"] = same.get("weight", 1) + 1
    if len(merged) > 1:
        found.give("data.sources", merged)
        return
    only = next(iter(merged.values()), {"path": PLACEHOLDER})
    for key, place in (("path", "train"), ("columns", "columns"), ("limit", "limit")):
        found.give(f"data.{place}", only.get(key))
    if only["path"] == PLACEHOLDER:
        found.look(f"The file names no rows to train on: write them in place of {PLACEHOLDER}.")


TRACKERS: tuple[str, ...] = get_args(Tracker)


def trackers(found: Translation, names: Container[str]) -> None:
    """Where metrics go besides metrics.jsonl."""
    found.give("trackers", [name for name in TRACKERS if name in names] or None)


def weights(found: Translation, *, bits: int | None) -> None:
    """How the backbone is stored, and in which precision products are."""
    found.give("model.weights", {4: "nf4", 8: "int8"}.get(bits or 0))
    if found.take("fp16") is True:
        found.give("model.compute", "float16")
    if found.take("bf16") is True:
        found.give("model.compute", "bfloat16")


def held_out(found: Translation, key: str) -> None:
    """The share of the rows that is held out."""
    share = found.number(key)
    if not share:
        found.look("No rows were held out there. Here 5 % are (data.held_out), for a run is scored before and after.")
    elif share < 1:
        found.give("data.held_out", share)
    else:
        found.look(f"{key}={share:g} rows: data.held_out is a share, here 0.05, or a file.")
