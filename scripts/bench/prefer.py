"""Learn from judged answers with this workbench and with TRL: the same losses, and the ratios of speed and memory.

    python scripts/bench/prefer.py --only losses                 # first ten losses of DPO, KTO and ORPO, float32
    python scripts/bench/prefer.py --only speed --loss dpo       # 100 M parameters, 2 pairs of runs
    python scripts/bench/prefer.py --only speed --peer best      # TRL with its reference read beforehand, and tuned

GSM8K as prompt, answer and, as the rejected one, the answer to another question; LoRA of rank 16 on all linear layers,
AdamW, at most 512 tokens. Losses: eight examples, all of them in each of ten steps, in float32 with the same initial
adapter. Speed: 8 examples a step; every run is a process of its own, ours and theirs in turn; both must see the same
number of tokens, or no ratio is printed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import gsm8k
import measuring

from workbench.config.yaml_text import dump_yaml
from workbench.data import starter

LOSSES = ("dpo", "kto", "orpo")
STEPS = 10
EXAMPLES = 8
AGREE = 1e-4

# TRL 1.16 as read in trl/trainer/{dpo,kto}_trainer.py and trl/experimental/orpo/orpo_trainer.py:
# - DPO, loss_type "sigmoid": the same. The reference runs in every step, with the adapter off, unless
#   precompute_ref_log_probs=True.
# - KTO: its reference point is a mean over a micro-batch, of answers that are exchanged within batches of
#   per_device_train_batch_size rows in the order of the file; ours is over the whole step, of the answer to the prompt
#   before. With all rows in one batch the two are one.
# - ORPO: its negative log-likelihood is that of prompt and chosen answer, a mean over the tokens of a micro-batch; the
#   paper's, and ours, is of the answer alone, and each answer counts alike. peer_prefer.py takes the paper's.
# - All: gradient checkpointing is on, and autocast to bfloat16, where nobody says otherwise.


def main() -> None:
    arguments = _arguments()
    print(measuring.machine(arguments.device, ("torch", "transformers", "peft", "trl")))
    with tempfile.TemporaryDirectory(prefix="bench-prefer-") as name:
        folder = Path(name)
        if arguments.only in (None, "losses"):
            _compare_losses(folder, arguments)
        if arguments.only in (None, "speed"):
            _compare_speed(folder, arguments)


def _compare_losses(folder: Path, arguments: argparse.Namespace) -> None:
    adapter = _initial_adapter(folder)
    print(f"{'loss':6} {'largest difference':>20}   first and last loss of ours and of TRL")
    for loss in LOSSES if arguments.loss is None else (arguments.loss,):
        own = folder / loss
        own.mkdir()
        _write_rows(own / "train.jsonl", EXAMPLES, loss)
        _write_recipe(own / "ours.yaml", STEPS, loss, str(starter.FOLDER), EXAMPLES)
        in_float32 = ["model.weights=float32", "model.compute=float32", "seed=0"]
        command = [sys.executable, "-m", "workbench.cli.verbs", "run", str(own / "ours.yaml"), *in_float32]
        measuring.run([*command, "--out", str(own / "ours")], own / "ours.log", arguments.device)
        settings = _settings(arguments, loss) | {
            "num_train_epochs": STEPS,
            "bf16": False,
            "gradient_checkpointing": False,
            "per_device_train_batch_size": EXAMPLES,
            "gradient_accumulation_steps": 1,
            "dtype": "float32",
        }
        (own / "theirs").mkdir()
        words = [loss, str(starter.FOLDER), str(own / "train.jsonl"), str(own / "theirs"), json.dumps(settings)]
        script = [sys.executable, str(gsm8k.HERE / "peer_prefer.py")]
        measuring.run([*script, *words, str(adapter)], own / "theirs.log", arguments.device)
        ours, theirs = (_losses(own / side) for side in ("ours", "theirs"))
        worst = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
        shown = " ".join(f"{value:.6f}" for value in (ours[0], ours[-1], theirs[0], theirs[-1]))
        print(f"{loss:6} {worst:20.2e}   {shown}", flush=True)
        if worst > AGREE:
            sys.exit(f"{loss}: losses differ by more than {AGREE:g}: {ours} {theirs}")


def _compare_speed(folder: Path, arguments: argparse.Namespace) -> None:
    own, loss = folder / "speed", arguments.loss or "dpo"
    own.mkdir()
    if arguments.model == "100m":
        gsm8k.write_model("100m", own / "model", arguments.device)
    else:
        (own / "model").symlink_to(starter.FOLDER)
    _write_rows(own / "train.jsonl", arguments.steps * EXAMPLES, loss)
    _write_recipe(own / "ours.yaml", arguments.steps, loss, str(own / "model"), EXAMPLES)
    sides = {
        "workbench": partial(gsm8k.our_command, own / "ours.yaml", arguments),
        "TRL": partial(_their_command, own, arguments, loss),
    }
    results = measuring.in_turn(sides, own, arguments)
    ratios = measuring.ratios(results)
    print(measuring.summary(ratios, results))
    print(f"Tokens/s: without padding, after the first {measuring.WARM_UP} steps. The reference reads in `wall s`.")
    print(f"TRL {version('trl')} {arguments.peer}, {loss}.")
    measuring.write_report(arguments, runs=results, ratios=ratios)


def _arguments() -> argparse.Namespace:
    parser = gsm8k.parser(__doc__)
    parser.add_argument("--only", choices=("losses", "speed"), help="one of the two comparisons")
    parser.add_argument("--loss", choices=LOSSES, help="one of the losses; speed is that of dpo without")
    parser.add_argument("--model", choices=("100m", "starter"), default="100m", help="of the speed")
    arguments = parser.parse_args()
    most = gsm8k.epoch()
    if not measuring.WARM_UP < arguments.steps <= most:
        parser.error(f"--steps {arguments.steps}: write {measuring.WARM_UP + 1} to {most}.")
    return arguments


def _write_rows(path: Path, count: int, loss: str) -> None:
    """Rows of raw text, so that no chat template stands between the two sides."""
    rows = measuring.lines(gsm8k.ROWS)[: count + 1]
    lines = []
    for number, row in enumerate(rows[:count]):
        prompt = f"Question: {row['question']}\nAnswer:"
        own, other = f" {row['answer']}", f" {rows[(number + 1) % len(rows)]['answer']}"
        if loss == "kto":
            lines.append({"prompt": prompt, "completion": other if number % 2 else own, "label": number % 2 == 0})
        else:
            lines.append({"prompt": prompt, "chosen": own, "rejected": other})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def _write_recipe(path: Path, steps: int, loss: str, model: str, batch: int) -> None:
    held_out = path.parent / "held_out.jsonl"
    asked = [{"prompt": f"What is {n} + 1?", "chosen": f" {n + 1}", "rejected": " No idea"} for n in (1, 2)]
    single = [{"prompt": row["prompt"], "completion": row["chosen"], "label": True} for row in asked]
    held_out.write_text("".join(json.dumps(row) + "\n" for row in (single if loss == "kto" else asked)))
    recipe: dict[str, Any] = {
        "recipe": "prefer",
        "model": {"id": model},
        "adapter": {"method": "lora", "rank": 16, "alpha": 32, "targets": "all-linear"},
        "data": {
            "train": str(path.parent / "train.jsonl"),
            "held_out": str(held_out),
            "max_tokens": gsm8k.MAX_TOKENS,
            "truncate": "right",
        },
        "prefer": {"loss": loss, "beta": 0.1},
        "batch": {"size": batch},
        "train": {"steps": steps, "learning_rate": gsm8k.LEARNING_RATE},
        "schedule": {"name": "constant", "warmup": 0.0},
        "evaluate": {"every": None, "answers": 0},
        "save": {"every": None},
    }
    path.write_text(dump_yaml(recipe), encoding="utf-8")


def _settings(arguments: argparse.Namespace, loss: str) -> dict[str, Any]:
    """Fields of TRL's section, for the same steps of the same batches."""
    settings = gsm8k.trl_settings(arguments)
    settings |= {"dtype": settings.pop("model_init_kwargs")["dtype"], "beta": 0.1, "num_train_epochs": 1}
    if arguments.peer == "best" and loss != "orpo":
        settings["precompute_ref_log_probs"] = True
    if loss == "orpo":
        settings["max_completion_length"] = gsm8k.MAX_TOKENS
    return settings


def _their_command(folder: Path, arguments: argparse.Namespace, loss: str, out: Path) -> Sequence[str]:
    out.mkdir()
    script, rows = str(gsm8k.HERE / "peer_prefer.py"), str(folder / "train.jsonl")
    settings = json.dumps(_settings(arguments, loss))
    return [sys.executable, script, loss, str(folder / "model"), rows, str(out), settings]


def _initial_adapter(folder: Path) -> Path:
    """The adapter that a run of ours with seed 0 begins with."""
    from workbench import adapters
    from workbench.adapters import Lora
    from workbench.config import ModelConfig
    from workbench.models import backbones

    model = ModelConfig(weights="float32", compute="float32")
    backbone = backbones.load(model, backbones.tokenizer(model))
    lora = Lora(rank=16, alpha=32, targets="all-linear")
    adapters.save(adapters.attach(backbone.model, lora, seed=0), folder / "start")
    return folder / "start" / "adapter_model.safetensors"


def _losses(run: Path) -> list[float]:
    return [step["loss"] for step in measuring.steps(run)]


if __name__ == "__main__":
    main()
