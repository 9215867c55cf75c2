"""A store gives back the bytes that it was given, also where they are too many for memory."""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from workbench.data import byte_store
from workbench.data.byte_store import ByteStore
from workbench.errors import FileError


@pytest.mark.parametrize("most", [byte_store.IN_MEMORY, 5], ids=["in memory", "in a file"])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.binary(max_size=9), max_size=9), st.data())
def test_bytes_come_back(most: int, monkeypatch: pytest.MonkeyPatch, chunks: list[bytes], data: st.DataObject) -> None:
    monkeypatch.setattr(byte_store, "IN_MEMORY", most)
    store, whole = ByteStore(iter(chunks)), b"".join(chunks)
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, len(whole))] * 2)))
    assert len(store) == len(whole) and store.read(start, stop) == whole[start:stop]
    assert b"".join(store.chunks()) == whole == b"".join(ByteStore(store.chunks()).chunks())


def test_many_bytes_take_no_memory_and_leave_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(byte_store, "IN_MEMORY", 2**16)
    tracemalloc.start()
    store = ByteStore(bytes([number % 256]) * 1000 for number in range(4000))
    for number in range(4000):
        assert store.read(1000 * number, 1000 * number + 1) == bytes([number % 256])
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 2**19 < len(store) == 4_000_000
    assert not list((tmp_path / "cache").iterdir())


def test_a_forked_process_reads_beside_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(byte_store, "IN_MEMORY", 2)
    store = ByteStore([b"abc", b"def"])
    reading, writing = os.pipe()
    if not (child := os.fork()):
        os.write(writing, store.read(3, 6))
        os._exit(0)
    assert store.read(0, 3) == b"abc" and os.waitpid(child, 0)[1] == 0
    assert os.read(reading, 9) == b"def"


@pytest.mark.parametrize("made", [lambda path: path.touch(), lambda path: path.symlink_to("/dev/full")])
def test_a_folder_that_cannot_be_written_is_named(
    made: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(tmp_path / "cache")
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path / "cache"))
    with pytest.raises(FileError, match=r"cache: cannot be written .*WORKBENCH_CACHE"):
        ByteStore([b"abc"])
