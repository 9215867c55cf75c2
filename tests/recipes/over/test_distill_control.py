"""A distillation says what its teacher was worth: the control is the plain run, and verdicts are right."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import workbench
from tests.recipes.over.test_distill import FULL, _config, _run
from tests.run_files import read_losses, read_scores, write_lines
from tests.stopping import stop_after
from workbench.config.model_heads import TEXT
from workbench.config.sections.distill_config import DistillConfig
from workbench.distillation import teacher_sources
from workbench.errors import ConfigError, Stopped
from workbench.recipes.over import distill_control
from workbench.report import run_record, teacher_worth
from workbench.runs.run_directory import Run
from workbench.training.callbacks import Silent


class Said(Silent):
    """Keeps what a run says."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


KINDS = {"apple": "red", "sky": "blue", "tree": "green", "night": "black", "snow": "white", "rain": "grey"}


def _questions(path: Path, *, shuffled: bool = False) -> Path:
    """120 questions with one right answer each; or with another one's."""
    kinds = [list(KINDS)[number % len(KINDS)] for number in range(120)]
    answers = [KINDS[kind] for kind in kinds]
    if shuffled:
        random.Random(0).shuffle(answers)
    pairs = zip(kinds, answers, strict=True)
    rows = [{"prompt": f"{n}. The {kind} is", "completion": f" {answer}"} for n, (kind, answer) in enumerate(pairs)]
    return write_lines(path, rows)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _questions(tmp_path_factory.mktemp("rows") / "rows.jsonl")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory, short_stories: str, rows: Path) -> Path:
    train = {"steps": 10, "learning_rate": 1e-3}
    config = _config(short_stories, rows, recipe="sft", adapter=FULL, train=train)
    return _run(config, tmp_path_factory.mktemp("teacher") / "run")


def _taught(stories: str, rows: Path, teacher: Path, **distill: Any) -> Any:
    train = {"steps": 12, "learning_rate": 5e-3}
    return _config(stories, rows, train=train, distill={"teacher": {"id": str(teacher)}, "alpha": 0.9, **distill})


