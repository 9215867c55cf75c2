"""Does the rate that `workbench lr` suggests reach the best of a grid of whole runs?

    python scripts/bench/learning_rate.py [--recipe classify/quickstart] [--seeds 1] [--out FOLDER]

For each seed: seven rates a factor of 2 apart in a sweep of whole runs, short trainings at the same rates, and a whole
run at the suggested one. Held-out losses in nats, and how far the suggested rate's is above the lowest of the grid.
Runs stand below --out; what is finished is not run again.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import measuring
from measuring import Wanted

from workbench import recipes
from workbench.cli.console import Terminal
from workbench.config.yaml_text import read_yaml
from workbench.recipes.verbs import rate_finder

LOWEST, HIGHEST, COUNT = 5e-4, 3.2e-2, 7
SHARED = ["evaluate.every=0.99", "evaluate.answers=0", "evaluate.probe=0", "save.every=null"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="classify/quickstart", help="of sft, mlm or classify")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("runs/learning_rate"))
    arguments = parser.parse_args()
    lines: list[list[object]] = [["seed", "lowest of the grid", "at", "suggested", "its loss", "above the lowest"]]
    for seed in range(arguments.seeds):
        lines.append([seed, *_compared(arguments.recipe, seed, arguments.out / f"seed-{seed}")])
        print(measuring.markdown(lines), flush=True)


def _compared(name: str, seed: int, folder: Path) -> list[object]:
    """Lowest loss of the grid and its rate, the suggested rate, its loss, and how far it is above."""
    recipe = read_yaml(recipes.find(name))
    rates = rate_finder.rates_between(LOWEST, HIGHEST, COUNT)
    own = [*SHARED, f"seed={seed}"]
    grid = ["recipe=sweep", f"of={recipe['recipe']}", f"sweep.over.train.learning_rate={rates}"]
    runs = measuring.finish({"grid": Wanted(recipe, [*own, *grid])}, folder, jobs=1, device="cpu")
    members = json.loads((runs["grid"] / "sweep.json").read_text(encoding="utf-8"))["members"]
    done = {row["settings"]["train.learning_rate"]: row["held_out_loss"] for row in members if row["status"] == "done"}
    with Terminal(quiet=True) as terminal:
        found = rate_finder.find_learning_rate(
            name, own, out=folder / "lr", lowest=LOWEST, highest=HIGHEST, rates=COUNT, callback=terminal
        )
    suggested = Wanted(recipe, [*own, f"train.learning_rate={found.suggested}"])
    runs = measuring.finish({"suggested": suggested}, folder, jobs=1, device="cpu")
    loss, best = measuring.scores(runs["suggested"])["after"]["loss"], min(done, key=lambda rate: float(done[rate]))
    share = f"{100 * (loss / done[best] - 1):+.1f} %"
    return [f"{done[best]:.4f}", f"{best:g}", f"{found.suggested:g}", f"{loss:.4f}", share]


if __name__ == "__main__":
    main()
