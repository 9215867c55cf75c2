"""Tutorials are run as they stand: blocks that need no hardware, in one shell, with the settings of their comments."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import forked
from tests.scripts.shown_commands import ROOT, TUTORIALS, blocks, inline


@pytest.mark.slow
@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_a_tutorial_runs(page: Path, tmp_path: Path) -> None:
    script = "\n".join(block.script() for block in blocks(page) if not block.needs)
    folders = [Path(forked.python()).parent, Path(sys.executable).parent]
    path = os.pathsep.join([*map(str, folders), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script], capture_output=True, text=True, cwd=tmp_path, env=environment
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    promised = [code for code in inline(page) if code.startswith("runs/") and " " not in code]
    assert [name for name in promised if not (tmp_path / name).exists()] == []


TINY = "train.steps=2 evaluate.answers=1 evaluate.max_new_tokens=4 evaluate.samples=0 data.held_out=0.2"
"""Settings that make a second of a run."""


@pytest.mark.slow
def test_the_first_commands_of_the_readme_run_on_own_rows(tmp_path: Path) -> None:
    """From `init` to `merge`, as printed, but for a backbone without network, few steps, and an answer to `init`."""
    (block,) = [each for each in blocks(ROOT / "README.md") if "workbench init" in each.text]
    lines = [line.partition("  #")[0].rstrip() for line in block.text.splitlines()]
    assert [line.split()[1] for line in lines] == ["init", "check", "run", "generate", "merge"]
    rows = [{"question": f"How many is {n}?", "answer": f"It is {n}."} for n in range(40)]
    (tmp_path / "my.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    script = (
        "\n".join(lines)
        .replace("Qwen/Qwen3-0.6B", "starter")
        .replace("data.train=my.jsonl", f"data.train=my.jsonl {TINY}")
    )
    assert script.count("model.id=starter") == script.count(TINY) == 2
    path = os.pathsep.join([str(Path(forked.python()).parent), str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script.replace("init my.yaml", "init my.yaml --rows my.jsonl --memory 8GB")],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert (tmp_path / "runs/mine/report.html").is_file() and (tmp_path / "merged/model.safetensors").is_file()
