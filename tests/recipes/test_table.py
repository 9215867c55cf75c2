"""What goes with what: every task, alone and in every recipe over tasks, in every layout, with every verb.

A cell of the table runs, on a tiny backbone, or is refused, in the sentence of a fact and with exit status 2. Which of
both is read from the facts, so that a new task or a wider fact changes no line here; a task only needs some rows.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import sys
from collections.abc import Callable, Iterable
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import MINILM, cells, save_tiny
from tests.run_files import read_scores, write_lines
from tests.workbench.evaluation.serving.conftest import SETTINGS
from tests.workbench.training.distributed import layouts
from workbench.cli import verbs
from workbench.config import task_facts
from workbench.config.task_facts import OVER
from workbench.config.yaml_text import dump_yaml
from workbench.errors import WorkbenchError
from workbench.recipes.load import load
from workbench.recipes.task import implementation
from workbench.recipes.verbs import serving
from workbench.recipes.verbs.evaluate import evaluate
from workbench.runs import run_directory, score_files
from workbench.runs.ranks import Ranks
from workbench.training.distributed import layout_checks

# Stock PEFT uses what transformers calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

TASKS = {name: facts for name, facts in task_facts.TASKS.items() if facts.module.startswith("workbench.")}
"""Those that come with the package: other tests may have registered examples."""
ALONE = "alone"
RECIPES = (ALONE, *OVER)
"""How a task is carried out."""
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "ddp": {},
    "zero": {"zero": 2},
    "fsdp": {"engine": "fsdp2", "zero": 3},
    "tensor": {"tensor": 2},
    "pipeline": {"pipeline": 2},
    "sequence": {"sequence": 2},
}
"""Section `distributed` of each; all but the first are of two processes."""
PARTED, SHARED = ("tensor", "pipeline", "sequence"), ("zero", "fsdp")
OF_RECIPES = ("check", "plan", "data", "features", "lr")
OF_RUNS = ("evaluate", "predict", "generate", "merge", "export", "serve", "sample")
"""Verbs, besides `run`, which layouts matter for."""

OUTCOMES = SimpleNamespace(reward=SimpleNamespace(kind="outcome"))
"""The configuration that facts ask whether adapters of folds answer together."""

MINES_NOTHING = SimpleNamespace(embed=SimpleNamespace(mine=0))
"""The same of facts about what is cut."""

SECTIONS: dict[str, Callable[[str, Path], dict[str, Any]]] = {
    "sweep": lambda task, folder: {"sweep": {"over": {"seed": [0, 1]}}},
    "search": lambda task, folder: {
        "search": {"space": {"train.learning_rate": [1e-3, 1e-2]}, "trials": 2, "rungs": 1}
    },
    "fleet": lambda task, folder: {
        "fleet": {"members": {name: {"data": {"train": f"{folder}/{task}.jsonl"}} for name in ("a", "b")}}
    },
    "rounds": lambda task, folder: {
        "rounds": {
            **{"count": 1, "n": 4, "max_new_tokens": 8, "score": [{"kind": "regex", "pattern": "[aeiou]"}]},
            **{"warm_up": str(folder / "digits.jsonl"), "warm_up_steps": 16, "warm_up_rate": 2e-2},
        },
        "model": {"id": "starter", "weights": "float32"},  # which learns to end an answer
    },
    "crossval": lambda task, folder: {"folds": {"k": 2}, "duplicates": {"on_duplicate": "ignore"}},
    "distill": lambda task, folder: {"distill": {"teacher": {"id": str(folder / f"{task}-{ALONE}")}}},
}
"""Sections of each recipe over tasks, for a task whose rows and own run are in a folder."""
OF_TASKS: dict[str, dict[str, Any]] = {
    "reinforce": {
        "rewards": [{"kind": "regex", "pattern": "[aeiou]"}],
        "reinforce": {"answers": 2, "updates": 1, "beta": 0, "max_new_tokens": 4},
    },
    "rerank": {"rerank": {"negatives": 1, "candidates": 2}},
    "classify": {"evaluate": {"every": 1, "answers": 0, "probe": 0}},
}
"""Sections without which a task's tiny run would not be one."""
BACKBONES = {"masked": "MaskedLM", "classes": "SequenceClassification", "tokens": "TokenClassification"}
"""Head of the tiny BERT that learns what a task has as its head; others learn over two blocks of stories260K."""


