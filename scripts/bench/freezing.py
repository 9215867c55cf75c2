"""Train with half of the layers frozen: this workbench with and without its cache, and transformers' Trainer.

    python scripts/bench/freezing.py                                # 100 M parameters, LoRA and full, 2 rounds
    python scripts/bench/freezing.py --only full --layers 0.75 --pairs 3 --json freezing.json
    python scripts/bench/freezing.py --model FOLDER --rows 16 --steps 4 --pairs 1     # to try it with a small Llama

Five arms in turn, each run a process of its own, for LoRA of rank 16 on all linear layers and for full fine-tuning:
ours             everything trains
ours, frozen     freeze.policy=static freeze.cache=off: the frozen blocks are computed in every step, without a graph
ours, cached     freeze.cache=memory: they are computed in the first pass over the rows alone
Trainer          peer_causal.py: everything trains
Trainer, frozen  requires_grad=False on the same blocks and on what LoRA added to them

A random Llama, GSM8K as prompt and completion, 8 examples a step, AdamW. Seconds of a step are those of a whole pass
over the rows, in which all arms compute the same tokens, and of the passes after the first their median. Memory is the
most until the last step: resident, of the whole process; on a GPU what torch had allocated there.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import gsm8k
import measuring
from measuring import Ratio, Usage, markdown

OURS, FROZEN, CACHED, PEER, PEER_FROZEN = ARMS = ("ours", "ours, frozen", "ours, cached", "Trainer", "Trainer, frozen")
LORA = {"method": "lora", "rank": 16, "alpha": 32, "targets": "all-linear"}
Faster = Mapping[str, Mapping[str, Ratio]]
"""How many times faster each arm's step is than that of those that it is compared with."""
TARGETS = {"lora": {FROZEN: 1.25, CACHED: 1.85}, "full": {FROZEN: 1.4, CACHED: 1.9}}
"""How many times faster than unfrozen, with half of the layers frozen."""


class Setting(NamedTuple):
    """Settings that all runs share."""

    folder: Path
    model: str
    frozen: int
    """Blocks that do not train."""
    blocks: int


@dataclass(frozen=True)
class Result:
    """One run."""

    method: str
    arm: str
    step_s: float
    """Seconds of a warm step."""
    step_cpu_s: float
    """The same of processor time; on a busy machine it says more than the wall."""
    first_s: float
    """Seconds of a step of the first pass, in which a cache fills."""
    wall_s: float
    """Seconds of the whole process."""
    cpu_s: float
    """Processor time of the same."""
    peak_bytes: int
    """Most memory until the last step."""
    optimizer_bytes: int
    """Bytes of the optimizer's state after the last step."""
    trainable: int
    """Parameters."""
    tokens: int
    """Trained on, without padding."""
    loss: float
    """Mean of the last pass, in nats per supervised token; each step counts alike."""


def main() -> None:
    arguments = _arguments()
    print(machine := measuring.machine(arguments.device, ("torch", "transformers", "peft")))
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="bench-freezing-") as name:
        setting = _prepare(Path(name), arguments)
        for _ in range(arguments.pairs):
            for method in arguments.only or TARGETS:
                for arm in ARMS:
                    results.append(_run(method, arm, setting, arguments))
                    print(_line(results[-1]), flush=True)
                    _require_same_work(results)
    faster = {
        method: {field: _faster(results, method, field) for field in ("step_s", "step_cpu_s")}
        for method in arguments.only or TARGETS
    }
    for method, ratios in faster.items():
        print("", _table(results, method, ratios, setting), sep="\n")
    print(*_notes(arguments), sep="\n")
    measuring.write_report(arguments, machine=machine, frozen=setting.frozen, runs=results, faster=faster)


def _arguments() -> argparse.Namespace:
    parser = measuring.parser(__doc__)
    parser.add_argument("--only", nargs="*", choices=tuple(TARGETS), help="methods; both where none is named")
    parser.add_argument("--model", default="100m", help="shape of a random Llama (42m, 100m, 1b, 8b), or a folder")
    parser.add_argument("--layers", type=float, default=0.5, help="blocks that are frozen: a share, or their number")
    parser.add_argument("--rows", type=int, default=32, help="that a pass sees, of 256 from GSM8K")
    parser.add_argument("--steps", type=int, default=16, help="optimizer steps, of as many passes as that takes")
    parser.add_argument("--micro-batch", type=int, help="rows the Trainer computes at once: 1 on a CPU, all on cuda")
    parser.add_argument("--ours", nargs="*", default=[], metavar="KEY=VALUE", help="overrides of `workbench run`")
    arguments = parser.parse_args()
    known = gsm8k.epoch() * gsm8k.BATCH
    if arguments.rows % gsm8k.BATCH or not 2 * gsm8k.BATCH <= arguments.rows <= known:
        parser.error(f"--rows {arguments.rows}: write a multiple of {gsm8k.BATCH}, from {2 * gsm8k.BATCH} to {known}.")
    if arguments.steps % _per_pass(arguments) or arguments.steps < 2 * _per_pass(arguments):
        parser.error(f"--steps {arguments.steps}: write a multiple of {_per_pass(arguments)}, two passes or more.")
    return arguments


