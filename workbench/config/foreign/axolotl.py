"""Axolotl's YAML as a recipe (docs.axolotl.ai, config reference, read in November 2026)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workbench.config.foreign import shared_settings
from workbench.config.foreign.shared_settings import Translation

NO_TASK = {
    "processor_type": "pictures and sound beside text have no equivalent here.",
    "qat": "training that imitates quantisation has no equivalent here.",
    "ebft": "energy-based fine-tuning has no equivalent here.",
    "diffusion": "diffusion language models have no equivalent here.",
    "process_reward_model": "rewards of the steps of an answer are not translated.",
}
PREFERENCES = {"dpo": "dpo", "ipo": "ipo", "kto": "kto", "orpo": "orpo", "simpo": "simpo"}
PREFERENCE_LOSSES = {"dpo": "rl_beta", "ipo": "rl_beta", "kto": "rl_beta", "simpo": "rl_beta", "orpo": "orpo_alpha"}
FORMATS = {
    "alpaca": "alpaca",
    "sharegpt": "sharegpt",
    "chat_template": "messages",
    "completion": "text",
    "pretrain": "text",
}
"""Formats of rows whose columns need no other name, by the first word of `type`."""
TRACKED = {
    "tensorboard": ("use_tensorboard",),
    "wandb": ("wandb_project",),
    "mlflow": ("use_mlflow", "mlflow_experiment_name"),
    "trackio": ("use_trackio", "trackio_project_name"),
    "swanlab": ("use_swanlab", "swanlab_project"),
}
"""Keys that send metrics somewhere."""
KERNELS = ("liger_rms_norm", "liger_rms_norm_gated", "liger_layer_norm", "liger_glu_activation", "liger_rope")
IDLE = (
    *("dataset_prepared_path", "model_type", "tokenizer_type", "wandb_entity", "wandb_watch", "wandb_name"),
    *("wandb_log_model", "wandb_run_id", "eval_sample_packing", "pad_to_sequence_len", "attn_implementation"),
    *("flash_attention", "sdp_attention", "xformers_attention", "flex_attention", "eager_attention", "plugins"),
    *("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "use_kernels", "dataset_processes", "sample_packing"),
    *("liger_fused_linear_cross_entropy", "liger_cross_entropy", "liger_use_token_scaling", "cut_cross_entropy"),
    *("fused_attn_kernel", "is_llama_derived_model"),
    *("flash_attn_cross_entropy", "flash_attn_rms_norm", "flash_attn_fuse_mlp", "flash_attn_fuse_qkv"),
    *("flex_attn_compile_kwargs", "skip_prepare_dataset", "activation_offloading", "lora_fan_in_fan_out"),
    *("load_in_8bit", "load_in_4bit", "fsdp_version", "sample_packing_sequentially"),
    *("streaming_multipack_buffer_size", "pretrain_multipack_attn", "shuffle_merged_datasets", "use_ray"),
    *("loss_watchdog_threshold", "loss_watchdog_patience", "low_cpu_mem_usage", "is_mistral_derived_model"),
)


def translate(settings: Mapping[str, Any]) -> Translation:
    """The recipe of an Axolotl file.

    Raises:
        ConfigError: Its task has no equivalent, or a value is not what its key takes.
    """
    translation = Translation(settings)
    for key, reason in NO_TASK.items():
        translation.refuse(key, reason)
    translation.refuse("gptq", "GPTQ weights are told by the backbone's own files: leave gptq out.")
    _task(translation)
    translation.move("base_model", "model.id")
    translation.move("revision_of_model", "model.revision")
    shared_settings.trust(translation)
    name = translation.take("chat_template")
    if name == "jinja" or translation.left.get("chat_template_jinja"):
        text = translation.take("chat_template_jinja")
        translation.look(
            f"chat_template_jinja: write it to a file, named in model.chat_template ({len(str(text))} characters)."
        )
    elif name not in (None, "tokenizer_default"):
        translation.look(
            f"chat_template: {name}: here the tokenizer's own template is used, or a Jinja file (model.chat_template)."
        )
    if isinstance(translation.left.get("tokens"), list) and translation.left.get("adapter"):
        translation.give("model.new_tokens", [str(token) for token in translation.take("tokens")])
    translation.ignore("eot_tokens")
    special = translation.take("special_tokens")
    named = {key: value for key, value in (special or {}).items() if value is not None and key != "pad_token"}
    if named:
        translation.look(
            f"special_tokens {named}: here the tokenizer keeps its own. Where they differ, change its files."
        )
    kind = translation.take("adapter")
    four = translation.take("load_in_4bit") is True or kind == "qlora"
    shared_settings.weights(translation, bits=4 if four else 8 if translation.take("load_in_8bit") is True else None)
    _adapter(translation, kind)
    translation.move("sequence_len", "data.max_tokens", translation.whole)
    if translation.take("train_on_inputs"):
        translation.give("data.loss_on", "all")
    listed = translation.take("datasets") or translation.take("pretraining_dataset") or []
    sources = [_source(translation, each) for each in (listed if isinstance(listed, list) else [listed])]
    formats = {name for _, name, _ in sources if name is not None}
    shared_settings.sources(
        translation,
        {f"source{number}": {"path": path, "columns": own} for number, (path, _, own) in enumerate(sources, 1)},
    )
    if len(formats) == 1 and translation.recipe["recipe"] == "sft":
        translation.give("data.format", formats.pop())
    tests = translation.take("test_datasets")
    if tests:
        translation.give("data.held_out", _source(translation, tests[0])[0])
        translation.take("val_set_size")
    else:
        shared_settings.held_out(translation, "val_set_size")
    shared_settings.length_and_rate(translation, epochs=1)
    shared_settings.schedule(translation, "lr_scheduler")
    shared_settings.optimizer(translation, "optimizer")
    shared_settings.batch(translation, "micro_batch_size", packed=translation.take("sample_packing") is True)
    shared_settings.often(translation, "evaluate.every", steps="eval_steps", per_epoch="evals_per_epoch")
    shared_settings.often(translation, "save.every", steps="save_steps", per_epoch="saves_per_epoch")
    translation.move("save_total_limit", "save.keep", translation.whole)
    shared_settings.kernels(translation, *KERNELS)
    _devices(translation)
    if address := translation.take("mlflow_tracking_uri"):
        translation.look(f"mlflow_tracking_uri: set the environment variable MLFLOW_TRACKING_URI={address}.")
    shared_settings.trackers(
        translation, [name for name, keys in TRACKED.items() if any([translation.take(key) for key in keys])]
    )
    translation.ignore(*shared_settings.IDLE, *IDLE)
    return translation


def _task(translation: Translation) -> None:
    """The recipe: judged answers, a reward model, or answers to learn."""
    if translation.left.get("rl") not in (None, *PREFERENCES):
        translation.refuse("rl", "for rewards of own answers begin with `workbench cp reinforce/quickstart my.yaml`.")
    kind = translation.take("rl")
    if translation.take("reward_model"):
        translation.give("recipe", "reward")
        translation.ignore("num_labels")
    elif kind is not None:
        translation.give("recipe", "prefer")
        translation.give("prefer.loss", PREFERENCES[str(kind)])
        translation.move(PREFERENCE_LOSSES[str(kind)], "prefer.beta", translation.number)
        if kind == "kto":
            translation.move("kto_desirable_weight", "prefer.desirable", translation.number)
            translation.move("kto_undesirable_weight", "prefer.undesirable", translation.number)
        if kind == "simpo":
            translation.move("simpo_gamma", "prefer.gamma", translation.number)
    else:
        translation.give("recipe", "sft")


def _adapter(translation: Translation, kind: Any) -> None:
    for key in ("lora_model_dir", "relora", "relora_steps"):
        if translation.left.get(key):
            translation.look(f"{key}: has no equivalent; a run goes on with --resume.")
            translation.take(key)
    layers, every = translation.whole("lisa_n_layers"), translation.whole("lisa_step_interval")
    if kind in ("lora", "qlora"):
        listed, linear = translation.take("lora_target_modules"), translation.take("lora_target_linear")
        shared_settings.low_rank(translation, rank="lora_r", targets="all-linear" if linear else listed, default_rank=8)
        if translation.take("loftq") or translation.left.get("peft"):
            translation.look(
                f"peft: {translation.take('peft')}: adapter.method=loftq begins from what quantisation took away."
            )
        if translation.left.get("lora_target_parameters"):
            names = translation.take("lora_target_parameters")
            translation.give("adapter.experts", all("experts" in str(name) for name in names))
    elif kind is None:
        translation.give("adapter.method", "full")
        translation.ignore("lora_r", "lora_alpha", "lora_dropout", "lora_target_linear", "lora_target_modules")
    else:
        translation.give("adapter.method", str(kind))
        translation.look(f"adapter: {kind}: `workbench explain adapter.method` names its settings here.")
    if layers:
        translation.give("freeze", {"policy": "lisa", "active": layers, "every": every or 20})
        translation.ignore("lisa_layers_attribute")


def _source(translation: Translation, entry: Any) -> tuple[str, str | None, dict[str, str]]:
    """Path or hub id, format where it is known, and other names of columns."""
    left = Translation(entry if isinstance(entry, dict) else {"path": entry})
    path = str(left.take("path", shared_settings.PLACEHOLDER))
    files, config, split = left.take("data_files"), left.take("name"), left.take("split")
    if left.take("ds_type") and files:
        path = str(files[0] if isinstance(files, list) else files)
    if config:
        path += f":{config}"
    if split not in (None, "train"):
        if str(split).isidentifier():
            path += f"#{split}"
        else:
            translation.look(
                f"{path}: split {split}: here a whole split is read (OWNER/NAME#SPLIT), or its first rows (data.limit)."
            )
    kind, columns = left.take("type"), dict[str, str]()
    if isinstance(kind, dict):
        translation.look(f"{path}: type {kind}: rename columns with data.columns; raw text is prompt and completion.")
        kind = None
    for key, ours in (
        ("field_messages", "messages"),
        ("field_chosen", "chosen"),
        ("field_rejected", "rejected"),
        ("field", "text"),
        ("text_column", "text"),
    ):
        theirs = left.take(key)
        if theirs not in (None, ours):
            columns[ours] = str(theirs)
    word = str(kind or "").split(".")[0].split(":")[0]
    if kind and word not in (*FORMATS, "bradley_terry", "chatml", "llama3", "user_defined"):
        translation.look(
            f"{path}: type {kind}: here columns tell the format; `workbench check` shows what the model sees."
        )
    left.ignore(
        "roles",
        "message_property_mappings",
        "roles_to_train",
        "train_on_eos",
        "trust_remote_code",
        "conversation",
        "shards",
    )
    for key, value in left.left.items():
        translation.look(f"{path}: {key}={value} has no equivalent.")
    return path, FORMATS.get(word), columns


def _devices(translation: Translation) -> None:
    settings = translation.take("fsdp_config") or {}
    offload = bool(settings.get("offload_params") or settings.get("fsdp_offload_params"))
    fsdp = translation.take("fsdp") or settings
    shared_settings.sharing(translation, deepspeed=translation.take("deepspeed"), fsdp=fsdp, offload=offload)
    parts = translation.whole("context_parallel_size", translation.whole("sequence_parallel_degree", 1)) or 1
    if parts > 1:
        translation.give("distributed.sequence", parts)
