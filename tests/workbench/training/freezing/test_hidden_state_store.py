"""What is kept is given back to the bit, and nothing that a killed process leaves behind is ever taken for it."""

from __future__ import annotations

import copy
import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import PreTrainedModel

from workbench.adapters import anatomy
from workbench.errors import FileError
from workbench.training.freezing.hidden_state_store import DiskStore, HiddenStateStore, MemoryStore, fingerprint

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WIDTH = 6


def key(number: int) -> bytes:
    return number.to_bytes(16, "little")


def row(number: int, length: int = 4) -> Tensor:
    """States of a row that no other row has."""
    return torch.randn(length, WIDTH, generator=torch.Generator().manual_seed(number))


def put(states: HiddenStateStore, *numbers: int) -> None:
    states.put([key(number) for number in numbers], [row(number, 1 + number % 5) for number in numbers])


def require(states: HiddenStateStore, *numbers: int) -> None:
    """It holds these rows, as they were put."""
    keys = [key(number) for number in numbers]
    assert states.missing(keys) == []
    if not keys:
        return
    for number, found in zip(numbers, states.get(keys, 7), strict=True):
        wanted = torch.zeros(7, WIDTH)
        wanted[: 1 + number % 5] = row(number, 1 + number % 5)
        assert torch.equal(found, wanted.to(states.dtype))


def opened(folder: Path, dtype: torch.dtype = torch.float32) -> DiskStore:
    return DiskStore(folder, fingerprint="prefix", dtype=dtype)


@pytest.fixture(params=["memory", "disk"])
def where(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def make(where: str, folder: Path, dtype: torch.dtype = torch.float32) -> HiddenStateStore:
    return MemoryStore(dtype) if where == "memory" else opened(folder, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_come_back_cut_or_padded_in_any_order(where: str, dtype: torch.dtype, tmp_path: Path) -> None:
    states = make(where, tmp_path, dtype)
    put(states, 3, 1, 4)
    put(states, 5, 2)
    require(states, 2, 4, 4, 1, 5, 3)
    cut = states.get([key(4), key(5)], 2)
    assert cut.dtype == dtype and cut.shape == (2, 2, WIDTH) and cut.is_contiguous()
    assert torch.equal(cut[0], row(4, 5)[:2].to(dtype)) and not cut[1, 1:].any()


def test_what_is_given_is_the_callers_own(where: str, tmp_path: Path) -> None:
    states = make(where, tmp_path)
    put(states, 3)
    states.get([key(3)], 4).zero_()
    require(states, 3)


def test_missing_rows_are_named_once(where: str, tmp_path: Path) -> None:
    states = make(where, tmp_path)
    put(states, 1)
    assert states.missing([key(number) for number in (2, 1, 3, 2, 3)]) == [0, 2]
    assert states.missing([]) == []


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=6, unique=True), max_size=8))
def test_memory_is_disk(tmp_path_factory: pytest.TempPathFactory, puts: list[list[int]]) -> None:
    memory, disk = MemoryStore(torch.bfloat16), opened(tmp_path_factory.mktemp("disk"), torch.bfloat16)
    for numbers in puts:
        keys = [key(number) for number in numbers]
        unknown = memory.missing(keys)
        assert unknown == disk.missing(keys)
        for states in (memory, disk):
            put(states, *(numbers[place] for place in unknown))
        assert torch.equal(memory.get(keys, 4), disk.get(keys, 4))


def test_memory_does_not_hold_the_batch_that_a_row_came_in() -> None:
    states = MemoryStore(torch.float32)
    batch_BLD = torch.randn(8, 100, WIDTH)
    states.put([key(0)], [batch_BLD[0, :3]])
    kept = states.get([key(0)], 3)[0]
    batch_BLD.zero_()
    assert states._rows[key(0)].base is None
    assert torch.equal(states.get([key(0)], 3)[0], kept) and kept.any()


def test_files_outlast_their_process_and_are_shared(tmp_path: Path) -> None:
    one, other = opened(tmp_path), opened(tmp_path)
    put(one, 1, 2)
    require(other, 1, 2)
    put(other, 3)
    require(one, 3, 1)
    put(one, 3, 4)  # computed by both meanwhile: kept once
    before = (one.folder / "states.bin").stat().st_size
    put(other, 3, 4)
    assert (one.folder / "states.bin").stat().st_size == before
    del one, other
    require(opened(tmp_path), 1, 2, 3, 4)
    assert DiskStore(tmp_path, fingerprint="another", dtype=torch.float32).missing([key(1)]) == [0]