def _per_pass(arguments: argparse.Namespace) -> int:
    """Steps of a pass over the rows."""
    return int(arguments.rows // gsm8k.BATCH)


def _prepare(folder: Path, arguments: argparse.Namespace) -> Setting:
    """Write model, rows, and a recipe for each of our arms."""
    model: str = arguments.model
    if not Path(model).is_dir():
        model = str(folder / "model")
        gsm8k.write_model(arguments.model, folder / "model", arguments.device)
    gsm8k.write_rows(folder, _per_pass(arguments))
    blocks = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))["num_hidden_layers"]
    frozen = max(1, round(arguments.layers * blocks)) if arguments.layers < 1 else int(arguments.layers)
    return Setting(folder, model, frozen, blocks)


def _run(method: str, arm: str, setting: Setting, arguments: argparse.Namespace) -> Result:
    out = setting.folder / "out"
    result = (_ours if arm in (OURS, FROZEN, CACHED) else _theirs)(method, arm, setting, out, arguments)
    shutil.rmtree(out, ignore_errors=True)  # several times the model
    return result


def _ours(method: str, arm: str, setting: Setting, out: Path, arguments: argparse.Namespace) -> Result:
    units = _has_units(arguments)
    sections: dict[str, Any] = {
        "model": {"id": setting.model, "weights": "bfloat16" if units else "float32"},
        "adapter": LORA if method == "lora" else {"method": "full"},
    }
    if arm != OURS:
        cache = "off" if arm == FROZEN else "memory"
        sections["freeze"] = {"policy": "static", "layers": setting.frozen, "cache": cache}
    recipe = setting.folder / "ours.yaml"
    gsm8k.write_recipe(recipe, arguments.steps, sections)
    command = [sys.executable, str(gsm8k.HERE / "our_steps.py"), str(recipe), str(out), *arguments.ours]
    log = out.with_suffix(".log")
    usage = measuring.run(command, log, arguments.device)
    steps = measuring.steps(out)
    said = {
        **measuring.last_line(log),
        "elapsed_s": [step["elapsed_s"] for step in steps],
        "losses": [step["loss"] for step in steps],
        "tokens": sum(step["tokens"] for step in steps),
        "peak_bytes": steps[-1]["peak_bytes"],
        "optimizer_bytes": next((out / "checkpoints").glob("*/optimizer.safetensors")).stat().st_size,
        "trainable": json.loads((out / "manifest.json").read_text(encoding="utf-8"))["model"]["trainable"],
    }
    return _result(method, arm, said, usage, arguments)


def _theirs(method: str, arm: str, setting: Setting, out: Path, arguments: argparse.Namespace) -> Result:
    units = _has_units(arguments)
    rows = arguments.micro_batch or (1 if arguments.device == "cpu" else gsm8k.BATCH)
    settings = {
        "method": method,
        "frozen": setting.frozen if arm == PEER_FROZEN else 0,
        "steps": arguments.steps,
        "batch": gsm8k.BATCH,
        "micro-batch": rows,
        "lr": gsm8k.LEARNING_RATE,
        "max-tokens": gsm8k.MAX_TOKENS,
        # Mixed precision of what trains: float32 weights under autocast.
        "weights": "bfloat16" if units and method == "lora" else "float32",
        "compute": "bfloat16" if units else "float32",
    }
    command = [sys.executable, str(gsm8k.HERE / "peer_causal.py"), setting.model, str(setting.folder / "train.jsonl")]
    command += [word for key, value in settings.items() for word in (f"--{key}", str(value))]
    log = out.with_suffix(".log")
    usage = measuring.run(command, log, arguments.device)
    return _result(method, arm, measuring.last_line(log), usage, arguments)


def _has_units(arguments: argparse.Namespace) -> bool:
    return arguments.device == "cuda" or measuring.has_bfloat16_units()


