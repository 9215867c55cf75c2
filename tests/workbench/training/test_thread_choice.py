"""Threads of a training: by its rows, backbone and cores alone, by the user's word, and the same after a resume."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.workbench.training.together import LabelledSet, Silent, Together, bert, class_outputs, section
from workbench.runs import run_directory
from workbench.training import thread_choice
from workbench.training.thread_choice import worth


@pytest.fixture(autouse=True)
def two_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine of two cores, on which nobody has asked for a number."""
    monkeypatch.delenv(thread_choice.ASKED, raising=False)
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


class Counting(Silent):
    """Keeps the threads of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: list[int] = []

    def step(self, record: dict[str, Any], *, total: int) -> None:
        super().step(record, total=total)
        self.threads.append(torch.get_num_threads())


def chosen(*, members: int) -> int:
    """Threads of members that have six rows of a step each, in micro-batches of 40 tokens."""
    each: Any = SimpleNamespace(task=SimpleNamespace(train=LabelledSet(24, 0), config=section(size=6)))
    with thread_choice.chosen([each] * members, 40, bert()):
        found = torch.get_num_threads()
    assert torch.get_num_threads() == 2, "as before"
    return found


@pytest.mark.parametrize(
    ("tokens", "width", "cores", "expected"),
    [
        (51, 160, 2, 1),  # one of 32 members of search/quickstart
        (1638, 160, 2, 2),  # sft/quickstart
        (1638, 160, 64, 3),
        (640, 768, 64, 7),
        (2048, 4096, 64, 64),
        (1, 1, 1, 1),
    ],
)
def test_each_thread_has_enough_to_do(tokens: float, width: int, cores: int, expected: int) -> None:
    found = worth(tokens, width, most=cores)
    assert found == expected
    assert found in (1, cores) or found * thread_choice.WORTH <= tokens * width < (found + 1) * thread_choice.WORTH


def test_more_work_or_cores_never_take_fewer_threads() -> None:
    for cores in range(1, 65, 9):
        found = [worth(2.0**power, 64, most=cores) for power in range(20)]
        assert found == sorted(found) and found[0] == 1 and found[-1] == cores
        assert all(worth(2.0**power, 64, most=cores + 1) >= each for power, each in enumerate(found))


def test_a_small_bank_trains_with_one_thread(tmp_path: Path) -> None:
    data, callback = [LabelledSet(24, seed) for seed in (0, 1)], Counting()
    Together(bert(), data, [section(steps=2)] * 2, tmp_path, class_outputs).fit(callback)
    assert set(callback.threads) == {1} and torch.get_num_threads() == 2


def test_the_choice_is_by_what_one_adapter_has_of_a_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A micro-batch has 40 tokens, which two members share."""
    monkeypatch.setattr(thread_choice, "WORTH", 20 * bert().config.hidden_size)
    assert (chosen(members=1), chosen(members=2)) == (2, 1)
    monkeypatch.setenv(thread_choice.ASKED, "2")
    assert chosen(members=2) == 2, "the user's word"


@pytest.mark.parametrize("asked", [True, False])
def test_a_resumed_run_has_the_threads_it_began_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: bool
) -> None:
    config = section()
    if asked:
        monkeypatch.setenv(thread_choice.ASKED, "2")
    begun = run_directory.start(tmp_path, config, resume=False)
    with thread_choice.as_begun(begun):
        assert torch.get_num_threads() == 2
    begun.close()
    monkeypatch.delenv(thread_choice.ASKED, raising=False)
    torch.set_num_threads(1)
    resumed = run_directory.start(tmp_path, config, resume=True)
    with thread_choice.as_begun(resumed):
        assert torch.get_num_threads() == 2 and (os.environ.get(thread_choice.ASKED) == "2") == asked
    assert torch.get_num_threads() == 1 and thread_choice.ASKED not in os.environ
    monkeypatch.setenv(thread_choice.ASKED, "1")
    with thread_choice.as_begun(resumed):
        assert torch.get_num_threads() == 1, "the user's word"
    resumed.close()
