"""LLaMA-Factory's YAML as a recipe (its hparams, read in November 2026)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workbench.config.foreign import shared_settings
from workbench.config.foreign.shared_settings import NO_SIDE, PLACEHOLDER, RowSource
from workbench.config.foreign.translation import EMPTY, Rule, Translation, named, no_effect, to, told
from workbench.config.yaml_text import is_unicode
from workbench.errors import ConfigError
from workbench.schema import shown

LOSSES = {"sigmoid": "dpo", "hinge": "hinge", "ipo": "ipo", "orpo": "orpo", "simpo": "simpo"}
RECIPES = {"pt": "sft", "sft": "sft", "rm": "reward", "dpo": "prefer", "kto": "prefer"}
NO_TRAINING = "this file computes, exports or answers with another program and trains nothing that could be translated."
NO_TASK = {
    **dict.fromkeys(("image_max_pixels", "video_max_pixels", "freeze_vision_tower", "audio_sampling_rate"), NO_SIDE),
    **dict.fromkeys(("video_fps", "video_maxlen"), NO_SIDE),
    **dict.fromkeys(("use_kt", "export_dir", "infer_backend"), NO_TRAINING),
}
SUBSPACES = {"use_galore": ("galore", 2.0), "use_apollo": ("apollo", 32.0)}
"""Words that switch on an optimizer with moments in a subspace, its name, and its scale where the file has none."""
TABLE: dict[str, Rule] = {
    "model_revision": to("model.revision", Translation.text),
    "template": told("here the tokenizer's own template is used, or a Jinja file (model.chat_template)."),
    "adapter_name_or_path": told("prefer.start names a run of this workbench; others are not continued."),
    "ref_model": told("prefer.reference is the backbone itself, or a finished run."),
    "dataset_dir": told("dataset_info.json is read from a folder here."),
    "do_train": told("this recipe trains.", but=(True,)),
    "do_predict": told("`workbench predict` and `generate` answer.", but=(False,)),
    "pure_bf16": lambda translation, key: (
        translation.give("model.weights", "bfloat16", key) if translation.flag(key) else translation.ignore(key)
    ),
    "quantization_method": told("4 and 8 bits are those of bitsandbytes here.", but=("bnb", "bitsandbytes")),
    "double_quantization": told("here constants of 4-bit weights are in 8 bits (nf4).", but=(True,)),
    "mix_strategy": told(
        "data.sources.NAME.weight and data.mix.by=weight say how often rows of each source are drawn.", but=("concat",)
    ),
    "interleave_probs": told("write them to data.sources.NAME.weight, with data.mix.by=weight."),
    "tokenized_path": told("rows are read from their files here, and not as tokens of another tokenizer."),
    "disable_shuffling": told("here rows are always drawn at random.", but=(False,)),
    "use_llama_pro": told("is a kind of finetuning_type freeze.", but=(False,)),
    "freeze_trainable_modules": told("whole blocks train here.", but=("all",)),
    "galore_target": told("matrices inside the blocks have a subspace here.", but=("all",)),
    "apollo_target": told("matrices inside the blocks have a subspace here.", but=("all",)),
    "galore_proj_type": told("the shorter side of a matrix is projected here.", but=("std",)),
    "apollo_proj": told("the subspace is random here.", but=("random",)),
    "apollo_scale_type": told("apollo scales columns here, apollo_mini whole matrices.", but=("channel",)),
    "packing": told("documents become blocks of their own here.", but=(True,)),
    **shared_settings.TABLE,
    **no_effect(
        "do_eval overwrite_cache preprocessing_num_workers preprocessing_batch_size plot_loss flash_attn cache_dir "
        "disable_gradient_checkpointing use_reentrant_gc use_unsloth use_unsloth_gc use_v1_kernels upcast_layernorm "
        "upcast_lmhead_output print_param_status predict_with_generate use_fast_tokenizer pissa_iter pissa_convert "
        "ray_* resources_per_worker placement_strategy swanlab_* neat_packing fsdp_* eval_on_each_dataset "
        "include_effective_tokens_per_second data_shared_file_system galore_layerwise apollo_layerwise "
        "enable_liger_kernel use_dora use_rslora pissa_init"
    ),
}
PLACES = {
    "hf_hub_url": "",
    "ms_hub_url": "an id on ModelScope; here it is one of the Hugging Face hub.",
    "om_hub_url": "an id on Modelers; here it is one of the Hugging Face hub.",
    "script_url": "no loading script of a data set is run here; write a file or a hub id to data.train.",
    "cloud_file_name": "",
    "file_name": "",
}
"""Where a data set may be, the first that an entry has, and what to say about it."""
CHAT = {"messages": "conversations", "system": "system", "tools": "tools"}
COLUMNS = {
    "alpaca": {
        **{"prompt": "instruction", "query": "input", "response": "output"},
        **{name: name for name in ("history", "system", "tools")},
    },
    "sharegpt": CHAT,
    "openai": CHAT,
}
"""Columns that each format of rows has there, and their names here."""
TAGS: dict[str, Rule] = {
    key: told(
        "here a turn is {role: user, assistant, system or tool, content} or {from: human, gpt, system, observation or "
        "function_call, value}. Rename keys and names in the rows.",
        but=known,
    )
    for key, known in {
        "role_tag": ("from", "role"),
        "content_tag": ("value", "content"),
        "user_tag": ("human", "user"),
        "assistant_tag": ("gpt", "assistant"),
        "observation_tag": ("observation", "tool"),
        "function_tag": ("function_call",),
        "system_tag": ("system",),
    }.items()
}


def translate(settings: Mapping[str, Any], *, folders: tuple[Path, ...]) -> Translation:
    """The recipe of a LLaMA-Factory file.

    Args:
        folders: Where dataset_info.json is looked for, in `dataset_dir` below each.

    Raises:
        ConfigError: Its task has no equivalent, or a value is not what its key takes.
    """
    translation = Translation(settings)
    translation.refuse(NO_TASK)
    if translation.flag("do_predict") and not translation.flag("do_train"):
        raise ConfigError(f"do_predict: {NO_TRAINING}")
    stage = translation.text("stage") or "sft"
    if stage == "ppo":
        raise ConfigError(
            "stage: ppo: learning from rewards is recipe reinforce: `workbench cp reinforce/quickstart my.yaml`."
        )
    if stage not in RECIPES:
        raise ConfigError(f"stage: {stage}: expected {', '.join(RECIPES)}.")
    translation.give("recipe", RECIPES[stage], "stage")
    translation.move("model_name_or_path", "model.id", Translation.text)
    if translation.recipe["recipe"] == "prefer":
        _judged(translation, stage)
    bits = translation.whole("quantization_bit")
    four = {"nf4": "nf4", "fp4": "fp4"}.get(translation.text("quantization_type") or "nf4", "nf4")
    shared_settings.weights(translation, bits=bits, keys=("quantization_bit", "quantization_type"), four=four)
    _adapter(translation)
    _rows(translation, stage, folders)
    shared_settings.length_and_rate(translation, passes="num_train_epochs", epochs=3.0, warmup=0.0)
    translation.default("learning_rate", 5e-5, "train.learning_rate")
    shared_settings.schedule(translation, "lr_scheduler_type", default="linear")
    _optimizer(translation)
    packing = ("packing", "neat_packing") if stage == "sft" else ()
    shared_settings.batch(translation, "per_device_train_batch_size", *packing, default=8)
    shared_settings.often(translation, "evaluate.every", steps="eval_steps")
    shared_settings.often(translation, "save.every", steps="save_steps")
    shared_settings.kernels(translation, "enable_liger_kernel")
    shared_settings.sharing(translation)
    reports = {name: ["report_to"] for name in translation.texts("report_to")}
    if translation.flag("use_swanlab"):
        reports["swanlab"] = ["use_swanlab"]
    translation.ignore("use_swanlab")
    for name in {*reports} - {"none", *shared_settings.TRACKERS}:
        translation.remark(f"report_to: {name} has no equivalent; metrics.jsonl has every figure.")
    shared_settings.trackers(translation, reports)
    translation.ignore("report_to")
    translation.apply(TABLE)
    translation.finish()
    return translation


def _judged(translation: Translation, stage: str) -> None:
    """The loss of judged answers."""
    if stage == "kto":
        translation.give("prefer.loss", "kto")
        translation.move("kto_chosen_weight", "prefer.desirable", Translation.number)
        translation.move("kto_rejected_weight", "prefer.undesirable", Translation.number)
    else:
        translation.choose("pref_loss", LOSSES, "prefer.loss")
        loss = translation.recipe.get("prefer", {}).get("loss", "dpo")
        if loss == "simpo":
            translation.default("simpo_gamma", 0.5, "prefer.gamma")
            translation.move("simpo_gamma", "prefer.gamma", Translation.number)
        if loss == "dpo" and translation.number("dpo_label_smoothing"):
            translation.give("prefer.loss", "cdpo")
            translation.move("dpo_label_smoothing", "prefer.label_smoothing", Translation.number)
        if loss == "dpo" and translation.number("ld_alpha") is not None:
            translation.give("prefer.length", "desensitised")
            translation.move("ld_alpha", "prefer.ld_alpha", Translation.number)
        translation.ignore("simpo_gamma", "dpo_label_smoothing")
    translation.move("pref_beta", "prefer.beta", Translation.number)
    translation.move("pref_ftx", "prefer.alpha", Translation.number)


def _adapter(translation: Translation) -> None:
    kind = translation.text("finetuning_type") or "lora"
    if kind == "lora":
        shared_settings.low_rank(translation, rank="lora_rank")
        translation.give("adapter.targets", "all-linear")
        shared_settings.place(translation, "lora_target")
    elif kind == "oft":
        translation.default("oft_block_size", 32, "adapter.block")
        translation.move("oft_block_size", "adapter.block", Translation.whole)
        translation.give("adapter.targets", "all-linear")
        shared_settings.place(translation, "oft_target")
    elif kind == "freeze" and translation.flag("use_llama_pro"):
        translation.look(
            "adapter.method=block-expansion adds the new blocks itself: name the backbone as it was before it was "
            "expanded.",
            "use_llama_pro",
            "freeze_trainable_layers",
        )
    elif kind == "freeze":
        translation.default("freeze_trainable_layers", 2, "adapter.layers")
        translation.move("freeze_trainable_layers", "adapter.layers", Translation.whole)
    elif kind != "full":
        raise ConfigError(f"finetuning_type: {kind}: expected lora, oft, freeze or full.")
    methods = {"lora": translation.recipe.get("adapter", {}).get("method"), "freeze": "last-layers"}
    expanded = kind == "freeze" and translation.flag("use_llama_pro")
    method = "block-expansion" if expanded else methods.get(kind, kind)
    translation.give("adapter.method", method, "finetuning_type")
    if kind != "lora":
        translation.ignore("lora_rank", "lora_alpha", "lora_dropout", "lora_target")


def _optimizer(translation: Translation) -> None:
    """The optimizer; some are switched on by a word of their own."""
    shared_settings.optimizer(translation, "optim")
    for word, name in (("use_adam_mini", "adam_mini"), ("use_muon", "muon")):
        if translation.flag(word):
            translation.give("optimizer.name", name, word)
        translation.ignore(word)
    for word, (name, scale) in SUBSPACES.items():
        if translation.flag(word):
            translation.give("optimizer.name", name, word)
            translation.default(f"{name}_rank", 16, "optimizer.rank")
            translation.default(f"{name}_scale", scale, "optimizer.rank_scale")
            translation.move(f"{name}_rank", "optimizer.rank", Translation.whole)
            translation.move(f"{name}_update_interval", "optimizer.rank_every", Translation.whole)
            translation.move(f"{name}_scale", "optimizer.rank_scale", Translation.number)
        translation.ignore(word)


def _rows(translation: Translation, stage: str, folders: tuple[Path, ...]) -> None:
    """Rows to train on and to hold out, their length, and which tokens carry loss."""
    for key, loss in (("train_on_prompt", "all"), ("mask_history", "last")):
        if translation.flag(key):
            translation.give("data.loss_on", loss, key)
        translation.ignore(key)
    where = translation.value("dataset_dir")
    folder = (translation.text("dataset_dir") if where and not isinstance(where, dict) else None) or "data"
    table = where if isinstance(where, dict) else _table(folders, folder)
    sets, tests = (
        {name: _source(translation, name, table, folder, stage) for name in translation.texts(key)}
        for key in ("dataset", "eval_dataset")
    )
    limit = translation.whole("max_samples")
    for source in sets.values():
        source.keys["dataset"] = "path"
        if limit is not None:
            source.limit = limit if source.limit is None else min(limit, source.limit)
            source.keys["max_samples"] = "limit"
    for source in tests.values():
        source.keys["eval_dataset"] = "path"
    shared_settings.sources(translation, sets)
    translation.ignore("max_samples")
    if not folder.startswith("REMOTE:"):
        translation.ignore("dataset_dir")
    if tests:
        shared_settings.held_out_files(translation, tests)
        translation.look("eval_dataset is held out in its place.", "val_size")
    else:
        shared_settings.held_out(translation, "val_size")
    translation.default("cutoff_len", 2048, "data.max_tokens")
    translation.move("cutoff_len", "data.max_tokens", Translation.whole)
    if stage == "pt":
        translation.give("data.format", "text")
        translation.remark(
            "Stage pt: there documents follow one another, each with an end token, and are cut into blocks of "
            "cutoff_len; here each document becomes blocks of its own, and its rest a shorter one."
        )
    else:
        translation.remark(
            "Rows longer than cutoff_len: there prompt and answer are both cut at their ends; here the left of the row "
            "is (data.truncate)."
        )
        if any(source.format == "alpaca" for source in sets.values()):
            translation.remark("Instruction and input: a line break is between them there, an empty line here.")


def _table(folders: tuple[Path, ...], where: str) -> dict[str, Any]:
    """Contents of dataset_info.json; empty where there is none."""
    for folder in folders:
        file = folder / where / "dataset_info.json"
        try:
            if not file.is_file():
                continue
            table = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise ConfigError(f"{str(file)[:200]}: not a JSON file that can be read: {reason}.") from None
        if not isinstance(table, dict) or not is_unicode(table):
            raise ConfigError(f"{file}: expected a mapping of data sets, found {shown(table)}.")
        return table
    return {}


def _source(translation: Translation, name: str, table: Mapping[str, Any], folder: str, stage: str) -> RowSource:
    """A data set, as dataset_info.json describes it."""
    entry = table.get(name)
    if folder == "ONLINE":
        return RowSource(name)
    if entry in EMPTY:
        path = f"{folder}/{name}.json"
        translation.remark(f"dataset {name}: no dataset_info.json has it; write a file or a hub id in place of {path}.")
        return RowSource(path)
    if not isinstance(entry, dict):
        raise ConfigError(f"dataset_info.json: {name}: expected a mapping, found {shown(entry)}.")
    at = f"dataset_info.json.{named(name)}"
    settings = translation.at(at)
    if translation.value(at) is None:
        translation.add(at, entry)
    settings.refuse({f"columns.{key}": NO_SIDE for key in ("images", "videos", "audios")})
    formatting = settings.text("formatting") or "alpaca"
    if formatting not in COLUMNS:
        raise ConfigError(f"{settings.path('formatting')}: {formatting}: expected {', '.join(COLUMNS)}.")
    names = {"prompt": "text"} if stage == "pt" else dict(COLUMNS[formatting])
    if settings.flag("ranking"):
        names |= {"chosen": "chosen", "rejected": "rejected"}
    elif stage == "kto":
        names |= {"kto_tag": "label"}
    source = _place(settings, folder)
    source.keys |= {settings.path(key): "format" for key in ("formatting", "ranking")}
    if stage == "sft" and formatting == "alpaca":
        source.format = "alpaca"
    source.rename(settings, {f"columns.{key}": ours for key, ours in names.items()})
    columns = settings.value("columns")
    others = [f"columns.{named(key)}" for key in columns if key not in names] if isinstance(columns, dict) else ()
    settings.look(f"not read there with formatting {formatting} in stage {stage}, nor here.", *others)
    settings.at("tags").apply(TAGS)
    if (rows := settings.whole("num_samples")) is not None:
        source.limit = rows
        settings.look(f"so many rows, drawn at random, there; here the first {rows} (data.limit).", "num_samples")
    return source


def _place(settings: Translation, folder: str) -> RowSource:
    """Where the rows are: a hub data set, a file in the cloud, or one beside dataset_info.json."""
    key = next((key for key in PLACES if settings.text(key)), "file_name")
    path = settings.text(key) or PLACEHOLDER
    source = RowSource(f"{folder}/{path}" if key == "file_name" and settings.text(key) else path)
    if PLACES[key]:
        settings.look(PLACES[key], key)
    source.keys[settings.path(key)] = "path"
    if key.endswith("hub_url"):
        shared_settings.rows_of(settings, source, split="split", config="subset")
    else:
        settings.apply({"split": told("a file has one split here.", but=("train",))})
    settings.ignore(*(other for other in PLACES if other != key))  # of several, the first one holds there, too
    return source
