"""Axolotl's settings, as its documentation names them, against the recipe that means the same."""

from __future__ import annotations

from typing import Any

import pytest

from workbench.config import RunConfig
from workbench.config.foreign import axolotl
from workbench.errors import ConfigError

FILE: dict[str, Any] = {
    "base_model": "owner/model",
    "datasets": [{"path": "owner/rows", "type": "alpaca"}],
    "val_set_size": 0.1,
    "sequence_len": 2048,
    "micro_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "num_epochs": 2,
    "learning_rate": "2e-4",
    "optimizer": "adamw_torch",
    "lr_scheduler": "cosine",
}
DATA = {"train": "owner/rows", "held_out": 0.1, "max_tokens": 2048}
LORA = {"adapter": "lora", "lora_r": 8, "lora_alpha": 32, "lora_target_linear": True}


def given(recipe: dict[str, Any], place: str) -> Any:
    for key in place.split("."):
        recipe = recipe.get(key, {})
    return recipe


CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"recipe": "sft", "adapter.method": "full", "batch.size": 8, "train.epochs": 2.0, "data.held_out": 0.1}),
    ({}, {"train.learning_rate": 2e-4, "optimizer.name": "adamw", "schedule.name": "cosine", "data.format": "alpaca"}),
    (LORA, {"adapter": {"method": "lora", "rank": 8, "alpha": 32.0, "targets": "all-linear"}}),
    ({**LORA, "adapter": "qlora", "load_in_4bit": True}, {"model.weights": "nf4", "adapter.method": "lora"}),
    ({**LORA, "load_in_8bit": True}, {"model.weights": "int8"}),
    (
        {**LORA, "lora_target_linear": None, "lora_target_modules": ["q_proj", "v_proj"]},
        {"adapter.targets": ["q_proj", "v_proj"]},
    ),
    ({**LORA, "peft_use_dora": True}, {"adapter.method": "dora"}),
    ({**LORA, "peft_use_rslora": True}, {"adapter.method": "rslora"}),
    ({**LORA, "loraplus_lr_ratio": 8}, {"adapter.method": "lora+", "adapter.rate_ratio": 8.0}),
    ({**LORA, "lora_target_parameters": ["mlp.experts.gate_up_proj"]}, {"adapter.experts": True}),
    ({**LORA, "rl": "dpo", "rl_beta": 0.2}, {"recipe": "prefer", "prefer": {"loss": "dpo", "beta": 0.2}}),
    (
        {**LORA, "rl": "kto", "kto_desirable_weight": 0.5, "kto_undesirable_weight": 2},
        {"prefer": {"loss": "kto", "desirable": 0.5, "undesirable": 2.0}},
    ),
    ({**LORA, "rl": "orpo", "orpo_alpha": 0.3}, {"prefer": {"loss": "orpo", "beta": 0.3}}),
    ({**LORA, "rl": "simpo", "simpo_gamma": 0.4}, {"prefer": {"loss": "simpo", "gamma": 0.4}}),
    ({**LORA, "reward_model": True, "num_labels": 1}, {"recipe": "reward"}),
    ({"max_steps": 200, "warmup_steps": 10}, {"train": {"steps": 200, "learning_rate": 2e-4}, "schedule.warmup": 0.05}),
    ({"warmup_ratio": 0.2, "weight_decay": 0.01}, {"schedule.warmup": 0.2, "train.weight_decay": 0.01}),
    ({}, {"schedule.warmup": 0.03}),
    ({"warmup_steps": 0}, {"schedule.warmup": 0}),
    ({"lr_scheduler": None, "sequence_len": None}, {"schedule.name": "cosine", "data.max_tokens": 512}),
    ({"cosine_min_lr_ratio": 1.0}, {"schedule": {"name": "constant", "warmup": 0.03}}),
    ({"lr_scheduler": "polynomial"}, {"schedule.power": 1.0}),
    ({"lr_scheduler": "cosine_with_restarts", "lr_scheduler_kwargs": {"num_cycles": 3}}, {"schedule.cycles": 3}),
    ({"lr_scheduler": "one_cycle", "warmup_ratio": 0}, {"schedule": {"name": "one_cycle"}}),
    ({"optimizer": "schedule_free_adamw"}, {"schedule.name": "constant", "optimizer.name": "schedule_free"}),
    ({"optimizer": "adafactor", "adam_beta1": 0.9}, {"optimizer": {"name": "adafactor"}}),
    ({"max_grad_norm": 0}, {"train.max_grad_norm": 1e9}),
    ({"dataset_exact_deduplication": True}, {"data.clean": ["exact_duplicate"]}),
    ({"evals_per_epoch": 4, "saves_per_epoch": 1}, {"evaluate.every": 0.125, "save.every": 0.5}),
    (
        {"eval_steps": 50, "save_steps": 100, "save_total_limit": 3},
        {"evaluate.every": 50, "save": {"every": 100, "keep": 3}},
    ),
    ({"early_stopping_patience": 3}, {"evaluate.patience": 3, "save.ship": "best"}),
    ({"lisa_n_layers": 4, "lisa_step_interval": 10}, {"freeze": {"policy": "lisa", "active": 4, "every": 10}}),
    ({"optimizer": "adamw_bnb_8bit", "adam_beta2": 0.95}, {"optimizer": {"name": "adamw8bit", "betas": [0.9, 0.95]}}),
    ({"lr_scheduler": "constant_with_warmup"}, {"schedule.name": "constant"}),
    ({"cosine_min_lr_ratio": 0.1}, {"schedule.floor": 0.1}),
    ({"neftune_noise_alpha": 5, "seed": 42}, {"regularise.neftune": 5.0, "seed": 42}),
    ({"bf16": True}, {"model.compute": "bfloat16"}),
    ({"liger_rope": True, "liger_rms_norm": True, "liger_layer_norm": False}, {"train.kernels": "auto"}),
    ({"liger_rope": False, "liger_fused_linear_cross_entropy": True}, {"train.kernels": {}}),
    ({"fp16": True, "bf16": False}, {"model.compute": "float16"}),
    ({"train_on_inputs": True}, {"data.loss_on": "all"}),
    ({"wandb_project": "mine"}, {"trackers": ["wandb"]}),
    ({"use_mlflow": True, "trackio_project_name": "mine", "wandb_project": ""}, {"trackers": ["mlflow", "trackio"]}),
    ({"deepspeed": "deepspeed_configs/zero2.json"}, {"distributed": {"zero": 2}}),
    (
        {"deepspeed": "deepspeed_configs/zero3_bf16_cpuoffload_all.json"},
        {"distributed": {"zero": 3, "offload_optimizer": "cpu", "offload_parameters": "cpu"}},
    ),
    ({"fsdp": ["full_shard", "auto_wrap"], "fsdp_config": {"x": 1}}, {"distributed": {"engine": "fsdp2", "zero": 3}}),
    ({"context_parallel_size": 2}, {"distributed": {"sequence": 2}}),
    ({"datasets": [{"path": "owner/rows", "name": "en", "split": "test"}]}, {"data.train": "owner/rows:en#test"}),
    (
        {"datasets": [{"path": "owner/rows", "type": "chat_template", "field_messages": "turns"}]},
        {"data.columns": {"messages": "turns"}, "data.format": "messages"},
    ),
    (
        {"datasets": [{"path": "owner/rows", "type": "alpaca"}, {"path": "owner/more", "type": "sharegpt"}]},
        {"data.sources": {"source1": {"path": "owner/rows"}, "source2": {"path": "owner/more"}}},
    ),
    ({"pretraining_dataset": "owner/text", "datasets": None}, {"data.train": "owner/text"}),
    ({"test_datasets": [{"path": "held.jsonl"}], "val_set_size": None}, {"data.held_out": "held.jsonl"}),
    (
        {"test_datasets": [{"path": "o/a", "name": "en", "split": "test"}, {"path": "b.jsonl"}], "val_set_size": None},
        {"data.held_out": {"test1": "o/a:en#test", "test2": "b.jsonl"}},
    ),
    ({"datasets": "owner/rows"}, {"data.train": "owner/rows"}),
    ({"datasets": [{"path": "owner/rows", "split": "train[:100]"}]}, {"data": DATA | {"limit": 100}}),
    ({"datasets": [{"path": "json", "data_files": ["a.jsonl"]}]}, {"data.train": "a.jsonl"}),
    (
        {"datasets": [{"path": "a", "type": "completion", "field": "story"}]},
        {"data.columns": {"text": "story"}},
    ),
    (
        {"datasets": [{"path": "a", "type": {"field_instruction": "q", "field_output": "a", "field_system": "s"}}]},
        {"data.columns": {"instruction": "q", "output": "a", "system": "s"}},
    ),
    ({"datasets": [{"path": "a"}, {"path": "a"}]}, {"data": DATA | {"train": "a"}}),
    (
        {"datasets": [{"path": "a"}, {"path": "b"}, {"path": "a"}]},
        {"data.sources": {"source1": {"path": "a", "weight": 2}, "source2": {"path": "b"}}},
    ),
]
TOLD: list[tuple[dict[str, Any], str]] = [
    ({}, "Rows longer than sequence_len are left out there"),
    ({"excess_length_strategy": "truncate"}, "excess_length_strategy: truncate: here the left"),
    ({}, "datasets[0].type: alpaca: there prompts have Alpaca's words"),
    ({"lr_scheduler": None}, "written as is usual there: warmup_ratio: 0.03 (schedule.warmup), lr_scheduler: cosine"),
    ({"eot_tokens": ["<|im_end|>"]}, "eot_tokens: ['<|im_end|>']: here the end of each turn"),
    (
        {"datasets": [{"path": "a", "train_on_eos": "last"}]},
        "datasets[0].train_on_eos: last: here the end",
    ),
    ({"datasets": [{"path": "a", "roles_to_train": ["user"]}]}, "datasets[0].roles_to_train: ['user']"),
    ({"datasets": [{"path": "a", "roles": {"user": ["asker"]}}]}, "datasets[0].roles.user: ['asker']: rows"),
    ({"datasets": [{"path": "a", "message_property_mappings": {"role": "who"}}]}, "mappings.role: who: here a turn is"),
    ({"datasets": [{"path": "a", "type": {"format": "[INST] {instruction}"}}]}, "datasets[0].type.format: [INST]"),
    ({"datasets": [{"path": "a", "split": "train[:10%]"}]}, "datasets[0].split: train[:10%]: here a whole split"),
    ({"datasets": [{"path": "o/n", "data_files": ["a", "b"]}]}, "datasets[0].data_files: ['a', 'b']"),
    (
        {"datasets": [{"path": "a"}, {"path": "a", "split": "train[:9]"}]},
        "datasets[1].split: train[:9]: a is read",
    ),
    (
        {"test_datasets": [{"path": "h", "type": "completion", "field": "t"}]},
        "test_datasets[0].field: t: held-out rows test1: data.columns is that of the training rows, {}",
    ),
    ({"test_datasets": [{"path": "h"}]}, "val_set_size: 0.1: test_datasets are held out in its place"),
    ({"special_tokens": {"eos_token": "</s>", "pad_token": "<pad>"}}, "special_tokens.eos_token: </s>: here"),
    (
        {"fsdp": ["full_shard"], "fsdp_config": {"offload_params": True}},
        "fsdp_config.offload_params: True: dist",
    ),
    ({"wandb_project": "mine"}, "wandb_project: mine: an environment variable"),
    (
        {**LORA, "peft_use_dora": True, "peft_use_rslora": True},
        "peft_use_rslora: True: here each is a method",
    ),
    ({**LORA, "lora_target_linear": None, "lora_target_modules": "layers.(0|1).q_proj"}, "q_proj: layers by a pattern"),
]


