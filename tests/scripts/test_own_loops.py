"""The page on loops of one's own runs as it stands."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scripts.shown_commands import ROOT, blocks

PAGE = ROOT / "recipes" / "verbs" / "own_loops.md"


@pytest.mark.slow
def test_its_loop_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    code = next(block.text for block in blocks(PAGE) if block.language == "python")
    exec(compile(code, str(PAGE), "exec"), {"__name__": "page"})
    steps = [line.split() for line in capsys.readouterr().out.splitlines()[:6]]
    first, last = (float(line[1].strip("[',")) for line in (steps[0], steps[-1]))
    assert last < 0.7 * first
    assert (tmp_path / "states").is_dir()
