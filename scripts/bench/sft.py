"""Fine-tune the same model on the same rows with this workbench and with TRL, and print the ratios.

    python scripts/bench/sft.py                                  # 100 M parameters, 32 steps, 2 pairs of runs
    python scripts/bench/sft.py --peer best --pairs 3 --json speed.json
    python scripts/bench/sft.py --model 8b --device cuda
    python scripts/bench/sft.py --ours model.compute=bfloat16    # settings of this workbench
    python scripts/bench/sft.py --peer best --ours train.compile=true --theirs torch_compile=true   # of trl.SFTConfig

A random Llama, GSM8K as prompt and completion, LoRA of rank 16 on all linear layers, 8 examples a step, no packing,
at most 512 tokens, AdamW, loss on the completion. Every run is a process of its own, ours and theirs in turn; both
must see the same number of tokens, and of tokens with loss, or no ratio is printed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import measuring
import yaml

HERE = Path(__file__).parent
ROWS = HERE / "gsm8k_256.jsonl"
BATCH = 8
MAX_TOKENS = 512
LEARNING_RATE = 2e-4
WARM_UP = 2
"""Steps at the start that do not count: they allocate, tune and compile."""

# TRL 1.16 as read in trl/trainer/{base_config,sft_config,sft_trainer}.py and trl/kernels/chunked_logprob.py:
# - bf16=True: autocast to bfloat16. PEFT keeps the adapter in float32.
# - gradient_checkpointing=True for every layer.
# - Weights: float32 when SFTTrainer loads the model itself, whatever the checkpoint holds. Loaded in bfloat16 here,
#   which is kinder: less memory, and no cast of every weight in every step.
# - completion_only_loss=None: on for rows with prompt and completion. EOS is added to the completion and carries loss.
# - loss_type "nll": a fused head, the only one there is. It projects the labelled positions alone where it has Triton
#   (CUDA, XPU); on a CPU it projects all positions, padding too, and once more in the backward pass, with tiles
#   of 4,096 positions x 32,768 words: here the logits of the whole batch.
# - No packing, rows in random order, padding to the longest row of a batch, fused AdamW.
DEFAULT = {"bf16": True, "model_init_kwargs": {"dtype": "bfloat16"}}
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


@dataclass(frozen=True)
class Result:
    """One run, measured from outside and by its own metrics.jsonl."""

    name: str
    tokens_per_second: float
    """Tokens without padding, over the warm steps."""
    wall_s: float
    """The whole process: imports, loading, tokenising, training, and for ours also scoring and the report."""
    peak_bytes: int
    """Most memory: resident, of the whole process; on a GPU what torch had allocated there."""
    loss: float
    """Mean over the last quarter of the steps, in nats per supervised token."""
    tokens: int
    supervised_tokens: int


def main() -> None:
    arguments = _arguments()
    print(machine := measuring.machine(arguments.device, ("torch", "transformers", "peft", "trl")))
    with tempfile.TemporaryDirectory(prefix="bench-sft-") as name:
        folder = Path(name)
        _prepare(folder, arguments)
        sides: dict[str, Callable[[Path], Sequence[str]]] = {
            "workbench": partial(_our_command, folder, arguments),
            "TRL": partial(_their_command, folder, arguments),
        }
        results: list[Result] = []
        for number in range(2 * arguments.pairs):
            side = list(sides)[number % 2]
            results.append(_measure(side, sides[side], folder / f"run{number}", arguments.device))
            print(_line(results[-1]) if number else f"{_HEADER}\n{_line(results[-1])}", flush=True)
            _require_same_work(results)
    ratios = _ratios(results)
    print(_summary(ratios, results))
    print(*_notes(arguments), sep="\n")
    if arguments.json:
        report = {"machine": machine, "arguments": vars(arguments), "runs": results, "ratios": ratios}
        arguments.json.write_text(json.dumps(report, default=_plain, indent=2) + "\n", encoding="utf-8")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=2, help="runs of each side")
    parser.add_argument("--steps", type=int, default=32, help="optimizer steps; 32 are one pass over the rows")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--model", choices=("100m", "1b", "8b"), default="100m", help="shape; 1b and 8b as in Llama 3")
    parser.add_argument("--peer", choices=("default", "best"), default="default", help="TRL as it comes, or tuned")
    parser.add_argument("--ours", nargs="*", default=[], metavar="KEY=VALUE", help="overrides of `workbench run`")
    parser.add_argument("--theirs", nargs="*", default=[], metavar="KEY=VALUE", help="fields of SFTConfig")
    parser.add_argument("--json", type=Path, help="write everything that was measured to this file")
    arguments = parser.parse_args()
    if arguments.steps <= WARM_UP:
        parser.error(f"--steps {arguments.steps}: the first {WARM_UP} are left out; write {WARM_UP + 1} or more.")
    if arguments.steps > _epoch() and arguments.steps % _epoch():
        parser.error(
            f"--steps {arguments.steps}: write up to {_epoch()}, or a multiple, so that both see the same rows."
        )
    return arguments


def _epoch() -> int:
    return len(ROWS.read_text(encoding="utf-8").splitlines()) // BATCH


def _prepare(folder: Path, arguments: argparse.Namespace) -> None:
    """Put model, rows and our recipe into `folder`: as many rows as the steps of one pass take."""
    command = [sys.executable, str(HERE / "random_llama.py"), arguments.model, str(folder / "model"), arguments.device]
    measuring.run(command, folder / "model.log", arguments.device)
    rows = [json.loads(line) for line in ROWS.read_text(encoding="utf-8").splitlines()]
    _write_rows(folder / "train.jsonl", rows[: arguments.steps * BATCH])
    _write_rows(folder / "held_out.jsonl", [{"question": "What is 1 + 1?", "answer": "1 + 1 = 2\n#### 2"}])
    recipe = {
        "recipe": "sft",
        "model": {"id": str(folder / "model")},
        "adapter": {"method": "lora", "rank": 16, "alpha": 32, "targets": "all-linear"},
        "data": {
            "train": str(folder / "train.jsonl"),
            "held_out": str(folder / "held_out.jsonl"),
            "format": "prompt_completion",
            "max_tokens": MAX_TOKENS,
            "truncate": "right",
        },
        "batch": {"size": BATCH},
        "train": {"steps": arguments.steps, "learning_rate": LEARNING_RATE},
        "schedule": {"name": "constant", "warmup": 0.0},
        "evaluate": {"every": None, "answers": 0},
        "save": {"every": None},
    }
    (folder / "ours.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")


def _write_rows(path: Path, rows: Sequence[dict[str, str]]) -> None:
    """Raw text, so that no chat template stands between the two sides."""
    pairs = [{"prompt": f"Question: {row['question']}\nAnswer:", "completion": f" {row['answer']}"} for row in rows]
    path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs), encoding="utf-8")


def _our_command(folder: Path, arguments: argparse.Namespace, out: Path) -> Sequence[str]:
    command = [sys.executable, "-m", "workbench.cli", "run", str(folder / "ours.yaml"), *arguments.ours]
    return [*command, "--out", str(out)]


def _their_command(folder: Path, arguments: argparse.Namespace, out: Path) -> Sequence[str]:
    settings = {
        "per_device_train_batch_size": BATCH,
        "num_train_epochs": max(1, arguments.steps // _epoch()),
        "max_length": MAX_TOKENS,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "use_cpu": arguments.device == "cpu",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        **DEFAULT,
    }
    if arguments.peer == "best":
        settings |= FASTER_ON_CPU if arguments.device == "cpu" else FASTER
        settings |= IN_FLOAT32 if arguments.device == "cpu" and not measuring.has_bfloat16_units() else {}
    for key, _, value in (word.partition("=") for word in arguments.theirs):
        settings[key] = yaml.safe_load(value)
    out.mkdir()
    script, rows = str(HERE / "peer_trl.py"), str(folder / "train.jsonl")
    return [sys.executable, script, str(folder / "model"), rows, str(out), json.dumps(settings)]


def _measure(name: str, command: Callable[[Path], Sequence[str]], out: Path, device: str) -> Result:
    usage = measuring.run(command(out), out.with_suffix(".log"), device)
    steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    warm, last = steps[WARM_UP:], steps[-max(1, len(steps) // 4) :]
    seconds = steps[-1]["elapsed_s"] - steps[WARM_UP - 1]["elapsed_s"]
    supervised = sum(step["supervised_tokens"] for step in last)
    return Result(
        name=name,
        tokens_per_second=sum(step["tokens"] for step in warm) / seconds,
        wall_s=usage.wall_s,
        peak_bytes=usage.peak_bytes if device == "cpu" else max(step["peak_bytes"] for step in steps),
        loss=sum(step["loss"] * step["supervised_tokens"] for step in last) / supervised,
        tokens=sum(step["tokens"] for step in steps),
        supervised_tokens=sum(step["supervised_tokens"] for step in steps),
    )


def _require_same_work(results: Sequence[Result]) -> None:
    counts = {result.name: (result.tokens, result.supervised_tokens) for result in results}
    if len(set(counts.values())) > 1:
        sys.exit(f"not the same work, so no ratio (tokens, tokens with loss): {counts}")


def _ratios(results: Sequence[Result]) -> dict[str, tuple[float, float, float]]:
    """Ours through theirs: of the medians, then the lowest and the highest of the pairs."""
    pairs = list(zip(results[::2], results[1::2], strict=True))
    ratios = {}
    for field in ("tokens_per_second", "wall_s", "peak_bytes", "loss"):
        ours, theirs = ([getattr(pair[side], field) for pair in pairs] for side in (0, 1))
        single = [our / their for our, their in zip(ours, theirs, strict=True)]
        ratios[field] = (median(ours) / median(theirs), min(single), max(single))
    return ratios


_HEADER = f"{'':10} {'tokens/s':>10} {'wall s':>9} {'peak GB':>9} {'last loss':>10} {'tokens':>9} {'with loss':>10}"


def _line(result: Result) -> str:
    return (
        f"{result.name:10} {result.tokens_per_second:10,.0f} {result.wall_s:9.1f} {result.peak_bytes / 1e9:9.2f}"
        f" {result.loss:10.3f} {result.tokens:9,} {result.supervised_tokens:10,}"
    )


def _summary(ratios: dict[str, tuple[float, float, float]], results: Sequence[Result]) -> str:
    columns = [f"{ratios[field][0]:.2f}" for field in ("tokens_per_second", "wall_s", "peak_bytes", "loss")]
    speed, memory = ratios["tokens_per_second"], ratios["peak_bytes"]
    return (
        f"{'ratio':10} {columns[0]:>10} {columns[1]:>9} {columns[2]:>9} {columns[3]:>10}\n\n"
        f"workbench: {speed[0]:.2f} times TRL's tokens/s (pairs {speed[1]:.2f} to {speed[2]:.2f}), "
        f"{memory[0]:.2f} times its peak memory (pairs {memory[1]:.2f} to {memory[2]:.2f}); "
        f"medians of {len(results) // 2}."
    )


def _notes(arguments: argparse.Namespace) -> list[str]:
    tuned = "".join(f" {word}" for word in arguments.theirs)
    notes = [
        f"Tokens/s: without padding, after the first {WARM_UP} steps. TRL {version('trl')} {arguments.peer}{tuned}."
    ]
    if arguments.device == "cpu" and not measuring.has_bfloat16_units():
        notes.append(
            "This CPU has no bfloat16 units and emulates bfloat16 products, slower than float32 ones. The workbench "
            "stores the weights in bfloat16 and computes in float32 here; --ours model.compute=bfloat16 computes like "
            "TRL's bf16, and --peer best lets TRL use float32."
        )
    return notes


def _plain(value: Any) -> Any:
    return asdict(value) if isinstance(value, Result) else str(value)


if __name__ == "__main__":
    main()
