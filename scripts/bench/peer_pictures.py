"""Fine-tune a classifier of pictures with transformers' Trainer and PEFT, as their documentation shows it.

    python scripts/bench/peer_pictures.py MODEL ROWS.csv --fold 0/5      # rows whose column `fold` is 0 are held out

ROWS.csv has the columns image, label and fold. One line of JSON at the end: seconds of training, rows that were held
out, and how many of them were right. Pictures are opened by Pillow, prepared by the backbone's own processor and kept
in memory.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from PIL import Image

# This project requires it, a user of the Trainer need not have it, and accelerate imports it where it is (two seconds).
sys.modules["deepspeed"] = None  # type: ignore[assignment]

from peft import LoraConfig, get_peft_model  # noqa: E402
from torch import nn  # noqa: E402
from transformers import AutoModelForImageClassification, Trainer, TrainingArguments  # noqa: E402
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil  # noqa: E402


def main(arguments: argparse.Namespace) -> dict[str, Any]:
    table = pd.read_csv(arguments.rows, dtype={"label": str})
    classes = sorted(set(table["label"]))
    number, _ = map(int, arguments.fold.split("/"))
    held = table["fold"] == number
    processor = ViTImageProcessorPil.from_pretrained(arguments.model)
    train, test = (_rows(part, arguments.rows.parent, processor, classes) for part in (table[~held], table[held]))
    model = AutoModelForImageClassification.from_pretrained(
        arguments.model, num_labels=len(classes), ignore_mismatched_sizes=True, dtype=torch.float32
    )
    layers = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and "layer" in name]
    lora = LoraConfig(
        r=arguments.rank, lora_alpha=2 * arguments.rank, target_modules=layers, modules_to_save=["classifier"]
    )
    model = get_peft_model(model, lora)
    settings = TrainingArguments(
        output_dir=str(arguments.out),
        num_train_epochs=arguments.epochs,
        per_device_train_batch_size=arguments.batch,
        per_device_eval_batch_size=64,
        learning_rate=arguments.lr,
        warmup_steps=0.05,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        seed=arguments.seed,
        use_cpu=not torch.cuda.is_available(),
        bf16=arguments.bf16,
        disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=settings, train_dataset=train, eval_dataset=test)
    began = time.perf_counter()
    trainer.train()
    took = time.perf_counter() - began
    said = trainer.predict(test)  # type: ignore[arg-type]
    right = int((said.predictions.argmax(1) == said.label_ids).sum())  # type: ignore[union-attr]
    trainable = sum(each.numel() for each in model.parameters() if each.requires_grad)
    return {"train_s": took, "right": right, "held_out_rows": len(test), "trainable": trainable}


def _rows(table: pd.DataFrame, folder: Path, processor: Any, classes: list[str]) -> list[dict[str, Any]]:
    pictures = [np.asarray(Image.open(folder / name).convert("RGB")) for name in table["image"]]
    found = []
    for picture, label in zip(pictures, table["label"], strict=True):
        pixels = processor(picture, return_tensors="pt")["pixel_values"][0]
        found.append({"pixel_values": pixels, "labels": classes.index(label)})
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("rows", type=Path)
    parser.add_argument("--fold", default="0/5")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bf16", action="store_true", help="autocast to bfloat16")
    parser.add_argument("--out", type=Path, default=Path("trainer"))
    print(json.dumps(main(parser.parse_args())))
