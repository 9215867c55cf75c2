"""Effect of the ways to mix sources, over paired seeds, at equal steps.

    python scripts/bench/mixture.py gsm8k/ --out runs/mixture [--steps 30] [--seeds 3] [--json FILE]

The folder has GSM8K's train.jsonl (Cobbe et al. 2021). The starter, 6 M parameters, trains by LoRA on three sources:
1,000 rows of GSM8K, the shipped 2,000 questions about fairy tales, and 500 rows of noise, which are questions of GSM8K
with the shuffled words of other answers. Four in a hundred rows of each source are held out. `learned, given` is
compared with the losses that the run by size of the same seed ended with, as in DoReMi; `learned` with the backbone's
own. Runs stand below --out, one after another; what is finished is not run again.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterable
from pathlib import Path

import data_methods
import measuring
import numpy as np
from measuring import Wanted

from workbench import recipes
from workbench.config.yaml_text import read_yaml
from workbench.data import starter

SOURCES = ("sums", "tales", "noise")
SUMS, NOISE = 1_000, 500
CONTROL, GIVEN = "by size", "learned, given"
ARMS: dict[str, list[str]] = {
    CONTROL: [],
    "even": ["data.mix.by=weight"],
    "learned": ["data.mix.by=learned", "data.mix.every=3"],
    GIVEN: ["data.mix.by=learned", "data.mix.every=3"],
}


def main() -> None:
    arguments = _arguments()
    _write(arguments.gsm8k, arguments.out)
    recipe = read_yaml(recipes.find("sft/quickstart"))
    folder = arguments.out.resolve()
    shared = [f"data.sources.{name}.path={folder}/{name}.jsonl" for name in SOURCES]
    shared += ["data.held_out=0.04", "data.overlap=drop", "train.epochs=null", f"train.steps={arguments.steps}"]
    shared += ["evaluate.every=null", "evaluate.answers=0"]
    runs: dict[tuple[str, int], Path] = {}
    for arm, words in ARMS.items():
        for seed in range(arguments.seeds):
            own = [*shared, f"seed={seed}", *words]
            own += _reference(runs[CONTROL, seed]) if arm == GIVEN else []
            name = f"{arm.replace(' ', '-').replace(',', '')}/seed-{seed}"
            runs[arm, seed] = measuring.finish({name: Wanted(recipe, own)}, folder, jobs=1, device="cpu")[name]
    print(measuring.markdown(_table(runs, arguments.seeds)))
    machine = measuring.machine("cpu", ("torch", "transformers", "peft"))
    told = {f"{arm} {seed}": measuring.scores(run)["after"] for (arm, seed), run in runs.items()}
    measuring.write_report(arguments, machine=machine, runs=told)


def _write(gsm8k: Path, out: Path) -> None:
    """The sources, the same each time."""
    if (out / "noise.jsonl").exists():
        return
    chance = random.Random(0)
    train = data_methods.prompts(gsm8k / "train.jsonl")
    chance.shuffle(train)
    spoilt, others = train[2_000 : 2_000 + NOISE], train[3_000 : 3_000 + NOISE]
    noise = [
        {
            "prompt": row["prompt"],
            "completion": " ".join(chance.sample(words := other["completion"].split(), len(words))),
        }
        for row, other in zip(spoilt, others, strict=True)
    ]
    tales = data_methods.prompts(Path(starter.resolve("starter/fairytaleqa_train.jsonl")))
    for name, rows in {"sums": train[:SUMS], "tales": tales, "noise": noise}.items():
        measuring.write_rows(rows, out / f"{name}.jsonl")


def _reference(run: Path) -> list[str]:
    """The losses that a run ended with, as those to compare with."""
    after = measuring.scores(run)["after"]
    return [f"data.mix.reference.{name}={after[f'loss[{name}]']}" for name in SOURCES]


def _table(runs: dict[tuple[str, int], Path], seeds: int) -> list[list[object]]:
    rows: list[list[object]] = [["arm", *SOURCES, "sums and tales, mean: less than by size", "shares drawn"]]

    def losses(arm: str, name: str) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        return np.asarray([measuring.scores(runs[arm, seed])["after"][f"loss[{name}]"] for seed in range(seeds)])

    def useful(arm: str) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        return (losses(arm, "sums") + losses(arm, "tales")) / 2

    for arm in ARMS:
        gain = measuring.interval(useful(CONTROL) - useful(arm), digits=3) if arm != CONTROL else ""
        means = [f"{losses(arm, name).mean():.3f}" for name in SOURCES]
        rows.append([arm, *means, gain, _shares(runs[arm, seed] for seed in range(seeds))])
    return rows


def _shares(runs: Iterable[Path]) -> str:
    """Mean share of each source over the steps of runs whose mixture was learned."""
    found = []
    for run in runs:
        lines = measuring.steps(run)
        if f"mix_share[{SOURCES[0]}]" not in lines[0]:
            return ""
        found.append([[line[f"mix_share[{name}]"] for name in SOURCES] for line in lines])
    return ", ".join(f"{name} {share:.0%}" for name, share in zip(SOURCES, np.mean(found, (0, 1)), strict=True))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gsm8k", type=Path)
    parser.add_argument("--out", type=Path, default=Path("runs/mixture"))
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write everything that was measured to this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
