"""A student learns what its teacher writes, and the run says whether that helped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import workbench
from tests.fake_teacher import FakeServer, answered, server
from tests.recipes.over.test_distill import _config, _run
from tests.run_files import read_lines, read_losses, read_metrics, read_scores, write_lines
from tests.stopping import stop_after
from workbench.config import RunConfig
from workbench.errors import Stopped
from workbench.recipes.verbs.plans.plan import plan
from workbench.report import run_record, teacher_worth

__all__ = ["server"]
pytestmark = pytest.mark.slow


def _rows(path: Path, answer: str, *, start: int = 0, count: int = 48) -> Path:
    numbers = range(start, start + count)
    return write_lines(path, ({"question": f"What comes after {n}?", "answer": answer} for n in numbers))


def _taught(stories: str, rows: Path, teacher: dict[str, Any], **changes: Any) -> RunConfig:
    answers = {"max_new_tokens": 8, **changes.pop("answers", {})}
    train = {"steps": None, "epochs": 2, "learning_rate": 1e-2}
    distill = {"teacher": teacher, "answers": answers, **changes.pop("distill", {})}
    return _config(stories, rows, train=train, distill=distill, **changes)


def test_the_control_has_the_same_rows_and_steps(short_stories: str, trained: Path, tmp_path: Path) -> None:
    """A teacher that is loaded here writes two answers to a prompt, of which different ones are learnt."""
    rows = _rows(tmp_path / "rows.jsonl", "One more.", count=24)
    answers = {"n": 2, "to": "accepted", "temperature": 0.9, "max_new_tokens": 40}
    run = _run(_taught(short_stories, rows, {"id": str(trained)}, answers=answers), tmp_path / "run")
    lines = read_lines(run / "answers.jsonl")
    assert lines and not list(run.glob(".*unfinished*"))
    places = [line["place"] for line in lines]
    assert len(set(places)) <= 24 and all(place.startswith("rows.jsonl, row ") for place in places)
    ours, theirs = (read_metrics(each) for each in (run, run / "control"))
    assert len(ours) == len(theirs) == -(-len(lines) // 8) * 2
    assert read_losses(run) != read_losses(run / "control")
    (one,) = [each for each in read_scores(run) if each == "control"]
    assert read_scores(run)[one] == read_scores(run / "control")["after"]


@pytest.mark.parametrize(
    ("own", "written", "verdict"), [("No idea.", "One.", "helped"), ("One.", "No idea.", "harmed")]
)
def test_the_verdict_is_right(
    server: FakeServer, short_stories: str, tmp_path: Path, own: str, written: str, verdict: str
) -> None:
    server.behave = lambda number, time, handler: answered(number, 0, content=written)
    rows = _rows(tmp_path / "rows.jsonl", own)
    held_out = _rows(tmp_path / "held_out.jsonl", "One.", start=100, count=30)
    data = {"train": str(rows), "held_out": str(held_out), "max_tokens": 64}
    config = _taught(
        short_stories, rows, {"id": "teacher", "url": server.url}, data=data, evaluate={"every": None, "answers": 30}
    )
    run = _run(config, tmp_path / "run")
    found = teacher_worth.worth(run_record.read(run))
    assert found is not None and found.verdict == verdict
    assert "on the answers of the data" in found.sentence and found.sentence in (run / "report.html").read_text()


def test_a_stopped_run_asks_for_nothing_twice(server: FakeServer, short_stories: str, tmp_path: Path) -> None:
    rows = _rows(tmp_path / "rows.jsonl", "One more.", count=24)
    config = _taught(short_stories, rows, {"id": "teacher", "url": server.url}, distill={"control": False})
    whole = _run(config, tmp_path / "whole")
    count = len(server.asked)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stopped):
        stop_after(patch, 2)
        _run(config, tmp_path / "again")
    again = workbench.run(config, out=tmp_path / "again", resume=True, quiet=True)
    assert read_losses(again) == read_losses(whole) and len(server.asked) == 2 * count


def test_check_and_plan_ask_for_no_answer(server: FakeServer, short_stories: str, tmp_path: Path) -> None:
    config = _taught(short_stories, _rows(tmp_path / "rows.jsonl", "One."), {"id": "teacher", "url": server.url})
    (first, *_) = workbench.check(config).notes
    assert first.startswith("Teacher: teacher at http://127.0.0.1") and "writes 1 answer " in first
    assert plan(config).needed > 0
    assert not server.asked
