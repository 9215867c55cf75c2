"""What a teacher adds to labels, over ten pairs of teacher and student, at equal steps and at equal processor time.

    OMP_NUM_THREADS=1 python scripts/bench/student_pairs.py --encoder $MODEL --clinc150 clinc150/data_full.json
        --wnut17 wnut17 --gsm8k gsm8k --fashion fashion_mnist_subset.zip --out runs/pairs [--table FILE] [pair ...]

Classes, tags, embeddings, text and pictures; a pair whose option is missing is left out. A teacher trains by a shipped
recipe's own settings, on few rows. A student has half of its layers, chosen once by `workbench distill-student`, and
trains whole: on labels alone, and with its teacher by the settings that recipe distill has by itself:

soft       the teacher's probabilities or vectors
hidden     and its hidden states, of every layer of the student
sequences  the answers that the teacher writes, in place of the data's (text)
on-policy  half of the answers are written by the student and judged by the teacher (text)
shuffled   soft, of a teacher that was trained on shuffled labels, with distill.control=true; in the first seed also by
           default, which may refuse it

Equal steps: all arms of a seed take the same ones. Equal time: what an arm takes until its last step, in seconds of
processor time, beside labels alone, both without what labels alone take before their first step, is its cost in the
first seed; asking, scoring and writing of the teacher are part of it. Labels alone run again with the steps that it
pays for, to the nearest of RATIOS. The verdict is that of a run with a control: rows in pairs, 95 % interval.

Every cell is a line of OUT/cells.jsonl, seed by seed; a cell that has its line is not run again, one that was cut off
starts anew. All in one process, one after another.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import measuring
import numpy as np
from our_steps import Watch

import workbench
from workbench.data import starter
from workbench.data.rows import read_rows
from workbench.errors import ConfigError, WorkbenchError
from workbench.recipes.load import load
from workbench.recipes.verbs.run import run
from workbench.report import run_record, teacher_worth

Rows = list[dict[str, Any]]
RATIOS = (1.25, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Steps of labels alone at equal time, as multiples."""
LABELS, SHUFFLED, DEFAULT = "labels alone", "shuffled", "shuffled, by default"
ARMS = {
    "soft": [],
    "hidden": ["distill.match=[{what: hidden_mse, layers: uniform}]"],
    "sequences": ["distill.answers={temperature: 0.1, max_new_tokens: 24}"],
    "on-policy": ["distill.on_policy.share=0.5", "distill.on_policy.max_new_tokens=24"],
}
CAUSAL = ("sequences", "on-policy")


@dataclass(frozen=True)
class Pair:
    """A teacher, the data of both, and how long they train."""

    recipe: str
    """Shipped; trains the teacher."""
    score: str
    rows: Callable[[argparse.Namespace, Path], tuple[Rows, Rows]]
    """Training and held-out rows; the folder is for pictures."""
    label: str
    """The column that a harmful teacher finds shuffled."""
    option: str | None = None
    """What names its data, beside the shipped ones."""
    encoder: bool = False
    """Whether --encoder is the backbone, and not the shipped one."""
    words: tuple[str, ...] = ()
    steps: int = 40
    """Of a student."""
    taught: int = 120
    """Of a teacher."""
    rate: float = 5e-4
    """Learning rate of a student."""
    arms: tuple[str, ...] = ("soft",)


def main() -> None:
    arguments = _arguments()
    pairs = {name: pair for name, pair in PAIRS.items() if not arguments.pairs or name in arguments.pairs}
    for name, pair in list(pairs.items()):
        needed = [option for option in (pair.option, "encoder" if pair.encoder else None) if option]
        if missing := [f"--{option}" for option in needed if getattr(arguments, option) is None]:
            print(f"{name} is left out: no {' and '.join(missing)}.", file=sys.stderr)
            del pairs[name]
    for seed in range(arguments.seeds):
        for name, pair in pairs.items():
            try:
                Bench(name, pair, arguments).finish(seed)
            except WorkbenchError as error:
                print(f"{name}, seed {seed}: {error}", file=sys.stderr, flush=True)
            _tell(pairs, arguments)


