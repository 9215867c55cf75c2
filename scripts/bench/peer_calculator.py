"""The calculator of `reinforce/tools` by TRL's GRPOTrainer as it ships, from the same start: reward over time.

    python scripts/bench/peer_calculator.py OUT STEPS [SEED]

Writes OUT/metrics.jsonl as peer_grpo.py does, whose curve this is.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import measuring
import torch
from datasets import load_dataset
from peer_grpo import Curve
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import chat_template_utils
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from workbench.data import starter

OWN = starter.FOLDER / "tools"
QUESTIONS, ANSWERS, TOKENS, UPDATES, RATE, TEMPERATURE = 16, 8, 96, 2, 2.0e-4, 0.7
"""Those of the recipe."""


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


def reward(completions: list[list[dict[str, Any]]], answer: list[str], **_: Any) -> list[float | None]:
    """1 where the last number of the last turn is that of the row, else 0."""
    found = [re.findall(r"-?\d+", str(turns[-1].get("content") or "")) for turns in completions]
    return [float(bool(each) and each[-1] == wanted) for each, wanted in zip(found, answer, strict=True)]


def main(out: str, steps: str, seed: str = "0") -> None:
    torch.set_num_threads(1)
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(starter.FOLDER)
    tokenizer.chat_template = (OWN / "chat_template.jinja").read_text()
    # Llama 3.1's form of calls, with the starter's words around a turn.
    told = json.dumps(chat_template_utils.llama3_template).replace(r"<\\|eot_id\\|>", r"<\\|endoftext\\|>")
    tokenizer.response_template = json.loads(told) | {"start_anchor": "Assistant:\n"}
    backbone = AutoModelForCausalLM.from_pretrained(starter.FOLDER, dtype=torch.bfloat16)
    rows = load_dataset("json", data_files=str(OWN / "train.jsonl"), split="train")
    rows = rows.map(lambda row: {"prompt": [{"role": "user", "content": row["question"]}]}, remove_columns=["question"])
    trainer = GRPOTrainer(
        model=PeftModel.from_pretrained(backbone, OWN / "start" / "adapter", is_trainable=True),
        reward_funcs=reward,
        args=GRPOConfig(
            output_dir=str(folder / "trainer"),
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            per_device_train_batch_size=QUESTIONS * ANSWERS,
            num_generations=ANSWERS,
            num_iterations=UPDATES,
            max_completion_length=TOKENS,
            max_tool_calling_iterations=1,
            max_steps=int(steps),
            learning_rate=RATE,
            lr_scheduler_type="linear",
            warmup_steps=0,
            loss_type="grpo",
            scale_rewards="group",
            beta=0.0,
            epsilon=0.2,
            epsilon_high=0.28,
            temperature=TEMPERATURE,
            seed=int(seed),
            bf16=measuring.has_bfloat16_units(),
            gradient_checkpointing=False,
            use_cpu=True,
            disable_tqdm=True,
        ),
        train_dataset=rows,
        processing_class=tokenizer,
        tools=[add],
        callbacks=[Curve(folder / "metrics.jsonl")],
    )
    trainer.train()


if __name__ == "__main__":
    main(*sys.argv[1:])
