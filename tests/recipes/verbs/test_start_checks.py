"""A run that would not fit is refused before it begins; one that plainly fits is not planned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers.utils import hub

import workbench
from workbench.errors import ConfigError
from workbench.recipes.load import load
from workbench.recipes.verbs import check, start_checks
from workbench.recipes.verbs.plans import plan

SHORT = ["data.limit=60", "data.held_out=0.1", "train.steps=2", "train.epochs=null", "evaluate.answers=0"]


def test_a_run_that_would_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(start_checks, "available", lambda _: 60_000_000)
    with pytest.raises(ConfigError, match=r"would need .* and 60\.0 MB are free") as refused:
        workbench.run("sft/full", SHORT, out=tmp_path / "run", quiet=True)
    assert "activations" in str(refused.value) and "model.weights=auto" in str(refused.value)
    assert not (tmp_path / "run").exists()


def test_one_that_fits_narrowly_is_planned_and_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stories: str
) -> None:
    planned: list[Any] = []

    def planning(*args: Any, **kwargs: Any) -> Any:
        planned.append(plan_of(*args, **kwargs))
        return planned[-1]

    plan_of = plan.plan
    monkeypatch.setattr(plan, "plan", planning)
    monkeypatch.setattr(start_checks, "available", lambda _: 400_000_000)
    monkeypatch.setattr(start_checks, "PLAIN", 0.01)
    words = [f"model.id={stories}", "adapter={method: full}", "data.max_tokens=128", *SHORT]
    workbench.run("sft/quickstart", words, out=tmp_path / "run", quiet=True)
    assert len(planned) == 1 and 0 < planned[0].peak < 400_000_000


def test_one_that_plainly_fits_is_not_planned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stories: str) -> None:
    monkeypatch.setattr(plan, "plan", None)
    workbench.run(
        "sft/quickstart", [f"model.id={stories}", "data.max_tokens=128", *SHORT], out=tmp_path / "run", quiet=True
    )
    assert (tmp_path / "run" / "report.html").exists()


@pytest.mark.slow
def test_a_student_of_its_teacher_is_looked_for_nowhere_else(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stories: str
) -> None:
    """`teacher` is no name of a model on the hub: asking there took 40 s where there is no network."""
    asked: list[str] = []

    def looking(path_or_repo_id: Any, *args: Any, **kwargs: Any) -> Any:
        asked.append(str(path_or_repo_id))
        return found(path_or_repo_id, *args, **kwargs)

    found = hub.cached_files
    monkeypatch.setattr(hub, "cached_files", looking)
    words = ["model.id=teacher", f"distill.teacher.id={stories}", *SHORT]
    check.check(load("distill/quickstart", words))
    workbench.run("distill/quickstart", words, out=tmp_path / "run", quiet=True)
    assert asked and "teacher" not in asked and all(Path(name).is_absolute() for name in asked)


def test_a_student_needs_at_most_what_its_teacher_would(monkeypatch: pytest.MonkeyPatch, stories: str) -> None:
    words = [f"distill.teacher.id={stories}", "distill.student.layers=all", "adapter={method: full}", *SHORT]
    student = load("distill/quickstart", ["model.id=teacher", *words])
    named = load("distill/quickstart", [f"model.id={stories}", *words])
    assert start_checks.state_bytes(student) == start_checks.state_bytes(named) > 3_000_000
    monkeypatch.setattr(start_checks, "available", lambda _: 1_000_000)
    with pytest.raises(ConfigError, match=r"would need .* and 1\.0 MB are free"):
        check.check(student)


def test_what_is_wrong_with_a_run_is_for_the_run_to_say(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(start_checks, "available", lambda _: 1)
    with pytest.raises(ConfigError, match="is below the longest example"):
        words = ["adapter={method: full}", "batch.tokens_per_device=8", *SHORT]
        workbench.run("sft/quickstart", words, out=tmp_path / "run", quiet=True)
