"""The largest micro-batch that fits, and what is remembered of it."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.workbench.training.together import LabelledSet
from workbench.config import RunConfig
from workbench.runs.ranks import ALONE
from workbench.training import capacity
from workbench.training.capacity import Remembered, smaller_until_fits

ROWS = LabelledSet(24, 1)
LONGEST = int(ROWS.lengths.max())


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path))


def remembered(signal: dict[str, Any] | None = None, **sections: Any) -> Remembered:
    config = RunConfig.model_validate({"recipe": "sft", "data": {"train": "x.jsonl"}, **sections})
    return Remembered(config, LONGEST, signal or {})


def test_what_memory_made_smaller_is_remembered_for_the_same_memory_alone() -> None:
    assert remembered().read() is None
    remembered().write(4 * LONGEST, "elementwise")
    assert remembered().read() == (4 * LONGEST, "elementwise")
    assert remembered(seed=7, evaluate={"every": None}, schedule={"name": "cosine"}).read() == remembered().read()
    for other in (
        remembered(batch={"size": 8}),
        remembered(optimizer={"name": "sgd"}),
        remembered(freeze={"policy": "static"}),
        remembered(recipe="classify"),
        remembered({"teacher": {"id": "runs/teacher"}}),
        remembered(adapter={"method": "lora", "rank": 4}),
    ):
        assert other.read() is None


def test_fewer_tokens_are_tried_until_they_fit_and_never_fewer_than_the_longest_row() -> None:
    tried: list[int] = []

    def compute(tokens: int) -> int:
        tried.append(tokens)
        raise torch.OutOfMemoryError("fake")

    with pytest.raises(torch.OutOfMemoryError):
        smaller_until_fits(compute, 100, longest=30, retry=lambda tokens: None)
    assert tried == [100, 50, 30]


def test_nothing_of_a_pass_that_failed_is_alive_when_the_next_one_begins() -> None:
    import weakref

    alive: list[Any] = []

    def compute(tokens: int) -> int:
        if tokens > 10:
            value = torch.zeros(tokens)
            alive.append(weakref.ref(value))
            raise torch.OutOfMemoryError("fake")
        return tokens

    def retry(tokens: int) -> None:
        assert alive[-1]() is None

    assert capacity.smaller_until_fits(compute, 40, longest=1, retry=retry) == 10


@given(
    lengths=st.lists(st.integers(1, 500), min_size=1, max_size=40),
    tokens=st.integers(1, 20_000),
    room=st.integers(2_000, 40_000),
    fixed=st.integers(0, 1000),
)
@settings(max_examples=200, deadline=None)
def test_no_pass_is_computed_that_does_not_fit(lengths: list[int], tokens: int, room: int, fixed: int) -> None:
    """A pass takes two bytes a token, and a constant."""
    rows = cast(Any, SimpleNamespace(lengths=np.array(lengths), place=str))
    passes, computed = capacity.growing_passes(rows.lengths, tokens=tokens), list[int]()
    sizes = [max(lengths[row] for row in each) * len(each) for each in passes]

    def compute(each: Any) -> None:
        computed.append(fixed + 2 * max(lengths[row] for row in each) * len(each))

    with (
        mock.patch.object(capacity, "room", lambda _: room),
        mock.patch.object(capacity, "peak_bytes", lambda _: computed[-1] if computed else fixed),
    ):
        found = capacity.largest_foreseen(passes, rows, compute, device=torch.device("cpu"), ranks=ALONE)
    enough = (1 - capacity.SPARE) * room
    assert all(each <= enough for each in computed[2:])
    assert found == max([size for size in sizes if fixed + 2 * size <= enough], default=sizes[0])
    assert sizes[-1] == max(lengths) * min(len(lengths), max(1, tokens // max(lengths)))
    assert sizes == sorted(set(sizes)), "each is larger than the one before"


@pytest.mark.parametrize(("lengths", "elements"), [([65, 65, 65], 2**20), ([20, 65, 65], 2**18)])
def test_rows_of_one_length_share_larger_passes_on_a_cpu(lengths: list[int], elements: int) -> None:
    rows = SimpleNamespace(lengths=np.array(lengths))
    config = RunConfig.model_validate({"recipe": "sft", "data": {"train": "x.jsonl"}, "batch": {"size": 1000}})
    tokens = partial(capacity.tokens_per_device, config, cast(Any, rows))
    assert tokens(torch.device("cpu"), width=160) == elements // 160
    assert tokens(torch.device("cpu"), width=2**16) == 640, "never fewer than are worth a pass over the weights"
    assert tokens(torch.device("meta"), width=160) == 65 * 1000, "an accelerator tries the whole batch"


@pytest.mark.parametrize(
    ("members", "compute", "elements"),
    [(1, torch.bfloat16, 2**18), (5, torch.bfloat16, 2**19), (5, torch.float32, 2**18)],
)
def test_a_bank_in_half_precision_takes_larger_passes(members: int, compute: torch.dtype, elements: int) -> None:
    rows = cast(Any, SimpleNamespace(lengths=np.array([20, 65, 65])))
    config = RunConfig.model_validate({"recipe": "sft", "data": {"train": "x.jsonl"}, "batch": {"size": 1000}})
    tokens = partial(capacity.tokens_per_device, config, rows, torch.device("cpu"), members=members, compute=compute)
    assert tokens(width=160) == elements // 160


def test_a_bank_may_compute_the_rows_of_all_its_members_at_once() -> None:
    config = RunConfig.model_validate(
        {"recipe": "classify", "data": {"train": "x.csv", "format": "image"}, "batch": {"size": 4}}
    )
    even = cast(Any, SimpleNamespace(lengths=np.full(24, 600), weighted_rows=None))

    def tokens(members: int) -> int:
        return capacity.tokens_per_device(config, even, torch.device("cpu"), width=64, members=members)

    assert [tokens(members) for members in (1, 2, 5)] == [2400, 4800, 12_000]
    assert tokens(50) == capacity.EVEN_CPU_ELEMENTS // 64, "no more than a CPU's caches take"
