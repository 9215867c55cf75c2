"""Teach some layers of a sentence encoder its own vectors with sentence-transformers' trainer, as documented.

    python scripts/bench/peer_embed_student.py MODEL TRAIN.csv TEST.csv --layers 0 3 5 --loss cosine

One line of JSON at the end: processor time of the training, and the accuracy of the nearest training text on the test
rows. Every text comes twice in batches of 128, as in an epoch of ours over batches of 64 rows with classes; dropout is
off, schedule and optimizer are ours.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from typing import Any

import pandas as pd
from torch import nn

sys.modules["deepspeed"] = None  # type: ignore[assignment]  # two seconds to import, and not used

from datasets import Dataset  # noqa: E402
from sentence_transformers import (  # noqa: E402
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.sentence_transformer.losses.embed_distill import EmbedDistillLoss  # noqa: E402


def main(arguments: argparse.Namespace) -> dict[str, Any]:
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    teacher, model = (
        SentenceTransformer(arguments.model, device="cpu", local_files_only=True, config_kwargs=dropout)
        for _ in range(2)
    )
    first: Any = model[0]
    encoder = first.auto_model.encoder
    encoder.layer = nn.ModuleList([encoder.layer[number] for number in arguments.layers])
    known, asked = (
        pd.read_csv(path, keep_default_na=False).drop_duplicates("text") for path in (arguments.train, arguments.test)
    )
    vectors = teacher.encode(list(known["text"]))
    with tempfile.TemporaryDirectory() as folder:
        settings = SentenceTransformerTrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=128,
            num_train_epochs=2,
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
            train_dataset=Dataset.from_dict({"text": list(known["text"]), "label": vectors}),
            loss=EmbedDistillLoss(model, distance_metric=arguments.loss),
        )
        began = time.process_time()
        trainer.train()
        took = time.process_time() - began
    found = [model.encode(list(rows["text"]), normalize_embeddings=True) for rows in (known, asked)]
    nearest = (found[1] @ found[0].T).argmax(1)
    hits = int((known[arguments.label].to_numpy()[nearest] == asked[arguments.label].to_numpy()).sum())
    return {"processor_s": took, "accuracy": hits / len(asked), "rows": len(asked)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("model", help="folder of sentence-transformers")
    parser.add_argument("train", help="csv with text and a class")
    parser.add_argument("test", help="csv with text and a class")
    parser.add_argument("--layers", type=int, nargs="+", required=True, help="that the student has")
    parser.add_argument("--loss", choices=("cosine", "mse"), default="cosine")
    parser.add_argument("--label", default="category", help="column with the class")
    parser.add_argument("--rate", type=float, default=3e-4)
    print(json.dumps(main(parser.parse_args())))
