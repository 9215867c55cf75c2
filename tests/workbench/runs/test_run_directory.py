"""A run directory holds those of its members, under one lock."""

from __future__ import annotations

import fcntl
import re
import time
from pathlib import Path
from threading import Timer

import pytest

from tests.workbench.training.together import section
from workbench.config import RunConfig
from workbench.config.yaml_text import read_yaml
from workbench.errors import ConfigError, ResumeError
from workbench.runs import metrics_log, run_directory

CONFIG = section()


def test_a_child_is_a_run_of_its_own(tmp_path: Path) -> None:
    run = run_directory.start(tmp_path / "run", CONFIG, resume=False)
    one, other = run.child("members/one"), run.child("members/other")
    metrics_log.append(one.path / metrics_log.METRICS, [{"step": 1}])
    one.note(status="failed")
    assert run.child("members").child("one") is one and not one.resumed
    assert one.path == tmp_path / "run" / "members" / "one" and metrics_log.read(one.path) == [{"step": 1}]
    assert not metrics_log.read(run.path) and not metrics_log.read(other.path) and run.manifest["status"] == "running"
    one.close()  # gives nothing back: the lock is the run's
    for resume in (True, False):
        with pytest.raises(ResumeError, match="another process works on this run"):
            run_directory.start(tmp_path / "run", CONFIG, resume=resume)
    run.close()


def test_a_child_is_resumed_with_its_run_where_it_was_there(tmp_path: Path) -> None:
    run = run_directory.start(tmp_path / "run", CONFIG, resume=False)
    run.child("one").note(status="failed", reason="why")
    (run.child("one").checkpoints / ".step-1.7.unfinished").mkdir(parents=True)
    run.close()
    run = run_directory.start(tmp_path / "run", CONFIG, resume=True)
    assert run.child("one").resumed and run.child("one").manifest == {"status": "failed", "reason": "why"}
    assert not any(run.child("one").checkpoints.iterdir())
    assert not run.child("other").resumed and run.child("other").path.is_dir()
    run.close()


def test_a_run_that_starts_anew_forgets_its_children_unless_they_hold_checkpoints(tmp_path: Path) -> None:
    for checkpoint in (None, "step-00000003"):
        run = run_directory.start(tmp_path / "run", CONFIG, resume=False)
        assert not run.child("one").manifest and not metrics_log.read(run.child("one").path)
        metrics_log.append(run.child("one").path / metrics_log.METRICS, [{"step": 1}])
        run.child("one").note(status="failed")
        run.note(status="failed")
        run.close()
        if checkpoint is not None:
            (run.child("one").checkpoints / checkpoint).mkdir(parents=True)
    with pytest.raises(ResumeError, match="already holds a run"):
        run_directory.start(tmp_path / "run", CONFIG, resume=False)


def test_a_restart_knows_the_run_that_its_launch_began(tmp_path: Path) -> None:
    before = time.time()
    assert not run_directory.began_since(tmp_path / "run", 0.0), "there is none"
    run_directory.start(tmp_path / "run", CONFIG, resume=False).close()
    assert run_directory.began_since(tmp_path / "run", before)
    assert not run_directory.began_since(tmp_path / "run", time.time() + 2), "it was there before"


def test_somebody_who_only_looks_whether_a_run_lives_refuses_nobody(tmp_path: Path) -> None:
    run_directory.start(tmp_path / "run", CONFIG, resume=False).close()
    look = (tmp_path / "run" / "run.lock").open("rb")
    fcntl.flock(look, fcntl.LOCK_SH)
    Timer(0.05, look.close).start()
    run_directory.start(tmp_path / "run", CONFIG, resume=True).close()


def test_a_member_goes_on_with_those_that_it_trains_with_alone(tmp_path: Path) -> None:
    run = run_directory.start(tmp_path / "run", CONFIG, resume=False)
    member = run.child("members/one").path
    run.close()
    (member / "config.yaml").write_bytes((tmp_path / "run" / "config.yaml").read_bytes())
    with pytest.raises(ResumeError, match=f"Resume them together: workbench run .* --out {tmp_path / 'run'} --resume"):
        run_directory.start(member, CONFIG, resume=True)
    assert run_directory.whole(member) == tmp_path / "run" == run_directory.whole(tmp_path / "run")
    assert run_directory.whole(tmp_path / "members" / "one") == tmp_path / "members" / "one", "a run in such a folder"


def test_the_configuration_of_a_run_has_no_sections_of_other_tasks(tmp_path: Path) -> None:
    config = RunConfig.model_validate({"recipe": "sft", "model": {"id": "starter"}, "data": {"train": "rows.jsonl"}})
    run_directory.start(tmp_path / "run", config, resume=False).close()
    written = read_yaml(tmp_path / "run" / "config.yaml")
    assert not written.keys() & {"prefer", "reinforce", "classes", "sweep", "distill"} and "train" in written
    assert RunConfig.model_validate(written) == config


def test_an_adapter_where_a_run_is_wanted_is_told_apart(tmp_path: Path) -> None:
    for folder in (tmp_path / "of another", tmp_path / "run/adapter"):
        folder.mkdir(parents=True)
        (folder / "adapter_config.json").write_text("{}")
    (tmp_path / "run/config.yaml").write_text("recipe: sft\n")
    with pytest.raises(ConfigError, match=r"Write `workbench adopt '.*of another' --out RUN`"):
        run_directory.shipped_values(tmp_path / "of another")
    with pytest.raises(ConfigError, match=rf"the adapter of a run\. Write {re.escape(str(tmp_path / 'run'))}\.$"):
        run_directory.shipped_values(tmp_path / "run/adapter")
    with pytest.raises(ConfigError, match="ls runs"):
        run_directory.shipped_values(tmp_path)
