"""The quickstart as a script, for people who like scripts.

    python scripts/finetune.py [RUN_DIRECTORY]

Change the sections to your own model and data; every field is explained in workbench/config/run_config.py.
"""

from __future__ import annotations

import json
import sys

import workbench
from workbench.adapters import Lora
from workbench.config import BatchConfig, DataConfig, EvaluateConfig, ModelConfig, RunConfig, TrainConfig

config = RunConfig(
    recipe="sft",
    model=ModelConfig(id="starter"),  # a folder, or a hub id such as Qwen/Qwen3-0.6B
    adapter=Lora(rank=16, alpha=32, targets="all-linear"),
    data=DataConfig(
        train="starter/fairytaleqa_train.jsonl",  # your.jsonl
        held_out="starter/fairytaleqa_held_out.jsonl",  # or a share of the training rows, such as 0.05
        max_tokens=512,
    ),
    batch=BatchConfig(size=16),
    train=TrainConfig(epochs=1, learning_rate=1e-3),
    evaluate=EvaluateConfig(every=0.25, answers=32, max_new_tokens=24),
)

if __name__ == "__main__":
    run = workbench.run(config, out=sys.argv[1] if len(sys.argv) > 1 else None)
    scores = json.loads((run / "scores.json").read_text())
    for name, after in scores["after"].items():
        print(f"{name:>15}  {scores['before'][name]:.4f} -> {after:.4f}")
    print(f"{run}/report.html")