def test_the_control_is_the_plain_run_and_alpha_0_asks_nobody(
    short_stories: str, rows: Path, teacher: Path, tmp_path: Path
) -> None:
    plain = _run(_config(short_stories, rows, recipe="sft", train={"steps": 12, "learning_rate": 5e-3}), tmp_path / "p")
    taught = _run(_taught(short_stories, rows, teacher, control=True), tmp_path / "taught")
    silent = _run(_taught(short_stories, rows, teacher, alpha=0.0), tmp_path / "silent")
    assert read_losses(taught / "control") == read_losses(silent) == read_losses(plain) != read_losses(taught)
    scores = read_scores(taught)
    assert scores["control"] == read_scores(plain)["after"] == read_scores(silent)["after"]
    assert "teacher" in scores and "teacher" not in read_scores(silent)
    assert workbench.evaluate(taught / "control", [])["loss"] == pytest.approx(scores["control"]["loss"], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_a_teacher_that_was_trained_on_held_out_rows_is_told(
    short_stories: str, rows: Path, teacher: Path, tmp_path: Path, seed: int
) -> None:
    """Another seed holds out other rows than the teacher's; the same seed the same."""
    other = _taught(short_stories, rows, teacher, control=False).model_copy(update={"seed": seed})
    run = _run(other, tmp_path / "run")
    noted, page = (run / "manifest.json").read_text(), (run / "report.html").read_text()
    assert ("trained_on" in noted) == ("its score is too good" in page) == bool(seed)


@pytest.mark.nightly
@pytest.mark.slow
def test_a_teacher_of_wrong_labels_is_refused_or_told_to_harm(rows: Path, tmp_path: Path) -> None:
    learnt = _config("starter", rows, recipe="sft", train={"steps": 120, "learning_rate": 4e-3}, batch={"size": 16})
    wrong = learnt.model_copy(update={"data": learnt.data.model_copy(update={"train": str(tmp_path / "wrong.jsonl")})})
    _questions(tmp_path / "wrong.jsonl", shuffled=True)
    good, bad = (str(_run(each, tmp_path / name)) for name, each in (("good", learnt), ("bad", wrong)))
    workbench.merge(good, out=tmp_path / "merged")
    distill: dict[str, Any] = {"teacher": {"id": bad}, "alpha": 1.0}
    config = _config(str(tmp_path / "merged"), rows, train={"steps": 30, "learning_rate": 5e-3}, distill=distill)
    with pytest.raises(ConfigError, match=r"scores worse .* than the student before .* distill.control=true"):
        _run(config, tmp_path / "refused")
    measured = config.distill.model_copy(update={"control": True})
    run = _run(config.model_copy(update={"distill": measured}), tmp_path / "run")
    record = run_record.read(run)
    found = teacher_worth.worth(record)
    assert found is not None and found.verdict == "harmed"
    difference = record.scores["after"]["loss"] - record.scores["control"]["loss"]
    assert difference > 0 and f"({difference:+.4f}; 95 %" in found.sentence
    page = (run / "report.html").read_text()
    assert found.sentence in page and "Labels alone" in page


@pytest.mark.parametrize(
    ("right", "of_control", "verdict"),
    [(0.9, 0.5, "helped"), (0.5, 0.9, "harmed"), (0.6, 0.6, "no difference")],
)
def test_a_verdict_is_that_of_the_paired_rows(right: float, of_control: float, verdict: str, tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    for folder, share in ((tmp_path, right), (tmp_path / "control", of_control)):
        folder.mkdir(exist_ok=True)
        said = draw.random(200) < share
        table = pd.DataFrame({"row": [f"row {n}" for n in range(200)], "label": "a", "predicted": "a", "right": said})
        table.to_parquet(folder / "predictions.parquet")
        scores = {"accuracy": float(said.mean()), "loss": 0.5}
        (folder / "scores.json").write_text(json.dumps({"before": scores, "after": scores, "control": scores}))
        (folder / "config.yaml").write_text("recipe: classify\n")
        (folder / "manifest.json").write_text("{}")
    found = teacher_worth.worth(run_record.read(tmp_path))
    assert found is not None and found.verdict == verdict and "200 rows" in found.sentence


@pytest.mark.parametrize(("sure", "verdict"), [(0.9, "helped"), (0.4, "harmed"), (0.6, "no difference")])
def test_where_accuracy_does_not_decide_the_loss_of_the_same_rows_does(
    sure: float, verdict: str, tmp_path: Path
) -> None:
    """Both are right about the same rows; they differ in how sure they are of them."""
    draw = np.random.default_rng(0)
    for folder, share in ((tmp_path, sure), (tmp_path / "control", 0.6)):
        folder.mkdir(exist_ok=True)
        p_N = np.clip(share + draw.normal(0, 0.02, 200), 0.34, 0.98)
        shares = {"p_a": p_N, "p_b": 0.6 * (1 - p_N), "p_c": 0.4 * (1 - p_N)}
        table = pd.DataFrame({"row": [f"row {n}" for n in range(200)], "label": "a", "predicted": "a", **shares})
        table.to_parquet(folder / "predictions.parquet")
        scores = {"accuracy": 1.0, "loss": float(-np.log(p_N).mean())}
        (folder / "scores.json").write_text(json.dumps({"after": scores, "control": scores}))
        (folder / "config.yaml").write_text("recipe: classify\n")
        (folder / "manifest.json").write_text("{}")
    found = teacher_worth.worth(run_record.read(tmp_path))
    own = run_record.read(tmp_path).scores["after"]["loss"]
    assert found is not None and found.verdict == verdict
    assert f"held-out loss {own:.4g}" in found.sentence and "held-out accuracy 1, on labels alone 1" in found.sentence


@pytest.mark.parametrize(
    ("teacher", "refused"),
    [
        ({"accuracy": 0.06, "accuracy_low": 0.04, "accuracy_high": 0.09, "loss": 3.3}, True),
        ({"accuracy": 0.01, "accuracy_low": 0.0, "accuracy_high": 0.03, "loss": 2.9}, True),
        ({"accuracy": 0.06, "accuracy_low": 0.04, "accuracy_high": 0.09, "loss": 2.9}, False),
        ({"accuracy": 0.20, "accuracy_low": 0.15, "accuracy_high": 0.25, "loss": 3.3}, False),
    ],
)
def test_a_teacher_is_refused_that_is_right_by_chance_and_surer_than_guessing(
    teacher: dict[str, float], refused: bool, short_stories: str, rows: Path
) -> None:
    config = _config(short_stories, rows, distill={"teacher": {"id": short_stories}})
    start = {"accuracy": 0.05, "loss": 3.0}
    if not refused:
        distill_control.require_useful(config, "t", teacher, start)
        return
    with pytest.raises(ConfigError, match=r"scores worse .* than guessing: accuracy .*distill.control=true"):
        distill_control.require_useful(config, "t", teacher, start)


@pytest.mark.parametrize(
    ("teacher", "told"),
    [
        ({"accuracy": 0.02, "accuracy_low": 0.01, "loss": 3.5}, True),
        ({"accuracy": 0.06, "accuracy_low": 0.03, "loss": 2.99}, True),
        ({"accuracy": 0.06, "accuracy_low": 0.03, "loss": 2.5}, False),
        ({"accuracy": 0.20, "accuracy_low": 0.15, "loss": 3.1}, False),
    ],
)
def test_a_teacher_that_guesses_is_told(teacher: dict[str, float], told: bool, tmp_path: Path) -> None:
    """The first is that of CLINC150 whose labels were shuffled: 3 % above the loss of guessing, and not refused."""
    said, run = Said(), Run(tmp_path, None, resumed=False)
    distill_control.tell_guessing("t", teacher, {"accuracy": 0.05, "loss": 3.0}, run, said)
    assert bool(said.lines) is told
    assert run.manifest.get("told") == (said.lines or None)


@pytest.mark.slow
@pytest.mark.nightly(but=["5"])
@pytest.mark.parametrize("steps", [5, 12])
def test_a_run_stopped_in_its_control_or_after_it_ends_as_if_it_had_not_been(
    steps: int, short_stories: str, rows: Path, teacher: Path, tmp_path: Path
) -> None:
    config = _taught(short_stories, rows, teacher, control=True)
    whole = _run(config, tmp_path / "whole")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stopped):
        stop_after(patch, steps)
        workbench.run(config, out=tmp_path / "cut")
    assert not (tmp_path / "cut" / "adapter").exists()
    workbench.run(config, out=tmp_path / "cut", resume=True, quiet=True)
    cut, uncut = read_scores(tmp_path / "cut"), read_scores(whole)
    times = cut.pop("costs"), uncut.pop("costs")
    assert cut == uncut and times[0].keys() == times[1].keys()
    assert read_losses(tmp_path / "cut" / "control") == read_losses(whole / "control")


def test_the_control_comes_by_itself_where_the_teacher_is_far_larger(
    short_stories: str, rows: Path, teacher: Path
) -> None:
    config = _taught(short_stories, rows, teacher)
    source = teacher_sources.find(config.distill.teacher, config.model)

    def wanted(**distill: Any) -> bool:
        section = DistillConfig.model_validate({**config.distill.model_dump(), **distill})
        return distill_control.wanted(config.model_copy(update={"distill": section}), source, config.model, TEXT)

    assert not wanted() and wanted(control=True) and not wanted(control=False)
    assert wanted(on_policy={"share": 0.5}) and not wanted(alpha=0.0, on_policy={"share": 0.5})
    many = replace(source, adapters=(Path("a"),) * 7)
    assert distill_control.wanted(config, many, config.model, TEXT)


@pytest.mark.parametrize(
    ("distill", "share"),
    [
        ({"control": False}, 0.0),
        ({"control": True}, 6 / (6 + 2)),
        ({"control": True, "cache": {"folder": "said"}}, 1.0),
        ({"control": True, "answers": {}, "alpha": 0.5}, 1.0),
    ],
)
def test_a_plan_counts_the_steps_of_the_control(
    distill: dict[str, Any], share: float, short_stories: str, rows: Path
) -> None:
    """A student as large as its teacher: 6 operations for each parameter and token to train, and 2 to be asked."""
    config = _config(short_stories, rows, distill={"teacher": {"id": short_stories}, **distill})
    source = teacher_sources.find(config.distill.teacher, config.model)
    assert distill_control.share_of_step(config, source, config.model, TEXT) == pytest.approx(share)
