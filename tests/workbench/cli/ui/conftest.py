"""A folder of runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.workbench.cli.ui.made_runs import make_run


@pytest.fixture(autouse=True)
def state_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where queues stand, instead of the home folder of whoever runs the tests."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with two runs that have ended."""
    found = tmp_path / "runs"
    make_run(found, "first", steps=60)
    make_run(found, "second", steps=40)
    return found
