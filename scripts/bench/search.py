"""Cost of a search, and whether it finds the setting that a full grid finds.

    python scripts/bench/search.py quality [--seeds 3] [--steps 27 --batch 4 --held-out 100]
    python scripts/bench/search.py cost    [--steps 62 --batch 16 --held-out 200]
    python scripts/bench/search.py optuna  [...]

`quality`: 32 settings by halving in the bank, and all 32 trained to their end in one bank, for each seed. `cost`: the
search beside one plain run of its best setting. `optuna`: the same 32 settings by Optuna, two processes at a time, one
a trial, stopped by its own pruner with the same rungs. Every run is a process of its own, measured from outside;
processor time is what a busy machine does not change. What is finished stands below --out and is not run again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import measuring
import standing

from workbench.data import starter
from workbench.training.search.halving import Halving

SPACE: dict[str, list[float]] = {
    "train.learning_rate": [5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2, 6.4e-2],
    "adapter.rank": [4, 16],
    "schedule.warmup": [0.0, 0.1],
}
TRIALS, JOBS = 32, 2
TIMES = "cpu_s", "wall_s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("quality", "cost", "optuna"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=62)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--held-out", type=int, default=200, help="rows")
    parser.add_argument("--rows", type=int, default=64, help="held-out rows that decide who goes on")
    parser.add_argument("--eta", type=int, default=3)
    parser.add_argument("--rungs", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("runs/search"))
    arguments = parser.parse_args()
    arguments.out = arguments.out.resolve()
    print(measuring.machine("cpu", ["torch", "optuna"]))
    {"quality": _quality, "cost": _cost, "optuna": _optuna}[arguments.part](arguments)


def _quality(arguments: argparse.Namespace) -> None:
    lines: list[list[object]] = [["seed", "lowest of the grid", "found", "above it", "place", "search, CPU s", "grid"]]
    for seed in range(arguments.seeds):
        grid, found = _run("grid", arguments, seed), _run("search", arguments, seed)
        every = sorted(row["held_out_loss"] for row in _table(grid, "sweep") if row["status"] == "done")
        (best,) = (row for row in _table(found, "search") if row["member"] == _best(found))
        loss, times = best["held_out_loss"], [f"{_usage(run)['cpu_s']:.0f}" for run in (found, grid)]
        place = 1 + sum(other < loss - 1e-4 for other in every)
        above = f"{100 * (loss / every[0] - 1):+.2f} %"
        lines.append([seed, f"{every[0]:.4f}", f"{loss:.4f}", above, f"{place} of {len(every)}", *times])
        print(standing.markdown(lines), flush=True)


def _cost(arguments: argparse.Namespace) -> None:
    found = _run("search", arguments, 0)
    plain = _run("plain", arguments, 0, [f"{key}={value}" for key, value in _settings(found).items()])
    lines: list[list[object]] = [["", "search", "one run", "ratio"]]
    for name in TIMES:
        ours, one = _usage(found)[name], _usage(plain)[name]
        lines.append([name, f"{ours:.0f}", f"{one:.0f}", f"{ours / one:.2f}"])
    print(standing.markdown(lines))


def _optuna(arguments: argparse.Namespace) -> None:
    found, other = _run("search", arguments, 0), arguments.out / "optuna"
    if not (other / "usage.json").exists():
        other.mkdir(parents=True, exist_ok=True)
        words = [arguments.out / "optuna.json", other, JOBS, arguments.eta, _first(arguments)]
        settings = {"command": _words("plain", arguments, 0), "space": SPACE, "trials": TRIALS}
        (arguments.out / "optuna.json").write_text(json.dumps(settings), encoding="utf-8")
        peer = Path(__file__).with_name("peer_optuna.py")
        _measured([sys.executable, str(peer), *map(str, words)], other)
    ours, theirs = _usage(found), _usage(other)
    told = json.loads((other / "study.json").read_text(encoding="utf-8"))
    lines: list[list[object]] = [["", "search", "Optuna, a process each", "ratio"]]
    for name, per in (("wall_s", 1), ("cpu_s", 1), ("cpu_s", JOBS)):
        title = name if per == 1 else f"search on one core, Optuna on {JOBS}"
        lines.append(
            [title, f"{ours[name]:.0f}", f"{theirs[name] / per:.0f}", f"{ours[name] * per / theirs[name]:.2f}"]
        )
    lines.append(["held-out loss", *(f"{each:.4f}" for each in (_loss(found), told["best"])), ""])
    print(standing.markdown(lines))


def _run(kind: str, arguments: argparse.Namespace, seed: int, words: list[str] | None = None) -> Path:
    out: Path = arguments.out / f"{kind}-{seed}"
    if not (out / "usage.json").exists():
        command = [sys.executable, "-m", "workbench.cli", "run", *_words(kind, arguments, seed), *(words or ())]
        _measured([*command, "--out", str(out)], out)
    return out


def _words(kind: str, arguments: argparse.Namespace, seed: int) -> list[str]:
    """Recipe and settings of a grid, a search or a plain run."""
    rows = (starter.FOLDER / "fairytaleqa_held_out.jsonl").read_text(encoding="utf-8").splitlines()
    held_out: Path = arguments.out / f"held_out_{arguments.held_out}.jsonl"
    held_out.parent.mkdir(parents=True, exist_ok=True)
    held_out.write_text("\n".join(rows[: arguments.held_out]) + "\n", encoding="utf-8")
    own = [f"seed={seed}", f"train.steps={arguments.steps}", "train.epochs=null", f"batch.size={arguments.batch}"]
    own += [f"data.held_out={held_out}", "evaluate.every=100000", "save.every=null"]
    if kind == "plain":
        return ["sft/quickstart", *own]
    if kind == "grid":
        over = json.dumps(SPACE)
        return ["sft/quickstart", "recipe=sweep", f"sweep={{of: sft, over: {over}}}", "evaluate.answers=0", *own]
    section = {"of": "sft", "space": SPACE, "trials": TRIALS, "eta": arguments.eta, "rungs": arguments.rungs}
    return ["sft/quickstart", "recipe=search", f"search={json.dumps(section | {'rows': arguments.rows})}", *own]


def _first(arguments: argparse.Namespace) -> int:
    """Steps at the first rung."""
    return -(-arguments.steps // round(1 / Halving(arguments.eta, arguments.rungs).shares[0]))


def _measured(command: list[str], out: Path) -> None:
    usage = measuring.run(command, out.with_suffix(".log"), "cpu")
    (out / "usage.json").write_text(json.dumps(usage._asdict()), encoding="utf-8")


def _usage(run: Path) -> dict[str, float]:
    return dict(json.loads((run / "usage.json").read_text(encoding="utf-8")))


def _table(run: Path, recipe: str) -> list[dict[str, Any]]:
    return list(json.loads((run / f"{recipe}.json").read_text(encoding="utf-8"))["members"])


def _best(run: Path) -> str:
    return str(json.loads((run / "search.json").read_text(encoding="utf-8"))["best"])


def _settings(run: Path) -> dict[str, Any]:
    (found,) = (row["settings"] for row in _table(run, "search") if row["member"] == _best(run))
    return dict(found)


def _loss(run: Path) -> float:
    (found,) = (row["held_out_loss"] for row in _table(run, "search") if row["member"] == _best(run))
    return float(found)


if __name__ == "__main__":
    try:
        main()
    except subprocess.CalledProcessError as error:
        sys.exit(str(error))