class Bench:
    """The cells of one pair, below its folder."""

    def __init__(self, name: str, pair: Pair, arguments: argparse.Namespace) -> None:
        self.name, self.pair, self.arguments = name, pair, arguments
        self.folder: Path = (arguments.out / name.replace(" ", "-").replace(",", "")).resolve()
        self.cells = arguments.out / "cells.jsonl"

    def finish(self, seed: int) -> None:
        """All cells of a seed that have no line yet."""
        student = partial(self._student, seed)
        self._prepare()
        student(LABELS, ["distill.alpha=0", "distill.control=false"], self.pair.steps)
        costs = {}
        for arm in self.pair.arms:
            student(arm, [*ARMS[arm], "distill.control=false"], self.pair.steps)
            if (cost := self.cost(arm)) is not None:
                costs[arm] = cost
        for ratio in sorted({_nearest(cost) for cost in costs.values()} - {1.0}):
            steps = round(ratio * self.pair.steps)
            student(_longer(ratio), ["distill.alpha=0", "distill.control=false"], steps)
        harmful = [f"distill.teacher.id={self.folder}/{SHUFFLED}"]
        student(SHUFFLED, [*harmful, "distill.control=true"], self.pair.steps)
        if not seed:
            student(DEFAULT, harmful, self.pair.steps)
        for each in self.folder.glob(f"seed-{seed}/*/"):
            shutil.rmtree(each, ignore_errors=True)

    def cost(self, arm: str) -> float | None:
        """Times what labels alone cost, in the first seed; None of an arm that was refused."""
        known = {cell["arm"]: cell for cell in _cells(self.cells) if cell["pair"] == self.name and not cell["seed"]}
        if "ends_s" not in known[arm]:
            return None
        own, labels = (np.array(known[name]["ends_s"]) for name in (arm, LABELS))
        before = labels[0] - (labels[-1] - labels[0]) / (len(labels) - 1)
        return float((own[-1] - before) / (labels[-1] - before))

    def _prepare(self) -> None:
        """Rows, teachers and the untrained student, each once."""
        for name in ("teacher", SHUFFLED):
            train = self.folder / f"{name}.jsonl"
            if not train.exists():
                rows, held_out = self.pair.rows(self.arguments, self.folder)
                measuring.write_rows(held_out, self.folder / "held_out.jsonl")
                measuring.write_rows(rows if name == "teacher" else _shuffled(rows, self.pair.label), train)
            out = self.folder / name
            if (out / "adapter").exists() and (out / "scores.json").exists():
                continue
            shutil.rmtree(out, ignore_errors=True)
            model = [f"model.id={self.arguments.encoder}"] if self.pair.encoder else []
            steps = [f"train.steps={self.pair.taught}", "evaluate.answers=0"][: 2 if self._writes else 1]
            self._run(self.pair.recipe, [*model, *self._shared(train), *steps], out)
        if not (self.folder / "student").exists():
            words = [*self._taught("teacher"), "model.id=teacher", "distill.student.layers=important-50%"]
            workbench.distill_student(self.pair.recipe, words, out=self.folder / "student")

    @property
    def _writes(self) -> bool:
        return self.pair.recipe.startswith("sft/")

    def _shared(self, train: Path) -> list[str]:
        data = [f"data.train={train}", f"data.held_out={self.folder}/held_out.jsonl"]
        return [*data, "train.epochs=null", "evaluate.every=null", "save.every=null", *self.pair.words]

    def _taught(self, teacher: str) -> list[str]:
        of = load(self.pair.recipe).recipe
        words = ["recipe=distill", f"of={of}", f"distill.teacher.id={self.folder}/{teacher}"]
        whole = ["adapter={method: full}", f"train.learning_rate={self.pair.rate}"]
        return [*words, *self._shared(self.folder / "teacher.jsonl"), *whole]

    def _student(self, seed: int, arm: str, words: Sequence[str], steps: int) -> None:
        """Train one student, unless its line is there, and write the line."""
        if any((cell["pair"], cell["arm"], cell["seed"]) == (self.name, arm, seed) for cell in _cells(self.cells)):
            return
        out = self.folder / f"seed-{seed}" / arm.replace(" ", "-").replace(",", "")
        shutil.rmtree(out, ignore_errors=True)
        words = [*self._taught("teacher"), f"model.id={self.folder}/student", f"train.steps={steps}", *words]
        words += [f"seed={seed}", *(["evaluate.answers=64", "evaluate.max_new_tokens=24"] if self._writes else [])]
        cell: dict[str, Any] = {"pair": self.name, "arm": arm, "seed": seed, "steps": steps}
        began = time.process_time()
        try:
            cell["ends_s"] = self._run(self.pair.recipe, words, out)
        except ConfigError as error:
            cell |= {"refused": str(error)}
        else:
            cell |= {"scores": measuring.scores(out)} | self._worth(out, seed, arm)
        cell["cpu_s"] = round(time.process_time() - began, 2)
        with self.cells.open("a", encoding="utf-8") as file:
            file.write(json.dumps(cell) + "\n")
        print(f"{self.name}, {arm}, seed {seed}: {cell['cpu_s']:.0f} s", file=sys.stderr, flush=True)

    def _worth(self, out: Path, seed: int, arm: str) -> dict[str, str]:
        """The verdict on the teacher, of the run's own control or of the arm on labels alone."""
        if arm.startswith(LABELS):
            return {}
        record = run_record.read(out)
        found = teacher_worth.worth(record)
        if found is None:
            labels = self.folder / f"seed-{seed}" / LABELS.replace(" ", "-")
            found = teacher_worth.beside(record, run_record.read(labels))
        return {} if found is None else found._asdict()

    def _run(self, recipe: str, words: Sequence[str], out: Path) -> list[float]:
        """Processor time from the start to the end of each step, of a run in this process."""
        out.parent.mkdir(parents=True, exist_ok=True)
        watch, began = Watch(out / measuring.PROCESSOR_TIMES), time.process_time()
        with (
            out.with_name(f"{out.name}.log").open("w", encoding="utf-8") as said,
            redirect_stdout(said),
            redirect_stderr(said),
        ):
            run(load(recipe, words), out=out, resume=False, callback=watch)
        return [round(at - began, 4) for at in watch.processor_s]