def rows(n: int) -> dict[str, dict[str, Any]]:
    """Row `n` of each task."""
    name, word = ("Ada", "Bob", "Cleo", "Dan")[n % 4], "cat" if n % 2 else "dog"
    others = random.Random(n).sample(("red", "old", "house", "river", "train", "letter", "music", "winter", "story"), 4)
    text = f"{name} saw the {word} {' '.join(others)}."
    pair = {"prompt": f"What comes after {n}?", "chosen": f" It is {n + 1}.", "rejected": f" No idea, {name}."}
    return {
        "sft": {"prompt": pair["prompt"], "completion": pair["chosen"]},
        "mlm": {"text": text},
        "classify": {"text": text, "label": word},
        "prefer": pair,
        "reward": pair,
        "embed": {"anchor": text, "positive": f"It was a {word} {' '.join(others)}."},
        "rerank": {"anchor": text, "positive": f"It was a {word} {' '.join(others)}."},
        "reinforce": {"prompt": pair["prompt"], "answer": str(n + 1)},
        "tag": {"tokens": text.split(), "tags": ["B-PER", "O", "O", f"B-{word.upper()}", *"OOOO"]},
    }


# What the facts refuse


def refused(task: str, recipe: str, layout: str = "one") -> str | None:
    """A part of the sentence that refuses a run, from the facts of its task and recipe; None where it runs."""
    facts, over = TASKS[task], OVER.get(recipe)
    if over is not None and (why := over.able(facts)) is not None:
        return f"recipe={recipe} does not take of={task}: {why}"
    if layout in PARTED and over is not None:
        return f"was not tried with recipe={recipe}"
    if layout in PARTED and (why := getattr(facts, layout)) is not None:
        return str(why)
    if layout == "zero" and over is not None and over.shared:
        return "each with an optimizer of its own, and DeepSpeed steps one"
    if layout == "fsdp" and (why := facts.cut(MINES_NOTHING)) is not None:
        return why
    if layout in SHARED and over is not None and over.folds and not facts.labelled:
        return "scores each member over a whole backbone"
    if layout != "one" and over is not None and over.shared and layout not in SHARED:
        return "trains on one device, or over a backbone that devices share"
    if layout != "one" and not facts.devices:
        return "trains on one device"
    return None


def refused_verb(task: str, recipe: str, verb: str) -> str | None:
    """The same for a verb; None also for verbs of what does not run at all."""
    facts, over = TASKS[task], OVER.get(recipe)
    ships = over is None or over.ships
    together = over is not None and over.folds and (facts.labelled or facts.averages(OUTCOMES))
    reasons: dict[str, tuple[tuple[bool, str], ...]] = {
        "plan": (
            (over is not None and over.inspects is not None, "what a round learns is not written yet"),
            (
                over is not None and (over.table is not None or over.folds) and facts.compares is not None,
                "knows no bank of such",
            ),
            (over is not None and over.folds and not facts.banked, "its members train one after another"),
        ),
        "data": ((not ships, "each member has rows of its own"),),
        "features": ((not facts.labelled, "learns no labels"),),
        "lr": ((not facts.fleets or over is not None, "is looked for in the training of one adapter"),),
        "predict": ((facts.predicts is None, "trains no model that writes text"),),
        "generate": ((not facts.writes_text, "trains no model that writes text"),),
        "sample": ((not facts.writes_text, "trains no model that writes text"),),
        "serve": ((not facts.serves, "is not served"),),
        "merge": ((together, "is no single model"),),
        "export": ((together, "is no single model"),),
    }
    if verb in OF_RUNS and not ships:
        return "ships no adapter; each of its members does"
    return next((why for applies, why in reasons.get(verb, ()) if applies), None)


# Cells, and in which line of tests each is


Cell = tuple[str, str, str]
RUN_CELLS = [(task, recipe, layout) for task in TASKS for recipe in RECIPES for layout in LAYOUTS]
VERB_CELLS = [(task, recipe, verb) for task in TASKS for recipe in RECIPES for verb in (*OF_RECIPES, *OF_RUNS)]
"""Verbs are asked in one process."""


