"""GRPO of TRL as it ships, on prompts with numbers as answers: a process of its own for scripts/bench/reinforce.py.

    python scripts/bench/peer_grpo.py MODEL ROWS OUT SETTINGS

MODEL is the folder of a model, ROWS has `prompt` and `answer`, SETTINGS is a JSON object of fields of GRPOConfig.
Writes OUT/metrics.jsonl: step, mean reward of the answers of the step, and seconds since the training began.
"""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import load_dataset
from transformers import AutoTokenizer, TrainerCallback
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

NUMBER = re.compile(r"-?\d+")


def reward(completions: list[str], answer: list[str], **_: Any) -> list[float | None]:
    """1 where the last number of the answer is that of the row, else 0."""
    found = [NUMBER.findall(completion) for completion in completions]
    return [float(bool(each) and each[-1] == wanted) for each, wanted in zip(found, answer, strict=True)]


class Curve(TrainerCallback):
    """Writes the reward of each step."""

    def __init__(self, path: Path) -> None:
        self._path, self._began = path, 0.0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._began = time.monotonic()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        if logs is None or "reward" not in logs:
            return
        line = {
            "step": state.global_step,
            "reward": logs["reward"],
            "elapsed_s": round(time.monotonic() - self._began, 3),
            "processor_s": round(time.process_time(), 3),
        }
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def main(model: str, rows: str, out: str, settings: str) -> None:
    torch.set_num_threads(1)
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(model)
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=GRPOConfig(
            output_dir=str(folder / "trainer"),
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            **json.loads(settings),
        ),
        train_dataset=load_dataset("json", data_files=rows, split="train"),
        processing_class=tokenizer,
        callbacks=[Curve(folder / "metrics.jsonl")],
    )
    trainer.train()


if __name__ == "__main__":
    main(*sys.argv[1:])
