"""Addresses that fsspec reads: rows come from them, runs go to them, and what is missing is told."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from typer.testing import CliRunner

import workbench
from workbench.cli.verbs import app
from workbench.config import DataConfig
from workbench.data.images import picture_sources
from workbench.data.rows import fingerprint, read_rows
from workbench.errors import FileError, WorkbenchError
from workbench.runs import addresses, remote_copy

ROWS = [{"text": f"message {n}", "label": "ab"[n % 2]} for n in range(12)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[fsspec.AbstractFileSystem]:
    """An empty file system in memory, and an empty cache."""
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path / "cache"))
    system = fsspec.filesystem("memory")
    system.store.clear()
    yield system
    system.store.clear()


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("s3://bucket/a.jsonl", True),
        ("memory://a", True),
        ("hf://datasets/owner/name/a.csv", True),
        ("simplecache::s3://bucket/a", True),
        ("owner/name", False),
        ("owner/name:main#test", False),
        ("/a/b.jsonl", False),
        ("a:b", False),
        ("s3://", False),
    ],
)
def test_what_an_address_is(source: str, found: bool) -> None:
    assert addresses.is_address(source) == found


def test_rows_of_files_and_folders_at_an_address(memory: fsspec.AbstractFileSystem, tmp_path: Path) -> None:
    memory.pipe("/data/a.jsonl", LINES)
    memory.pipe("/data/b.jsonl.gz", gzip.compress(LINES))
    assert [row.columns for row in read_rows("memory://data/a.jsonl")] == ROWS
    assert next(iter(read_rows("memory://data/b.jsonl.gz"))).place == "b.jsonl.gz, row 1"
    assert len(list(read_rows("memory://data"))) == 24
    before = fingerprint("memory://data/a.jsonl")
    memory.pipe("/data/a.jsonl", LINES[: LINES.index(b"\n") + 1])
    assert [row.columns for row in read_rows("memory://data/a.jsonl")] == ROWS[:1]
    assert fingerprint("memory://data/a.jsonl") != before


def test_labels_and_their_names_at_an_address(memory: fsspec.AbstractFileSystem) -> None:
    for name, content in (("t.txt", b"one\ntwo\n"), ("l.txt", b"1\n0\n"), ("m.txt", b"0\tno\n1\tyes\n")):
        memory.pipe(f"/d/{name}", content)
    config = DataConfig(train="memory://d/t.txt", labels="memory://d/l.txt", label_names="memory://d/m.txt")
    assert [row.columns["label"] for row in read_rows("memory://d/t.txt", config)] == ["yes", "no"]


def test_pictures_of_a_folder_at_an_address(memory: fsspec.AbstractFileSystem) -> None:
    for name in ("cat/1.png", "dog/2.png"):
        memory.pipe(f"/pets/{name}", b"a picture")
    assert [row.columns["label"] for row in picture_sources.read_rows("memory://pets")] == ["cat", "dog"]


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("memory://none/a.jsonl", "memory://none/a.jsonl: no such file or folder"),
        ("s3://bucket/a.jsonl", r"a package for s3:// is not installed: .*Write `pip install s3fs`"),
        ("gs://bucket/a.jsonl", r"a package for gs:// is not installed: .*Write `pip install gcsfs`"),
        ("az://bucket/a.jsonl", r"a package for az:// is not installed: .*Write `pip install adlfs`"),
        ("sftp://host/a.jsonl", r"a package for sftp:// is not installed: .*paramiko"),
        ("nonsense://host/a.jsonl", r"cannot be reached: ValueError: Protocol not known: nonsense"),
    ],
)
def test_what_is_missing_is_told(address: str, words: str) -> None:
    with pytest.raises(FileError, match=words):
        list(read_rows(address))
    if not address.startswith("memory"):
        with pytest.raises(FileError, match=words):
            addresses.require_free(address)


def test_a_data_set_at_an_address_is_checked(memory: fsspec.AbstractFileSystem) -> None:
    memory.pipe("/data/a.jsonl", LINES)
    words = ["data.train=memory://data/a.jsonl", "data.held_out=0.4", "data.test=null"]
    found = workbench.check("classify/quickstart", words)
    assert len(found.data.train) + len(found.data.held_out) == 12
    with pytest.raises(WorkbenchError, match=r"memory://data/b.jsonl: no such file"):
        workbench.check("classify/quickstart", [words[0].replace("a.jsonl", "b.jsonl"), *words[1:]])


@pytest.mark.parametrize("word", ["runs/mine", "owner/name", "s3:/bucket/run"])
def test_a_path_or_a_name_is_no_address_to_push_to(word: str, tmp_path: Path) -> None:
    for look in (addresses.require_free, lambda name: remote_copy.fetch(name, tmp_path / "run")):
        with pytest.raises(FileError, match=rf"--push {word}: no address\. Write one as s3://BUCKET/RUN"):
            look(word)


def test_an_address_that_is_taken_is_told(memory: fsspec.AbstractFileSystem, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a")
    addresses.require_free("memory://runs/first")
    addresses.put({str(tmp_path / "a"): "memory://runs/first/deep/a"})
    assert memory.cat("/runs/first/deep/a") == b"a" and addresses.read("memory://runs/first/deep/a") == b"a"
    assert addresses.found("memory://runs/first/") == {"deep/a": "memory://runs/first/deep/a"}
    with pytest.raises(FileError, match=r"--push memory://runs/first: holds files already"):
        addresses.require_free("memory://runs/first")
    addresses.require_free("memory://runs/second")
    addresses.remove("memory://runs/first")
    addresses.require_free("memory://runs/first")


@pytest.mark.slow
def test_a_finished_run_is_copied(memory: fsspec.AbstractFileSystem, tmp_path: Path) -> None:
    memory.pipe("/data/a.jsonl", "".join(json.dumps({"text": row["text"]}) + "\n" for row in ROWS).encode())
    words = ["data.train=memory://data/a.jsonl", "data.held_out=0.3", "data.test=null", "train.steps=1"]
    command = ["run", "sft/quickstart", *words, "evaluate.answers=0", "--out", str(tmp_path / "run"), "--push"]
    result = CliRunner().invoke(app, [*command, "memory://runs/first"])
    assert result.exit_code == 0 and "Copied to memory://runs/first" in result.output
    assert memory.cat("/runs/first/scores.json") == (tmp_path / "run" / "scores.json").read_bytes()
    assert memory.exists("/runs/first/adapter/adapter_model.safetensors")
    again = CliRunner().invoke(app, [*command, "memory://runs/first", "--out", str(tmp_path / "other")])
    assert isinstance(again.exception, FileError) and not (tmp_path / "other").exists()
    again = CliRunner().invoke(app, [*command, "memory://runs/second", "--resume"])
    assert again.exit_code == 0 and memory.exists("/runs/second/scores.json")
