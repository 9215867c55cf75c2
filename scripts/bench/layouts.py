"""Loss curves of every layout of several devices beside that of one process: their largest distance.

    python scripts/bench/layouts.py [--steps 12] [--only zero,fsdp2] [--out FOLDER]

sft/quickstart in float32, with LoRA, with all weights, and taught by its backbone, by `workbench run --devices N` as a
person types it; devices are cores here, and where there are fewer, torchrun starts the processes. A curve is exact
where its largest relative distance from that of one process is rounding alone; compressed ones are not. What each
process holds is compared with its plan in `tests/workbench/training/distributed/test_held_bytes.py`. Finished runs are
not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

import measuring

METHODS = {
    "lora": ["train.learning_rate=2e-3"],
    "full": ["adapter={method: full}", "train.learning_rate=1e-4"],
    "student": ["recipe=distill", "distill.teacher.id=backbone", "train.learning_rate=2e-3"],
}
FEW = {"student": ("data",)}
"""Layouts of a method that does not go with all."""
WARM_UP = 4
"""Steps in which PowerSGD sends gradients as they are."""
LAYOUTS: dict[str, tuple[int, str]] = {
    "data": (2, "{zero: 0}"),
    "zero 1": (2, "{zero: 1}"),
    "zero 2": (2, "{zero: 2}"),
    "zero 3": (2, "{zero: 3}"),
    "zero 2, optimizer on the host": (2, "{zero: 2, offload_optimizer: cpu}"),
    "zero 3, all on the host": (2, "{zero: 3, offload_optimizer: cpu, offload_parameters: cpu}"),
    "fsdp2, kept whole": (2, "{engine: fsdp2, zero: 2}"),
    "fsdp2": (2, "{engine: fsdp2, zero: 3}"),
    "fsdp2, two replicas of two": (4, "{engine: fsdp2, zero: 3, replicas: 2}"),
    "sequence of two": (2, "{sequence: 2}"),
    "sequence of two, zero 3": (4, "{sequence: 2, zero: 3}"),
    "sequence of two, fsdp2": (4, "{sequence: 2, engine: fsdp2, zero: 3}"),
    "compressed, float16": (2, "{compression: {gradients: float16}}"),
    "compressed, powersgd": (2, f"{{compression: {{gradients: powersgd, warm_up: {WARM_UP}}}}}"),
    "compressed, powersgd of rank 4": (2, f"{{compression: {{gradients: powersgd, rank: 4, warm_up: {WARM_UP}}}}}"),
    "compressed, fsdp2, bfloat16": (2, "{engine: fsdp2, zero: 3, compression: {gradients: bfloat16}}"),
    "compressed, zero 2, bfloat16": (2, "{zero: 2, compression: {gradients: bfloat16}}"),
    "tensor of two": (2, "{tensor: 2}"),
    "tensor of two, two groups": (4, "{tensor: 2}"),
    "pipeline of two": (2, "{pipeline: 2}"),
    "pipeline of two, interleaved": (2, "{pipeline: 2, schedule: interleaved}"),
    "pipeline of two, zero bubble": (2, "{pipeline: 2, schedule: zero_bubble}"),
    "pipeline, two of two": (4, "{pipeline: 2}"),
}
"""Devices, and the section `distributed`."""
SHARED = ["model.weights=float32", "model.compute=float32", "train.epochs=null", "batch.size=8", "data.limit=100"]
SHARED += ["data.held_out=0.1", "evaluate.every=null", "evaluate.answers=0", "save.every=null"]
SHARED += ["batch.tokens_per_device=512"]


def main() -> None:
    """Print a table of all layouts and methods."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--only", default="", help="layouts whose names begin with one of these words")
    parser.add_argument("--out", type=Path, default=Path("runs/layouts"))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    print(measuring.machine("cpu", ["torch", "deepspeed"]))
    rows: list[list[object]] = [["layout", "devices", *METHODS]]
    alone = {method: _run(method, 1, None, arguments) for method in METHODS}
    for name, (devices, _) in LAYOUTS.items():
        if name.startswith(tuple(arguments.only.split(","))):
            able = [method for method in METHODS if name in FEW.get(method, LAYOUTS)]
            runs = {method: _run(method, devices, name, arguments) for method in able}
            told = {method: _distance(run, alone[method]) for method, run in runs.items()}
            rows.append([name, devices, *(told.get(method, "") for method in METHODS)])
            print(measuring.markdown(rows), flush=True)


def _distance(run: Path, alone: Path) -> str:
    """The largest relative distance of two loss curves."""
    pairs = zip(_losses(run), _losses(alone), strict=True)
    return f"{max(abs(one / other - 1) for one, other in pairs):.0e}"


def _losses(run: Path) -> list[float]:
    return [line["loss"] for line in measuring.steps(run)]


def _run(method: str, devices: int, layout: str | None, arguments: argparse.Namespace) -> Path:
    """The finished run of a method in a layout; None: of one process."""
    out = Path(arguments.out / f"{method} {layout or 'alone'}".replace(", ", "-").replace(" ", "-"))
    done = out.with_name(f"{out.name}.usage.json")
    if not done.exists():
        words = [*SHARED, *METHODS[method], f"train.steps={arguments.steps}"]
        words += [f"distributed={LAYOUTS[layout][1]}"] if layout else []
        fits = devices <= len(os.sched_getaffinity(0))
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={devices}"]
        command = [sys.executable, *([] if fits else torchrun), "-m", "workbench.cli", "run", "sft/quickstart", *words]
        command += ["--devices", str(devices)] if fits and layout else []
        usage = measuring.run([*command, "--out", str(out)], out.with_name(f"{out.name}.log"), "cpu")
        done.write_text(json.dumps(usage._asdict()), encoding="utf-8")
    return out


if __name__ == "__main__":
    main()
