"""LLaMA-Factory's settings, as its documentation names them, against the recipe that means the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.workbench.config.foreign.test_axolotl import given
from workbench.config import RunConfig
from workbench.config.foreign import llamafactory
from workbench.errors import ConfigError

FILE: dict[str, Any] = {
    "model_name_or_path": "owner/model",
    "stage": "sft",
    "finetuning_type": "lora",
    "lora_rank": 8,
    "lora_target": "all",
    "dataset": "mine",
    "cutoff_len": 512,
    "val_size": 0.2,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "learning_rate": 1e-4,
    "num_train_epochs": 2.0,
    "lr_scheduler_type": "cosine",
}
CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"recipe": "sft", "adapter": {"method": "lora", "rank": 8, "alpha": 16.0, "targets": "all-linear"}}),
    ({}, {"data.max_tokens": 512, "data.held_out": 0.2, "data.train": "data/mine.json", "batch.size": 8}),
    ({"num_train_epochs": None}, {"train.epochs": 3.0}),
    (
        {"lora_target": "q_proj,v_proj", "lora_alpha": 4},
        {"adapter.targets": ["q_proj", "v_proj"], "adapter.alpha": 4.0},
    ),
    ({"use_dora": True}, {"adapter.method": "dora"}),
    ({"pissa_init": True, "pissa_iter": 16}, {"adapter.method": "pissa"}),
    ({"loraplus_lr_ratio": 16.0}, {"adapter.method": "lora+"}),
    ({"quantization_bit": 4, "quantization_method": "bnb"}, {"model.weights": "nf4"}),
    ({"pure_bf16": True}, {"model.weights": "bfloat16"}),
    ({"finetuning_type": "full"}, {"adapter": {"method": "full"}}),
    ({"finetuning_type": "freeze", "freeze_trainable_layers": 3}, {"adapter": {"method": "last-layers", "layers": 3}}),
    ({"finetuning_type": "freeze", "use_llama_pro": True}, {"adapter": {"method": "block-expansion"}}),
    (
        {"finetuning_type": "oft", "oft_block_size": 16, "oft_target": "all"},
        {"adapter.method": "oft", "adapter.block": 16},
    ),
    ({"stage": "pt"}, {"recipe": "sft", "data.format": "text"}),
    ({"stage": "rm"}, {"recipe": "reward"}),
    ({"stage": "dpo", "pref_loss": "sigmoid", "pref_beta": 0.3}, {"prefer": {"loss": "dpo", "beta": 0.3}}),
    ({"stage": "dpo", "pref_loss": "orpo"}, {"prefer": {"loss": "orpo"}}),
    ({"stage": "kto", "kto_chosen_weight": 1.2}, {"prefer": {"loss": "kto", "desirable": 1.2}}),
    (
        {"finetuning_type": "full", "use_galore": True, "galore_rank": 64, "galore_scale": 2.0},
        {"optimizer": {"name": "galore", "rank": 64, "rank_scale": 2.0}},
    ),
    ({"enable_liger_kernel": True}, {"train.kernels": "auto"}),
    ({"optim": "adamw_8bit"}, {"optimizer.name": "adamw8bit"}),
    ({"mask_history": True}, {"data.loss_on": "last"}),
    ({"train_on_prompt": True}, {"data.loss_on": "all"}),
    (
        {"deepspeed": "examples/deepspeed/ds_z3_offload_config.json"},
        {"distributed.zero": 3, "distributed.offload_parameters": "cpu"},
    ),
    ({"report_to": "wandb"}, {"trackers": ["wandb"]}),
    ({"report_to": ["mlflow", "tensorboard"], "use_swanlab": True}, {"trackers": ["tensorboard", "mlflow", "swanlab"]}),
    ({"max_samples": 50}, {"data.limit": 50}),
    ({"dataset": "a, b"}, {"data.sources": {"a": {"path": "data/a.json"}, "b": {"path": "data/b.json"}}}),
]


@pytest.mark.parametrize("changes,wanted", CASES)
def test_a_setting_becomes_what_means_the_same(changes: dict[str, Any], wanted: dict[str, Any]) -> None:
    found = llamafactory.translate({**FILE, **changes}, folders=())
    RunConfig.model_validate(found.recipe)
    assert {place: given(found.recipe, place) for place in wanted} == wanted
    assert set(found.left) <= {"lora_rank", "lora_target"}  # of a file that trains another method


def test_data_sets_are_found_by_the_table_of_their_folder(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    columns = {"prompt": "question", "response": "answer", "query": "input"}
    table = {
        "mine": {"file_name": "rows.json", "columns": columns},
        "talk": {"hf_hub_url": "owner/talk", "formatting": "sharegpt", "columns": {"messages": "turns"}},
    }
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(table))
    found = llamafactory.translate({**FILE, "dataset": "mine,talk"}, folders=(tmp_path,))
    assert found.recipe["data"]["sources"] == {
        "mine": {"path": "data/rows.json", "columns": {"instruction": "question", "output": "answer"}},
        "talk": {"path": "owner/talk", "columns": {"conversations": "turns"}},
    }


@pytest.mark.parametrize("theirs,columns", [("text", {}), ("content", {"text": "content"})])
def test_raw_text_stands_in_the_column_of_prompts(theirs: str, columns: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    table = {"web": {"file_name": "web.jsonl", "columns": {"prompt": theirs}}}
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(table))
    found = llamafactory.translate({**FILE, "stage": "pt", "dataset": "web"}, folders=(tmp_path,))
    assert found.recipe["data"]["format"] == "text"
    assert found.recipe["data"].get("columns", {}) == columns


@pytest.mark.parametrize(
    "change,reason",
    [
        ({"stage": "ppo"}, "stage: ppo: .*reinforce/quickstart"),
        ({"stage": "sleep"}, "expected pt, sft, rm, dpo or kto"),
        ({"finetuning_type": "prompt"}, "expected lora, oft, freeze or full"),
        ({"image_max_pixels": 262144}, "pictures, films"),
        ({"use_kt": True}, "trains nothing that could be translated"),
    ],
)
def test_a_task_that_is_none_is_refused_by_name(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        llamafactory.translate({**FILE, **change}, folders=())
