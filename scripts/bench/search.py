"""Cost of a search, and whether it finds the setting that a full grid finds.

    python scripts/bench/search.py cost                       # search/quickstart, and its best setting as a plain run
    python scripts/bench/search.py quality [--seeds 3]        # 32 settings by halving, and all of them to their end
    python scripts/bench/search.py optuna                     # the same by Optuna, a process each

`cost` takes search/quickstart as it is shipped. `quality` and `optuna` take sft/quickstart with its questions alone,
without the passages, and a list of 32 settings: in a sweep, which trains each to its end, in a search, and in a study
of Optuna whose trials are processes, two at a time, that its own pruner stops. Every run is a process of its own,
measured from outside; processor time is what a busy machine does not change. What is finished below --out is not run
again.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import measuring

from workbench.data import starter
from workbench.training.search.halving import Halving

SPACE: dict[str, list[float]] = {
    "train.learning_rate": [5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2, 6.4e-2],
    "adapter.rank": [4, 16],
    "schedule.warmup": [0.0, 0.1],
}
JOBS = 2
ROWS = {"train": 1200, "held_out": 100}
"""Questions of each split."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("cost", "quality", "optuna"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--trials", type=int, default=32, help="settings that are tried")
    parser.add_argument("--json", type=Path, help="write what `optuna` measured to this file")
    parser.add_argument("--steps", type=int, default=256)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--eta", type=int, default=2)
    parser.add_argument("--rungs", type=int, default=6)
    parser.add_argument("--rows", type=int, default=64, help="held-out rows of the last comparison")
    parser.add_argument("--out", type=Path, default=Path("runs/search"))
    arguments = parser.parse_args()
    arguments.out = arguments.out.resolve()
    arguments.out.mkdir(parents=True, exist_ok=True)
    print(measuring.machine("cpu", ["torch", "optuna"]))
    {"quality": _quality, "cost": _cost, "optuna": _optuna}[arguments.part](arguments)


def _cost(arguments: argparse.Namespace) -> None:
    found, plain = arguments.out / "shipped", arguments.out / "plain"
    _measured(_run("search/quickstart"), found)
    best = [f"{key}={value}" for key, value in _best(found)["settings"].items()]
    _measured(_run("search/quickstart", "recipe=sft", "search={}", *best), plain)
    lines: list[list[object]] = [["", "search", "one run", "ratio"]]
    for name in ("cpu_s", "wall_s"):
        ours, one = _usage(found)[name], _usage(plain)[name]
        lines.append([name, f"{ours:.0f}", f"{one:.0f}", f"{ours / one:.2f}"])
    print(measuring.markdown(lines))


def _quality(arguments: argparse.Namespace) -> None:
    lines: list[list[object]] = [
        ["seed", "lowest of the grid", "found", "above", "place", "search, CPU s", "grid, CPU s"]
    ]
    for seed in range(arguments.seeds):
        grid, found = arguments.out / f"grid-{seed}", arguments.out / f"search-{seed}"
        _measured(_run(*_words("grid", arguments, seed)), grid)
        _measured(_run(*_words("search", arguments, seed)), found)
        members = json.loads((grid / "sweep.json").read_text(encoding="utf-8"))["members"]
        # What the grid gave the setting that was found, so that both are of one bank.
        losses = {str(row["settings"]): row["held_out_loss"] for row in members if row["status"] == "done"}
        loss, every = losses[str(_best(found)["settings"])], sorted(losses.values())
        times = [f"{_usage(run)['cpu_s']:.0f}" for run in (found, grid)]
        place = f"{1 + every.index(loss)} of {len(every)}"
        lines.append([seed, f"{every[0]:.4f}", f"{loss:.4f}", f"{100 * (loss / every[0] - 1):.2f} %", place, *times])
        print(measuring.markdown(lines), flush=True)


