"""A copy of a run at an address: whole at each moment, and another machine goes on from it to the same bits."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

import workbench
from workbench.errors import FileError, ResumeError
from workbench.runs import addresses, files, remote_copy


def checkpoint(run: Path, name: str, step: int) -> None:
    """Write or replace a checkpoint, as a run does."""
    with files.new_folder(run / "checkpoints" / name, durable=False) as aside:
        for each in ("optimizer.safetensors", "trainable.safetensors", "state.json"):
            (aside / each).write_text(str(step))


def advance(run: Path, step: int) -> None:
    """What a run writes between two checkpoints, of which it keeps two."""
    run.mkdir(exist_ok=True)
    if not (run / "config.yaml").exists():
        (run / "config.yaml").write_text("recipe: sft")
    with (run / "metrics.jsonl").open("a") as file:
        file.write(f"{step}\n")
    checkpoint(run, "best", step)
    checkpoint(run, f"step-{step:08d}", step)
    shutil.rmtree(run / "checkpoints" / f"step-{step - 2:08d}", ignore_errors=True)


def steps(run: Path) -> list[int]:
    """The checkpoints of a run, each of which is whole, with the best and metrics that are no older."""
    found = sorted((run / "checkpoints").glob("step-*"))
    for path in found:
        step = str(int(path.name.removeprefix("step-")))
        assert {each.name: each.read_text() for each in path.iterdir()} == {
            "optimizer.safetensors": step,
            "trainable.safetensors": step,
            "state.json": step,
        }
    numbers = [int(path.name.removeprefix("step-")) for path in found]
    best = {each.read_text() for each in (run / "checkpoints/best").iterdir()}
    assert len(best) == 1 and int(best.pop()) >= max(numbers)
    assert int((run / "metrics.jsonl").read_text().split()[-1]) >= max(numbers)
    return numbers


@pytest.mark.parametrize("cut", range(11))
def test_a_copy_that_is_cut_off_leaves_the_state_before(
    cut: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, address = tmp_path / "run", f"file://{tmp_path}/there"
    copy = remote_copy._RemoteCopy(run, address)
    for step in (1, 2, 3):
        advance(run, step)
    copy.update()
    for step in (4, 5):
        advance(run, step)
    left, put = [cut], addresses.put

    def cut_off(files_to: Mapping[str, str]) -> None:
        if not left[0]:
            raise FileError("the network is gone")
        left[0] -= 1
        put(files_to)

    with monkeypatch.context() as patch:
        patch.setattr(addresses, "put", cut_off)
        if cut < 10:  # nine files of checkpoints, and metrics
            with pytest.raises(FileError):
                copy.update()
        else:
            copy.update()
    remote_copy.fetch(address, tmp_path / "elsewhere")
    assert steps(tmp_path / "elsewhere") == ([2, 3] if cut < 10 else [4, 5])
    remote_copy._RemoteCopy(run, address).update()  # by another process
    remote_copy.fetch(address, tmp_path / "after")
    assert steps(tmp_path / "after") == [4, 5]
    assert len(list((tmp_path / "there/unfinished").iterdir())) == 12, "what no state holds any more is deleted"


@pytest.mark.parametrize("links", [True, False])
def test_a_run_is_copied_while_it_goes_on(links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever moment the copies are made at; when it stops, what it ends with stands there."""
    if not links:

        def refused(*_: object) -> None:
            raise PermissionError("this file system has no links")

        monkeypatch.setattr(os, "link", refused)
    monkeypatch.setattr(remote_copy, "_LOOK_S", 0.001)
    run, address, said = tmp_path / "run", f"file://{tmp_path}/there", list[str]()
    with pytest.raises(KeyboardInterrupt), remote_copy.kept(run, address, said.append):
        for step in range(1, 60):
            advance(run, step)
        raise KeyboardInterrupt
    remote_copy.fetch(address, tmp_path / "elsewhere")
    assert steps(tmp_path / "elsewhere") == [58, 59] and not said
    assert not list(run.glob(".*"))
    with remote_copy.kept(tmp_path / "elsewhere", address, said.append):
        advance(tmp_path / "elsewhere", 60)
    assert not (tmp_path / "there/unfinished").exists() and steps(tmp_path / "there") == [59, 60]


