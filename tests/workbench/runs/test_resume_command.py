"""The command that continues a run is whole, and is what was typed."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from workbench.runs.resume_command import finish, resume_command


@pytest.mark.parametrize(
    ("typed", "changes", "expected"),
    [
        ("run my.yaml", (), "run my.yaml --out runs/my --resume"),
        ("run my.yaml --out runs/my", (), "run my.yaml --out runs/my --resume"),
        ("run my.yaml --out=runs/my seed=1", (), "run my.yaml --out=runs/my seed=1 --resume"),
        ("run my.yaml --resume --out runs/my", ("a.b=1",), "run my.yaml --resume --out runs/my a.b=1"),
        ("run 'my own.yaml' --devices 2", (), "run 'my own.yaml' --devices 2 --out runs/my --resume"),
        ("evaluate runs/my", ("a.b=1",), "run runs/my/config.yaml --out runs/my --resume a.b=1"),
    ],
)
def test_it_is_what_was_typed(
    typed: str, changes: tuple[str, ...], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["workbench", *shlex.split(typed)])
    assert resume_command(Path("runs/my"), *changes) == f"workbench {expected}"


def test_another_run_is_continued_by_its_own_configuration() -> None:
    assert finish(Path("a b")) == "workbench run 'a b/config.yaml' --out 'a b' --resume"