def test_descriptors_are_closed(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    states = opened(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before + 2
    del states
    assert len(os.listdir("/proc/self/fd")) == before


def written(folder: Path) -> list[Path]:
    return [folder / "prefix" / name for name in ("states.bin", "index.bin")]


@pytest.mark.parametrize("which", [0, 1], ids=["states", "index"])
def test_cut_anywhere_no_row_is_wrong(tmp_path: Path, which: int) -> None:
    """Rows are as they were put, or missing; what is missing is put again, and then everything is there."""
    put(opened(tmp_path), 1, 2)
    put(opened(tmp_path), 3)
    whole = [path.read_bytes() for path in written(tmp_path)]
    missing_before = 3
    for end in range(len(whole[which]) + 1):
        for path, content in zip(written(tmp_path), whole, strict=True):
            path.write_bytes(content)
        os.truncate(written(tmp_path)[which], end)
        states = opened(tmp_path)
        missing = [(1, 2, 3)[place] for place in states.missing([key(1), key(2), key(3)])]
        assert len(missing) <= missing_before
        missing_before = len(missing)
        require(states, *{1, 2, 3}.difference(missing))
        put(states, *missing, 7)
        require(states, 1, 2, 3, 7)
        require(opened(tmp_path), 1, 2, 3, 7)
    assert missing_before == 0


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(which=st.integers(0, 1), place=st.floats(0, 1, exclude_max=True), flip=st.integers(1, 255))
def test_damaged_anywhere_no_row_is_wrong(
    tmp_path_factory: pytest.TempPathFactory, which: int, place: float, flip: int
) -> None:
    folder = tmp_path_factory.mktemp("damaged")
    put(opened(folder), 1, 2, 3)
    path = written(folder)[which]
    content = bytearray(path.read_bytes())
    content[int(place * len(content))] ^= flip
    path.write_bytes(content)
    states = opened(folder)
    missing = [(1, 2, 3)[place] for place in states.missing([key(1), key(2), key(3)])]
    assert len(missing) == 1
    require(states, *{1, 2, 3}.difference(missing))
    put(states, *missing)
    require(states, 1, 2, 3)
    require(opened(folder), 1, 2, 3)


def test_cut_while_it_is_in_use(tmp_path: Path) -> None:
    states = opened(tmp_path)
    put(states, 1)
    os.truncate(written(tmp_path)[0], 3)
    with pytest.raises(FileError, match=r"cut while it was in use. Resume"):
        states.get([key(1)], 4)


def test_a_place_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "prefix").write_text("")
    with pytest.raises(FileError, match=r"prefix: cannot be written .*WORKBENCH_CACHE.*freeze\.cache=memory"):
        opened(tmp_path)
    states = opened(tmp_path / "other")
    put(states, 1)
    monkeypatch.setattr(os, "pwrite", no_room)
    with pytest.raises(FileError, match=r"No space left.*Make room"):
        put(states, 2)
    monkeypatch.undo()
    put(opened(tmp_path / "other"), 2)
    require(opened(tmp_path / "other"), 1, 2)


def no_room(*_: object) -> int:
    raise OSError(28, "No space left on device")


def write_for_ever(folder: Path, first: int) -> None:
    states = opened(folder)
    for start in range(first, 10**6, 10):
        numbers = [start + each for each in range(10)]
        put(states, *(numbers[place] for place in states.missing([key(number) for number in numbers])))


def test_two_processes_that_are_killed(tmp_path: Path) -> None:
    """They write the same rows and others at the same time; what both leave is whole."""
    context: Any = multiprocessing.get_context("fork")
    processes = [context.Process(target=write_for_ever, args=(tmp_path, first)) for first in (0, 20)]
    for process in processes:
        process.start()
    deadline = time.monotonic() + 20
    while not all(path.exists() and path.stat().st_size > 4000 for path in written(tmp_path)):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    for process in processes:
        os.kill(process.pid, signal.SIGKILL)
        process.join()
    states = opened(tmp_path)
    numbers = list(range(200))
    unknown = states.missing([key(number) for number in numbers])
    assert len(unknown) < len(numbers)
    require(states, *(number for place, number in enumerate(numbers) if place not in unknown))
    put(states, *unknown)
    require(opened(tmp_path), *numbers)


def name(model: PreTrainedModel, *, depth: int = 1, dtype: torch.dtype = torch.float32, **about: str) -> str:
    (paths,) = anatomy.blocks(model)
    return fingerprint(
        model, blocks=[model.get_submodule(path) for path in paths], depth=depth, dtype=dtype, about=about
    )


def test_a_fingerprint_is_of_everything_that_matters_and_of_nothing_else(llama: PreTrainedModel) -> None:
    llama.requires_grad_(False)
    wanted = name(llama, compute="float32")
    assert name(copy.deepcopy(llama), compute="float32") == wanted
    assert len({wanted, name(llama), name(llama, depth=2), name(llama, dtype=torch.bfloat16)}) == 4
    for path, changes in {
        "model.layers.0.mlp.up_proj": True,
        "model.embed_tokens": True,
        "model.layers.1.mlp.up_proj": False,
        "lm_head": False,
    }.items():
        other = copy.deepcopy(llama)
        weight = other.get_submodule(path).weight
        assert isinstance(weight, Tensor)
        weight[3, 3] += 1e-3
        assert (name(other, compute="float32") != wanted) == changes, path
    other = copy.deepcopy(llama)
    other.config.rms_norm_eps *= 2
    assert name(other, compute="float32") != wanted
    other.config.rms_norm_eps /= 2
    other.config._name_or_path = "moved"
    assert name(other, compute="float32") == wanted
    assert name(other.half(), compute="float32") != wanted


def test_what_trains_is_no_part_of_a_fingerprint(llama: PreTrainedModel) -> None:
    """So it is the same when a run is resumed."""
    llama.requires_grad_(False)
    llama.model.norm.requires_grad_(True)
    before = name(llama)
    llama.model.norm.weight.data += 1
    assert name(llama) == before
