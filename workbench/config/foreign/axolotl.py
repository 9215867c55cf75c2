"""Axolotl's YAML as a recipe (docs.axolotl.ai, config reference, read in November 2026)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workbench.config.foreign import shared_settings
from workbench.config.foreign.shared_settings import NO_SIDE, PLACEHOLDER, RowSource
from workbench.config.foreign.translation import Rule, Translation, no_effect, to, told
from workbench.errors import ConfigError

NO_TASK = {
    "processor_type": NO_SIDE,
    "qat": "training that imitates quantisation has no equivalent here.",
    "ebft": "energy-based fine-tuning has no equivalent here.",
    "diffusion": "diffusion language models have no equivalent here.",
    "process_reward_model": "rewards of the steps of an answer are not translated.",
    "gptq": "GPTQ weights are told by the backbone's own files: leave gptq out.",
}
PREFERENCES = {"dpo": "rl_beta", "ipo": "rl_beta", "kto": "rl_beta", "simpo": "rl_beta", "orpo": "orpo_alpha"}
"""Losses of judged answers, and the key of each one's beta."""
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
    "wandb": ("wandb_project", "use_wandb"),
    "mlflow": ("use_mlflow", "mlflow_experiment_name"),
    "trackio": ("use_trackio", "trackio_project_name"),
    "swanlab": ("use_swanlab", "swanlab_project"),
}
"""Keys that send metrics somewhere."""
KERNELS = ("liger_rms_norm", "liger_rms_norm_gated", "liger_layer_norm", "liger_glu_activation", "liger_rope")
OFFLOAD = "distributed={zero: 3, offload_parameters: cpu} does it, by DeepSpeed."
TABLE: dict[str, Rule] = {
    "revision_of_model": to("model.revision", Translation.text),
    "chat_template": told(
        "here the tokenizer's own template is used, or a Jinja file (model.chat_template).", but=("tokenizer_default",)
    ),
    "chat_template_jinja": told("write it to a file, named in model.chat_template."),
    "bnb_config_kwargs.bnb_4bit_use_double_quant": told("constants are in 8 bits here.", but=(True,)),
    "tokens": told("with an adapter, model.new_tokens has them as a list."),
    "special_tokens": told("here the tokenizer keeps its own. Where they differ, change its files."),
    "lora_model_dir": told("has no equivalent; a run goes on with --resume."),
    "relora": told("has no equivalent.", but=(False,)),
    "peft": told("adapter.method=loftq begins from what quantisation took away."),
    "loftq": told("adapter.method=loftq begins from what quantisation took away."),
    "lora_modules_to_save": told("these train whole there; here adapter.targets and rows of model.new_tokens do."),
    "excess_length_strategy": told("here the left of a long row is cut (data.truncate)."),
    "shuffle_merged_datasets": told("here rows are always drawn at random.", but=(True,)),
    "dataset_exact_deduplication": lambda translation, key: (
        translation.give("data.clean", ["exact_duplicate"], key) if translation.flag(key) else translation.ignore(key)
    ),
    "train_on_inputs": lambda translation, key: (
        translation.give("data.loss_on", "all", key) if translation.flag(key) else translation.ignore(key)
    ),
    "bfloat16": told("model.weights=bfloat16 is how the backbone is stored.", but=(False,)),
    "float16": told("model.weights=float16 is how the backbone is stored.", but=(False,)),
    "float32": told("model.weights=float32 is how the backbone is stored.", but=(False,)),
    "tensor_parallel_size": told("distributed.tensor cuts weights among devices, for recipes that allow it.", but=(1,)),
    "dp_shard_size": told("distributed.zero=3 or engine=fsdp2 shares weights among all devices.", but=(1,)),
    "dp_replicate_size": told("distributed.replicas are copies of all weights, with engine=fsdp2.", but=(1,)),
    "fsdp_config.sharding_strategy": told("distributed.zero=2 or 3 says what is shared.", but=("FULL_SHARD",)),
    "fsdp_config.fsdp_sharding_strategy": told("distributed.zero=2 or 3 says what is shared.", but=("FULL_SHARD",)),
    "fsdp_config.reshard_after_forward": told("distributed.zero=2 keeps weights until the backward pass.", but=(True,)),
    "fsdp_config.fsdp_reshard_after_forward": told("distributed.zero=2 keeps weights that long.", but=(True,)),
    "fsdp_config.offload_params": told(OFFLOAD, but=(False,)),
    "fsdp_config.fsdp_offload_params": told(OFFLOAD, but=(False,)),
    "eot_tokens": told("here the end of each turn that carries loss does, too, as the template writes it."),
    "mlflow_tracking_uri": told("set the environment variable MLFLOW_TRACKING_URI to it."),
    "hub_model_id": told("`workbench run --push` copies a run directory."),
    **shared_settings.TABLE,
    **no_effect(
        "dataset_prepared_path dataset_processes dataset_num_proc dataset_keep_in_memory skip_prepare_dataset "
        "model_type tokenizer_type tokenizer_use_fast is_*_derived_model plugins wandb_* swanlab_* trackio_* mlflow_* "
        "use_wandb use_tensorboard use_mlflow use_trackio use_swanlab use_otel_metrics otel_metrics_* "
        "hf_use_auth_token attn_implementation flash_attention sdp_attention xformers_attention flex_attention "
        "eager_attention flash_attn_* flex_attn_compile_kwargs fused_attn_kernel flash_optimum lora_*_kernel "
        "use_kernels lora_fan_in_fan_out lora_on_cpu sample_packing_* eval_sample_packing "
        "pad_to_sequence_len streaming_multipack_buffer_size pretrain_multipack_* pretraining_sample_concatenation "
        "batch_flattening liger_* cut_cross_entropy chunked_cross_entropy* tiled_mlp* activation_offloading "
        "layer_offloading experts_implementation use_scattermoe use_sonicmoe load_in_8bit load_in_4bit fsdp_version "
        "fsdp_config loss_watchdog_* gc_steps gc_collect_steps torch_empty_cache_steps profiler_* eval_table_size "
        "experimental_skip_move_to_device max_memory gpu_memory_limit total_num_tokens "
        "auto_resume_from_checkpoints gptq gptq_* gemma4_hybrid_attn_impl llama4_linearized_experts ddp "
        "lisa_layers_attribute"
    ),
}
COLUMNS = {
    "field_messages": "messages",
    "field_tools": "tools",
    "field_system": "system",
    "field_chosen": "chosen",
    "field_rejected": "rejected",
    "field_instruction": "instruction",
    "field_input": "input",
    "field_output": "output",
    "field_prompt": "prompt",
    "field_completion": "completion",
    "field_label": "label",
    "field": "text",
    "text_column": "text",
}
"""Columns of rows by the keys that give them other names."""
ROLES = "rows: here roles are user, assistant, system, tool, human and gpt, as they stand. Rename others in the rows."
KEYS = "here a turn is {role, content} or {from, value}. Rename its keys in the rows."
SOURCE_TABLE: dict[str, Rule] = {
    "message_field_role": told(KEYS, but=("role", "from")),
    "message_field_content": told(KEYS, but=("content", "value")),
    "message_property_mappings.role": told(KEYS, but=("role", "from")),
    "message_property_mappings.content": told(KEYS, but=("content", "value")),
    "message_field_training": told("here it is `loss`, `train` or `training`.", but=("train", "training")),
    "roles.user": told(ROLES, but=(["user"], ["human"], ["human", "user"], ["user", "human"])),
    "roles.assistant": told(ROLES, but=(["assistant"], ["gpt"], ["gpt", "assistant"], ["assistant", "gpt"])),
    "roles.system": told(ROLES, but=(["system"],)),
    "roles.tool": told(ROLES, but=(["tool"],)),
    "roles_to_train": told(
        "here turns of the assistant carry loss, and those with a flag as it says.", but=(["assistant"], ["gpt"])
    ),
    "train_on_eos": told("here the end of each turn that carries loss does, too.", but=("turn",)),
    "train_on_eot": told("here the end of each turn that carries loss does, too.", but=("turn",)),
    "chat_template": told("here one template holds for all rows (model.chat_template).", but=("tokenizer_default",)),
    "field_thinking": told("here reasoning is read from these.", but=("reasoning_content", "reasoning", "thinking")),
    "trust_remote_code": told("no loading script of a data set is run here.", but=(False,)),
    **no_effect("template_thinking_key split_thinking preprocess_shards"),
}


