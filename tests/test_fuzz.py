"""Damaged files: whatever stands in them, a reader raises a WorkbenchError, and never anything else.

A seeded mutator changes every shipped recipe and every kind of file that a run reads or writes. A plain `pytest` takes
300 files, `pytest -m nightly` 10,000.
"""

from __future__ import annotations

import io
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from workbench import recipes
from workbench.config import load_config
from workbench.config.sections.basic_sections import DataConfig
from workbench.data import rows
from workbench.data.text import formats
from workbench.errors import WorkbenchError
from workbench.report import run_record
from workbench.runs import run_directory
from workbench.training import checkpoints

WEIRD = ["2026-13-45", "9" * 5000, "[" * 5000, "&a [*a]", '"\\ud800"', "{", "null", "[]", "-1", "1e400", ".inf"]
WEIRD += ["!!python/name:os", "!!bool maybe", "!!int ''", "!!omap [a: 1, a: 2]", "%YAML 1.3", "&a 1", "yes", "1.0.0"]
WEIRD += ["\x00", "\ufeff", "\t", "'", "x: y: z", "%", '"x"', "{}", "😀", "\\"]
Reader = Callable[[Path], object]


def mutated(content: bytes, chance: random.Random) -> bytes:
    """One to three changes: bytes flipped, removed, doubled or cut off; a value exchanged; lines shuffled."""
    for _ in range(chance.randint(1, 3)):
        at = chance.randrange(len(content) + 1)
        end = min(len(content), at + chance.choice([1, 3, 20]))
        way = chance.randrange(7)
        if way == 0:
            content = content[:at] + bytes([chance.randrange(256)]) + content[end:]
        elif way == 1:
            content = content[:at] + content[end:]
        elif way == 2:
            content = content[:at] + content[at:end] * 3 + content[end:]
        elif way == 3:
            content = content[:at]
        elif way == 4:
            lines = content.split(b"\n")
            chance.shuffle(lines)
            content = b"\n".join(lines)
        else:
            weird = chance.choice(WEIRD).encode("utf-8", "surrogatepass")
            colon = content.find(b": ", at)
            start = colon + 2 if colon >= 0 else at
            stop = content.find(b"\n", start)
            content = content[:start] + weird + content[stop if stop >= 0 else len(content) :]
    return content


def _rows(path: Path) -> object:
    return list(formats.read(str(path), DataConfig(train=str(path)), skipped=[]))


def _parquet() -> bytes:
    table = pyarrow.table({"prompt": ["a", "b"] * 4, "completion": ["c", "d"] * 4})
    file = io.BytesIO()
    pyarrow.parquet.write_table(table, file)
    return file.getvalue()


def _files(finished: Path) -> list[tuple[str, bytes, Reader]]:
    """Name, content and reader of each kind of file."""
    pair = {"prompt": "What?", "completion": "That."}
    found: list[tuple[str, bytes, Reader]] = [
        (f"{name.replace('/', '-')}.yaml", recipes.find(name).read_bytes(), lambda path: load_config(path))
        for name in recipes.shipped()
    ]
    found += [
        ("rows.jsonl", "\n".join(json.dumps(pair) for _ in range(8)).encode(), _rows),
        ("rows.json", json.dumps([pair] * 8).encode(), _rows),
        ("rows.csv", b"prompt,completion\n" + b"What?,That.\n" * 8, _rows),
        ("rows.txt", b"Once upon a time.\n\nThere was a fox.\n" * 4, lambda path: list(rows.read_rows(str(path)))),
        ("rows.parquet", _parquet(), _rows),
    ]
    for name in ("config.yaml", "manifest.json", "metrics.jsonl", "scores.json"):
        found.append((f"run/{name}", (finished / name).read_bytes(), lambda path: run_record.read(path.parent)))
    found.append(
        (
            "run/config.yaml",
            (finished / "config.yaml").read_bytes(),
            lambda path: run_directory.read_config(path.parent),
        )
    )
    step = next((finished / "checkpoints").glob("step-*"))
    found.append(
        ("step/state.json", (step / "state.json").read_bytes(), lambda path: checkpoints.read_progress(path.parent))
    )
    return found


def _survive(finished: Path, folder: Path, *, seeds: range) -> None:
    files = _files(finished)
    wrong = []
    for seed in seeds:
        chance = random.Random(seed)
        name, content, read = chance.choice(files)
        path = folder / str(seed) / name
        path.parent.mkdir(parents=True)
        if name.startswith("run/"):
            for each in ("config.yaml", "manifest.json", "metrics.jsonl", "scores.json"):
                shutil.copy(finished / each, path.parent)
        path.write_bytes(mutated(content, chance))
        try:
            read(path)
        except WorkbenchError:
            pass
        except Exception as error:
            wrong.append(f"seed {seed}, {name}: {type(error).__name__}: {str(error)[:200]}")
        shutil.rmtree(folder / str(seed))
    assert not wrong, "\n".join(wrong)


def test_three_hundred_damaged_files(trained: Path, tmp_path: Path) -> None:
    _survive(trained, tmp_path, seeds=range(300))


@pytest.mark.nightly
def test_ten_thousand_damaged_files(trained: Path, tmp_path: Path) -> None:
    _survive(trained, tmp_path, seeds=range(300, 10_300))
