"""First losses beside TRL's SFTTrainer on rows with pictures: the same rows, pictures, weights, adapter and order.

    python scripts/bench/peer_trl_pictures.py MODEL [--steps 10]
    python scripts/bench/peer_trl_pictures.py MODEL --speed --pairs 3

MODEL is a folder that AutoModelForImageTextToText loads, with its processor. Every step of both reads all rows, so that
their order does not matter; float32, AdamW, a constant rate. Prints both curves and their largest difference.

--speed instead times whole processes in turn: ours, ours without kept outputs of the tower, and TRL's, each with STEPS
steps of all rows and with a fifth of them. What the further steps take, in processor time, is told as tokens and
pictures a second; their start, loading and what ours does after training cancel.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import measuring
import numpy as np
from PIL import Image

# This project requires it, a user of TRL need not have it, and accelerate imports it where it is (two seconds).
sys.modules["deepspeed"] = None  # type: ignore[assignment]

import workbench  # noqa: E402
from workbench import adapters  # noqa: E402
from workbench.adapters import Lora  # noqa: E402
from workbench.config import ModelConfig  # noqa: E402
from workbench.config.sections.image_config import ImageConfig  # noqa: E402
from workbench.models import backbones, picture_features  # noqa: E402
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


SIDES = ("ours", "ours, each time anew", "TRL")


def side(name: str, model: str, steps: int) -> None:
    """Train as one side, in a process of its own; prints how many tokens a step has, where ours knows it."""
    if name == SIDES[1]:
        picture_features.can_keep = lambda model: False
    with tempfile.TemporaryDirectory() as folder:
        if name == SIDES[2]:
            theirs(model, steps, Path(folder))
            return
        ours(model, steps, Path(folder))
        print(json.dumps({"tokens": next(line["tokens"] for line in metrics_log.read(Path(folder) / "run"))}))


def speed(arguments: argparse.Namespace) -> None:
    """Tokens and pictures a second of processor time of each side, medians, and most memory."""
    print(measuring.machine("cpu", ("torch", "transformers", "trl")))
    few, many = arguments.steps // 5, arguments.steps
    seconds: dict[str, list[float]] = {name: [] for name in SIDES}
    peaks: dict[str, list[int]] = {name: [] for name in SIDES}
    tokens = 0
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(arguments.pairs):
            for name in SIDES:
                used = []
                for steps in (few, many):
                    log = Path(folder) / f"{len(seconds[name])}-{name.replace(' ', '-')}-{steps}"
                    command = [sys.executable, __file__, arguments.model, "--side", name, "--steps", str(steps)]
                    used.append(measuring.run(command, log, "cpu"))
                if name == SIDES[0]:
                    tokens = measuring.last_line(log)["tokens"]
                seconds[name].append((used[1].cpu_s - used[0].cpu_s) / (many - few))
                peaks[name].append(used[1].peak_bytes)
    pictures = sum(len(row["images"]) for row in rows())
    print(f"{'':22} {'tokens/s':>9} {'pictures/s':>10} {'peak GB':>8}  a step of {tokens} tokens, {pictures} pictures")
    for name in SIDES:
        took = statistics.median(seconds[name])
        print(f"{name:22} {tokens / took:9.0f} {pictures / took:10.1f} {max(peaks[name]) / 1e9:8.2f}")


def main(arguments: argparse.Namespace) -> None:
    if arguments.side is not None:
        side(arguments.side, arguments.model, arguments.steps)
        return
    if arguments.speed:
        speed(arguments)
        return
    with tempfile.TemporaryDirectory() as folder:
        curves = [each(arguments.model, arguments.steps, Path(folder)) for each in (ours, theirs)]
    for step, (own, other) in enumerate(zip(*curves, strict=True), start=1):
        print(f"step {step}: {own:.5f}, TRL {other:.5f}")
    print(f"largest difference {max(abs(own - other) for own, other in zip(*curves, strict=True)):.1e}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--side", choices=SIDES, help="of --speed, which starts this")
    main(parser.parse_args())