def translate(settings: Mapping[str, Any]) -> Translation:
    """The recipe of an Axolotl file.

    Raises:
        ConfigError: Its task has no equivalent, or a value is not what its key takes.
    """
    translation = Translation(shared_settings.mappings(settings, "datasets", "pretraining_dataset", "test_datasets"))
    translation.refuse(NO_TASK)
    _task(translation)
    translation.move("base_model", "model.id", Translation.text)
    kind = translation.text("adapter")
    four = translation.flag("load_in_4bit")
    bits = 4 if four or kind == "qlora" else 8 if translation.flag("load_in_8bit") else None
    shared_settings.weights(translation, bits=bits, keys=("load_in_4bit",) if four else ("load_in_8bit",))
    _adapter(translation, kind)
    translation.ignore("special_tokens.pad_token")
    if translation.value("tokens") and kind and isinstance(translation.value("tokens"), list):
        translation.give("model.new_tokens", translation.texts("tokens"), "tokens")
    _rows(translation)
    shared_settings.length_and_rate(translation, passes="num_epochs", epochs=1, warmup=0.03)
    shared_settings.schedule(translation, "lr_scheduler", default="cosine")
    shared_settings.optimizer(translation, "optimizer")
    shared_settings.batch(translation, "micro_batch_size", "sample_packing", default=1)
    shared_settings.often(translation, "evaluate.every", steps="eval_steps", per_epoch="evals_per_epoch")
    shared_settings.often(translation, "save.every", steps="save_steps", per_epoch="saves_per_epoch")
    shared_settings.kernels(translation, *KERNELS)
    shared_settings.sharing(translation)
    for key in ("context_parallel_size", "sequence_parallel_degree"):
        if (translation.whole(key) or 1) > 1:
            translation.move(key, "distributed.sequence", Translation.whole)
        translation.ignore(key)
    asked = {name: [key for key in keys if translation.value(key)] for name, keys in TRACKED.items()}
    shared_settings.trackers(translation, {name: keys for name, keys in asked.items() if keys})
    translation.apply(TABLE)
    translation.finish()
    return translation


