"""A bank that was killed at any moment resumes to the bits, and to the metrics, of one that never was."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.run_files import read_lines
from tests.workbench.training.together import LabelledSet, Silent, Together, Trained, bert, class_outputs, section
from workbench.data.batching import global_batch
from workbench.errors import Stopped
from workbench.training import capacity


def test_stopped_in_the_middle_and_resumed_it_ends_where_it_would_have(tmp_path: Path) -> None:
    """The members stand at different steps; one has ended before."""
    configs = [section(steps=12, size=3), section(steps=4, seed=1), section(steps=9, seed=2, patience=2)]
    data = [LabelledSet(20, 1), LabelledSet(20, 2), LabelledSet(20, 3)]
    whole = Together(bert(), data, configs, tmp_path / "whole", class_outputs).fit()
    broken = Together(bert(), data, configs, tmp_path / "broken", class_outputs)
    with pytest.raises(Stopped):
        broken.fit(Silent(stop_after=5))
    found = broken.fit(resume=True)
    assert found.losses == whole.losses and [len(each) for each in found.losses] == [12, 4, 6]
    for tensors, wanted in zip(found.tensors, whole.tensors, strict=True):
        assert all(torch.equal(tensors[name], wanted[name]) for name in wanted)
    assert any("Resuming after step 5 of 12" in sentence for sentence in found.callback.said)


class Killed(BaseException):
    """The process is gone."""


@contextmanager
def killed(before: int) -> Iterator[None]:
    """Die before the n-th time, from 0, that a complete file or checkpoint is given its name."""
    original, done = os.replace, []

    def replace(source: Any, target: Any) -> None:
        if len(done) == before:
            raise Killed
        done.append(target)
        original(source, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "replace", replace)
        yield


class Spoilt(LabelledSet):
    """The weight of a row is no number; the row comes in the batch of step `spoilt_in`."""

    spoilt_in = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        self.supervised = np.ones(self.rows)
        self.supervised[global_batch(self.spoilt_in - 1, rows=self.rows, size=2, seed=self.seed)[0]] = np.nan


class SpoiltLater(Spoilt):
    spoilt_in = 4


MEMBERS = {
    "saves in 2, 4 and 6": (LabelledSet(20, 1), section(steps=6, size=3, save_every=2, learning_rate=1e-2)),
    "ends after 3": (LabelledSet(23, 2), section(steps=3, size=4, learning_rate=1e-2, seed=1)),
    "loses patience after 4": (LabelledSet(17, 3), section(size=3, learning_rate=1e-2, seed=2, patience=1)),
    "fails in 2, after no save": (Spoilt(20, 4), section(size=2, learning_rate=1e-2, seed=4)),
    "fails in 4, after a save": (SpoiltLater(20, 5), section(size=2, learning_rate=1e-2, seed=5)),
}
CLOCK = {"elapsed_s", "tokens_per_second", "data_wait", "peak_bytes"}


def _bank(folder: Path) -> Together:
    data, configs = zip(*MEMBERS.values(), strict=True)
    return Together(bert(), data, configs, folder, class_outputs, tokens=100)


def _survives(bank: Together, kill: int, *, resume: bool = False, stop_after: int = 10**9) -> bool:
    bank.during = lambda _: killed(kill)
    try:
        bank.fit(Silent(stop_after=stop_after), resume=resume)
    except Killed:
        return False
    return True


def _lines(folder: Path) -> list[list[dict[str, Any]]]:
    """Every member's metrics without what a clock says."""
    files = [folder / "members" / str(number) / "metrics.jsonl" for number in range(len(MEMBERS))]
    lines = [read_lines(file) if file.exists() else [] for file in files]
    return [[{key: each[key] for key in each.keys() - CLOCK} for each in member] for member in lines]


def _assert_same(trained: Trained, folder: Path, wanted: Trained, wanted_folder: Path) -> None:
    assert _lines(folder) == _lines(wanted_folder)
    for tensors, wanted_tensors in zip(trained.tensors, wanted.tensors, strict=True):
        assert all(torch.equal(tensors[name], wanted_tensors[name]) for name in wanted_tensors)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Trained, Path]:
    folder = tmp_path_factory.mktemp("whole") / "run"
    return _bank(folder).fit(), folder


