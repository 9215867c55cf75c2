"""Learn to call a calculator from rewards alone (`reinforce/tools`): success over steps and processor time.

    python scripts/bench/calculator.py OUT
    python scripts/bench/calculator.py OUT --seeds 0 --words train.steps=4      # whether it runs

Each seed is a process of its own with one thread, in OUT/SEED, which is kept; a run that is there is only read.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import measuring

SHOWN = 6
"""Steps of a curve that are printed."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--words", nargs="*", default=[])
    arguments = parser.parse_args()
    print(measuring.machine("cpu", ("torch", "transformers")))
    for seed in arguments.seeds:
        run = arguments.out / str(seed)
        if not (run / "scores.json").exists():
            _train(run, seed, arguments.words)
        scores = json.loads((run / "scores.json").read_text())
        lines = measuring.steps(run)
        shown = sorted({round(n * (len(lines) - 1) / (SHOWN - 1)) for n in range(SHOWN)})
        curve = ", ".join(f"{lines[n]['step']}: {lines[n]['episodes[success]']:.2f}" for n in shown)
        before, after = scores["before"], scores["after"]
        bounds = f"{after['reward_low']:.2f} to {after['reward_high']:.2f}"
        time = f"{lines[-1]['elapsed_s']:.0f} s of training by the clock"
        used = run / "processor_s.txt"
        time += f", {float(used.read_text()):.0f} s of processor in all" if used.exists() else ""
        print(f"seed {seed}: held out {before['success']:.2f} to {after['success']:.2f} (95 %: {bounds}); {time}")
        print(f"  success of the episodes of step {curve}")


def _train(run: Path, seed: int, words: list[str]) -> None:
    run.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "workbench.cli.verbs", "run", "reinforce/tools", f"seed={seed}", *words]
    with (run.parent / f"{seed}.log").open("w") as log:
        own = subprocess.Popen(
            [*command, "--out", str(run)],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        _, status, usage = os.wait4(own.pid, 0)
    if status:
        raise SystemExit(f"{run} failed: {(run.parent / f'{seed}.log').read_text()[-2000:]}")
    (run / "processor_s.txt").write_text(f"{usage.ru_utime + usage.ru_stime:.1f}\n")


if __name__ == "__main__":
    main()