def _task(translation: Translation) -> None:
    """The recipe: judged answers, a reward model, or answers to learn."""
    kind = translation.text("rl")
    if kind is not None and kind not in PREFERENCES:
        raise ConfigError(
            f"rl: {kind!r}: expected {', '.join(PREFERENCES)}; for rewards of own answers begin with "
            "`workbench cp reinforce/quickstart my.yaml`."
        )
    if translation.flag("reward_model"):
        translation.give("recipe", "reward", "reward_model")
        translation.apply({"num_labels": told("a reward is one number here.", but=(1,))})
    elif kind is not None:
        translation.give("recipe", "prefer", "rl")
        translation.give("prefer.loss", kind)
        translation.move(PREFERENCES[kind], "prefer.beta", Translation.number)
        if kind == "kto":
            translation.move("kto_desirable_weight", "prefer.desirable", Translation.number)
            translation.move("kto_undesirable_weight", "prefer.undesirable", Translation.number)
        if kind == "simpo":
            translation.default("simpo_gamma", 0.5, "prefer.gamma")
            translation.move("simpo_gamma", "prefer.gamma", Translation.number)
    else:
        translation.give("recipe", "sft")
    translation.ignore("reward_model")


def _adapter(translation: Translation, kind: str | None) -> None:
    layers, every = translation.whole("lisa_n_layers"), translation.whole("lisa_step_interval")
    if kind in ("lora", "qlora"):
        shared_settings.low_rank(translation, rank="lora_r")
        translation.give("adapter.method", translation.recipe["adapter"]["method"], "adapter")
        if translation.flag("lora_target_linear"):
            translation.give("adapter.targets", "all-linear", "lora_target_linear")
            translation.look(
                "all-linear has all linear layers but the head; there these are, too.", "lora_target_modules"
            )
        else:
            translation.ignore("lora_target_linear")
            shared_settings.place(translation, "lora_target_modules")
        if names := translation.texts("lora_target_parameters"):
            experts = all("experts" in name for name in names)
            translation.give("adapter.experts", experts, *(["lora_target_parameters"] if experts else ()))
    elif kind is None:
        translation.give("adapter.method", "full")
        translation.ignore("lora_r", "lora_alpha", "lora_dropout", "lora_target_linear", "lora_target_modules")
    else:
        translation.give("adapter.method", kind)
        translation.look("`workbench explain adapter.method` names its settings here.", "adapter")
    if layers:
        translation.give(
            "freeze", {"policy": "lisa", "active": layers, "every": every or 20}, "lisa_n_layers", "lisa_step_interval"
        )


