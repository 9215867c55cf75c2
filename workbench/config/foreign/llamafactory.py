"""LLaMA-Factory's YAML as a recipe (its hparams, read in November 2026)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workbench.config.foreign import shared_settings
from workbench.config.foreign.shared_settings import Translation
from workbench.errors import ConfigError

LOSSES = {"sigmoid": "dpo", "hinge": "hinge", "ipo": "ipo", "orpo": "orpo", "simpo": "simpo"}
IDLE = (
    *("do_train", "do_eval", "do_predict", "overwrite_cache", "preprocessing_num_workers", "plot_loss", "flash_attn"),
    *("disable_gradient_checkpointing", "use_reentrant_gc", "use_unsloth", "use_v1_kernels"),
    *("quantization_method", "double_quantization", "bnb_quantization", "upcast_layernorm", "upcast_lmhead_output"),
    *("neat_packing", "packing", "cache_dir", "print_param_status", "low_cpu_mem_usage", "predict_with_generate"),
    *("tokenized_path", "pissa_iter", "pissa_convert", "include_num_input_tokens_seen", "galore_layerwise"),
    *("ray_run_name", "ray_storage_path", "ray_num_workers", "resources_per_worker", "placement_strategy"),
    *("badam_mode", "tokenizer_name_or_path", "use_fast_tokenizer", "dataset_dir"),
)
PICTURES = ("image_max_pixels", "video_max_pixels", "freeze_vision_tower", "video_fps", "audio_sampling_rate")


def translate(settings: Mapping[str, Any], *, folders: tuple[Path, ...]) -> Translation:
    """The recipe of a LLaMA-Factory file.

    Args:
        folders: Where dataset_info.json is looked for, in `dataset_dir` below each.

    Raises:
        ConfigError: Its task has no equivalent, or a value is not what its key takes.
    """
    translation = Translation(settings)
    for key in PICTURES:
        translation.refuse(key, "pictures, films and sound beside text have no equivalent here.")
    if "use_kt" in settings or "export_dir" in settings:
        raise ConfigError(
            "This file computes or exports with another program and trains nothing that could be translated."
        )
    stage = str(translation.take("stage", "sft"))
    if stage == "ppo":
        raise ConfigError(
            "stage: ppo: learning from rewards is recipe reinforce: `workbench cp reinforce/quickstart my.yaml`."
        )
    if stage not in ("pt", "sft", "rm", "dpo", "kto"):
        raise ConfigError(f"stage: {stage}: expected pt, sft, rm, dpo or kto.")
    translation.give("recipe", {"dpo": "prefer", "kto": "prefer", "rm": "reward"}.get(stage, "sft"))
    if stage == "pt":
        translation.give("data.format", "text")
    if stage == "kto":
        translation.give("prefer.loss", "kto")
        translation.move("kto_chosen_weight", "prefer.desirable", translation.number)
        translation.move("kto_rejected_weight", "prefer.undesirable", translation.number)
    if stage == "dpo":
        translation.choose("pref_loss", LOSSES, "prefer.loss")
        translation.move("simpo_gamma", "prefer.gamma", translation.number)
        translation.move("dpo_label_smoothing", "prefer.label_smoothing", translation.number)
    if stage in ("dpo", "kto"):
        translation.move("pref_beta", "prefer.beta", translation.number)
        translation.move("pref_ftx", "prefer.alpha", translation.number)
        reference = translation.take("ref_model")
        if reference:
            translation.look(f"ref_model: {reference}: prefer.reference is the backbone itself, or a finished run.")
    translation.move("model_name_or_path", "model.id")
    translation.move("model_revision", "model.revision")
    shared_settings.trust(translation)
    template = translation.take("template")
    if template is not None:
        translation.look(
            f"template: {template}: here the tokenizer's own template is used, or a Jinja file (model.chat_template)."
        )
    shared_settings.weights(translation, bits=translation.whole("quantization_bit"))
    if translation.take("pure_bf16"):
        translation.give("model.weights", "bfloat16")
    kind = str(translation.take("finetuning_type", "lora"))
    if kind == "lora":
        shared_settings.low_rank(
            translation, rank="lora_rank", targets=translation.take("lora_target", "all"), default_rank=8
        )
    elif kind == "oft":
        translation.give("adapter.method", "oft")
        translation.move("oft_block_size", "adapter.block", translation.whole)
        shared_settings.place(translation, translation.take("oft_target", "all"))
    elif kind == "freeze":
        translation.give("adapter.method", "last-layers")
        translation.move("freeze_trainable_layers", "adapter.layers", translation.whole)
        translation.ignore("freeze_trainable_modules")
        if translation.take("use_llama_pro"):
            translation.recipe["adapter"] = {"method": "block-expansion"}
            translation.look(
                "use_llama_pro: adapter.method=block-expansion adds the new blocks itself: name the backbone as it was "
                "before it was expanded."
            )
    elif kind == "full":
        translation.give("adapter.method", "full")
    else:
        raise ConfigError(f"finetuning_type: {kind}: expected lora, oft, freeze or full.")
    start = translation.take("adapter_name_or_path")
    if start:
        translation.look(
            f"adapter_name_or_path: {start}: prefer.start names a run of this workbench; others are not continued."
        )
    translation.move("cutoff_len", "data.max_tokens", translation.whole)
    if translation.take("train_on_prompt"):
        translation.give("data.loss_on", "all")
    elif translation.take("mask_history"):
        translation.give("data.loss_on", "last")
    limit = translation.whole("max_samples")
    where = str(translation.take("dataset_dir", "data"))
    listed = translation.take("dataset", [])
    names = [name.strip() for name in listed.split(",")] if isinstance(listed, str) else [str(name) for name in listed]
    table = _table(folders, where)
    sources = {name: _source(translation, name, table, where) for name in names}
    named = {name: {"path": path, "columns": own, "limit": limit} for name, (path, own) in sources.items()}
    shared_settings.sources(translation, named)
    held_out = translation.take("eval_dataset")
    if held_out:
        translation.give("data.held_out", _source(translation, str(held_out).split(",")[0], table, where)[0])
        translation.take("val_size")
    else:
        shared_settings.held_out(translation, "val_size")
    shared_settings.length_and_rate(translation, epochs=3)
    shared_settings.schedule(translation, "lr_scheduler_type")
    _optimizer(translation)
    packed = bool(translation.take("packing") or translation.take("neat_packing"))
    shared_settings.batch(translation, "per_device_train_batch_size", packed=packed)
    shared_settings.often(translation, "evaluate.every", steps="eval_steps", per_epoch="")
    shared_settings.often(translation, "save.every", steps="save_steps", per_epoch="")
    translation.move("save_total_limit", "save.keep", translation.whole)
    shared_settings.kernels(translation, "enable_liger_kernel")
    shared_settings.sharing(
        translation, deepspeed=translation.take("deepspeed"), fsdp=translation.take("fsdp"), offload=False
    )
    translation.ignore("fsdp_config")
    report = translation.take("report_to")
    report = [*report] if isinstance(report, list) else [report]
    report += ["swanlab"] if translation.take("use_swanlab") else []
    shared_settings.trackers(translation, report)
    for name in report:
        if name not in (None, "none", "all", *shared_settings.TRACKERS):
            translation.look(f"report_to: {name} has no equivalent; metrics.jsonl has every figure.")
    translation.ignore(*shared_settings.IDLE, *IDLE)
    return translation


def _optimizer(translation: Translation) -> None:
    """The optimizer; some are switched on by a word of their own."""
    shared_settings.optimizer(translation, "optim")
    for word, name in (
        ("use_galore", "galore"),
        ("use_apollo", "apollo"),
        ("use_adam_mini", "adam_mini"),
        ("use_muon", "muon"),
    ):
        if translation.take(word):
            translation.give("optimizer.name", name)
            if name in ("galore", "apollo"):
                translation.move(f"{name}_rank", "optimizer.rank", translation.whole)
                translation.move(f"{name}_update_interval", "optimizer.rank_every", translation.whole)
                translation.move(f"{name}_scale", "optimizer.rank_scale", translation.number)
                translation.ignore(f"{name}_target", f"{name}_layerwise")


def _table(folders: tuple[Path, ...], where: str) -> dict[str, Any]:
    """Contents of dataset_info.json; empty where there is none."""
    for folder in folders:
        file = folder / where / "dataset_info.json"
        if file.is_file():
            try:
                return dict(json.loads(file.read_text(encoding="utf-8")))
            except ValueError as error:
                raise ConfigError(f"{file}: not JSON: {error}") from None
    return {}


def _source(translation: Translation, name: str, table: dict[str, Any], where: str) -> tuple[str, dict[str, str]]:
    """Path or hub id of a data set, and other names of its columns."""
    entry = table.get(name)
    if entry is None:
        translation.look(
            f"dataset {name}: no dataset_info.json names it; write a file or a hub id in place of {where}/{name}.json."
        )
        return f"{where}/{name}.json", {}
    path = entry.get("hf_hub_url") or f"{where}/{entry.get('file_name', f'{name}.json')}"
    names = {"prompt": "instruction", "query": "input", "response": "output", "messages": "messages"}
    if translation.recipe.get("data", {}).get("format") == "text":  # of stage pt, which reads one column as it stands
        names = {"prompt": "text"}
    elif entry.get("formatting") == "sharegpt":
        names = {"messages": "conversations"}
    if entry.get("ranking"):
        names = {**names, "chosen": "chosen", "rejected": "rejected"}
    columns = {names[key]: str(theirs) for key, theirs in (entry.get("columns") or {}).items() if key in names}
    return path, {ours: theirs for ours, theirs in columns.items() if ours != theirs}
