"""Train with TRL's SFTTrainer, and write what `workbench run` writes: a line per step in metrics.jsonl.

    python scripts/bench/peer_trl.py MODEL ROWS OUT SETTINGS     # settings of SFTConfig, and `rank`, as JSON

scripts/bench/sft.py starts this in a process of its own; TRL is used as its documentation shows: a model
folder, rows with prompt and completion, a LoraConfig, an SFTConfig.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from datasets import load_dataset
from measuring import PROCESSOR_TIMES
from peft import LoraConfig
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer


def main(model: str, rows: str, out: Path, settings: dict[str, Any]) -> None:
    rank = settings.pop("rank", 16)
    trainer = _CountingTrainer(
        model=model,
        args=SFTConfig(output_dir=str(out), **settings),
        train_dataset=load_dataset("json", data_files=rows, split="train"),
        peft_config=LoraConfig(r=rank, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    trainer.add_callback(Metrics(trainer, out / "metrics.jsonl"))
    trainer.train()


class _CountingTrainer(SFTTrainer):
    """SFTTrainer that remembers what it divides the loss of a step by: the supervised tokens of its batch."""

    supervised_tokens: torch.Tensor | int | None = None

    def compute_loss(
        self,
        model: Any,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        self.supervised_tokens = num_items_in_batch
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)  # type: ignore[no-untyped-call]

    def counts(self, logs: dict[str, Any]) -> Counts:
        assert self.supervised_tokens is not None  # the fused head takes it, so the Trainer counts it
        return Counts(int(logs["num_tokens"]), int(self.supervised_tokens))


class Counts(NamedTuple):
    """How much a trainer has seen."""

    tokens: int
    """Without padding, since the start."""
    supervised: int
    """Supervised tokens of the last step."""


class Counting(Protocol):
    """A trainer that counts."""

    def counts(self, logs: dict[str, Any]) -> Counts:
        """At the end of a step, of which it logs this."""


class Metrics(TrainerCallback):
    """Appends a line per step to `path`, with the keys of a run directory's metrics.jsonl.

    Processor times stand beside it at the end.
    """

    def __init__(self, trainer: Counting, path: Path) -> None:
        self.trainer, self.path = trainer, path
        self.started = 0.0
        self.tokens_before = 0
        self.processor_s: list[float] = []

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.started = time.perf_counter()

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **event: Any) -> None:
        logs = event["logs"]
        if "loss" not in logs:  # the summary at the end
            self.path.with_name(PROCESSOR_TIMES).write_text(json.dumps(self.processor_s), encoding="utf-8")
            return
        self.processor_s.append(time.process_time())
        seen = self.trainer.counts(logs)
        line = {
            "step": state.global_step,
            "loss": float(logs["loss"]),
            "tokens": seen.tokens - self.tokens_before,
            "supervised_tokens": seen.supervised,
            "elapsed_s": time.perf_counter() - self.started,
            "peak_bytes": torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None,
        }
        self.tokens_before = seen.tokens
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), json.loads(sys.argv[4]))