def _rows(translation: Translation) -> None:
    """Rows to train on and to hold out, and their length."""
    key = "datasets" if translation.value("datasets") else "pretraining_dataset"
    named = {f"source{number}": _source(each) for number, each in enumerate(translation.entries(key), 1)}
    shared_settings.sources(translation, named)
    if key == "pretraining_dataset" and named:
        translation.remark(
            "pretraining_dataset: there documents follow one another and are cut into blocks of sequence_len; here "
            "each becomes blocks of its own."
        )
    tests = {f"test{number}": _source(each) for number, each in enumerate(translation.entries("test_datasets"), 1)}
    if tests:
        shared_settings.held_out_files(translation, tests)
        translation.look("test_datasets are held out in its place.", "val_set_size")
    else:
        shared_settings.held_out(translation, "val_set_size")
    translation.default("sequence_len", 512, "data.max_tokens")
    translation.move("sequence_len", "data.max_tokens", Translation.whole)
    if any(source.format != "text" for source in named.values()) and not translation.value("excess_length_strategy"):
        translation.remark(
            "Rows longer than sequence_len are left out there (excess_length_strategy: drop); here their left is cut "
            "(data.truncate)."
        )


def _source(settings: Translation) -> RowSource:
    """A data set, with what tells its path, columns, split and format."""
    source = RowSource(settings.text("path") or PLACEHOLDER, keys={settings.path("path"): "path"})
    files = settings.texts("data_files")
    local = source.path in ("json", "csv", "parquet", "arrow", "text") or settings.value("ds_type")
    if files and local:
        source.path = files[0]
        source.keys |= {settings.path(key): "path" for key in ("ds_type", *["data_files"] * (len(files) == 1))}
    settings.look("data.train is a file, a folder of them, or a whole hub data set.", "data_files")
    shared_settings.rows_of(settings, source, split="split", config="name")
    source.rename(settings, {f"{at}{key}": ours for at in ("", "type.") for key, ours in COLUMNS.items()})
    if isinstance(settings.value("type"), dict):
        settings.look("prompts are in the backbone's chat template here, or they are raw text.", "type")
    elif kind := settings.text("type"):
        _format(settings, source, kind)
    if settings.value("roles_to_train") == []:
        settings.remark("roles_to_train: []: here turns of the assistant carry loss, but those whose flag is false.")
    settings.apply(SOURCE_TABLE)
    return source


def _format(settings: Translation, source: RowSource, kind: str) -> None:
    """Format of the rows, by the name of a way to make prompts."""
    word = kind.partition(".")[0].partition(":")[0]
    source.format = FORMATS.get(word)
    if word in ("completion", "pretrain", "chat_template") and kind == word:
        source.keys[settings.path("type")] = "format"
    elif word == "alpaca":
        settings.look(
            "there prompts have Alpaca's words (### Instruction:); here they are in the backbone's chat template.",
            "type",
        )
    else:
        settings.look("here columns tell the format; `workbench check` shows what the model sees.", "type")
