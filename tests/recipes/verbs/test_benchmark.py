"""Tasks of lm-eval, asked of a finished run: the same scores as lm-eval's own command line gives its merge."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import workbench
from workbench.cli import render
from workbench.cli.verbs import app
from workbench.errors import ConfigError, DataError
from workbench.evaluation.benchmarks import Benchmark, Metric, Paired, require
from workbench.recipes.verbs.benchmark import benchmark
from workbench.recipes.verbs.merge import merge

TASK = """\
task: sums
dataset_path: json
dataset_kwargs:
  data_files:
    test: {rows}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}} is"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: gold
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
"""


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty sums with three answers each."""
    folder = tmp_path_factory.mktemp("tasks")
    rows = [
        {"question": f"{a} plus {b}", "choices": [str(a + b), str(a + b + 3), str(a + 7)], "gold": 0}
        for a in range(1, 9)
        for b in range(1, 6)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "sums.yaml").write_text(TASK.format(rows=folder / "rows.jsonl"))
    return folder / "sums.yaml"


@pytest.fixture(scope="module")
def run(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run that may be written to."""
    return Path(shutil.copytree(trained, tmp_path_factory.mktemp("asked") / "run"))


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # lm-eval's own
def test_a_run_and_its_merge_have_the_scores_that_lm_eval_gives(
    run: Path, task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As its command line says them, which runs here: a process would import lm-eval a second time."""
    from lm_eval.__main__ import cli_evaluate

    (found,) = benchmark(run, [str(task)])
    merge(run, out=tmp_path / "merged", weights="float32")
    command = ["lm_eval", "run", "--model", "hf", "--tasks", str(task)]
    command += ["--model_args", f"pretrained={tmp_path / 'merged'},dtype=float32", "--device", "cpu"]
    command += ["--output_path", str(tmp_path / "theirs")]
    monkeypatch.setattr(sys, "argv", command)
    cli_evaluate()
    (file,) = (tmp_path / "theirs").rglob("results*.json")
    theirs = json.loads(file.read_text())["results"]["sums"]["acc,none"]
    assert len(found.after.documents) == 40
    assert found.after.value == theirs


def test_a_task_is_asked_before_and_after_and_kept(run: Path, task: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = CliRunner().invoke(app, ["evaluate", str(run), "--tasks", str(task), "--limit", "6"])
    assert done.exit_code == 0 and "sums" in done.output
    scores = json.loads((run / "scores.json").read_text())
    assert {"before", "after"} < scores.keys()
    kept = scores["tasks"]
    (row,) = kept["rows"]
    assert kept["limit"] == 6 and row["documents"] == 6 and row["difference"] == row["after"] - row["before"]
    assert "Tasks of lm-eval" in (run / "report.html").read_text()
    render.outcome(run)  # which knows scores of rows alone
    assert "tasks" not in capsys.readouterr().out


def test_against_itself_no_document_differs(run: Path, task: Path) -> None:
    before = (run / "scores.json").read_bytes()
    (found,) = benchmark(run, [str(task)], limit=4, against=run)
    assert found.difference == 0 and found.interval is None and found.before.documents == found.after.documents
    assert (run / "scores.json").read_bytes() == before, "its tasks are about the backbone"


def test_the_interval_is_students_of_the_paired_differences() -> None:
    before = Metric("t", "acc", 0.5, True, {"a": 1.0, "b": 0.0, "c": 0.0, "d": 1.0})
    after = Metric("t", "acc", 0.75, True, {"a": 1.0, "b": 1.0, "c": 0.0, "d": 1.0})
    assert Paired(before, after).difference == 0.25
    low, high = Paired(before, after).interval or (0.0, 0.0)
    assert (low + high) / 2 == pytest.approx(0.25) and high - low == pytest.approx(2 * 3.182446 * 0.5 / 2, rel=1e-5)
    other = Metric("t", "acc", 0.75, True, {"a": 1.0, "x": 1.0, "c": 0.0, "d": 1.0})
    assert Paired(before, other).interval is None  # not the same documents


@pytest.mark.parametrize(
    "asked,reason",
    [
        pytest.param(
            Benchmark(("no_such_task",)), "knows no such task", marks=pytest.mark.nightly
        ),  # reads 10,000 files
        (Benchmark(("none.yaml",)), "no such file"),
        (Benchmark(("a.yaml",), limit=0), "--limit must be at least 1"),
        (Benchmark(("a.yaml",), shots=-1), "--shots at least 0"),
    ],
)
def test_tasks_that_do_not_exist_are_refused_before_a_model_is_loaded(asked: Benchmark, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        require(asked)


def test_rows_that_are_missing_are_told_by_the_task(run: Path, task: Path, tmp_path: Path) -> None:
    (tmp_path / "lost.yaml").write_text(TASK.format(rows=tmp_path / "lost.jsonl"))
    with pytest.raises(DataError, match=r"lost\.yaml: lm-eval could not ask it: FileNotFoundError"):
        benchmark(run, [str(tmp_path / "lost.yaml")])


@pytest.mark.parametrize(
    "words,reason",
    [
        (["--limit", "3"], "Write --tasks NAME as well"),
        (["--tasks", ","], "expected a name"),
        (["--tasks", "a", "data.test=rows.jsonl"], "is read as it was trained"),
    ],
)
def test_words_that_do_not_go_together_are_refused(run: Path, words: list[str], reason: str) -> None:
    done = CliRunner().invoke(app, ["evaluate", str(run), *words], standalone_mode=False)
    assert isinstance(done.exception, ConfigError) and reason in str(done.exception)


def test_a_run_that_writes_no_text_is_refused(tmp_path: Path) -> None:
    rows = [{"text": f"word {n} {n % 3}", "label": str(n % 3)} for n in range(60)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [f"data.train={tmp_path / 'rows.jsonl'}", "data.held_out=0.2", "train.steps=1", "train.epochs=null"]
    classifier = workbench.run("classify/quickstart", words, out=tmp_path / "run", quiet=True)
    with pytest.raises(ConfigError, match="recipe classify trains no model that writes text"):
        benchmark(classifier, ["a.yaml"])