def reason(cell: Cell) -> str | None:
    """A part of the sentence that refuses a cell; None where it runs."""
    task, recipe, last = cell
    return refused(*cell) if last in LAYOUTS else refused(task, recipe) or refused_verb(*cell)


def covering() -> dict[str, str]:
    """A recipe for each task, such that every recipe is there."""
    chosen = dict[str, str]()
    for task in sorted(TASKS, key=lambda each: sum(refused(each, recipe) is None for recipe in RECIPES)):
        able = [recipe for recipe in RECIPES if refused(task, recipe) is None]
        chosen[task] = min(able, key=list(chosen.values()).count)
    return chosen


def one_of_each(cells: Iterable[Cell]) -> list[Cell]:
    """A cell for each last value, of a run that is carried out anyway, and of a task that has few of them so far."""
    chosen = list[Cell]()
    for _, group in itertools.groupby(sorted(cells, key=lambda cell: cell[2]), key=lambda cell: cell[2]):
        used = [task for task, _, _ in chosen]
        chosen.append(min(group, key=lambda cell: (COVER[cell[0]] != cell[1], used.count(cell[0]))))
    return chosen


NO_PLAN = {(task, ALONE, "tensor") for task, facts in TASKS.items() if facts.head == "masked"}
"""Runs whose tiny backbone no engine cuts."""
RUNS, VERBS = ([cell for cell in cells if reason(cell) is None] for cells in (RUN_CELLS, VERB_CELLS))
"""Cells that run."""
COVER = covering()
PLAIN = {(task, recipe, "one") for task, recipe in COVER.items()}
PLAIN |= set(one_of_each(VERBS))
TOGETHER = [cell for cell in RUNS if cell[2] != "one" and cell not in NO_PLAN]
SLOW = set(one_of_each(TOGETHER))


def of_lines(cells: Iterable[Cell]) -> list[Any]:
    """The cells as parameters, each with the mark of its line."""
    marks = {True: (), False: pytest.mark.nightly}
    return [
        pytest.param(*cell, id="-".join(cell), marks=pytest.mark.slow if cell in SLOW else marks[cell in PLAIN])
        for cell in cells
    ]


# Running


class Table:
    """A folder with rows of each task, tiny backbones, and the runs so far."""

    def __init__(self, folder: Path, stories: str) -> None:
        self.folder = folder
        for task in TASKS:
            write_lines(folder / f"{task}.jsonl", (rows(n)[task] for n in range(40)))
            write_lines(folder / f"{task}-new.jsonl", (rows(n)[task] for n in range(50, 53)))
        answers = (" one.", " It.", " 3.", " 4.")  # which rounds begin with
        write_lines(
            folder / "digits.jsonl",
            [{"prompt": rows(n)["sft"]["prompt"], "completion": answers[n % 4]} for n in range(40)],
        )
        self.llama = stories  # transformers has no plan for BERT
        heads = {head: save_tiny(folder / head, "Bert", form, MINILM) for head, form in BACKBONES.items()}
        self.backbones = {
            task: stories if facts.answers else heads.get(facts.head, stories) for task, facts in TASKS.items()
        }

    def values(self, task: str, recipe: str, layout: str = "one") -> dict[str, Any]:
        """A cell's recipe."""
        over = OVER.get(recipe)
        split = {} if over is not None and over.folds else {"held_out": 0.25}
        return {
            "recipe": task if over is None else recipe,
            "of": None if over is None else task,
            "model": {"id": self.llama if layout == "tensor" else self.backbones[task], "weights": "float32"},
            "adapter": {"method": "lora", "rank": 2, "alpha": 4},
            "data": {"train": str(self.folder / f"{task}.jsonl"), "max_tokens": 48, **split},
            "batch": {"size": 8},
            "train": {"steps": 2, "learning_rate": 1e-2},
            "evaluate": {"every": 1, "answers": 0},
            "save": {"every": None},
            "distributed": LAYOUTS[layout],
            **OF_TASKS.get(task, {}),
            **(SECTIONS[recipe](task, self.folder) if over is not None else {}),
        }

    def recipe(self, task: str, recipe: str, layout: str = "one") -> str:
        """The file of a cell's recipe."""
        path = self.folder / f"{task}-{recipe}-{layout}.yaml"
        path.write_text(dump_yaml(self.values(task, recipe, layout)))
        return str(path)

    def run(self, task: str, recipe: str, *, begun: bool = False) -> str:
        """The finished run of a cell in one process, carried out once; or one that has only begun."""
        out = self.folder / f"{task}-{recipe}{'-begun' * begun}"
        if begun:
            run_directory.start(out, load(self.recipe(task, recipe)), resume=False).close()
        elif not out.exists():
            if "distill" in self.values(task, recipe):
                self.run(task, ALONE)  # its teacher
            status, said = command("run", self.recipe(task, recipe), "--out", out)
            assert status == 0, said
        return str(out)

    def verb(self, task: str, recipe: str, verb: str, *, begun: bool = False) -> tuple[int, str]:
        """Exit status of a verb, and what it prints."""
        if verb in OF_RECIPES:
            if recipe == "distill":
                self.run(task, ALONE)  # its teacher
            more = {"data": ["--perplexity", "off"], "lr": ["--rates", 3, "--steps", 8]}.get(verb, [])
            out = [] if verb in ("check", "plan") else ["--out", self.folder / f"{task}-{recipe}-{verb}.parquet"]
            return command(verb, self.recipe(task, recipe), *out, *more)
        run = f"{self.folder}/{task}-{recipe}-begun" if begun else self.run(task, recipe)
        new = self.folder / f"{task}-new.jsonl"
        out = ["--out", f"{run}-{verb}.jsonl"]
        if verb == "serve":  # which would not end
            return answering(lambda: serving.load(serving.named([run], trust=False), SETTINGS))
        words: dict[str, list[Any]] = {
            "evaluate": [f"data.test={new}"],
            "predict": [new, *out],
            "generate": ["What comes after 3?", "--max-new-tokens", 2],
            "merge": out,
            "export": ["--to", "peft", *out],
            "sample": [
                new,
                "--score",
                "{kind: regex, pattern: a}",
                "--to",
                "all",
                "--n",
                1,
                "--max-new-tokens",
                2,
                *out,
            ],
        }
        return command(verb, run, *words[verb])


