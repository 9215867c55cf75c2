"""Folders of runs as `workbench run` leaves them, and a server of the page in a process of its own."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd

HOSTILE = "<script>document.title = 'executed'</script><img src=x onerror=\"document.title='executed'\">"
"""Text that a page must show and not execute."""
TOKEN = "a-token-of-the-tests"
CONFIG = """\
recipe: sft
model: {id: starter}
adapter: {method: lora, rank: 16}
data: {train: starter/fairytaleqa_train.jsonl}
train: {learning_rate: 0.0001}
"""


def row(step: int) -> dict[str, Any]:
    """A line of metrics.jsonl."""
    found = {
        "step": step,
        "loss": 2.0 + 3 * math.exp(-step / 300) + 0.3 * math.sin(step * 12.9898) * math.cos(step),
        "learning_rate": 1e-4,
        "grad_norm": 1.0 + 0.2 * math.sin(step),
        "tokens": 1000,
        "supervised_tokens": 100,
        "tokens_per_second": 900.0,
        "data_wait": 0.0,
        "peak_bytes": 900_000_000,
        "elapsed_s": step * 0.5,
    }
    return {**found, "held_out_loss": found["loss"] + 0.2} if step % 20 == 0 else found


def log(path: Path, first: int, last: int) -> None:
    """Append the lines of steps first to last."""
    with (path / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(row(step)) + "\n" for step in range(first, last + 1))


def make_run(folder: Path, name: str, *, steps: int, status: str = "done", text: str = "a quiet answer") -> Path:
    """A run directory of so many steps, whose prompts and answers are `text`."""
    path = folder / name
    path.mkdir(parents=True)
    (path / "config.yaml").write_text(CONFIG.replace("0.0001", f"{0.0001 * (1 + len(name))}"))
    facts = {"name": name, "created": "2026-11-25T03:15:16+00:00", "status": status, "reason": None}
    (path / "manifest.json").write_text(json.dumps({**facts, "batch": {"steps": max(steps, 200)}}))
    (path / "scores.json").write_text(json.dumps({"before": {"loss": 5.1}, "after": {"loss": 2.2}}))
    (path / "report.html").write_text(f"<!doctype html><title>report</title><p>{text}</p>")
    (path / "run.lock").touch()
    answers = {"row": ["a.jsonl, row 1"], "prompt": [text], "reference": [text], "after": [text], "f1_after": [0.5]}
    pd.DataFrame(answers).to_parquet(path / "predictions.parquet")
    log(path, 1, steps)
    return path


def write_samples(path: Path, *, steps: Sequence[int], prompts: Sequence[str], name: str = "a.jsonl, row") -> None:
    """Append the sample answers of some steps."""
    with (path / "samples.jsonl").open("a") as file:
        for step in steps:
            for number, prompt in enumerate(prompts, start=1):
                own = {"step": step, "row": f"{name} {number}", "prompt": prompt, "reference": "right"}
                file.write(json.dumps({**own, "answer": f"answer of step {step} to {prompt}"}) + "\n")


def write_layers(path: Path, *, changes: Sequence[tuple[int, str]], kinds: Sequence[str] = ("q", "k", "v")) -> None:
    """Write which of some layers train from which steps on; of a block, q trains."""
    blocks = [
        {"name": f"block {number}", "layer": number, "parts": {kind: 512 * (kind == kinds[0]) for kind in kinds}}
        for number in range(1, len(changes[0][1]) - 1)
    ]
    outside = [{"name": "before the blocks", "layer": 0, "parts": {"embedding": 0}}]
    after = [{"name": "after the blocks", "layer": len(blocks) + 1, "parts": {"norm": 0, "head": 64}}]
    (first, trains), *others = changes
    lines = [{"step": first, "trains": trains, "layers": [*outside, *blocks, *after]}]
    lines += [{"step": step, "trains": now} for step, now in others]
    (path / "layers.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@contextmanager
def served(folder: Path, *words: str, port: int = 0) -> Iterator[str]:
    """The address of a server of this folder, with its token; ended by SIGTERM."""
    command = [sys.executable, "-m", "workbench.cli", "ui", str(folder), "--port", str(port), "--token", TOKEN, *words]
    log_path = folder.parent / f"server-{time.monotonic_ns()}.log"
    with log_path.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, cwd=folder.parent, env=os.environ)
    try:
        deadline = time.monotonic() + 60
        while not (found := re.search(r"http://\S+", log_path.read_text())):
            assert process.poll() is None and time.monotonic() < deadline, log_path.read_text()
            time.sleep(0.05)
        yield found[0]
    finally:
        process.terminate()
        process.wait(20)
        printed = log_path.read_text()
    assert process.returncode == 0 and "ERROR" not in printed and "Traceback" not in printed, printed


def asked(address: str, path: str, body: Any = None) -> Any:
    """What the server says to a request with the token."""
    request = urllib.request.Request(
        address.partition("/#")[0] + path,
        None if body is None else json.dumps(body).encode(),
        {"Authorization": f"Bearer {TOKEN}"},
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=60) as response:
        return json.load(response)