def _result(method: str, arm: str, result: dict[str, Any], usage: Usage, arguments: argparse.Namespace) -> Result:
    per_pass, losses = _per_pass(arguments), result["losses"]
    wall, cpu = (_steps(result[key], per_pass) for key in ("elapsed_s", "processor_s"))
    return Result(
        method=method,
        arm=arm,
        step_s=median(wall[1:]),
        step_cpu_s=median(cpu[1:]),
        first_s=wall[0],
        wall_s=usage.wall_s,
        cpu_s=usage.cpu_s,
        peak_bytes=result["peak_bytes"],
        optimizer_bytes=result["optimizer_bytes"],
        trainable=result["trainable"],
        tokens=result["tokens"],
        loss=sum(losses[-per_pass:]) / per_pass,
    )


def _steps(ends: Sequence[float], per_pass: int) -> list[float]:
    """Seconds of a step, of each pass; of the first pass without its first step, in which a process warms up."""
    marks = [ends[0], *ends[per_pass - 1 :: per_pass]]
    counts = [per_pass - 1, *[per_pass] * (len(marks) - 2)]
    return [(end - start) / count for (start, end), count in zip(pairwise(marks), counts, strict=True)]


def _require_same_work(results: Sequence[Result]) -> None:
    counts = {each.arm: each.tokens for each in results}
    if len(set(counts.values())) > 1:
        sys.exit(f"not the same work, so no ratio (tokens): {counts}")


def _faster(results: Sequence[Result], method: str, field: str) -> Faster:
    own = [each for each in results if each.method == method]
    seconds = {arm: [getattr(each, field) for each in own if each.arm == arm] for arm in ARMS}
    return {
        arm: {other: measuring.ratio(seconds[other], seconds[arm]) for other in (OURS, PEER, PEER_FROZEN)}
        for arm in ARMS
    }


def _line(result: Result) -> str:
    return (
        f"{result.method:5} {result.arm:16} {result.step_s:7.3f} s a step ({result.step_cpu_s:7.3f} of processor, "
        f"{result.first_s:7.3f} in the first pass); whole process {result.wall_s:6.1f} s, {result.cpu_s:6.1f} of "
        f"processor, {result.peak_bytes / 1e9:5.2f} GB"
    )


def _table(results: Sequence[Result], method: str, faster: Mapping[str, Faster], setting: Setting) -> str:
    own = {arm: [each for each in results if (each.method, each.arm) == (method, arm)] for arm in ARMS}
    wall, cpu = faster["step_s"], faster["step_cpu_s"]
    head = [f"{method}, {setting.frozen} of {setting.blocks} blocks frozen", "s a step"]
    head += [*(f"times faster than {other}" for other in (OURS, PEER, PEER_FROZEN)), "target"]
    head += ["processor s a step", f"times less than {OURS}", "trainable M", "optimizer MB", "peak GB", "loss"]
    rows: list[list[object]] = [list(head)]
    for arm, runs in own.items():
        unfrozen = own[PEER if arm in (PEER, PEER_FROZEN) else OURS][0]
        cells: list[object] = [arm, f"{median(run.step_s for run in runs):.3f}", *map(_rounds, wall[arm].values())]
        cells.append(TARGETS[method].get(arm, ""))
        cells += [f"{median(run.step_cpu_s for run in runs):.3f}", _rounds(cpu[arm][OURS])]
        cells.append(f"{runs[0].trainable / 1e6:.2f}{_fall(runs[0].trainable, unfrozen.trainable)}")
        cells.append(f"{runs[0].optimizer_bytes / 1e6:.1f}{_fall(runs[0].optimizer_bytes, unfrozen.optimizer_bytes)}")
        cells += [f"{median(run.peak_bytes for run in runs) / 1e9:.2f}", f"{runs[-1].loss:.4f}"]
        rows.append(cells)
    return markdown(rows)


def _rounds(ratio: Ratio) -> str:
    return f"{ratio.of_medians:.2f} ({ratio.low:.2f}-{ratio.high:.2f})"


def _fall(size: float, unfrozen: float) -> str:
    return "" if size == unfrozen else f" ({size / unfrozen - 1:+.1%})"


def _notes(arguments: argparse.Namespace) -> list[str]:
    found = [
        "",
        f"Medians of {arguments.pairs}, in brackets the single rounds; {arguments.rows} rows a pass, "
        f"{arguments.steps // _per_pass(arguments) - 1} warm passes. Targets are for half of the blocks, against ours.",
    ]
    if _has_units(arguments):
        found.append(
            "Products in bfloat16 on both sides. Full fine-tuning: ours holds bfloat16 weights with float32 masters, "
            "the Trainer float32 weights under autocast."
        )
    return found


if __name__ == "__main__":
    main()
