"""Predictions of `workbench plan` against runs on this accelerator, both by their commands: Llamas of 1 and 8 B.

    python scripts/bench/gpu_plan.py [CASE ...] [--out FOLDER] [--rehearse]

Models have random weights (random_llama.py), rows are those of sft/quickstart. A case is planned in one process, and
trained in the next; bytes are the most that torch's allocator gave in a step, seconds the median of steps after the
first two. Results are written as they come, to gpu_plan.jsonl and gpu_plan.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).parent
STEPS, WARM_UP = 12, 2
QUIET = ["evaluate={every: null, answers: 0, samples: 0}", "save.every=null"]
SHORT = [f"train.steps={STEPS}", "train.epochs=null", *QUIET]
CASES: dict[str, tuple[str, list[str]]] = {
    "8B, lora, bfloat16": ("8b", ["model.weights=bfloat16"]),
    "8B, lora, nf4": ("8b", ["model.weights=nf4"]),
    "8B, lora, nf4, checkpointing": ("8b", ["model.weights=nf4", "train.checkpointing=true"]),
    "1B, lora, bfloat16": ("1b", ["model.weights=bfloat16"]),
    "1B, lora, int8": ("1b", ["model.weights=int8"]),
    "1B, full": ("1b", ["adapter={method: full}"]),
    "starter, lora": ("starter", []),
}
HEADER = ["case", "planned GB", "held GB", "ratio", "planned s a step", "measured s", "ratio", "planned in s"]


def main() -> None:
    arguments = _arguments()
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    lines = [f"| {' | '.join(HEADER)} |", "|---" * len(HEADER) + "|"]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        for name in arguments.cases or CASES:
            shape, words = CASES[name]
            model = "starter" if arguments.rehearse or shape == "starter" else _model(shape, Path(folder))
            figures = measured(model, [*words, *SHORT], Path(folder) / name.replace(", ", "-"))
            with (out / "gpu_plan.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps({"case": name, **figures}) + "\n")
            lines.append(_row(name, figures))
            (out / "gpu_plan.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
            print(lines[-1], flush=True)


def measured(model: str, words: list[str], run: Path) -> dict[str, Any]:
    """Bytes and seconds of a step, as planned and as they are; of a case that ends in an error, its last words."""
    words = [f"model.id={model}", *words]
    began = time.monotonic()
    planned = _workbench("plan", *words, "--json")
    took = time.monotonic() - began
    if planned.returncode:
        return {"error": planned.stderr[-2000:]}
    plan = json.loads(planned.stdout)
    trained = _workbench("run", *words, "--out", str(run))
    if trained.returncode:
        return {"error": trained.stderr[-2000:]}
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    seconds = [after["elapsed_s"] - before["elapsed_s"] for before, after in pairwise(records)][WARM_UP - 1 :]
    return {
        "planned_bytes": plan["bytes"]["peak"] + plan["process_bytes"],
        "bytes": max(record["peak_bytes"] for record in records),
        "planned_seconds": plan["seconds_per_step"],
        "interval": plan["seconds_per_step_interval"],
        "seconds": median(seconds),
        "took": took,
        "batch": plan["batch"],
        "checkpointing": plan["checkpointing"],
    }


def _workbench(verb: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "workbench.cli", verb, "sft/quickstart", *words]
    return subprocess.run(command, capture_output=True, text=True)


def _model(shape: str, folder: Path) -> str:
    """The folder of a model, which is made where it is not there yet."""
    if not (folder / shape).exists():
        command = [sys.executable, str(HERE / "random_llama.py"), shape, str(folder / shape), "cuda"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return str(folder / shape)


def _row(name: str, figures: dict[str, Any]) -> str:
    if "error" in figures:
        return f"| {name} | {figures['error'].strip().splitlines()[-1]} |" + " |" * (len(HEADER) - 2)
    planned, held = figures["planned_bytes"], figures["bytes"]
    expected, taken = figures["planned_seconds"], figures["seconds"]
    cells = [f"{planned / 1e9:.3f}", f"{held / 1e9:.3f}", f"{planned / held:.3f}"]
    cells += [f"{expected:.3f}", f"{taken:.3f}", f"{expected / taken:.2f}", f"{figures['took']:.1f}"]
    return f"| {' | '.join([name, *cells])} |"


def _arguments() -> argparse.Namespace:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("cases", nargs="*", metavar="CASE", choices=[*CASES, []], default=[])
    found.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "gpu-results")))
    found.add_argument("--rehearse", action="store_true", help="the starter model in place of all")
    return found.parse_args()


if __name__ == "__main__":
    main()
