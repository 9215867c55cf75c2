"""Mistakes in what trains when, until when and by what: `check` and `run` refuse the same, before a weight is read."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.mistakes.cases import Case, assert_refused, file, lines, refusal
from tests.mistakes.optimizer_cases import AVERAGES, OPTIMIZERS, SCHEDULES
from tests.mistakes.pacing_cases import BUDGETS, FREEZING
from tests.mistakes.test_folds import RECIPE as CROSSVAL
from tests.mistakes.test_folds import ROWS as LABELLED

CASES = {
    f"{table}: {name}": case
    for table, cases in (
        ("freeze", FREEZING),
        ("budget", BUDGETS),
        ("optimizer", OPTIMIZERS),
        ("average", AVERAGES),
        ("schedule", SCHEDULES),
    )
    for name, case in cases.items()
}
ALIKE = (
    "freeze: policy",
    "freeze: all layers",
    "freeze: all layers of a sweep",
    "freeze: more than all layers of folds",
    "freeze: all layers of a student",
    "freeze: layers of peers",
    "freeze: two stacks",
    "budget: no Slurm job",
    "budget: less than a step",
    "optimizer: paged on a CPU",
    "optimizer: orthogonal vectors",
)
"""Of each place where `check` and `run` refuse, one; the others are made with one verb."""


@pytest.fixture(autouse=True)
def world(folder: Path, encoder_decoder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside what every mistake finds: a cross-validation and an encoder-decoder; and weights that nobody may read."""
    file("cv.yaml", CROSSVAL.replace("rows.jsonl", "labelled.jsonl"))(folder)
    lines(LABELLED, "labelled.jsonl")(folder)
    (folder / "t5").symlink_to(encoder_decoder)

    def read(*_: object, **__: object) -> None:
        raise AssertionError("weights are read")

    monkeypatch.setattr("workbench.models.backbones.load", read)


def _command(verb: str, words: str) -> str:
    return f"{verb} {words}" if words.startswith("cv.yaml") else f"{verb} my.yaml {words}"


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_mistake_is_told(
    case: tuple[str, str, str], folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words, place, cure = case
    if told := refusal(_command("", words)):
        assert place in told and cure in told, told
    else:
        assert_refused(Case(_command("run", words), place, cure), folder, monkeypatch, capsys)


@pytest.mark.parametrize("verb", ["check", "run"])
@pytest.mark.parametrize("name", ALIKE)
def test_check_and_run_refuse_alike(
    name: str, verb: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words, place, cure = CASES[name]
    assert_refused(Case(_command(verb, words), place, cure), folder, monkeypatch, capsys)


@pytest.mark.parametrize(
    ("package", "name", "cure"),
    [
        ("pytorch_optimizer", "lion", "pip install 'peft-workbench[optimizers]'"),
        ("bitsandbytes", "adamw8bit", "pip install bitsandbytes"),
    ],
)
def test_an_optimizer_that_is_not_installed_is_told(
    package: str,
    name: str,
    cure: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    for verb in ("check", "run"):
        case = Case(f"{verb} my.yaml optimizer.name={name}", f"optimizer.name={name}", cure)
        assert_refused(case, folder, monkeypatch, capsys)
