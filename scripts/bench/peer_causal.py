"""Fine-tune a language model with transformers' Trainer, and with PEFT for LoRA, its first blocks frozen or none.

    python scripts/bench/peer_causal.py MODEL ROWS.jsonl --method full --frozen 6 --steps 16

Rows have `prompt` and `completion`, which alone carries loss. What is frozen has `requires_grad=False`, as every guide
says: the embeddings, the blocks and what LoRA added to them. One line of JSON at the end: seconds at the end of each
step, of wall and processor, losses, tokens, memory. Chosen for speed, as a careful user would: rows tokenised once and
grouped by length, fused AdamW, no gradient checkpointing, nothing evaluated or saved.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch

# This project requires it, a user of the Trainer need not have it, and accelerate imports it where it is (two seconds).
sys.modules["deepspeed"] = None  # type: ignore[assignment]

from peft import LoraConfig, TaskType, get_peft_model  # noqa: E402
from transformers import (  # noqa: E402
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)


def main(arguments: argparse.Namespace) -> dict[str, Any]:
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    rows = [_row(json.loads(line), tokenizer, arguments) for line in arguments.rows.read_text("utf-8").splitlines()]
    model, watch = _model(arguments), _Watch()
    trainer = Trainer(
        model=model,
        args=_settings(arguments),
        train_dataset=rows,
        data_collator=DataCollatorForSeq2Seq(tokenizer),
        callbacks=[watch],
    )
    trainer.train()
    assert trainer.optimizer is not None
    state = [value for each in trainer.optimizer.state.values() for value in each.values()]
    passes = arguments.steps * arguments.batch / len(rows)
    return {
        "elapsed_s": watch.elapsed_s,
        "processor_s": watch.processor_s,
        "losses": [line["loss"] for line in trainer.state.log_history if "loss" in line],
        "tokens": round(passes * sum(len(row["input_ids"]) for row in rows)),
        "peak_bytes": watch.peak_bytes,
        "optimizer_bytes": sum(value.numel() * value.element_size() for value in state if torch.is_tensor(value)),
        "trainable": sum(each.numel() for each in model.parameters() if each.requires_grad),
    }


def _row(row: dict[str, str], tokenizer: Any, arguments: argparse.Namespace) -> dict[str, list[int]]:
    prompt = tokenizer(row["prompt"])["input_ids"]
    completion = tokenizer(row["completion"], add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
    labels = [-100] * len(prompt) + completion
    return {"input_ids": [*prompt, *completion][: arguments.max_tokens], "labels": labels[: arguments.max_tokens]}


def _model(arguments: argparse.Namespace) -> Any:
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=getattr(torch, arguments.weights))
    if arguments.method == "lora":
        lora = LoraConfig(task_type=TaskType.CAUSAL_LM, r=16, lora_alpha=32, target_modules="all-linear")
        model = get_peft_model(model, lora)
    for name, parameter in model.named_parameters() if arguments.frozen else ():
        block = re.search(r"\.layers\.(\d+)\.", name)
        if int(block[1]) < arguments.frozen if block else "embed_tokens" in name:
            parameter.requires_grad_(False)
    return model


def _settings(arguments: argparse.Namespace) -> TrainingArguments:
    return TrainingArguments(
        output_dir="unused",
        per_device_train_batch_size=arguments.micro_batch,
        gradient_accumulation_steps=arguments.batch // arguments.micro_batch,
        max_steps=arguments.steps,
        learning_rate=arguments.lr,
        lr_scheduler_type="constant",
        train_sampling_strategy="group_by_length",
        bf16=arguments.compute == "bfloat16",
        use_cpu=not torch.cuda.is_available(),
        dataloader_pin_memory=torch.cuda.is_available(),
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


class _Watch(TrainerCallback):
    """Notes when each step ends, and most memory so far."""

    def __init__(self) -> None:
        self.started, self.peak_bytes = 0.0, 0
        self.elapsed_s: list[float] = []
        self.processor_s: list[float] = []

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.started = time.perf_counter()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.elapsed_s.append(time.perf_counter() - self.started)
        self.processor_s.append(time.process_time())
        self.peak_bytes = (
            torch.cuda.max_memory_allocated()
            if torch.cuda.is_available()
            else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("model", help="folder or hub id of the backbone, a Llama or named like one")
    parser.add_argument("rows", type=Path, help="jsonl with prompt and completion")
    parser.add_argument("--method", choices=("lora", "full"), default="lora", help="lora: rank 16, all linear layers")
    parser.add_argument("--frozen", type=int, default=0, help="blocks that do not train, and the embeddings with them")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--batch", type=int, default=8, help="rows of a step")
    parser.add_argument("--micro-batch", type=int, default=1, help="rows of a forward pass")
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--weights", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--compute", choices=("float32", "bfloat16"), default="float32", help="bfloat16: autocast")
    return parser.parse_args()


if __name__ == "__main__":
    print(json.dumps(main(_arguments())))
