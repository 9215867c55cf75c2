"""Distil with TRL's GKDTrainer, and write what `workbench run` writes: a line per step in metrics.jsonl.

    python scripts/bench/peer_gkd.py STUDENT TEACHER ROWS OUT SETTINGS     # settings of GKDConfig, as JSON

scripts/bench/distill.py starts this in a process of its own. Its `beta` of 0 is forward KL(teacher || student), at
temperature 1: GKDConfig.temperature is that of sampling alone. `lmbda` of 0 keeps the rows' own completions.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, load_dataset
from peer_trl import Counts, Metrics
from peft import LoraConfig
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from trl.experimental.gkd import GKDConfig, GKDTrainer


def main(student: str, teacher: str, rows: str, out: Path, settings: dict[str, Any]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(student)
    read = load_dataset("json", data_files=rows, split="train")
    trainer = _CountingTrainer(
        model=student,
        teacher_model=teacher,
        args=GKDConfig(output_dir=str(out), **settings),
        processing_class=tokenizer,
        train_dataset=_tokenised(read, tokenizer, settings["max_length"]),
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    trainer.add_callback(Metrics(trainer, out / "metrics.jsonl"))
    trainer.train()


def _tokenised(rows: Dataset, tokenizer: PreTrainedTokenizerBase, longest: int) -> Dataset:
    """As TRL's SFTTrainer writes prompt and completion, with the end of text; its GKDTrainer itself reads chats alone.

    That spares the peer its template, and tokenising every row in every epoch.
    """

    def tokenise(row: dict[str, str]) -> dict[str, list[int]]:
        prompt = tokenizer(row["prompt"])["input_ids"]
        ids = [*tokenizer(row["prompt"] + row["completion"])["input_ids"], tokenizer.eos_token_id][:longest]
        completion = [int(place >= len(prompt)) for place in range(len(ids))]
        return {"input_ids": ids, "attention_mask": [1] * len(ids), "completion_mask": completion}

    return rows.map(tokenise, remove_columns=["completion"])


class _CountingTrainer(GKDTrainer):
    """GKDTrainer that counts the tokens it sees."""

    tokens = 0
    supervised_tokens: torch.Tensor | int | None = None

    def compute_loss(
        self,
        model: Any,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        self.tokens += int(inputs["attention_mask"].sum())
        self.supervised_tokens = num_items_in_batch
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)  # type: ignore[no-untyped-call]

    def counts(self, logs: dict[str, Any]) -> Counts:
        assert self.supervised_tokens is not None
        return Counts(self.tokens, int(self.supervised_tokens))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], Path(sys.argv[4]), json.loads(sys.argv[5]))
