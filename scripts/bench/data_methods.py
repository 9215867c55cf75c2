"""Effect of each way to clean, choose, draw or order rows of text, over paired seeds, at equal rows and equal compute.

    python scripts/bench/data_methods.py gsm8k/ --out runs/data [--steps 40] [--seeds 3] [--json FILE] [key=value]

The folder has GSM8K's train.jsonl and test.jsonl (Cobbe et al. 2021). The starter, 6 M parameters, trains by LoRA on a
mixture of rows of GSM8K, rows of the shipped questions about fairy tales, and noise: questions of GSM8K, half of them
with the shuffled words of other answers, half with a fault that `data.clean` has a rule for. It is asked for GSM8K:
some of its test rows are held out, and other training rows are the target of by=importance and by=gradient. Rows are
short ones, at most --characters long, but for the tales, which are the shortest.

Every arm takes as many steps as the control, which is equal rows. What choosing and drawing cost beside that is in the
processor time of the run: at equal compute an arm is compared with a control that trains for as long, the reference of
Rho-1, a run over the target's rows, left out. Runs stand below --out, in this process one after another, seed by seed;
what is finished is not run again. --arms runs some of the arms alone, by a part of their names.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import data_quality
import measuring
from measuring import Arm, Control, Wanted

from workbench import recipes
from workbench.config.yaml_text import read_yaml
from workbench.data import starter

FAULTS = ("answer_repeats_prompt", "refusal", "empty_turn", "broken_characters", "symbols")
RULES = (*FAULTS, "exact_duplicate", "near_duplicate")
LENGTHS = (0.5, 1.0, 2.0, 7.0)
"""Steps of the runs of the control, as multiples of its own."""
CHOICE = "random choice"
ARMS: dict[str, list[str]] = {
    CHOICE: ["data.select.by=random"],
    "by importance (DSIR)": ["data.select.by=importance", "data.select.target={folder}/target.jsonl"],
    "by gradient (LESS)": ["data.select.by=gradient", "data.select.target={folder}/target.jsonl"],
    "by perplexity, middle": ["data.select.by=perplexity"],
    "by difficulty (IFD)": ["data.select.by=ifd"],
    "cleaned": [f"data.clean=[{','.join(RULES)}]"],
    "InfoBatch": ["data.sampling.by=infobatch"],
    "importance sampling": ["data.sampling.by=importance"],
    "selective (biased)": ["data.sampling.by=selective"],
    "hard rows count more (TERM, tilt 1)": ["data.sampling.by=tilted"],
    "hard rows count less (TERM, tilt -1)": ["data.sampling.by=tilted", "data.sampling.tilt=-1"],
    "tokens above a reference (Rho-1)": ["data.sampling.by=tokens", "data.sampling.reference={reference}"],
    "learned mixture": ["data.train=", "data.sources={sources}", "data.mix.by=learned"],
    "short rows first": ["data.curriculum.by=length"],
    "easy rows first, by the backbone": ["data.curriculum.by=perplexity"],
    "self-paced": ["data.curriculum.by=self_paced"],
}
REFERENCE = "reference"
"""A run over the target's rows, whose losses of tokens Rho-1 compares with; its time counts for no arm."""
SOURCES = ("sums", "tales", "noise")
"""The parts of the mixture, for arms that mix them anew; whoever has the rows would not know which are noise."""


def main() -> None:
    arguments = _arguments()
    _write(arguments)
    wanted = {name: run for seed in range(arguments.seeds) for name, run in _runs(arguments, seed)}
    runs = measuring.finish_here(wanted, arguments.out)

    def arm(name: str) -> Arm:
        own = [runs[_name(name, seed)] for seed in range(arguments.seeds)]
        losses = [measuring.scores(run)["after"]["loss"] for run in own]
        return Arm(losses, [measuring.cpu_s(run) for run in own])

    control = Control({length: arm(f"every row {length:g}") for length in LENGTHS})
    arms = {name: arm(name) for name in _wanted_arms(arguments)}
    choosers = {name: CHOICE for name in arms if _chooses(ARMS[name]) and name != CHOICE and CHOICE in arms}
    print(
        measuring.markdown(
            measuring.gains_table(control, arms, references=choosers, score="held-out loss", sign=-1, digits=3)
        )
    )
    machine = measuring.machine("cpu", ("torch", "transformers", "peft"))
    measuring.write_report(arguments, machine=machine, control=control.lengths, arms=arms)


