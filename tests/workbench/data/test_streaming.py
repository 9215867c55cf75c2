"""Streams of rows: the same files after any interruption, no row twice, and no more of them than was asked for."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pandas as pd
import pytest

from tests import forked
from tests.run_files import write_lines
from workbench.data import hub_datasets, streaming
from workbench.data.rows import fingerprint, read_rows
from workbench.data.streaming import RowStream, take
from workbench.errors import DataError

SHARDS = 5
EACH = 60


@pytest.fixture
def shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of jsonl files, and a cache of this test's own."""
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(streaming, "PART", 16)
    monkeypatch.setattr(streaming, "AWAY", 4)
    folder = tmp_path / "shards"
    folder.mkdir()
    for shard in range(SHARDS):
        rows = [{"question": f"{shard} and {n}?", "answer": f"On 2020-01-{n % 28 + 1:02}."} for n in range(EACH)]
        (folder / f"{shard}.jsonl").write_text("".join(json.dumps(row) + "\n\n" for row in rows))
    return folder


class Killed(Exception):
    """What ends a reading in its middle."""


def interrupted(stream: RowStream, monkeypatch: pytest.MonkeyPatch, *, after: int, written: bool) -> None:
    """A reading that ends after so many parts; the last one is there, and its position is not, or both are."""
    parts, write = 0, streaming.files.write_json

    def dying(path: Path, content: Any) -> None:
        nonlocal parts
        parts += 1
        if written:
            write(path, content)
        if parts == after:
            raise Killed
        write(path, content)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(streaming.files, "write_json", dying)
        take(stream)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("share", [1.0, 0.3])
@pytest.mark.parametrize("written", [True, False])
def test_an_interrupted_reading_ends_with_the_same_bytes(
    shards: Path, share: float, written: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = RowStream(str(shards), 70, share, 3)
    whole = content(take(stream))
    for after in range(1, len(whole)):
        monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path / f"cache-{after}"))
        interrupted(stream, monkeypatch, after=after, written=written)
        assert content(take(stream)) == whole


def test_rows_are_those_of_the_source_each_once_and_from_all_shards(shards: Path) -> None:
    folder = str(take(RowStream(str(shards), 100, 1.0, 0)))
    rows = [row.columns for row in read_rows(folder)]
    every = [row.columns for row in read_rows(str(shards))]
    asked = [row["question"] for row in rows]
    assert len(rows) == len(set(asked)) == 100 and all(row in every for row in rows)
    assert {each[0] for each in asked} == set("01234"), "shards in turn"
    assert fingerprint(folder) != fingerprint(str(take(RowStream(str(shards), 100, 1.0, 1)))), "by the seed"


def test_a_stream_that_ends_gives_all_that_it_has(shards: Path) -> None:
    rows = [row.columns["question"] for row in read_rows(str(take(RowStream(str(shards), 10_000, 1.0, 0))))]
    assert sorted(rows) == sorted(f"{shard} and {n}?" for shard in range(SHARDS) for n in range(EACH))


def test_a_share_is_taken_by_chance(shards: Path) -> None:
    counts = [len(list(read_rows(str(take(RowStream(str(shards), 10_000, 0.4, seed)))))) for seed in range(6)]
    rows = SHARDS * EACH
    assert abs(sum(counts) / 6 - 0.4 * rows) < 4 * (rows * 0.24 / 6) ** 0.5


def test_no_more_is_read_than_needed_and_nothing_twice(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readings, lines = [], streaming._lines

    def counted(*arguments: Any) -> Iterator[list[str]]:
        for each in lines(*arguments):
            readings.append(len(each))
            yield each

    monkeypatch.setattr(streaming, "_lines", counted)
    folder = take(RowStream(str(shards), 30, 1.0, 0))
    assert len(readings) <= 5, "empty lines among 16"
    told: list[str] = []
    assert take(RowStream(str(shards), 30, 1.0, 0), told.append) == folder and not told and len(readings) <= 5
    (shards / "0.jsonl").write_text('{"question": "new?", "answer": "Yes."}\n')
    assert take(RowStream(str(shards), 30, 1.0, 0)) != folder, "other files"


def test_parquet_and_lines_of_text(tmp_path: Path, shards: Path) -> None:
    table = [{"question": f"{n}?", "answer": str(n), "tags": [{"a": n}] if n % 2 else None} for n in range(40)]
    pd.DataFrame(table).to_parquet(tmp_path / "rows.parquet")
    rows = [row.columns for row in read_rows(str(take(RowStream(str(tmp_path / "rows.parquet"), 90, 1.0, 0))))]
    wanted = [row.columns for row in read_rows(str(tmp_path / "rows.parquet"))]
    assert sorted(rows, key=lambda row: int(row["answer"])) == wanted
    (tmp_path / "lines.txt").write_text("One.\n\nTwo\u2028three.\nFour")
    found = take(RowStream(str(tmp_path / "lines.txt"), 9, 1.0, 0))
    assert {row.columns["text"] for row in read_rows(str(found))} == {"One.", "Two\u2028three.", "Four"}


def test_a_hub_data_set(tmp_path: Path, shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`datasets` itself over local files, in the place of the hub's."""
    load = datasets.load_dataset

    def local(repository: str, config: str | None, *, split: str, streaming: bool) -> Any:
        assert (repository, split, streaming) == ("owner/name", "train", True)
        return load(str(shards), split=split, streaming=streaming)

    monkeypatch.setattr(datasets, "load_dataset", local)
    monkeypatch.setattr(hub_datasets, "fingerprint", lambda source: f"{source}@commit")
    folder = take(RowStream("owner/name", 50, 1.0, 0))
    rows = [row.columns for row in read_rows(str(folder))]
    assert len(rows) == 50 and all(row in [each.columns for each in read_rows(str(shards))] for row in rows)
    assert next(folder.iterdir()).name.startswith("name-")


@pytest.mark.slow
def test_a_killed_process_goes_on_to_the_same_bytes(tmp_path: Path, shards: Path) -> None:
    """SIGKILL in the middle of shards, with parts of the real size."""
    for shard in range(SHARDS):
        rows = ({"question": f"{shard} and {n}?", "answer": "x" * 200} for n in range(6_000))
        write_lines(shards / f"{shard}.jsonl", rows)
    program = tmp_path / "taking.py"
    program.write_text(
        "import sys\nfrom workbench.data.streaming import *\nprint(take(RowStream(sys.argv[1], 28_000, 1, 3)))\n"
    )

    def started(cache: str) -> subprocess.Popen[str]:
        environment = {**os.environ, "WORKBENCH_CACHE": str(tmp_path / cache)}
        command = [forked.python(), str(program), str(shards)]
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)

    def written() -> int:
        return len(list((tmp_path / "killed").glob("streams/*/rows/*")))

    whole = Path(started("whole").communicate()[0].strip())
    for _ in range(2):
        known, process = written(), started("killed")
        while written() < known + 7:
            assert process.poll() is None
            time.sleep(0.01)
        process.kill()
        process.communicate()
    assert content(Path(started("killed").communicate()[0].strip())) == content(whole)
    assert len(content(whole)) == 28


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("rows.csv", "question,answer\n", "data.streaming reads jsonl, parquet and txt files"),
        ("rows.jsonl", "\n\n", "streaming gave no row"),
        ("rows.txt", b"caf\xe9\n", "not UTF-8 text .*iconv"),
    ],
)
def test_what_cannot_be_streamed(name: str, text: str | bytes, says: str, shards: Path) -> None:
    path = shards.parent / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(DataError, match=says):
        take(RowStream(str(path), 9, 1.0, 0))
