"""A run for each value of a key: mistakes in any come first, and all stand side by side in the end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import workbench
from workbench.cli.each_value import run_each
from workbench.cli.verbs import app
from workbench.errors import WorkbenchError

WORDS = ["data.train=starter/arithmetic_start.jsonl", "data.held_out=0.2", "evaluate.answers=0", "train.steps=2"]


@pytest.mark.parametrize(
    ("each", "told"),
    [
        ("distill.student.layers", "write a key and two different values"),
        ("train.steps=[3]", "write a key and two different values"),
        ("train.steps=[3, 3]", "write a key and two different values"),
        ("train.steps=3", "write a key and two different values"),
        ("train.stps=[3, 4]", "unknown key"),
        ("train.steps=[3, 0]", "expected greater than 0, found 0"),
    ],
)
def test_a_mistake_in_any_value_comes_before_all_runs(
    each: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workbench, "run", lambda *_, **__: pytest.fail("begins"))
    with pytest.raises(WorkbenchError, match=told):
        run_each("sft/quickstart", each, WORDS, out=tmp_path)
    assert not list(tmp_path.iterdir())


def test_each_value_is_the_run_that_it_would_be_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: dict[str, Any] = {}

    def run(config: Any, *, out: Path, **_: Any) -> Path:
        begun[out.name] = config
        return out

    monkeypatch.setattr(workbench, "run", run)
    each = "distill.student.layers=[important-25%, important-50%, [0, 2]]"
    runs = run_each("distill/quickstart", each, ["distill.teacher.id=starter"], out=tmp_path)
    assert [run.parent for run in runs] == [tmp_path] * 3 and len({run.name for run in runs}) == 3
    layers = [config.distill.student.layers for config in begun.values()]
    assert layers == ["important-25%", "important-50%", (0, 2)]


@pytest.mark.nightly
@pytest.mark.slow
def test_students_of_several_sizes_end_side_by_side(tmp_path: Path) -> None:
    words = ["distill.teacher.id=starter", "data.limit=24", "data.held_out=0.2", "train.steps=2", "evaluate.answers=0"]
    each = ["--each", "distill.student.layers=[first-2, first-4]", "--out", str(tmp_path / "sizes")]
    said = CliRunner().invoke(app, ["run", "distill/quickstart", *words, *each], env={"COLUMNS": "200"})
    assert said.exit_code == 0, said.output
    assert "distill.student.layers" in said.output and "first-2" in said.output
    page = (tmp_path / "sizes" / "comparison.html").read_text()
    assert "layers=first-2" in page and "layers=first-4" in page and "first-4" in page
    again = CliRunner().invoke(app, ["run", "distill/quickstart", *words, *each, "--resume"], env={"COLUMNS": "200"})
    assert again.exit_code == 0, again.output


def test_devices_and_copies_are_refused() -> None:
    said = CliRunner().invoke(app, ["run", "sft/quickstart", "--each", "train.steps=[1, 2]", "--devices", "2"])
    assert "Leave --devices and --push out" in str(said.exception)
