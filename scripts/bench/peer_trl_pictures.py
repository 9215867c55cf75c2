"""First losses beside TRL's SFTTrainer on rows with pictures: the same rows, pictures, weights, adapter and order.

    python scripts/bench/peer_trl_pictures.py MODEL [--steps 10]

MODEL is a folder that AutoModelForImageTextToText loads, with its processor. Every step of both reads all rows, so that
their order does not matter; float32, AdamW, a constant rate. Prints both curves and their largest difference.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

# This project requires it, a user of TRL need not have it, and accelerate imports it where it is (two seconds).
sys.modules["deepspeed"] = None  # type: ignore[assignment]

import workbench  # noqa: E402
from workbench import adapters  # noqa: E402
from workbench.adapters import Lora  # noqa: E402
from workbench.config import ModelConfig  # noqa: E402
from workbench.config.sections.image_config import ImageConfig  # noqa: E402
from workbench.models import backbones  # noqa: E402
from workbench.models.picture_processor import PictureProcessor  # noqa: E402
from workbench.runs import metrics_log  # noqa: E402

ROWS, RATE, RANK = 8, 1e-3, 8


def rows() -> list[dict[str, Any]]:
    """Questions about pictures of noise, one or two in a row, of several sizes."""
    rng = np.random.default_rng(0)
    found = []
    for number in range(ROWS):
        sizes = [(20 + 7 * number, 40), (33, 28 + 3 * number)][: 1 + number % 2]
        pictures = [Image.fromarray(rng.integers(0, 256, (*size, 3), dtype=np.uint8)) for size in sizes]
        found.append({"images": pictures, "question": f"What is {number}?", "answer": f"It is noise, {number} of it."})
    return found


def ours(model: str, steps: int, folder: Path) -> list[float]:
    """Losses of a run of the workbench."""
    lines = []
    for number, row in enumerate(rows()):
        names = [f"{number}-{place}.png" for place, _ in enumerate(row["images"])]
        for name, picture in zip(names, row["images"], strict=True):
            picture.save(folder / name)
        lines.append({**row, "images": names})
    (folder / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = [
        *(f"model.id={model}", "model.weights=float32", f"adapter.rank={RANK}", f"adapter.alpha={2 * RANK}"),
        *(f"data.train={folder / 'rows.jsonl'}", f"data.held_out={folder / 'held.jsonl'}"),
        *(f"batch.size={ROWS}", f"train.steps={steps}", f"train.learning_rate={RATE}", "train.weight_decay=0"),
        *("schedule.name=constant", "schedule.warmup=0", "evaluate.every=null", "evaluate.answers=0"),
    ]
    held = {**lines[0], "question": "Another question?"}
    (folder / "held.jsonl").write_text(json.dumps(held) + "\n")
    run = workbench.run("sft/quickstart", words, out=folder / "run", quiet=True)
    return [line["loss"] for line in metrics_log.read(run) if "loss" in line][:steps]


def theirs(model: str, steps: int, folder: Path) -> list[float]:
    """Losses of TRL's SFTTrainer, over an adapter with the same first values."""
    from datasets import Dataset

    trl: Any = importlib.import_module("trl")
    section = ModelConfig(id=model, weights="float32")
    tokenizer = backbones.tokenizer(section)
    backbone = backbones.load(section, tokenizer).model
    peft = adapters.attach(backbone, Lora(rank=RANK, alpha=2 * RANK), seed=0)
    processor = PictureProcessor(section, type(backbone.config), ImageConfig()).processor
    table = Dataset.from_list(
        [
            {
                "images": row["images"],
                "prompt": [{"role": "user", "content": row["question"]}],
                "completion": [{"role": "assistant", "content": row["answer"]}],
            }
            for row in rows()
        ]
    )
    settings = trl.SFTConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=ROWS,
        max_steps=steps,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_length=None,
        logging_steps=1,
        report_to="none",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
    )
    trainer = trl.SFTTrainer(model=peft, args=settings, train_dataset=table, processing_class=processor)
    trainer.train()
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def main(arguments: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        curves = [each(arguments.model, arguments.steps, Path(folder)) for each in (ours, theirs)]
    for step, (own, other) in enumerate(zip(*curves, strict=True), start=1):
        print(f"step {step}: {own:.5f}, TRL {other:.5f}")
    print(f"largest difference {max(abs(own - other) for own, other in zip(*curves, strict=True)):.1e}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--steps", type=int, default=10)
    main(parser.parse_args())