def _nearest(cost: float) -> float:
    return min((1.0, *RATIOS), key=lambda ratio: abs(np.log(ratio / cost)))


def _longer(ratio: float) -> str:
    return f"{LABELS}, {ratio:g} times the steps"


def _cells(path: Path) -> list[dict[str, Any]]:
    return measuring.lines(path) if path.exists() else []


# Rows


def _shuffled(rows: Rows, label: str) -> Rows:
    """Rows each of which has another one's label; of tags, each word another word's."""
    chance = random.Random(0)
    if isinstance(rows[0][label], list):
        tags = [tag for row in rows for tag in row[label]]
        chance.shuffle(tags)
        left = iter(tags)
        return [{**row, label: [next(left) for _ in row[label]]} for row in rows]
    labels = [row[label] for row in rows]
    chance.shuffle(labels)
    return [{**row, label: value} for row, value in zip(rows, labels, strict=True)]


def _sample(train: Rows, held_out: Rows, counts: tuple[int, int]) -> tuple[Rows, Rows]:
    chance = random.Random(0)
    return chance.sample(train, min(counts[0], len(train))), chance.sample(held_out, min(counts[1], len(held_out)))


def _shipped(name: str, counts: tuple[int, int], arguments: argparse.Namespace, folder: Path) -> tuple[Rows, Rows]:
    del arguments, folder
    train, held_out = (
        [dict(row.columns) for row in read_rows(starter.resolve(f"starter/{name.format(part)}"))]
        for part in ("train", "held_out")
    )
    return _sample(train, held_out, counts)


def _clinc150(arguments: argparse.Namespace, folder: Path) -> tuple[Rows, Rows]:
    """30 of the 150 intents."""
    del folder
    parts = json.loads(arguments.clinc150.read_text(encoding="utf-8"))
    intents = sorted({label for _, label in parts["train"]})[::5]
    train, held_out = (
        [{"text": text, "label": label} for text, label in parts[part] if label in intents]
        for part in ("train", "test")
    )
    return _sample(train, held_out, (900, 300))


def _tags(
    files: Callable[[argparse.Namespace], Sequence[Path]], arguments: argparse.Namespace, folder: Path
) -> tuple[Rows, Rows]:
    del folder
    train, held_out = (list(_sentences(path)) for path in files(arguments))
    return _sample(train, held_out, (600, 200))


