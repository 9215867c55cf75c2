"""Fine-tune sentence embeddings with sentence-transformers' own trainer and PEFT's LoRA, as documented.

    python scripts/bench/peer_embed.py MODEL PAIRS.jsonl TRAIN.csv TEST.csv --batch 64 --rate 1e-3

One line of JSON at the end: processor time at the end of each step, and the accuracy of the nearest training text on
the test rows. The loss is MultipleNegativesRankingLoss; the backbone's dropout is off, as in ours.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from typing import Any

import pandas as pd

sys.modules["deepspeed"] = None  # type: ignore[assignment]  # two seconds to import, and not used

from datasets import Dataset  # noqa: E402
from peft import LoraConfig  # noqa: E402
from sentence_transformers import (  # noqa: E402
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss  # noqa: E402
from transformers import TrainerCallback  # noqa: E402

LINEAR = r".*encoder.*\.(query|key|value|dense)"
"""The linear layers inside the blocks."""


class Watch(TrainerCallback):
    """Notes the processor time of all threads when a step ends."""

    def __init__(self) -> None:
        self.processor_s: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.processor_s.append(time.process_time())


def main(arguments: argparse.Namespace) -> dict[str, Any]:
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = SentenceTransformer(arguments.model, device="cpu", local_files_only=True, config_kwargs=dropout)
    model.max_seq_length = arguments.max_tokens
    model.add_adapter(LoraConfig(r=16, lora_alpha=32, lora_dropout=0.0, target_modules=LINEAR))
    watch = Watch()
    with tempfile.TemporaryDirectory() as folder:
        settings = SentenceTransformerTrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=arguments.batch,
            num_train_epochs=1,
            learning_rate=arguments.rate,
            lr_scheduler_type="linear",
            warmup_steps=0.1,
            max_grad_norm=1.0,
            optim="adamw_torch_fused",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        )
        trainer = SentenceTransformerTrainer(
            model=model,
            args=settings,
            train_dataset=Dataset.from_json(arguments.pairs),
            loss=MultipleNegativesRankingLoss(model, scale=20.0),
            callbacks=[watch],
        )
        trainer.train()
    sets = [pd.read_csv(path, keep_default_na=False) for path in (arguments.train, arguments.test)]
    known, asked = (model.encode(list(rows["text"]), normalize_embeddings=True) for rows in sets)
    nearest = (asked @ known.T).argmax(1)
    hits = int((sets[0]["label"].to_numpy()[nearest] == sets[1]["label"].to_numpy()).sum())
    return {"processor_s": watch.processor_s, "hits": hits, "rows": len(asked)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("model")
    parser.add_argument("pairs", help="jsonl with anchor and positive")
    parser.add_argument("train", help="csv with text and label, among which test rows look for their neighbours")
    parser.add_argument("test", help="csv with text and label")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--max-tokens", type=int, default=128)
    print(json.dumps(main(parser.parse_args())))
