"""Many users' adapters in one fleet, against a run for each, and against TRL's SFTTrainer for each.

    python scripts/bench/fleet.py sides [--users 4] [--model starter] [--pairs 1]
    python scripts/bench/fleet.py change [--users 4] [--model starter]     # of one member that leaves and joins

Every user has questions of GSM8K of its own and a rank of its own; all sides compute the same rows as often. A side is
all of its processes one after another, measured from outside: wall clock and processor time are their sums, memory is
the most that one held, and their sum if all were to run at once. `change` works in this process.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import measuring

from workbench.data import starter

ROWS = Path(__file__).with_name("gsm8k_256.jsonl")
RANKS = (8, 32, 4, 16, 64)
Command = Callable[[Path], Sequence[str]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("sides", "change"))
    parser.add_argument("--users", type=int, default=4)
    parser.add_argument("--model", default="starter", help="starter, or a folder of a causal language model")
    parser.add_argument("--rows", type=int, default=48, help="training rows of each user")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--pairs", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("runs/bench-fleet"))
    arguments = parser.parse_args()
    arguments.out = arguments.out.resolve()
    arguments.out.mkdir(parents=True, exist_ok=True)
    print(measuring.machine("cpu", ["torch", "trl"]), flush=True)
    {"sides": _sides, "change": _change}[arguments.part](arguments)


def _sides(arguments: argparse.Namespace) -> None:
    sides: dict[str, list[Command]] = {
        "one fleet": [lambda out: _workbench(_fleet(arguments, out.with_suffix(".yaml")), out)],
        "a run each": [_run(arguments, user) for user in range(arguments.users)],
        "TRL each": [_trl(arguments, user) for user in range(arguments.users)],
    }
    used: dict[str, list[list[measuring.Usage]]] = {name: [] for name in sides}
    for pair in range(arguments.pairs):
        for name, commands in sides.items():
            folder = arguments.out / f"{name.replace(' ', '-')}-{pair}"
            folder.mkdir(parents=True, exist_ok=True)
            runs = [folder / str(number) for number in range(len(commands))]
            used[name].append(
                [
                    measuring.run(command(run), run.with_suffix(".log"), "cpu")
                    for command, run in zip(commands, runs, strict=True)
                ]
            )
        print(_table(used), flush=True)


def _table(used: dict[str, list[list[measuring.Usage]]]) -> str:
    lines: list[list[object]] = [["", "wall, s", "processor, s", "ratio", "most memory", "memory at once", "ratio"]]
    first = used["one fleet"]
    for name, rounds in used.items():
        if not rounds:
            continue
        cpu, ours = (sum(run.cpu_s for runs in each for run in runs) for each in (rounds, first[: len(rounds)]))
        wall = sum(run.wall_s for runs in rounds for run in runs)
        peak, own = (max(run.peak_bytes for runs in each for run in runs) for each in (rounds, first))
        together = max(sum(run.peak_bytes for run in runs) for runs in rounds)
        count = len(rounds)
        row = [name, f"{wall / count:.0f}", f"{cpu / count:.0f}", f"{cpu / ours:.2f}"]
        lines.append([*row, f"{peak / 1e9:.2f} GB", f"{together / 1e9:.2f} GB", f"{together / own:.2f}"])
    return measuring.markdown(lines)


def _change(arguments: argparse.Namespace) -> None:
    from workbench.recipes.load import load
    from workbench.recipes.over import fleet, fleet_training, member_results
    from workbench.recipes.over.fleet_board import FleetBoard
    from workbench.runs import run_directory
    from workbench.training.callbacks import Silent

    config = load(str(_fleet(arguments, arguments.out / "change.yaml", at_once=arguments.users - 1)))
    run = run_directory.start(arguments.out / f"change-{time.time_ns()}", config, resume=False)
    trials = fleet_training.trials(config)
    board = FleetBoard.of(run, trials, arguments.users - 1)
    members = {
        trial.name: fleet.read(trial, member_results.opened(board.run_of(trial), trial), Silent()) for trial in trials
    }
    training = fleet_training.FleetTraining(config, board, members, Silent())
    training.trainer.prepare()
    began, wall = time.process_time(), time.perf_counter()
    training.change([next(iter(board.bank))])
    print(f"a change of membership: {time.process_time() - began:.2f} s of processor time", end=", ")
    print(f"{time.perf_counter() - wall:.2f} s by the clock, with {len(board.bank)} members")


def _fleet(arguments: argparse.Namespace, path: Path, *, at_once: int | str = "auto") -> Path:
    members = {f"user{user}": _settings(arguments, user) for user in range(arguments.users)}
    values = {**_shared(arguments), "recipe": "fleet", "fleet": {"at_once": at_once, "members": members}}
    path.write_text(json.dumps(values), encoding="utf-8")
    return path


def _run(arguments: argparse.Namespace, user: int) -> Command:
    def command(out: Path) -> Sequence[str]:
        path = out.with_suffix(".yaml")
        words = [f"{key}={json.dumps(value)}" for key, value in _settings(arguments, user).items()]
        values = {**_shared(arguments), "recipe": "sft", "data": {"train": _settings(arguments, user)["data.train"]}}
        values["data"] |= _shared(arguments)["data"]
        path.write_text(json.dumps(values), encoding="utf-8")
        return _workbench(path, out, *words)

    return command


def _trl(arguments: argparse.Namespace, user: int) -> Command:
    model = starter.FOLDER if arguments.model == "starter" else arguments.model
    settings = {
        "per_device_train_batch_size": arguments.batch,
        "max_steps": arguments.steps,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "linear",
        "max_length": 256,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "seed": user,
        "rank": RANKS[user % len(RANKS)],
    }
    peer = Path(__file__).with_name("peer_trl.py")

    def command(out: Path) -> Sequence[str]:
        out.mkdir(parents=True, exist_ok=True)
        return [sys.executable, str(peer), str(model), str(_rows(arguments, user)), str(out), json.dumps(settings)]

    return command


def _workbench(recipe: Path, out: Path, *words: str) -> list[str]:
    return [sys.executable, "-m", "workbench.cli", "run", str(recipe), *words, "--out", str(out)]


def _shared(arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        "model": {"id": arguments.model, "weights": "float32", "compute": "float32"},
        "adapter": {"method": "lora", "alpha": 32, "targets": "all-linear"},
        "data": {"max_tokens": 256, "held_out": 0.1},
        "batch": {"size": arguments.batch},
        "train": {"steps": arguments.steps, "learning_rate": 1e-3},
        "schedule": {"name": "linear"},
        "evaluate": {"every": None, "answers": 0, "dynamics": False},
        "save": {"every": None},
    }


def _settings(arguments: argparse.Namespace, user: int) -> dict[str, Any]:
    return {"data.train": str(_rows(arguments, user)), "adapter.rank": RANKS[user % len(RANKS)], "seed": user}


def _rows(arguments: argparse.Namespace, user: int) -> Path:
    """Questions of one user."""
    lines = ROWS.read_text(encoding="utf-8").splitlines()
    own = [json.loads(line) for line in lines[user * arguments.rows : (user + 1) * arguments.rows]]
    rows = [{"prompt": row["question"], "completion": row["answer"]} for row in own]
    return measuring.write_rows(rows, arguments.out / f"user{user}.jsonl")


if __name__ == "__main__":
    main()