def _optuna(arguments: argparse.Namespace) -> None:
    found, other = arguments.out / "search-0", arguments.out / "optuna"
    _measured(_run(*_words("search", arguments, 0)), found)
    settings = {"command": _words("plain", arguments, 0), "space": SPACE, "trials": arguments.trials}
    (arguments.out / "optuna.json").write_text(json.dumps(settings), encoding="utf-8")
    peer = [sys.executable, str(Path(__file__).with_name("peer_optuna.py")), str(arguments.out / "optuna.json")]
    first = round(arguments.steps * Halving(arguments.eta, arguments.rungs).shares[0])
    _measured(lambda out: [*peer, str(out), str(JOBS), str(arguments.eta), str(first)], other)
    ours, theirs = _usage(found), _usage(other)
    study = json.loads((other / "study.json").read_text(encoding="utf-8"))
    lines: list[list[object]] = [["", "search, one process", "Optuna, two at a time", "ratio"]]
    for title, name, cores in (
        ("wall clock, s", "wall_s", 1),
        ("processor time, s", "cpu_s", 1),
        ("processor time through the processes at a time, s", "cpu_s", JOBS),
    ):
        per = theirs[name] / cores
        lines.append([title, f"{ours[name]:.0f}", f"{per:.0f}", f"{ours[name] / per:.2f}"])
    lines.append(["held-out loss", f"{_best(found)['held_out_loss']:.4f}", f"{study['best']:.4f}", ""])
    print(measuring.markdown(lines))
    ratio = measuring.ratio([ours["cpu_s"]], [theirs["cpu_s"] / JOBS])
    measuring.write_report(arguments, ours=ours, theirs=theirs, ratio=ratio)


def _words(kind: str, arguments: argparse.Namespace, seed: int) -> list[str]:
    """Recipe and settings of a grid, a search or a plain run."""
    own = [f"seed={seed}", f"train.steps={arguments.steps}", "train.epochs=null", f"batch.size={arguments.batch}"]
    own += [f"data.{split}={_questions(arguments.out, split)}" for split in ROWS]
    own += ["data.overlap=drop", "batch.tokens_per_device=4096", "evaluate.every=100000", "evaluate.answers=0"]
    own += ["evaluate.dynamics=false", "save.every=null"]
    if kind == "plain":
        return ["sft/quickstart", *own]
    section: dict[str, Any] = {"over": SPACE}
    if kind == "search":
        section = {"space": SPACE, "trials": arguments.trials, "rows": arguments.rows}
        section |= {"eta": arguments.eta, "rungs": arguments.rungs}
    recipe = "search" if kind == "search" else "sweep"
    return ["sft/quickstart", f"recipe={recipe}", f"{recipe}={json.dumps(section)}", *own]


def _questions(folder: Path, split: str) -> Path:
    """The first of the shipped questions, without their passages."""
    lines = (starter.FOLDER / f"fairytaleqa_{split}.jsonl").read_text(encoding="utf-8").splitlines()[: ROWS[split]]
    rows = [json.loads(line) for line in lines]
    asked = [{"prompt": f"{row['question']}\n", "completion": row["answer"]} for row in rows]
    return measuring.write_rows(asked, folder / f"{split}.jsonl")


def _run(*words: str) -> Any:
    """From the folder of a run to its command."""
    return lambda out: [sys.executable, "-m", "workbench.cli", "run", *words, "--out", str(out)]


def _measured(command: Any, out: Path) -> None:
    """Run once, and note what it took."""
    if not _file(out).exists():
        usage = measuring.run(command(out), out.with_suffix(".log"), "cpu")
        _file(out).write_text(json.dumps(usage._asdict()), encoding="utf-8")


def _usage(out: Path) -> dict[str, float]:
    return dict(json.loads(_file(out).read_text(encoding="utf-8")))


def _file(out: Path) -> Path:
    return out.with_name(f"{out.name}.usage.json")


def _best(run: Path) -> dict[str, Any]:
    """The member that a search ships."""
    table = json.loads((run / "search.json").read_text(encoding="utf-8"))
    (found,) = (row for row in table["members"] if row["member"] == table["best"])
    return dict(found)


if __name__ == "__main__":
    main()
