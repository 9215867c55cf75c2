"""Tutorials are run as they stand: blocks that need no hardware, in one shell, with the settings of their comments."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import forked
from tests.scripts.shown_commands import TUTORIALS, blocks, inline


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