def command(*words: object) -> tuple[int, str]:
    """Exit status of the command line in this process, and what it prints."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["workbench", *map(str, words)])
        return answering(verbs.main)


def answering(work: Callable[[], object]) -> tuple[int, str]:
    """Exit status of some work as `verbs.main` has it, and what it prints."""
    said = StringIO()
    with redirect_stdout(said), redirect_stderr(said):
        try:
            work()
        except WorkbenchError as error:
            return 2, str(error)
        except SystemExit as end:
            return int(end.code or 0), said.getvalue()
    return 0, said.getvalue()


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory, short_stories: str) -> Table:
    return Table(tmp_path_factory.mktemp("table"), short_stories)


def test_every_cell_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    """The size of the table, and that each line of tests has a part of it."""
    assert set(rows(0)) == set(TASKS), "a task needs rows here"
    assert set(SECTIONS) == set(OVER) and set(COVER.values()) == set(RECIPES)
    assert {cell[2] for cell in SLOW} == set(LAYOUTS) - {"one"}
    assert {cell[2] for cell in PLAIN} == {"one", *OF_RECIPES, *OF_RUNS}
    with capsys.disabled():
        for name, cells, runs in (("run", RUN_CELLS, RUNS), ("other verbs", VERB_CELLS, VERBS)):
            print(f"\n{name}: {len(cells)} cells, of which {len(runs)} run and {len(cells) - len(runs)} are refused")


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("task", TASKS)
def test_what_the_facts_refuse_is_refused_in_their_words(task: str, recipe: str, table: Table) -> None:
    """By `check`, in layouts that it can know of; else by what `run` asks first. What they do not refuse is not."""
    for layout in LAYOUTS:
        why, path = refused(task, recipe, layout), table.recipe(task, recipe, layout)
        ranks = Ranks(0, 1 if layout == "one" else 2)
        status, said = answering(lambda: layout_checks.require(load(path), ranks))  # noqa: B023 - called at once
        assert (status, why or "") == (2 if why else 0, why if why and why in said else ""), (layout, said)
    if refused(task, recipe):
        status, said = command("check", table.recipe(task, recipe))
        assert status == 2 and refused(task, recipe) in " ".join(said.split())


@pytest.mark.parametrize(
    ("task", "recipe"), [(task, recipe) for task in TASKS for recipe in RECIPES if refused(task, recipe) is None]
)
def test_a_verb_that_the_facts_refuse_is_refused_in_their_words(task: str, recipe: str, table: Table) -> None:
    """Of a run that has only begun, since what it would do is known by then."""
    run = Path(table.run(task, recipe, begun=True))
    for verb in (*OF_RECIPES, *OF_RUNS):
        if (why := refused_verb(task, recipe, verb)) is not None:
            status, said = table.verb(task, recipe, verb, begun=True)
            assert status == 2 and why in " ".join(said.split()), (verb, said)
    assert not (run / "adapter").exists()


@pytest.mark.parametrize("task", TASKS)
def test_the_seed_of_rows_decides_which_are_held_out(task: str, table: Table) -> None:
    def held_out(seed: int, of_rows: int | None) -> list[str]:
        config = load(table.recipe(task, ALONE), [f"seed={seed}", f"data.seed={json.dumps(of_rows)}"])
        rows = implementation(config).inspect(config).data._asdict()["held_out"]
        return [rows.place(row) for row in range(len(rows))]

    assert held_out(0, 5) == held_out(1, 5) == held_out(5, None) != held_out(0, None)


@pytest.mark.parametrize(("task", "recipe", "verb"), of_lines(VERBS))
@pytest.mark.usefixtures("drawn")
def test_a_verb_takes_it(task: str, recipe: str, verb: str, table: Table) -> None:
    status, said = table.verb(task, recipe, verb)
    assert status == 0, said


@pytest.mark.parametrize(("task", "recipe", "layout"), of_lines(cell for cell in RUNS if cell[2] == "one"))
def test_it_trains_and_is_scored(task: str, recipe: str, layout: str, table: Table) -> None:
    require_scores(Path(table.run(task, recipe)))


@pytest.mark.nightly
@pytest.mark.parametrize("task", [task for task in TASKS if refused(task, "sweep") is None])
def test_each_member_of_a_sweep_is_scored_as_a_run_of_its_own(task: str, table: Table) -> None:
    """By `evaluate` of its directory, on the rows that its seed would not hold out."""
    for member in (Path(table.run(task, "sweep")) / "members").iterdir():
        assert evaluate(member, []) == pytest.approx(read_scores(member)["after"], rel=1e-5)


@pytest.fixture(scope="module")
def together(request: pytest.FixtureRequest, table: Table) -> Callable[[Cell], Path]:
    """The run of a cell by two processes, which carry out all those that this session asks for, one after another."""
    every = cells(request, "test_processes_train_it_together")
    asked = [(cell["task"], cell["recipe"], cell["layout"]) for cell in every]

    @cache
    def folder(layout: str | None) -> Path:
        path = table.folder / f"together-{layout}"
        path.mkdir()
        (path / "recipe.yaml").write_text(dump_yaml({"recipe": "sft", "data": {"train": "none"}}))
        jobs: list[tuple[str, list[str], str | None]] = []
        for cell in (each for each in asked if layout in (None, each[2])):
            values = table.values(*cell)
            if "distill" in values:
                table.run(cell[0], ALONE)
            jobs.append(("-".join(cell), [f"{key}={json.dumps(value)}" for key, value in values.items()], None))
        try:
            layouts.in_processes(path, jobs)
        except AssertionError as error:  # of one cell, which those before it have nothing to do with
            (path / "error.txt").write_text(str(error))
        return path

    few = len(asked) <= len(LAYOUTS)  # else what fails takes only its layout along
    return lambda cell: folder(None if few else cell[2]) / "-".join(cell)


@pytest.mark.parametrize(("task", "recipe", "layout"), of_lines(TOGETHER))
def test_processes_train_it_together(task: str, recipe: str, layout: str, together: Callable[[Cell], Path]) -> None:
    run = together((task, recipe, layout))
    assert (run / "scores.json").exists(), (run.parent / "error.txt").read_text()
    require_scores(run)


def require_scores(run: Path) -> None:
    scores = score_files.of_rows(read_scores(run))
    assert all(math.isfinite(value) for each in scores.values() for value in each.values()), scores
