from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from workbench.config import RunConfig
from workbench.config.budget_config import BudgetConfig
from workbench.errors import ConfigError, FileError
from workbench.runs import run_clock


def test_a_run_without_a_limit_has_no_clock(tmp_path: Path) -> None:
    assert run_clock.start(BudgetConfig(), tmp_path / "clock.json", began=0.0) is None
    assert run_clock.start(BudgetConfig(tokens=100), tmp_path / "clock.json", began=0.0) is None
    with run_clock.kept(None, tmp_path / "clock.json"):
        pass
    assert not (tmp_path / "clock.json").exists()


def test_time_counts_from_the_beginning(tmp_path: Path) -> None:
    timer = run_clock.start(BudgetConfig(money=1, price=36), tmp_path / "clock.json", began=time.monotonic() - 30)
    assert timer is not None
    assert timer.limit_s == 100
    assert timer.spent == pytest.approx(30, abs=1)


def test_what_is_spent_is_noted_while_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_clock, "BEAT", 0.01)
    file = tmp_path / "clock.json"
    first = run_clock.start(BudgetConfig(time=100.0), file, began=time.monotonic() - 40)
    with run_clock.kept(first, file):
        deadline = time.monotonic() + 10
        while not file.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert 40 <= json.loads(file.read_text())["spent_s"] < 55
    second = run_clock.start(BudgetConfig(time=100.0), file, began=time.monotonic() - 7)
    assert second is not None
    assert 47 <= second.spent < 65
    assert [path.name for path in tmp_path.iterdir()] == ["clock.json"]


def test_the_last_note_is_written_when_the_run_fails(tmp_path: Path) -> None:
    file = tmp_path / "clock.json"
    timer = run_clock.start(BudgetConfig(time=100.0), file, began=time.monotonic())
    with pytest.raises(KeyError), run_clock.kept(timer, file):
        raise KeyError
    assert json.loads(file.read_text())["limit_s"] == 100


def test_a_damaged_note_is_told(tmp_path: Path) -> None:
    (tmp_path / "clock.json").write_text('{"spent_s": 4')
    with pytest.raises(FileError, match=r"clock\.json: damaged"):
        run_clock.start(BudgetConfig(time=100.0), tmp_path / "clock.json", began=0.0)


def test_a_slurm_job_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 600))
    began = time.monotonic() - 20
    timer = run_clock.start(BudgetConfig(time="slurm"), tmp_path / "clock.json", began=began)
    assert timer is not None
    assert timer.limit_s - timer.spent == pytest.approx(600, abs=2)
    shorter = run_clock.start(BudgetConfig(time="slurm", energy=1, power=36), tmp_path / "clock.json", began=began)
    assert shorter is not None
    assert shorter.limit_s == 100


@pytest.mark.parametrize("end", [None, "", "tomorrow"])
def test_outside_of_slurm_the_cure_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str | None) -> None:
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)
    if end is not None:
        monkeypatch.setenv("SLURM_JOB_END_TIME", end)
    with pytest.raises(ConfigError, match=r"Write the time itself, such as budget\.time=90m"):
        run_clock.start(BudgetConfig(time="slurm"), tmp_path / "clock.json", began=0.0)


@pytest.mark.parametrize(
    ("section", "cure"),
    [
        ({"time": 60}, r"Write budget\.time=120 or more"),
        ({"energy": 1, "power": 60}, r"Write budget\.energy=2 or more"),
        ({"money": 1, "price": 60}, r"Write budget\.money=2 or more"),
        ({"time": 60, "money": 1, "price": 60}, r"Write budget\.time=120 and budget\.money=2 or more"),
        ({"time": 900, "money": 1, "price": 60}, r"Write budget\.money=2 or more"),
    ],
)
def test_what_is_too_little_is_told_in_its_own_unit(tmp_path: Path, section: dict[str, Any], cure: str) -> None:
    timer = run_clock.start(BudgetConfig.model_validate(section), tmp_path / "clock.json", began=time.monotonic() - 100)
    assert timer is not None and timer.limit_s == 60
    with pytest.raises(ConfigError, match=cure):
        timer.require_time("anything")


def test_a_process_knows_when_it_began() -> None:
    code = "import time; time.sleep(1); from workbench.runs import run_clock; print(run_clock.process_began())"
    before = time.monotonic()
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert before - 0.1 <= float(told.stdout) <= time.monotonic() - 1


def test_plans_count_what_each_set_and_model_costs() -> None:
    base: dict[str, Any] = {"recipe": "sft", "data": {"train": "rows.jsonl"}}
    plain = run_clock.plan(RunConfig.model_validate(base), held_out=100, test=0)
    tested = run_clock.plan(RunConfig.model_validate(base), held_out=100, test=50)
    assert (plain.after["scoring"], tested.after["scoring"]) == (1.0, 1.5)
    assert (plain.after["answers"], tested.after["answers"]) == (1.0, 2.0)
    assert plain.after["evaluation"] == 1
    never = run_clock.plan(RunConfig.model_validate({**base, "evaluate": {"every": None}}), held_out=100, test=0)
    assert never.after["evaluation"] == 0
    averaged = RunConfig.model_validate({**base, "average": {"method": "ema"}})
    assert run_clock.plan(averaged, held_out=100, test=0).after["evaluation"] == 2
    assert run_clock.plan(RunConfig.model_validate(base), held_out=100, test=0, peers=3).after["evaluation"] == 6
