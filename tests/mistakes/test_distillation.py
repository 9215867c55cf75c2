"""Mistakes with teachers, students and caches end in status 2 and a message with place and cure, before any weights."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import workbench
from tests.conftest import CHAT_TEMPLATE, T5_SIZES, save_tiny
from tests.mistakes.cases import assert_nothing_left, assert_refused_with, content, lines, refusal
from tests.mistakes.teachers import ASKING, FOUND, WRITTEN, Case, matched
from workbench.cli.console import Terminal
from workbench.cli.verbs import main
from workbench.errors import Stopped
from workbench.recipes.load import load
from workbench.recipes.over import distill_verbs
from workbench.runs import run_directory

RECIPE = """
recipe: distill
model: {id: stories, weights: float32}
adapter: {method: lora, rank: 2}
data: {train: rows.jsonl, held_out: 0.2, max_tokens: 64}
batch: {size: 4}
train: {steps: 2}
evaluate: {every: null, answers: 0}
"""
ANIMALS = ("cat", "dog")
ROWS = [{"question": f"What comes after {n}?", "answer": f"It is {n + 1}."} for n in range(12)]
LABELLED = [{"text": f"The {name} said {n}.", "label": name} for n in range(10) for name in ANIMALS]
FILES = {
    "rows.jsonl": ROWS,
    "other.jsonl": [{**row, "answer": "No."} for row in ROWS],
    "texts.jsonl": [{"text": f"The cat number {n} sat and said {7 * n}."} for n in range(12)],
    "labelled.jsonl": LABELLED,
    "strange.jsonl": [{"text": f"Number {n} is a {name}.", "label": name} for n in range(10) for name in ANIMALS],
    "foxes.jsonl": [*LABELLED, *({"text": f"a fox {n}", "label": "fox"} for n in range(8))],
    "owls.jsonl": [{**row, "label": row["label"].replace("cat", "owl")} for row in LABELLED],
    "numbers.jsonl": [{"text": f"It is {n}.", "label": n / 2} for n in range(20)],
    "held.jsonl": [{"text": f"A {n} new {name}", "label": name} for n in range(3) for name in ANIMALS],
    "columns.jsonl": [{"txt": "a", "c": "b"}],
}
ALIKE = (
    "nowhere",
    "neither run nor model",
    "unfinished folds",
    "one of other tokens",
    "vocabularies",
    "causal teacher of masks",
    "no such layer of the teacher",
    "no such layer of the student",
    "a layer that is not there",
    "weights of several",
    "peers of layers",
    "answers beyond the positions",
    "a class more",
    "out of fold of other rows",
    "unlabelled columns",
    "nobody to ask",
    "of other data",
    "a shard is lost",
)
"""Of each place where `check` and `run` refuse, one; the others are made with one verb."""
Refused = Callable[[Case, str], None]
"""A mistake, and the command it is made with."""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, stories: str) -> Iterator[Path]:
    """Rows, models, finished runs and a cache, which no mistake changes."""
    folder = tmp_path_factory.mktemp("world")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        (folder / "stories").symlink_to(stories)
        (folder / "my.yaml").write_text(RECIPE)
        for name, rows in FILES.items():
            lines(rows, name)(folder)
        _train()
        _copies(folder)
        _models(folder)
        cached = load("my.yaml", ["distill.teacher.id=lora", "distill.cache.folder=cache", "distill.cache.k=8"])
        with Terminal(quiet=True) as terminal:
            distill_verbs.distill_cache(cached, callback=terminal)
    shutil.copytree(folder / "cache", folder / "unfinished").joinpath("cache.json").unlink()
    shutil.copytree(folder / "cache", folder / "torn").joinpath("shard-00000.safetensors").unlink()
    before = content(folder)
    yield folder
    assert content(folder) == before


def _train() -> None:
    folds = ["data.held_out=0.05", "folds.k=2", "duplicates.on_duplicate=ignore", "evaluate.answers=8"]
    for name, words in {
        "lora": ["recipe=sft"],
        "full": ["recipe=sft", "adapter.method=full"],
        "classes": ["recipe=classify", "data.train=labelled.jsonl"],
        "folds": ["recipe=crossval", "of=classify", "data.train=labelled.jsonl", *folds],
    }.items():
        workbench.run("my.yaml", words, out=Path(name), quiet=True)


def _copies(folder: Path) -> None:
    """Of runs, each another mistake."""
    for name in ("other", "started", "chat"):
        shutil.copytree(folder / "lora", folder / name)
    shutil.rmtree(folder / "started" / "adapter")
    (folder / "chat" / "adapter" / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    (folder / "undecided").mkdir()
    shutil.copy(folder / "folds" / "config.yaml", folder / "undecided")
    (folder / "empty").mkdir()
    (folder / "thesis").mkdir()
    (folder / "thesis" / "chapter.tex").touch()


def _models(folder: Path) -> None:
    from transformers import AutoTokenizer

    words = AutoTokenizer.from_pretrained(folder / "stories")
    words.add_special_tokens({"mask_token": "<mask>"})
    words.save_pretrained(folder / "words")
    save_tiny(folder / "t5", "T5", "Seq2SeqLM", "stories", **T5_SIZES)
    save_tiny(folder / "gpt2", "GPT2", "CausalLM", "words")
    save_tiny(folder / "maskless", "Bert", "MaskedLM", "stories")
    save_tiny(folder / "masked", "Bert", "MaskedLM", "words")
    save_tiny(folder / "albert", "Albert", "MaskedLM", "words", embedding_size=32)


@pytest.fixture
def here(world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, in which all of the world stands."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("workbench.models.backbones.device", lambda: torch.device("cpu"))
    for path in world.iterdir():
        (tmp_path / path.name).symlink_to(path)
    return tmp_path


@pytest.fixture
def refused(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Refused:
    """Sees that a command is refused before any weights are read, and leaves everything as it was."""

    def load_nothing(*_: object, **__: object) -> None:
        raise AssertionError("weights are read")

    def see(case: Case, verb: str) -> None:
        monkeypatch.setattr("workbench.models.backbones.load", load_nothing)
        before = content(here)
        assert_refused_with((case.place, case.cure), f"{verb} my.yaml {case.words}", monkeypatch, capsys)
        assert_nothing_left(here, before)
        assert not list(here.glob("runs/*/student/model.safetensors"))

    return see


@pytest.mark.parametrize("case", WRITTEN.values(), ids=WRITTEN.keys())
def test_what_is_written(case: Case, here: Path) -> None:
    told = refusal(f"my.yaml {case.words}")
    assert told and case.place in told and case.cure in told, told


@pytest.mark.parametrize("case", FOUND.values(), ids=FOUND.keys())
def test_what_is_found(case: Case, refused: Refused) -> None:
    refused(case, "run")


@pytest.mark.parametrize("name", ALIKE)
def test_check_finds_the_same(name: str, refused: Refused) -> None:
    refused(FOUND[name], "check")


@pytest.mark.parametrize("case", ASKING.values(), ids=ASKING.keys())
def test_a_teacher_is_not_asked(case: Case, refused: Refused) -> None:
    refused(case, "distill-cache")


def test_a_run_goes_on_with_its_own_teacher_alone(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_directory.start(here / "begun", load("my.yaml", ["distill.teacher.id=lora"]), resume=False).close()
    told = ("distill.teacher.id: 'lora' there, 'other' asked for", "Resume with the same configuration")
    assert_refused_with(told, "run my.yaml distill.teacher.id=other --out begun --resume", monkeypatch, capsys)


def test_a_teacher_that_said_everything_may_go(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cache is enough to go on with, and to start anew."""
    shutil.copytree(here / "lora", here / "gone")
    words = ["distill.teacher.id=gone", "distill.cache.folder=kept"]
    with monkeypatch.context() as patch:
        patch.setattr(Terminal, "stop_requested", lambda self: (here / "run" / "metrics.jsonl").exists())
        with pytest.raises(Stopped):
            workbench.run("my.yaml", words, out=here / "run", quiet=True)
    shutil.rmtree(here / "gone")
    workbench.run("my.yaml", words, out=here / "run", resume=True, quiet=True)
    workbench.run("my.yaml", words, out=here / "again", quiet=True)
    told = [(here / name / "metrics.jsonl").read_text().splitlines() for name in ("run", "again")]
    losses = [[json.loads(line)["loss"] for line in each] for each in told]
    assert len(losses[0]) == 2 and losses[0] == losses[1]


def test_a_mended_run_makes_the_student_it_asks_for(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = matched("what: hidden_mse, layers: {3: 5}")
    command = f"run my.yaml {words} --out run distill.student.layers="
    assert_refused_with(("the student has no layer 3",), command + "first-2", monkeypatch, capsys)
    monkeypatch.setattr(sys, "argv", ["workbench", *shlex.split(command + "first-3")])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    assert json.loads((here / "run" / "student" / "config.json").read_text())["num_hidden_layers"] == 3