def _sentences(path: Path) -> Iterator[dict[str, Any]]:
    """Words with their tags, of entities the kinds alone: shuffled, they would begin in the midst."""
    for block in path.read_text(encoding="utf-8").split("\n\n"):
        words = [line.split("\t") for line in block.split("\n") if line.split("\t")[0].strip()]
        if words and all(len(word) > 1 for word in words):
            yield {
                "tokens": [word[0] for word in words],
                "tags": [word[-1].strip()[2 * (word[-1][1:2] == "-") :] for word in words],
            }


def _tales(arguments: argparse.Namespace, folder: Path) -> tuple[Rows, Rows]:
    del arguments, folder
    parts = (
        measuring.lines(Path(starter.resolve(f"starter/fairytaleqa_{part}.jsonl"))) for part in ("train", "held_out")
    )
    return _prompts(*parts, characters=700)


def _sums(arguments: argparse.Namespace, folder: Path) -> tuple[Rows, Rows]:
    del folder
    return _prompts(*(measuring.lines(arguments.gsm8k / f"{part}.jsonl") for part in ("train", "test")), characters=400)


def _prompts(train: Rows, held_out: Rows, *, characters: int) -> tuple[Rows, Rows]:
    """Short rows, as prompts and completions."""
    short, others = (
        [
            {
                "prompt": "\n".join(row[key] for key in ("context", "question") if key in row),
                "completion": row["answer"],
            }
            for row in rows
            if sum(len(value) for value in row.values() if isinstance(value, str)) <= characters
        ]
        for rows in (train, held_out)
    )
    return _sample(short, others, (600, 96))


def _pictures(
    archive: Callable[[argparse.Namespace], Path], parts: tuple[str, str], arguments: argparse.Namespace, folder: Path
) -> tuple[Rows, Rows]:
    """Pictures of class folders in an archive, unpacked, as tables beside them."""
    found: list[Rows] = []
    with zipfile.ZipFile(archive(arguments)) as pictures:
        for part in parts:
            names = sorted(
                name for name in pictures.namelist() if name.startswith(f"{part}/") and not name.endswith("/")
            )
            found.append([{"image": name, "label": Path(name).parent.name} for name in names])
        chosen = _sample(found[0], found[1], (600, 300))
        pictures.extractall(folder, [row["image"] for rows in chosen for row in rows])
    return chosen


def _shipped_file(name: str) -> Path:
    return Path(starter.resolve(f"starter/{name}"))


# The pairs

CLASSES, EMBED, TAG, TEXT, PICTURES = (
    "classify/quickstart",
    "embed/quickstart",
    "tag/quickstart",
    "sft/full",
    "vision/quickstart",
)
_EWT = partial(_tags, lambda _: [_shipped_file(f"ewt_{part}.conll") for part in ("train", "held_out")])
_WNUT = partial(_tags, lambda given: [given.wnut17 / name for name in ("wnut17train.conll", "emerging.dev.conll")])
_BANKING = partial(_shipped, "banking77_{}.csv")
_DRAWN = ("batch.size=16",)
PAIRS = {
    "classes, starter, BANKING77": Pair(
        CLASSES, "accuracy", partial(_BANKING, (800, 300)), "label", steps=80, arms=("soft", "hidden")
    ),
    "classes, MiniLM, CLINC150": Pair(
        CLASSES, "accuracy", _clinc150, "label", "clinc150", encoder=True, steps=80, arms=("soft", "hidden")
    ),
    "tags, starter, EWT": Pair(TAG, "accuracy", _EWT, "tags", words=("batch.size=16",)),
    "tags, MiniLM, WNUT17": Pair(
        TAG, "loss", _WNUT, "tags", "wnut17", encoder=True, words=("batch.size=16",), rate=1e-4
    ),
    "embeddings, starter, BANKING77": Pair(
        EMBED, "ndcg@10", partial(_BANKING, (800, 300)), "label", steps=20, taught=60
    ),
    "embeddings, MiniLM, BANKING77": Pair(
        EMBED, "ndcg@10", partial(_BANKING, (800, 300)), "label", encoder=True, steps=20, taught=60
    ),
    "text, starter, FairytaleQA": Pair(
        TEXT, "loss", _tales, "completion", steps=30, taught=90, words=("batch.size=8",), arms=tuple(ARMS)
    ),
    "text, starter, GSM8K": Pair(
        TEXT, "loss", _sums, "completion", "gsm8k", steps=30, taught=90, words=("batch.size=8",), arms=tuple(ARMS)
    ),
    "pictures, ViT, sign digits": Pair(
        PICTURES,
        "accuracy",
        partial(_pictures, lambda _: _shipped_file("sign_digits.zip"), ("train", "test")),
        "label",
        words=_DRAWN,
        steps=40,
        taught=120,
        arms=("soft", "hidden"),
    ),
    "pictures, ViT, Fashion-MNIST": Pair(
        PICTURES,
        "accuracy",
        partial(_pictures, lambda given: given.fashion, ("train", "test")),
        "label",
        "fashion",
        words=_DRAWN,
        steps=40,
        taught=120,
        arms=("soft", "hidden"),
    ),
}


