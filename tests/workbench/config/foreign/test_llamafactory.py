"""LLaMA-Factory's settings, as its documentation names them, against the recipe that means the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.workbench.config.foreign.test_axolotl import given
from workbench.config import RunConfig
from workbench.config.foreign import llamafactory
from workbench.config.foreign.translation import Translation
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
    ({"learning_rate": None, "cutoff_len": None}, {"train.learning_rate": 5e-5, "data.max_tokens": 2048}),
    ({"per_device_train_batch_size": None, "gradient_accumulation_steps": None}, {"batch.size": 8}),
    ({"lr_scheduler_type": None}, {"schedule": {"name": "linear", "warmup": 0.0}}),
    ({"quantization_bit": 4, "quantization_type": "fp4"}, {"model.weights": "fp4"}),
    ({"stage": "dpo", "dpo_label_smoothing": 0.2}, {"prefer": {"loss": "cdpo", "label_smoothing": 0.2}}),
    ({"stage": "dpo", "pref_loss": "simpo"}, {"prefer": {"loss": "simpo", "gamma": 0.5}}),
    ({"eval_dataset": "a,b", "val_size": None}, {"data.held_out": {"a": "data/a.json", "b": "data/b.json"}}),
    ({"dataset_dir": {"mine": {"file_name": "x.jsonl", "columns": {"prompt": "q"}}}}, {"data.train": "data/x.jsonl"}),
    ({"dataset_dir": "ONLINE", "dataset": "owner/rows"}, {"data.train": "owner/rows"}),
    ({"dataset": "a, b"}, {"data.sources": {"a": {"path": "data/a.json"}, "b": {"path": "data/b.json"}}}),
]


@pytest.mark.parametrize("changes,wanted", CASES)
def test_a_setting_becomes_what_means_the_same(changes: dict[str, Any], wanted: dict[str, Any]) -> None:
    found = llamafactory.translate({**FILE, **changes}, folders=())
    RunConfig.model_validate(found.recipe)
    assert {place: given(found.recipe, place) for place in wanted} == wanted
    assert set(found.left) <= {"lora_rank", "lora_target"}  # of a file that trains another method


SHAREGPT = {"formatting": "sharegpt"}
SETS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("sft", {"file_name": "r.json"}, {"train": "data/r.json", "format": "alpaca"}),
    (
        "sft",
        {"file_name": "r.json", "columns": {"prompt": "q", "response": "a", "query": "input"}},
        {"columns": {"instruction": "q", "output": "a"}},
    ),
    (
        "sft",
        {"file_name": "r.json", "columns": {"query": "extra", "system": "s", "history": "past", "tools": "t"}},
        {"columns": {"input": "extra", "system": "s", "history": "past", "tools": "t"}},
    ),
    (
        "sft",
        {**SHAREGPT, "file_name": "r.json", "columns": {"messages": "turns", "system": "s", "tools": "functions"}},
        {"columns": {"conversations": "turns", "system": "s", "tools": "functions"}},
    ),
    ("sft", {"hf_hub_url": "o/n", "subset": "en", "split": "valid"}, {"train": "o/n:en#valid"}),
    ("sft", {"hf_hub_url": "o/n", "ms_hub_url": "o/m", "file_name": "x.json"}, {"train": "o/n"}),
    ("sft", {"ms_hub_url": "o/m", "split": "train[:7]"}, {"train": "o/m", "limit": 7}),
    ("sft", {"hf_hub_url": "o/n", "num_samples": 100}, {"limit": 100}),
    ("sft", {"cloud_file_name": "s3://bucket/r.json"}, {"train": "s3://bucket/r.json"}),
    (
        "dpo",
        {"file_name": "r.json", "ranking": True, "columns": {"prompt": "q", "chosen": "yes", "rejected": "no"}},
        {"columns": {"instruction": "q", "chosen": "yes", "rejected": "no"}},
    ),
    (
        "kto",
        {**SHAREGPT, "file_name": "r.json", "columns": {"messages": "m", "kto_tag": "good"}},
        {"columns": {"conversations": "m", "label": "good"}},
    ),
    ("pt", {"file_name": "w.jsonl", "columns": {"prompt": "text"}}, {"format": "text", "train": "data/w.jsonl"}),
    ("pt", {"file_name": "w.jsonl", "columns": {"prompt": "content"}}, {"columns": {"text": "content"}}),
]


def of_set(stage: str, entry: dict[str, Any], folder: Path, **more: Any) -> Translation:
    (folder / "data").mkdir()
    (folder / "data" / "dataset_info.json").write_text(json.dumps({"mine": entry}))
    return llamafactory.translate({**FILE, "stage": stage, **more}, folders=(folder,))


@pytest.mark.parametrize("stage,entry,wanted", SETS)
def test_a_data_set_is_read_as_its_table_says(
    stage: str, entry: dict[str, Any], wanted: dict[str, Any], tmp_path: Path
) -> None:
    found = of_set(stage, entry, tmp_path)
    RunConfig.model_validate(found.recipe)
    assert {key: found.recipe["data"].get(key) for key in wanted} == wanted
    assert not found.left


def test_several_data_sets_are_sources_with_columns_of_their_own(tmp_path: Path) -> None:
    entry = {"file_name": "rows.json", "columns": {"prompt": "question"}}
    talk = {"hf_hub_url": "owner/talk", **SHAREGPT, "columns": {"messages": "turns"}}
    found = of_set("sft", entry, tmp_path, dataset="mine,talk", dataset_dir={"mine": entry, "talk": talk})
    assert found.recipe["data"]["sources"] == {
        "mine": {"path": "data/rows.json", "columns": {"instruction": "question"}},
        "talk": {"path": "owner/talk", "columns": {"conversations": "turns"}},
    }


AT = "dataset_info.json.mine"
TOLD: list[tuple[str, dict[str, Any], str]] = [
    ("sft", {"file_name": "r"}, "Rows longer than cutoff_len: there prompt and answer are both cut"),
    ("sft", {"file_name": "r"}, "Instruction and input: a line break is between them there"),
    ("pt", {"file_name": "r"}, "Stage pt: there documents follow one another"),
    ("sft", {"hf_hub_url": "o/n", "num_samples": 9}, f"{AT}.num_samples: 9: so many rows, drawn at random"),
    ("sft", {"ms_hub_url": "o/n"}, f"{AT}.ms_hub_url: o/n: an id on ModelScope"),
    ("sft", {"script_url": "load.py"}, f"{AT}.script_url: load.py: no loading script"),
    ("sft", {"file_name": "r", "split": "test"}, f"{AT}.split: test: a file has one split"),
    ("sft", {"hf_hub_url": "o/n", "split": "train[5%:]"}, f"{AT}.split: train[5%:]: here a whole split"),
    ("sft", {"file_name": "r", "columns": {"messages": "m"}}, f"{AT}.columns.messages: m: not read there"),
    (
        "sft",
        {**SHAREGPT, "file_name": "r", "tags": {"user_tag": "asker"}},
        f"{AT}.tags.user_tag: asker: here a turn",
    ),
    ("sft", {**SHAREGPT, "file_name": "r", "tags": {"content_tag": "words"}}, f"{AT}.tags.content_tag: words: here"),
]


@pytest.mark.parametrize("stage,entry,sentence", TOLD)
def test_what_means_something_else_here_is_told(
    stage: str, entry: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    assert any(look.startswith(sentence) for look in of_set(stage, entry, tmp_path).looks)


def test_what_nothing_reads_of_a_data_set_has_no_equivalent(tmp_path: Path) -> None:
    found = of_set(
        "sft", {"hf_hub_url": "o/n", "folder": "python", "tags": {"x": 1}, "new": {"a": [{"b": 2}]}}, tmp_path
    )
    assert found.left == {f"{AT}.folder": "python", f"{AT}.tags.x": 1, f"{AT}.new.a[0].b": 2}


def test_columns_of_held_out_rows_that_differ_are_told(tmp_path: Path) -> None:
    table = {"mine": {"file_name": "r"}, "test": {"hf_hub_url": "o/n", "num_samples": 5, "columns": {"prompt": "q"}}}
    found = of_set("sft", {}, tmp_path, dataset_dir=table, eval_dataset="test")
    looked = " ".join(found.looks)
    assert "dataset_info.json.test.columns.prompt: q: held-out rows test: data.columns is that" in looked
    assert "dataset_info.json.test.num_samples: 5" in looked and "val_size: 0.2: eval_dataset is held out" in looked


@pytest.mark.parametrize(
    "text,reason",
    [
        ("[" * 100_000, "can be read: "),
        ("[]", "expected a mapping"),
        ('{"mine": "r.json"}', "mine: expected a mapping"),
        ('{"mine": {"formatting": "csv"}}', "mine.formatting: csv: expected alpaca, sharegpt, openai"),
        ('{"mine": {"columns": {"prompt": 1, "images": "i"}}}', "mine.columns.images: 'i': pictures"),
        ('{"mine": {"columns": {"prompt": ["q"]}}}', r"columns.prompt: expected a text, found \['q'\]"),
        ('{"mine": {"file_name": "\\ud800"}}', "expected a mapping of data sets"),
    ],
)
def test_a_table_that_is_none_is_refused_in_words(text: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/dataset_info.json").write_text(text)
    with pytest.raises(ConfigError, match=reason):
        llamafactory.translate(FILE, folders=(tmp_path,))


@pytest.mark.parametrize(
    "change,reason",
    [
        ({"stage": "ppo"}, "stage: ppo: .*reinforce/quickstart"),
        ({"stage": "sleep"}, "expected pt, sft, rm, dpo, kto"),
        ({"finetuning_type": "prompt"}, "expected lora, oft, freeze or full"),
        ({"image_max_pixels": 262144}, "pictures, films"),
        ({"do_predict": True}, "do_predict: this file computes"),
        ({"use_kt": True}, "trains nothing that could be translated"),
    ],
)
def test_a_task_that_is_none_is_refused_by_name(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        llamafactory.translate({**FILE, **change}, folders=())
