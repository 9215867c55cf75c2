"""Fine-tune a classifier with transformers' Trainer, and with PEFT for LoRA, as their documentation shows it.

    python scripts/bench/peer_trainer.py MODEL TRAIN.csv [TEST.csv] --method full --epochs 3
    python scripts/bench/peer_trainer.py MODEL TRAIN.csv --method lora --fold 0/5     # rows whose column `fold` is 0

One line of JSON at the end: times, memory, accuracies, losses. Trained are all rows but those of the fold. Chosen for
speed, as a careful user would: rows grouped by length and padded to the longest of a batch, fused AdamW, no evaluation
and no checkpoint while it trains, rows tokenised once, no gradient checkpointing.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import psutil
import torch
from measuring import has_bfloat16_units

# This project requires it, a user of the Trainer need not have it, and accelerate imports it where it is (two seconds).
sys.modules["deepspeed"] = None  # type: ignore[assignment]

from peft import LoraConfig, TaskType, get_peft_model  # noqa: E402
from transformers import (  # noqa: E402
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BitsAndBytesConfig,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
)


def main(arguments: argparse.Namespace) -> dict[str, Any]:
    table = pd.read_csv(arguments.train, keep_default_na=False)
    classes = sorted(set(table[arguments.label]))
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    held = _held(table, arguments.fold)
    sets = {"train": table[~held], "fold": table[held]}
    if arguments.test is not None:
        sets["test"] = pd.read_csv(arguments.test, keep_default_na=False)
    rows = {name: _rows(part, tokenizer, classes, arguments) for name, part in sets.items() if len(part)}
    model = _model(arguments, len(classes), tokenizer.pad_token_id)
    collator = _Counting(tokenizer)
    trainer = Trainer(
        model=model, args=_settings(arguments, len(rows["train"])), train_dataset=rows["train"], data_collator=collator
    )
    started, cpu_started = time.perf_counter(), time.process_time()
    trainer.train()
    train_s, train_cpu_s = time.perf_counter() - started, time.process_time() - cpu_started
    tokens = collator.tokens
    if arguments.out is not None:
        trainer.save_model(str(arguments.out))
    return {
        "train_s": train_s,
        "train_cpu_s": train_cpu_s,
        "accuracy": _accuracy(trainer, rows["fold"]) if "fold" in rows else None,
        "held_out_rows": int(held.sum()),
        "test_accuracy": _accuracy(trainer, rows["test"]) if "test" in rows else None,
        "wall_s": time.time() - psutil.Process().create_time(),
        "peak_bytes": _peak_bytes(),
        "tokens": tokens,
        "trainable": sum(each.numel() for each in model.parameters() if each.requires_grad),
        "steps": trainer.state.global_step,
        "losses": [line["loss"] for line in trainer.state.log_history if "loss" in line],
    }


def _held(table: pd.DataFrame, fold: str | None) -> pd.Series:
    """Which rows are validated."""
    if fold is None:
        return pd.Series(False, index=table.index)
    number, count = map(int, fold.split("/"))
    assert table["fold"].nunique() == count, "the column `fold` holds other folds"
    return table["fold"] == number


def _rows(part: pd.DataFrame, tokenizer: Any, classes: list[str], arguments: argparse.Namespace) -> list[Any]:
    ids = tokenizer(list(part[arguments.text]), truncation=True, max_length=arguments.max_tokens)["input_ids"]
    # The collator makes the attention mask: a list of plain rows is what its loader reads fastest.
    return [
        {"input_ids": row, "labels": classes.index(label)}
        for row, label in zip(ids, part[arguments.label], strict=True)
    ]


def _model(arguments: argparse.Namespace, classes: int, pad: int) -> Any:
    settings: dict[str, Any] = {"num_labels": classes, "pad_token_id": pad}
    if not arguments.dropout:
        own = AutoConfig.from_pretrained(arguments.model).to_dict().items()
        settings |= {key: 0.0 for key, value in own if "dropout" in key and isinstance(value, float)}
    config = AutoConfig.from_pretrained(arguments.model, **settings)
    torch.manual_seed(arguments.seed)
    if arguments.method == "full":  # mixed precision: float32 weights under autocast
        return AutoModelForSequenceClassification.from_pretrained(arguments.model, config=config, dtype=torch.float32)
    compute = getattr(torch, arguments.compute)
    four_bits = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=compute,
        llm_int8_skip_modules=["classifier", "score", "pooler"],
    )
    model = AutoModelForSequenceClassification.from_pretrained(
        arguments.model,
        config=config,
        dtype=compute,
        quantization_config=four_bits if arguments.weights == "nf4" else None,
        ignore_mismatched_sizes=True,
    )
    targets = arguments.targets if arguments.targets == "all-linear" else arguments.targets.split(",")
    # For this task PEFT itself trains and saves `classifier` or `score` whole (modules_to_save).
    lora = LoraConfig(
        task_type=TaskType.SEQ_CLS, r=arguments.rank, lora_alpha=arguments.alpha, target_modules=targets, lora_dropout=0
    )
    attached = get_peft_model(model, lora)
    for parameter in attached.parameters():
        if parameter.requires_grad:  # the head too, which PEFT leaves as it was loaded
            parameter.data = parameter.data.float()
    return attached


def _settings(arguments: argparse.Namespace, rows: int) -> TrainingArguments:
    steps = arguments.steps or math.ceil(arguments.epochs * math.ceil(rows / arguments.batch))
    return TrainingArguments(
        output_dir=str(arguments.out or "unused"),
        per_device_train_batch_size=arguments.batch,
        per_device_eval_batch_size=4 * arguments.batch,
        max_steps=steps,
        learning_rate=arguments.lr,
        lr_scheduler_type="linear",
        warmup_steps=math.ceil(0.05 * steps),
        train_sampling_strategy="random" if arguments.plain else "group_by_length",
        bf16=arguments.compute == "bfloat16",
        use_cpu=not torch.cuda.is_available(),
        dataloader_pin_memory=torch.cuda.is_available(),
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=arguments.seed,
    )


class _Counting(DataCollatorWithPadding):
    """Pads, and counts the tokens that it was given."""

    tokens = 0

    def __call__(self, features: list[dict[str, Any]]) -> Any:
        self.tokens += sum(len(row["input_ids"]) for row in features)
        return super().__call__(features)


def _accuracy(trainer: Trainer, rows: list[Any]) -> float:
    # The longest together, as in training; the order is taken back by reading labels from the same place.
    found = trainer.predict(sorted(rows, key=lambda row: -len(row["input_ids"])))  # type: ignore[arg-type]
    return float(np.mean(np.asarray(found.predictions).argmax(-1) == found.label_ids))


def _peak_bytes() -> int:
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("model", help="folder or hub id of the backbone")
    parser.add_argument("train", type=Path, help="csv")
    parser.add_argument("test", type=Path, nargs="?", help="csv, scored at the end")
    parser.add_argument("--text", default="text", help="column that is read")
    parser.add_argument("--label", default="category", help="column with the class")
    parser.add_argument("--fold", metavar="k/K", help="rows that do not train and are scored: column `fold` is k")
    parser.add_argument("--method", choices=("lora", "full"), default="lora")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--alpha", type=int, default=32)
    parser.add_argument("--targets", default="all-linear", help="names of modules with commas between")
    parser.add_argument("--lr", type=float, default=1e-3, help="peak; 5e-5 to 1e-4 suit --method full")
    parser.add_argument("--epochs", type=float, default=1)
    parser.add_argument("--steps", type=int, help="wins over --epochs")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--weights", choices=("float32", "bfloat16", "nf4"), default="float32")
    parser.add_argument("--compute", choices=("float32", "bfloat16"), help="by default what the device has units for")
    parser.add_argument("--dropout", action=argparse.BooleanOptionalAction, default=True, help="the backbone's own")
    parser.add_argument("--plain", action="store_true", help="rows in random order, as by default")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="folder for the adapter or model")
    arguments = parser.parse_args()
    if arguments.method == "full" and arguments.weights == "nf4":
        parser.error("--weights nf4 with --method full: quantised weights do not train. Write --weights float32.")
    if arguments.compute is None:
        units = torch.cuda.is_available() or has_bfloat16_units()
        arguments.compute = "bfloat16" if units and arguments.weights != "float32" else "float32"
    return arguments


if __name__ == "__main__":
    print(json.dumps(main(_arguments())))