# The table


def _tell(pairs: dict[str, Pair], arguments: argparse.Namespace) -> None:
    """Write the table of all cells so far."""
    if arguments.table is None:
        return
    rows: list[list[object]] = [
        ["pair, score, teacher", "arm", "seeds", "score", "cost", "gain at equal steps", "at equal time", "verdict"]
    ]
    for name, pair in pairs.items():
        rows += _rows(Bench(name, pair, arguments))
    arguments.table.write_text(measuring.markdown(rows) + "\n", encoding="utf-8")


def _rows(bench: Bench) -> Iterator[list[object]]:
    pair, cells = bench.pair, [cell for cell in _cells(bench.cells) if cell["pair"] == bench.name]
    of = {(cell["arm"], cell["seed"]): cell for cell in cells}
    sign = -1 if pair.score == "loss" else 1

    def values(arm: str, seeds: Sequence[int], when: str = "after") -> Any:
        return np.array([of[arm, seed]["scores"][when][pair.score] for seed in seeds])

    for arm in (LABELS, *pair.arms, SHUFFLED):
        seeds = [seed for known, seed in of if known == arm and (LABELS, seed) in of and "scores" in of[arm, seed]]
        if not seeds:
            continue
        score = values(arm, seeds)
        if arm == LABELS:
            of_soft = next((cell for (own, _), cell in of.items() if own == "soft"), None)
            teacher = "" if of_soft is None else f"; {of_soft['scores']['teacher'][pair.score]:.3f}"
            first = f"{bench.name}; {pair.score}{teacher}"
            yield [first, arm, len(seeds), f"{score.mean():.3f}", "1", "", "", ""]
            continue
        cost = bench.cost(arm) if arm != SHUFFLED else None
        longer = LABELS if cost is None or _nearest(cost) == 1 else _longer(_nearest(cost))
        timed = [seed for seed in seeds if (longer, seed) in of]
        gains = [sign * (values(arm, own) - values(other, own)) for other, own in ((LABELS, seeds), (longer, timed))]
        told = [_gain(each) if len(each) else "" for each in gains]
        verdicts = [of[arm, seed].get("verdict", "none") for seed in seeds]
        said = "; ".join(f"{verdict} {verdicts.count(verdict)}" for verdict in dict.fromkeys(verdicts))
        if refused := of.get((DEFAULT, 0), {}).get("refused") if arm == SHUFFLED else None:
            said += "; by default refused" if refused else ""
        shown = ["" if cost is None else f"{cost:.2f}", told[0], "" if cost is None else told[1]]
        yield ["", arm, len(seeds), f"{score.mean():.3f}", *shown, said]


def _gain(gains: Any) -> str:
    return f"{gains.mean():+.3f}" if len(gains) < 2 else measuring.interval(gains, digits=3)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pairs", nargs="*", help=f"by default all: {'; '.join(PAIRS)}")
    parser.add_argument("--out", type=Path, required=True, help="folder of rows, teachers, students and cells.jsonl")
    parser.add_argument("--table", type=Path, help="write the table to this file after every pair")
    parser.add_argument("--seeds", type=int, default=3, help="from 0 on")
    parser.add_argument("--encoder", type=Path, help="folder of all-MiniLM-L6-v2")
    parser.add_argument("--clinc150", type=Path, help="data_full.json of CLINC150")
    parser.add_argument("--wnut17", type=Path, help="folder with wnut17train.conll and emerging.dev.conll")
    parser.add_argument("--gsm8k", type=Path, help="folder with train.jsonl and test.jsonl")
    parser.add_argument("--fashion", type=Path, help="zip of pictures, train/CLASS/ and test/CLASS/")
    return parser.parse_args()


if __name__ == "__main__":
    main()