def _resumed_after(trained: Trained) -> int:
    """The step that the first member, which outlives the others, went on from."""
    (step,) = re.findall(r"member0000: Resuming after step (\d)", "\n".join(trained.callback.said))
    return int(step)


@pytest.mark.slow
def test_killed_before_every_write(whole: tuple[Trained, Path], tmp_path: Path) -> None:
    """No step is lost but those since the newest save that all had finished."""
    assert [len(losses) for losses in whole[0].losses] == [6, 3, 4, 1, 3]
    steps = []
    while not _survives(_bank(folder := tmp_path / str(len(steps))), len(steps)):
        found = _bank(folder).fit(resume=True)
        _assert_same(found, folder, *whole)
        steps.append(_resumed_after(found))
    # The kernels are noted first.
    # Saved after step 2: the best of one, then five states and a failure; after 3: four; after 4: two and a failure.
    assert steps == [0] * 8 + [2] * 4 + [3] * 3 + [4]


@pytest.mark.nightly(but=["0", "3"])
@pytest.mark.parametrize("again", range(6))
def test_killed_again_while_it_resumes(again: int, whole: tuple[Trained, Path], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert not _survives(_bank(folder), 9) and not _survives(_bank(folder), again, resume=True)
    found = _bank(folder).fit(resume=True)
    _assert_same(found, folder, *whole)
    assert _resumed_after(found) == 2


def test_what_failed_does_not_run_again(whole: tuple[Trained, Path], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert not _survives(_bank(folder), 15)
    callback = Silent()
    found = _bank(folder).fit(callback, resume=True)
    assert {(record["member"], record["step"]) for record in callback.records} == {("member0000", 5), ("member0000", 6)}
    (said,) = [sentence for sentence in callback.said if sentence.startswith("member0003")]
    assert "Not resumed, because it failed: The loss is not finite at step 2" in said
    _assert_same(found, folder, *whole)
    failed = [json.loads((folder / "members" / str(n) / "manifest.json").read_text())["status"] for n in (3, 4)]
    assert failed == ["failed", "failed"]


def test_what_was_gone_back_from_is_in_nobodys_way(tmp_path: Path) -> None:
    """Killed after one of two has saved step 6, and again, from step 3 on, after that one has saved step 4."""
    configs = [section(steps=7, size=3, seed=seed, save_every=3, learning_rate=1e-2) for seed in (0, 1)]
    bank = Together(bert(), [LabelledSet(20, 1), LabelledSet(20, 2)], configs, tmp_path, class_outputs)
    assert not _survives(bank, 3)
    assert not _survives(bank, 3, resume=True, stop_after=4)  # two of these three write metrics back to step 3
    bank.during = lambda _: nullcontext()
    assert _resumed_after(bank.fit(resume=True)) == 3


def test_where_one_checkpoint_is_damaged_all_go_back_a_save(whole: tuple[Trained, Path], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert not _survives(_bank(folder), 15)
    (folder / "members" / "2" / "checkpoints" / "step-00000004" / "optimizer.safetensors").write_bytes(b"")
    found = _bank(folder).fit(resume=True)
    assert _resumed_after(found) == 3
    assert any("damaged checkpoint" in said for said in found.callback.said)
    _assert_same(found, folder, *whole)


def test_a_bank_goes_on_with_the_micro_batch_that_fitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On an accelerator, where memory may have run out before: other micro-batches have other last bits."""
    monkeypatch.setattr(capacity, "limits_steps", lambda device: True)
    configs = [section(steps=6, size=3, seed=seed) for seed in (0, 1)]
    bank = Together(bert(), [LabelledSet(20, 1), LabelledSet(20, 2)], configs, tmp_path, class_outputs, tokens=100)
    with pytest.raises(Stopped):
        bank.fit(Silent(stop_after=3))
    manifests = [tmp_path / "members" / str(number) / "manifest.json" for number in (0, 1)]
    facts = [json.loads(file.read_text()) for file in manifests]
    assert [each["batch"]["tokens_per_device"] for each in facts] == [100, 100]
    facts[0]["batch"]["tokens_per_device"] = 40
    manifests[0].write_text(json.dumps(facts[0]))
    bank.fit(resume=True)
    assert [json.loads(file.read_text())["batch"]["tokens_per_device"] for file in manifests] == [40, 40]
