"""Damaged files and requests: whatever stands in them, a reader raises a WorkbenchError, and never anything else.

A seeded mutator changes every shipped recipe, files of other tools, every kind of file that a run reads or writes, and
requests to the page and to a server. A plain `pytest` takes 300 cases, `pytest -m nightly` 20,000.
"""

from __future__ import annotations

import io
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

import pyarrow
import pyarrow.parquet
import pytest
from starlette.testclient import TestClient

from workbench import recipes
from workbench.cli.ui.server import Access, Page
from workbench.config import load_config
from workbench.config.sections.basic_sections import DataConfig
from workbench.data import rows
from workbench.data.text import formats
from workbench.data.time_limit import time_limit
from workbench.errors import WorkbenchError
from workbench.evaluation.serving.app import Server, ServerLimits
from workbench.recipes.verbs import translated
from workbench.report import run_record
from workbench.runs import run_directory
from workbench.training import checkpoints

WEIRD = ["2026-13-45", "9" * 5000, "[" * 5000, "&a [*a]", '"\\ud800"', "{", "null", "[]", "-1", "1e400", ".inf"]
WEIRD += ["!!python/name:os", "!!bool maybe", "!!int ''", "!!omap [a: 1, a: 2]", "%YAML 1.3", "&a 1", "yes", "1.0.0"]
WEIRD += ["\x00", "\ufeff", "\t", "'", "x: y: z", "%", '"x"', "{}", "😀", "\\"]
Reader = Callable[[Path], object]
AXOLOTL = """\
base_model: starter
adapter: lora
lora_r: 8
lora_target_modules: [q_proj, v_proj]
datasets:
  - path: rows.jsonl
    type: chat_template
    field_messages: messages
    message_property_mappings:
      role: from
  - path: more.jsonl
    type: alpaca
    shards: 2
sequence_len: 512
micro_batch_size: 2
gradient_accumulation_steps: 4
num_epochs: 3
warmup_ratio: 0.1
val_set_size: 0.05
learning_rate: 0.0002
special_tokens:
  pad_token: "<pad>"
"""
LLAMAFACTORY = """\
model_name_or_path: starter
stage: sft
finetuning_type: lora
lora_target: all
lora_rank: 8
dataset: one,two
template: llama3
cutoff_len: 2048
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
val_size: 0.1
output_dir: saves
"""
SOURCES = """\
recipe: sft
model: {id: starter}
data:
  sources:
    one:
      path: one.jsonl
      weight: 2.0
      limit: 10
      columns: {prompt: question}
    two:
      path: two.jsonl
      passes: 3
  mix: {by: weight}
fleet:
  members:
    ann:
      data.train: ann.jsonl
"""
FORM = {"recipe": "sft/quickstart", "answers": {"adapter.rank": "8", "data.sources": "{a: {path: x}}"}, "run": "new"}
CHAT = {"model": "x", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5, "stop": ["a"], "n": 2}
TEXT = {"model": "x", "prompt": ["Once", "upon"], "max_tokens": 3, "temperature": 0.5, "logprobs": 2, "echo": True}


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


def _asked(client: TestClient, address: str, body: bytes | None = None, *, name: bytes = b"") -> None:
    """Send a request, which must be answered."""
    url = address + quote(name, safe="?&=/")
    answer = client.get(url) if body is None else client.post(url, content=body)
    assert answer.status_code < 500, answer.text


def _files(finished: Path, page: TestClient, server: TestClient) -> list[tuple[str, bytes, Reader]]:
    """Name, content and reader of each kind of file."""
    pair = {"prompt": "What?", "completion": "That."}
    found: list[tuple[str, bytes, Reader]] = [
        (f"{name.replace('/', '-')}.yaml", recipes.find(name).read_bytes(), lambda path: load_config(path))
        for name in recipes.shipped()
        if not name.startswith("models/")  # they are alike
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
    for name, text in (("axolotl", AXOLOTL), ("llamafactory", LLAMAFACTORY)):
        found += [(f"{name}.yaml", text.encode(), lambda path: translated.write(path, path.with_name("o.yaml")))] * 8
    found += [("sources.yaml", SOURCES.encode(), lambda path: load_config(path))] * 4
    form = json.dumps(FORM, indent=1).encode()
    found += [("form.json", form, lambda path: _asked(page, "/api/form/mistakes", path.read_bytes()))] * 4
    names = b"first?run=first&curve=first//&first=3"
    for address in ("/api/runs/", "/api/differences?run=", "/api/runs/first/tables/", "/api/recipes/", "/runs/"):
        found.append(("name", names, lambda path, address=address: _asked(page, address, name=path.read_bytes())))  # type: ignore[misc]
    for address, body in (("/v1/chat/completions", CHAT), ("/v1/completions", TEXT), ("/v1/embeddings", TEXT)):
        sent = json.dumps(body, indent=1).encode()
        found += [("body.json", sent, lambda path, address=address: _asked(server, address, path.read_bytes()))] * 2  # type: ignore[misc]
    step = next((finished / "checkpoints").glob("step-*"))
    found.append(
        ("step/state.json", (step / "state.json").read_bytes(), lambda path: checkpoints.read_progress(path.parent))
    )
    return found


@pytest.fixture(autouse=True)
def state_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def _survive(finished: Path, folder: Path, *, seeds: range) -> None:
    shutil.copytree(finished, folder / "runs" / "first")
    token = {"Authorization": "Bearer word"}
    shown = Page(folder / "runs", Access("word"))
    page = TestClient(shown.app, base_url="http://127.0.0.1", headers=token)
    server = TestClient(Server([], ServerLimits()).app, base_url="http://127.0.0.1")
    files = _files(finished, page, server)
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
            with time_limit(lambda: TimeoutError("60 s"), seconds=60, clock="wall"):
                read(path)
        except WorkbenchError:
            pass
        except Exception as error:
            wrong.append(f"seed {seed}, {name}: {type(error).__name__}: {str(error)[:200]}")
        shutil.rmtree(folder / str(seed))
    shown.close()
    assert not wrong, "\n".join(wrong)


def test_three_hundred_damaged_files(trained: Path, tmp_path: Path) -> None:
    _survive(trained, tmp_path, seeds=range(300))


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(10))
def test_twenty_thousand_damaged_files(trained: Path, tmp_path: Path, part: int) -> None:
    _survive(trained, tmp_path, seeds=range(300 + 2000 * part, 2300 + 2000 * part))