class LateThread(threading.Thread):
    """A thread that the machine lets wait."""

    def run(self) -> None:
        time.sleep(0.05)
        super().run()


def test_a_copy_that_fails_is_told_and_made_with_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the first checkpoint comes before anybody looks for one."""
    monkeypatch.setattr(remote_copy, "_LOOK_S", 0.001)
    monkeypatch.setattr(remote_copy, "Thread", LateThread)
    (tmp_path / "there").write_text("a file")
    run, said = tmp_path / "run", list[str]()
    address = f"file://{tmp_path}/there/run"
    whole = pytest.raises(FileError, match=rf"The run itself is whole, in {run}: `--resume --push ADDRESS` copies it")
    with whole, remote_copy.kept(run, address, said.append):
        advance(run, 1)
        for _ in range(30_000):
            if said:
                break
            time.sleep(0.001)
        assert "Training goes on, and the next checkpoint is copied there" in said[0]
    (tmp_path / "there").unlink()
    with pytest.raises(KeyboardInterrupt), remote_copy.kept(run, address, said.append):
        advance(run, 2)
        raise KeyboardInterrupt
    remote_copy.fetch(address, tmp_path / "elsewhere")
    assert steps(tmp_path / "elsewhere") == [1, 2]


def test_a_later_state_elsewhere_is_not_lost(tmp_path: Path) -> None:
    run, address = tmp_path / "run", f"file://{tmp_path}/there"
    remote_copy.fetch(address, run)
    assert not run.exists(), "nothing stands there"
    advance(run, 1)
    remote_copy._RemoteCopy(run, address).update()
    remote_copy.fetch(address, tmp_path / "elsewhere")
    advance(tmp_path / "elsewhere", 2)
    remote_copy.fetch(address, tmp_path / "elsewhere")
    assert steps(tmp_path / "elsewhere") == [1, 2], "what is newer here stays"
    remote_copy._RemoteCopy(tmp_path / "elsewhere", address).update()
    with pytest.raises(
        ResumeError, match=r"holds a later state of this run \(step-00000002\) than .* \(step-00000001\)"
    ):
        remote_copy.fetch(address, run)


@pytest.mark.nightly
@pytest.mark.slow
def test_another_machine_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    words = ["data.train=starter/arithmetic_start.jsonl", "data.held_out=0.1", "data.max_tokens=64", "batch.size=2"]
    words += ["train.steps=80", "save.every=10", "save.keep=2", "evaluate={every: 40, answers: 0}"]
    address = f"file://{tmp_path}/there"
    command = ["run", "sft/quickstart", *words, "--push", address]
    alone = workbench.run("sft/quickstart", words, out=tmp_path / "alone", quiet=True)
    lost = tmp_path / "lost"
    process = subprocess.Popen([sys.executable, "-m", "workbench.cli", *command, "--out", str(lost)])
    index = tmp_path / "there/unfinished/index.json"
    while process.poll() is None and not (index.exists() and "step-" in index.read_text()):
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, "it was killed before it was done"
    shutil.rmtree(lost)
    found = subprocess.run([sys.executable, "-m", "workbench.cli", *command, "--out", str(lost), "--resume"])
    assert found.returncode == 0
    for name in ("adapter/adapter_model.safetensors", "checkpoints/step-00000080/optimizer.safetensors"):
        assert files.digest(lost / name) == files.digest(alone / name) == files.digest(tmp_path / "there" / name)
    assert (
        json.loads((lost / "scores.json").read_text())["after"]
        == json.loads((alone / "scores.json").read_text())["after"]
    )
