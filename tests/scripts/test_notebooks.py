"""Notebooks run from their first cell to their last, offline, and hold no output that the code did not give."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from tests.scripts.shown_commands import ROOT

NOTEBOOKS = sorted((ROOT / "scripts" / "tutorials").glob("*.ipynb"))


def code_cells(notebook: Path) -> list[str]:
    """The code of a notebook, cell by cell."""
    cells = json.loads(notebook.read_text())["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def executed(notebook: Path) -> tuple[dict[str, Any], list[object]]:
    """All names after the last cell, and what each cell shows: the value of the expression that it ends with."""
    names: dict[str, Any] = {"__name__": "__main__"}
    shown: list[object] = []
    for number, source in enumerate(code_cells(notebook)):
        tree = ast.parse(source)
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        where = f"{notebook.name}, code cell {number}"
        exec(compile(tree, where, "exec"), names)
        shown.append(last and eval(compile(ast.Expression(last.value), where, "eval"), names))
    return names, shown


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_whole_and_has_no_outputs(notebook: Path) -> None:
    found = json.loads(notebook.read_text())
    assert (found["nbformat"], found["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in found["cells"]}) == len(found["cells"])
    code = [cell for cell in found["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    assert not [line for source in code_cells(notebook) for line in source.splitlines() if line.startswith(("%", "!"))]


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of other packages, which a reader sees below the cell
def test_the_first_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    names, shown = executed(ROOT / "scripts" / "tutorials" / "first_run.ipynb")
    run, scores = names["run"], names["scores"]
    assert run.resolve() == tmp_path / "runs" / "stories"
    assert {"adapter", "metrics.jsonl", "report.html", "scores.json"} <= set(shown[1])  # type: ignore[arg-type]
    assert scores["after"]["loss"] < scores["before"]["loss"] - 0.2
    assert len(names["metrics"]) == 16 and len(names["held_out"]) >= 2
    assert names["losses"].keys() == {"lora", "dora", "ia3"} and len(set(names["losses"].values())) == 3
    ours, peft = names["predictions"].after[0].split(), names["answer"].split()
    assert len(peft) > 5 and ours[:5] == peft[:5], "PEFT says the same, until a near tie falls the other way"
