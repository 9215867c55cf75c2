"""Rows, our recipe, TRL's settings and options of the benchmarks that train on GSM8K."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import measuring
from measuring import WARM_UP

from workbench.config.yaml_text import dump_yaml, load_yaml

HERE = Path(__file__).parent
ROWS = HERE / "gsm8k_256.jsonl"
BATCH = 8
MAX_TOKENS = 512
LEARNING_RATE = 2e-4

# What TRL 1.16 does where nobody says otherwise, as read in trl/trainer/{base_config,sft_config}.py:
# - bf16=True: autocast to bfloat16. PEFT keeps the adapter in float32.
# - gradient_checkpointing=True for every layer.
# - Weights: float32 when SFTTrainer loads the model itself, whatever the checkpoint holds. Here they are loaded as ours
#   are, in bfloat16 where nobody asks for more, which is kinder: less memory, and no cast of every weight in each step.
# - No packing, rows in random order, padding to the longest row of a batch, fused AdamW.
FASTER = {"gradient_checkpointing": False, "train_sampling_strategy": "group_by_length"}
# On a CPU one example at a time is more than twice as fast, in a fifth of the memory: no padding, no attention mask,
# and the logits of one example only. torch_compile stays out, as train.compile does on our side: it makes warm steps
# 17 % faster, but its start costs more than that saves in one pass over these rows.
FASTER_ON_CPU = {
    "gradient_checkpointing": False,
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": BATCH,
}
IN_FLOAT32 = {"bf16": False, "model_init_kwargs": {"dtype": "float32"}}
OURS_IN_FLOAT32 = ["model.weights=float32", "model.compute=float32"]


def parser(description: str) -> argparse.ArgumentParser:
    """With the options of both sides."""
    found = measuring.parser(description)
    found.add_argument("--steps", type=int, default=32, help="optimizer steps; 32 are one pass over the rows")
    found.add_argument("--peer", choices=("default", "best"), default="default", help="TRL as it comes, or tuned")
    found.add_argument(
        "--clock",
        choices=("wall", "processor"),
        default="wall",
        help="of tokens/s; processor time is for machines that others keep busy",
    )
    found.add_argument(
        "--precision", choices=("bfloat16", "float32"), default="bfloat16", help="of weights and products, both sides"
    )
    found.add_argument("--ours", nargs="*", default=[], metavar="KEY=VALUE", help="overrides of `workbench run`")
    found.add_argument("--theirs", nargs="*", default=[], metavar="KEY=VALUE", help="fields of TRL's configuration")
    return found


def arguments_of(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Arguments of the command line; refuses numbers of steps that cannot be compared."""
    arguments = parser.parse_args()
    if arguments.steps <= WARM_UP:
        parser.error(f"--steps {arguments.steps}: the first {WARM_UP} are left out; write {WARM_UP + 1} or more.")
    if arguments.steps > epoch() and arguments.steps % epoch():
        parser.error(
            f"--steps {arguments.steps}: write up to {epoch()}, or a multiple, so that both see the same rows."
        )
    return arguments


def epoch() -> int:
    """Steps of one pass over all rows."""
    return len(ROWS.read_text(encoding="utf-8").splitlines()) // BATCH


def write_model(shape: str, folder: Path, device: str) -> None:
    """A Llama with random weights, made in a process of its own; of a model folder in the place of a shape, a link."""
    if Path(shape).is_dir():
        folder.symlink_to(Path(shape).resolve(), target_is_directory=True)
        return
    command = [sys.executable, str(HERE / "random_llama.py"), shape, str(folder), device]
    measuring.run(command, folder.with_suffix(".log"), device)


def write_rows(folder: Path, steps: int) -> None:
    """train.jsonl, as many rows as the steps of one pass take, and held_out.jsonl."""
    rows = [json.loads(line) for line in ROWS.read_text(encoding="utf-8").splitlines()]
    _write(folder / "train.jsonl", rows[: steps * BATCH])
    _write(folder / "held_out.jsonl", [{"question": "What is 1 + 1?", "answer": "1 + 1 = 2\n#### 2"}])


def _write(path: Path, rows: Sequence[dict[str, str]]) -> None:
    """Raw text, so that no chat template stands between the two sides."""
    pairs = [{"prompt": f"Question: {row['question']}\nAnswer:", "completion": f" {row['answer']}"} for row in rows]
    path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs), encoding="utf-8")


def write_recipe(path: Path, steps: int, sections: Mapping[str, Any]) -> None:
    """Our recipe for the rows beside it, with these further `sections`; sft, unless they say otherwise."""
    recipe = {
        "recipe": "sft",
        "adapter": {"method": "lora", "rank": 16, "alpha": 32, "targets": "all-linear"},
        "data": {
            "train": str(path.parent / "train.jsonl"),
            "held_out": str(path.parent / "held_out.jsonl"),
            "format": "prompt_completion",
            "max_tokens": MAX_TOKENS,
            "truncate": "right",
        },
        "batch": {"size": BATCH},
        "train": {"steps": steps, "learning_rate": LEARNING_RATE},
        "schedule": {"name": "constant", "warmup": 0.0},
        "evaluate": {"every": None, "answers": 0},
        "save": {"every": None},
        **sections,
    }
    path.write_text(dump_yaml(recipe), encoding="utf-8")


def our_command(recipe: Path, arguments: argparse.Namespace, out: Path) -> Sequence[str]:
    """A run of ours."""
    overrides = [*(OURS_IN_FLOAT32 if arguments.precision == "float32" else []), *arguments.ours]
    if arguments.clock == "processor":
        return [sys.executable, str(HERE / "our_steps.py"), str(recipe), str(out), *overrides]
    return [sys.executable, "-m", "workbench.cli.verbs", "run", str(recipe), *overrides, "--out", str(out)]


def trl_settings(arguments: argparse.Namespace, *, weights: str = "bfloat16") -> dict[str, Any]:
    """Fields of SFTConfig, and of what is made of it, for the same steps of the same batches."""
    settings: dict[str, Any] = {
        "per_device_train_batch_size": BATCH,
        "num_train_epochs": max(1, arguments.steps // epoch()),
        "max_length": MAX_TOKENS,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "use_cpu": arguments.device == "cpu",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "bf16": True,
        "model_init_kwargs": {"dtype": weights},
    }
    if arguments.peer == "best":
        settings |= FASTER_ON_CPU if arguments.device == "cpu" else FASTER
        settings |= IN_FLOAT32 if arguments.device == "cpu" and not measuring.has_bfloat16_units() else {}
    settings |= IN_FLOAT32 if arguments.precision == "float32" else {}
    for key, _, value in (word.partition("=") for word in arguments.theirs):
        settings[key] = load_yaml(value)
    return settings


def notes(arguments: argparse.Namespace, trl: str) -> list[str]:
    """Notes that a reader of the ratios must know."""
    tuned = "".join(f" {word}" for word in arguments.theirs)
    found = [
        f"Tokens/s: median of steps, without padding, after the first {WARM_UP}. TRL {trl} {arguments.peer}{tuned}."
    ]
    if arguments.device == "cpu" and not measuring.has_bfloat16_units():
        found.append(
            "This CPU has no bfloat16 units and emulates bfloat16 products, slower than float32 ones. The workbench "
            "stores the weights in bfloat16 and computes in float32 here; --ours model.compute=bfloat16 computes like "
            "TRL's bf16, and --peer best lets TRL use float32."
        )
    return found
