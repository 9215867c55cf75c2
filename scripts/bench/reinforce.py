"""Learn to add from rewards alone, with this workbench and with TRL's GRPOTrainer: reward over time.

    python scripts/bench/reinforce.py
    python scripts/bench/reinforce.py --seeds 0 --steps 4          # whether it runs
    python scripts/bench/reinforce.py --seeds 0 --minutes 12       # as far as both come

The sums of `reinforce/quickstart` by the starter, all of its weights, from the same warm-up (recipe sft, some steps):
102 prompts x 32 answers of at most 4 tokens, two steps on each, GRPO's advantages and normalisation, AdamW with the
same rate and clipping. Both compute in bfloat16 with float32 values to train, or in float32 where the processor has no
units for it. Each run is a process of its own with one
thread, ours and theirs at the same time. The random numbers differ, and so do the orders of the prompts: three seeds
are three curves, not one. Seconds are those of training by the clock, and of its process; a busy machine changes the
former.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from signal import SIGTERM
from threading import Timer
from typing import Any

import measuring

from workbench.data import starter

HERE = Path(__file__).parent
PROMPTS, ANSWERS, TOKENS, UPDATES, RATE, TEMPERATURE = 102, 32, 4, 2, 4.0e-4, 1.2
PARTS = 8
"""Parts of a step of TRL's that are computed one after another: all at once would take several GB."""
LEVELS = (0.3, 0.5, 0.7, 0.8)
"""Mean rewards of which the table says when they were first reached, as a mean over WINDOW steps."""
WINDOW = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--minutes", type=float, default=60.0, help="after which both sides are stopped")
    parser.add_argument(
        "--json", type=Path, help="write every step, and their time of a step through ours, to this file"
    )
    arguments = parser.parse_args()
    print(machine := measuring.machine("cpu", ("torch", "transformers", "trl")))
    curves: dict[str, list[list[dict[str, float]]]] = {"workbench": [], "TRL": []}
    with tempfile.TemporaryDirectory(prefix="bench-reinforce-") as name:
        for seed in arguments.seeds:
            folder = Path(name) / str(seed)
            folder.mkdir()
            for side, curve in _both(folder, seed, arguments.steps, 60 * arguments.minutes).items():
                _print(seed, side, curve)
                curves[side].append(curve)
    if arguments.json:
        ours, theirs = ([_step_s(curve) for curve in curves[side]] for side in curves)
        measuring.write_report(arguments, machine=machine, curves=curves, ratio=measuring.ratio(theirs, ours))


def _step_s(curve: Sequence[dict[str, float]]) -> float:
    """Processor time of a step, between the first steps of rounds: answers are drawn once, and used UPDATES times."""
    rounds = [step for step in curve if (step["step"] - 1) % UPDATES == 0]
    first, last = rounds[0], rounds[-1]
    return (last["processor_s"] - first["processor_s"]) / (last["step"] - first["step"])


def _both(folder: Path, seed: int, steps: int, seconds: float) -> dict[str, list[dict[str, float]]]:
    """Reward and seconds of each step of both sides, which run at the same time from one warm-up."""
    warm_up = folder / "ours" / "start" / "adapter"
    with ThreadPoolExecutor(2) as pool:
        ours = pool.submit(_ours, folder, seed, steps, seconds)
        while not warm_up.exists() and not ours.done():
            time.sleep(0.5)
        theirs = pool.submit(_theirs, folder, seed, steps, seconds)
        return {"workbench": ours.result(), "TRL": theirs.result()}


def _ours(folder: Path, seed: int, steps: int, seconds: float) -> list[dict[str, float]]:
    command = [sys.executable, str(HERE / "our_steps.py"), "reinforce/quickstart", str(folder / "ours"), f"seed={seed}"]
    _run([*command, f"train.steps={steps}", "evaluate.every=null", "save.every=null"], folder / "ours.log", seconds)
    lines = measuring.steps(folder / "ours")
    ends = json.loads((folder / "ours" / measuring.PROCESSOR_TIMES).read_text(encoding="utf-8"))[-len(lines) :]
    return [
        {"step": line["step"], "reward": line["reward[mean]"], "elapsed_s": line["elapsed_s"], "processor_s": end}
        for line, end in zip(lines, ends, strict=True)
    ]


def _theirs(folder: Path, seed: int, steps: int, seconds: float) -> list[dict[str, float]]:
    rows = folder / "train.jsonl"
    rows.write_text((starter.FOLDER / "arithmetic_train.jsonl").read_text())
    settings: dict[str, Any] = {
        "per_device_train_batch_size": PROMPTS * ANSWERS // PARTS,
        "gradient_accumulation_steps": PARTS,
        "num_generations": ANSWERS,
        "num_iterations": UPDATES,
        "max_completion_length": TOKENS,
        "max_steps": steps,
        "learning_rate": RATE,
        "lr_scheduler_type": "linear",
        "warmup_steps": 0,
        "loss_type": "grpo",
        "scale_rewards": "group",
        "beta": 0.0,
        "epsilon": 0.2,
        "epsilon_high": 0.28,
        "temperature": TEMPERATURE,
        "seed": seed,
        "bf16": measuring.has_bfloat16_units(),  # what ours chooses by itself
        "gradient_checkpointing": False,
        "use_cpu": True,
        "disable_tqdm": True,
    }
    script = [sys.executable, str(HERE / "peer_grpo.py"), str(folder / "ours" / "start" / "adapter")]
    _run([*script, str(rows), str(folder / "theirs"), json.dumps(settings)], folder / "theirs.log", seconds)
    return measuring.steps(folder / "theirs")


def _run(command: Sequence[str], log: Path, seconds: float) -> None:
    """Run a command with one thread for so long at most."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment)
        limit = Timer(seconds, process.terminate)
        limit.start()
        process.wait()
        limit.cancel()
    if process.returncode not in (0, -SIGTERM):
        sys.exit(f"{' '.join(command)}\n{log.read_text()[-3000:]}")


def _print(seed: int, side: str, curve: list[dict[str, float]]) -> None:
    """The first and the last rewards, and when levels were reached."""
    rewards = [step["reward"] for step in curve]
    smooth = [sum(rewards[max(0, at - WINDOW + 1) : at + 1]) / min(WINDOW, at + 1) for at in range(len(rewards))]
    reached = []
    for level in LEVELS:
        at = next((number for number, value in enumerate(smooth) if value >= level), None)
        reached.append("-" if at is None else f"{curve[at]['elapsed_s']:.0f}/{curve[at]['processor_s']:.0f}")
    every = max(1, len(curve) // 6)
    course = " ".join(f"{value:.2f}" for value in smooth[::every])
    total = f"{curve[-1]['elapsed_s']:.0f} s, {curve[-1]['processor_s']:.0f} s processor"
    print(f"seed {seed} {side:9} {rewards[0]:.3f} -> {smooth[-1]:.3f} in {total}; reward by sixths: {course}")
    levels = ", ".join(f"{level} at {each} s" for level, each in zip(LEVELS, reached, strict=True))
    print(f"                 first reached (clock/processor): {levels}", flush=True)


if __name__ == "__main__":
    main()
