"""Rows that are collated beside: the same rows, their errors told, and no thread that outlives a run."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from tests.workbench.training.freezing.fits import assert_same_bits, build, configured, train
from tests.workbench.training.together import LabelledSet, Silent, Texts, Together, bert, class_outputs, section
from workbench.data.batching import Indices, MicroBatch
from workbench.data.prefetch import Prefetcher
from workbench.errors import Stopped

ROWS = Texts(20, 0)


def _making(*rows: int) -> tuple[tuple[int, ...], Callable[[], MicroBatch]]:
    return rows, lambda: ROWS.batch(np.array(rows))


def _alive() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name.startswith("workbench-rows")]


def test_what_was_expected_and_what_was_not_are_the_rows_that_are_asked_for() -> None:
    ahead = Prefetcher(pin=False)
    for expected, asked in (((1, 2), (1, 2)), ((3, 4), (5,)), ((6,), (3, 4))):
        ahead.expect(*_making(*expected))
        found, wanted = ahead.get(*_making(*asked)), ROWS.batch(np.array(asked))
        assert torch.equal(found.inputs["input_ids"], wanted.inputs["input_ids"])
    ahead.close()
    assert not _alive()


def test_the_thread_computes_alone_and_others_as_before() -> None:
    before, ahead = torch.get_num_threads(), Prefetcher[ThreadCount](pin=False)
    found = ahead.get((), lambda: ThreadCount(torch.get_num_threads()))
    assert found.threads == before, "made by the thread that asks"
    ahead.expect((1,), lambda: ThreadCount(torch.get_num_threads()))
    assert ahead.get((1,), lambda: ThreadCount(0)).threads == 1
    ahead.close()
    counts = []
    another = threading.Thread(target=lambda: counts.append(torch.get_num_threads()))
    another.start()
    another.join()
    assert counts == [before] == [torch.get_num_threads()]


class ThreadCount(NamedTuple):
    """A batch that says how many threads torch had where it was made."""

    threads: int

    def pinned(self) -> ThreadCount:
        """The same."""
        return self


def test_an_error_of_the_thread_is_raised_where_the_rows_are_asked_for() -> None:
    def broken() -> MicroBatch:
        raise ValueError("row 7 is broken")

    ahead = Prefetcher(pin=False)
    ahead.expect("key", broken)
    with pytest.raises(ValueError, match="row 7 is broken"):
        ahead.get("key", broken)
    ahead.close()


def test_a_training_reads_ahead_and_no_bit_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each micro-batch but the first is made in the thread, also over the ends of steps and of epochs."""
    model, config, threads = build("Llama"), configured(), list[str]()
    original = Texts.batch

    def batch(self: Texts, indices: Indices, *, epoch: int = 0) -> MicroBatch:
        threads.append(threading.current_thread().name)
        return original(self, indices, epoch=epoch)

    with monkeypatch.context() as patch:
        patch.setattr(Texts, "batch", batch)
        found = train(model, config, tmp_path / "found")
    beside = sum(each.startswith("workbench-rows") for each in threads)
    assert beside > 10 and not _alive()
    monkeypatch.setattr(Prefetcher, "expect", lambda *_: None)
    assert_same_bits(found, train(model, config, tmp_path / "wanted"))


def test_a_bank_reads_ahead_and_no_bit_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over the ends of steps, of epochs and of members; also after it was stopped and resumed."""
    configs = [section(steps=12, size=3), section(steps=4, seed=1), section(steps=9, seed=2)]
    data, threads = [LabelledSet(20, 1), LabelledSet(20, 2), LabelledSet(20, 3)], list[str]()
    original = LabelledSet.batch

    def batch(self: LabelledSet, indices: Indices, *, epoch: int = 0) -> MicroBatch:
        threads.append(threading.current_thread().name)
        return original(self, indices, epoch=epoch)

    def together(name: str) -> Together:
        return Together(bert(), data, configs, tmp_path / name, class_outputs)

    with monkeypatch.context() as patch:
        patch.setattr(LabelledSet, "batch", batch)
        found = together("found").fit()
        ahead = [each.startswith("workbench-rows") for each in threads]
        assert sum(ahead) > 0.8 * len(ahead) and not _alive()
        stopped = together("stopped")
        with pytest.raises(Stopped):
            stopped.fit(Silent(stop_after=5))
        assert not _alive()
        resumed = stopped.fit(resume=True)
    monkeypatch.setattr(Prefetcher, "expect", lambda *_: None)
    wanted = together("wanted").fit()
    for each in (found, resumed):
        assert each.losses == wanted.losses
        for tensors, others in zip(each.tensors, wanted.tensors, strict=True):
            assert all(torch.equal(tensors[name], others[name]) for name in others)


def test_no_thread_outlives_a_run_that_stops_or_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Stopped):
        train(build("Llama"), configured(), tmp_path / "stopped", stop_after=2)
    assert not _alive()
    original = Texts.batch

    def batch(self: Texts, indices: Indices, *, epoch: int = 0) -> MicroBatch:
        if epoch == 1:
            raise ValueError("no second epoch")
        return original(self, indices, epoch=epoch)

    monkeypatch.setattr(Texts, "batch", batch)
    with pytest.raises(ValueError, match="no second epoch"):
        train(build("Llama"), configured(), tmp_path / "failed")
    assert not _alive()