def _runs(arguments: argparse.Namespace, seed: int) -> Iterator[tuple[str, Wanted]]:
    """The runs of a seed with their names."""
    recipe = read_yaml(recipes.find("sft/quickstart"))
    folder = arguments.out.resolve()
    shared = [
        f"data.train={folder}/train.jsonl",
        f"data.held_out={folder}/held_out.jsonl",
        "train.epochs=null",
        "evaluate.every=null",
        "evaluate.answers=0",
        "save.every=null",
        f"batch.size={arguments.batch}",
        f"seed={seed}",
        *arguments.overrides,
    ]
    for length in LENGTHS:
        steps = round(length * arguments.steps)
        yield _name(f"every row {length:g}", seed), Wanted(recipe, [*shared, f"train.steps={steps}"])
    own_rows = [f"data.train={folder}/target.jsonl", f"train.steps={arguments.steps}"]
    yield _name(REFERENCE, seed), Wanted(recipe, [*shared, *own_rows])
    places = {
        "folder": folder,
        "reference": folder / _name(REFERENCE, seed),
        "sources": f"{{{', '.join(f'{name}: {{path: {folder}/{name}.jsonl}}' for name in SOURCES)}}}",
    }
    for name, words in _wanted_arms(arguments).items():
        kept = [f"data.select.rows={arguments.kept}"] if _chooses(words) else []
        own = [word.format(**places) for word in words]
        yield _name(name, seed), Wanted(recipe, [*shared, f"train.steps={arguments.steps}", *own, *kept])


def _wanted_arms(arguments: argparse.Namespace) -> dict[str, list[str]]:
    parts = arguments.arms or [""]
    return {name: words for name, words in ARMS.items() if any(part in name for part in parts)}


def _chooses(words: list[str]) -> bool:
    return words[0].startswith("data.select.")


def _write(arguments: argparse.Namespace) -> None:
    """The mixture, its held-out rows and the target's, the same each time."""
    out = arguments.out
    if (out / "train.jsonl").exists():
        return
    chance = random.Random(0)
    train, test = (prompts(arguments.gsm8k / f"{name}.jsonl") for name in ("train", "test"))
    train, test = ([row for row in rows if _characters(row) <= arguments.characters] for rows in (train, test))
    chance.shuffle(train)
    cuts = iter(train)
    own, target, spoilt = (
        [next(cuts) for _ in range(count)] for count in (arguments.wanted, arguments.target, arguments.noise)
    )
    others = [row["completion"] for row in cuts]
    noise = [_faulty(row, number, others, chance) for number, row in enumerate(spoilt)]
    tales = sorted(prompts(Path(starter.resolve("starter/fairytaleqa_train.jsonl"))), key=_characters)[
        : arguments.tales
    ]
    mixture = [*own, *tales[: arguments.tales], *noise]
    for name, part in zip(SOURCES, (own, tales, noise), strict=True):
        measuring.write_rows(part, out / f"{name}.jsonl")
    chance.shuffle(mixture)
    measuring.write_rows(target, out / "target.jsonl")
    measuring.write_rows(chance.sample(test, arguments.tested), out / "held_out.jsonl")
    measuring.write_rows(mixture, out / "train.jsonl")


def _faulty(row: dict[str, str], number: int, others: list[str], chance: random.Random) -> dict[str, str]:
    """A row with another one's answer, its words shuffled, or every second time with a fault that a rule is for."""
    if number % 2:
        rule = FAULTS[number // 2 % len(FAULTS)]
        prompt, completion = data_quality.FAULTS[rule](row["prompt"], row["completion"], chance)
        return {"prompt": prompt, "completion": completion}
    words = chance.choice(others).split()
    return {"prompt": row["prompt"], "completion": " ".join(chance.sample(words, len(words)))}


def prompts(path: Path) -> list[dict[str, Any]]:
    """Rows of GSM8K or of the shipped questions as prompts and completions."""
    rows = measuring.lines(path)
    return [
        {"prompt": "\n".join(row[key] for key in ("context", "question") if key in row), "completion": row["answer"]}
        for row in rows
    ]


def _characters(row: dict[str, str]) -> int:
    return len(row["prompt"]) + len(row["completion"])


def _name(arm: str, seed: int) -> str:
    word = arm.replace(" ", "-").replace(",", "").replace("(", "").replace(")", "")
    return f"seed-{seed}/{word}"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gsm8k", type=Path)
    parser.add_argument("overrides", nargs="*", help="key=value")
    parser.add_argument("--out", type=Path, default=Path("runs/data_methods"))
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--wanted", type=int, default=56, help="rows of GSM8K in the mixture")
    parser.add_argument("--tales", type=int, default=64)
    parser.add_argument("--noise", type=int, default=40)
    parser.add_argument("--kept", type=int, default=56, help="rows that arms keep which choose")
    parser.add_argument("--target", type=int, default=32)
    parser.add_argument("--tested", type=int, default=80, help="held-out rows")
    parser.add_argument("--characters", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--arms", action="append", help="part of the names of arms to run; all without it")
    parser.add_argument("--json", type=Path, help="write everything that was measured to this file")
    return parser.parse_intermixed_args()


if __name__ == "__main__":
    main()