@pytest.mark.parametrize("changes,sentence", TOLD)
def test_what_means_something_else_here_is_told_with_its_path_and_value(changes: dict[str, Any], sentence: str) -> None:
    assert any(sentence in look for look in axolotl.translate({**FILE, **changes}).looks)


def test_kernels_are_one_setting_and_those_that_are_off_are_none() -> None:
    found = axolotl.translate({**FILE, "liger_rope": True, "liger_glu_activation": True, "liger_rms_norm": False})
    (sentence,) = [look for look in found.looks if "liger" in look]
    assert sentence.startswith("liger_glu_activation: True, liger_rope: True: train.kernels=auto takes all")
    assert "liger_rms_norm" in found.idle and not found.left


@pytest.mark.parametrize("changes,wanted", CASES)
def test_a_setting_becomes_what_means_the_same(changes: dict[str, Any], wanted: dict[str, Any]) -> None:
    found = axolotl.translate({**FILE, **changes})
    RunConfig.model_validate(found.recipe)
    assert {place: given(found.recipe, place) for place in wanted} == wanted
    assert not found.left


def test_settings_without_an_equivalent_are_told_and_nothing_is_lost() -> None:
    extra = {"reinit_weights": True, "tensor_parallel_size": 2, "logging_steps": 1, "chat_template": "llama3"}
    extra |= {"mlflow_tracking_uri": "http://here"}
    found = axolotl.translate({**FILE, **extra, "trust_remote_code": True, "sample_packing": True})
    assert found.left == {"reinit_weights": True}
    assert found.idle == ["logging_steps"]
    looked = " ".join(found.looks)
    assert "chat_template: llama3" in looked and "model.trust_remote_code=true" in looked
    assert "sample_packing: True: there a row" in looked
    assert "mlflow_tracking_uri: http://here: set the environment variable MLFLOW_TRACKING_URI" in looked
    assert "tensor_parallel_size: 2: distributed.tensor" in looked
    assert "trust_remote_code" not in found.recipe["model"]


@pytest.mark.parametrize(
    "change,reason",
    [
        ({"processor_type": "AutoProcessor"}, "processor_type: .*pictures"),
        ({"rl": "grpo"}, "rl: 'grpo': .*reinforce/quickstart"),
        ({"qat": {"weight_dtype": "int4"}}, "imitates quantisation"),
        ({"learning_rate": "fast"}, "learning_rate: expected a number, found 'fast'"),
        ({"micro_batch_size": 1.5}, "micro_batch_size: expected a whole number, found 1.5"),
    ],
)
def test_a_task_or_value_that_is_none_is_refused_by_name(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        axolotl.translate({**FILE, **change})
