"""The table of layers in a report: parts by block, neighbours that are alike together, steps in which they trained."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.run_files import write_lines
from workbench import report
from workbench.errors import FileError
from workbench.report import dynamics_section, run_record

BLOCKS = [{"name": f"block {number}", "layer": number, "parts": {"q": 1024, "up": 0}} for number in (1, 2, 3)]
LAYERS = [{"name": "before the blocks", "layer": 0, "parts": {"embedding": 0}}, *BLOCKS]
LAYERS += [{"name": "after the blocks", "layer": 4, "parts": {"head": 64}}]


def _run(path: Path, *changes: tuple[int, str], steps: int = 10) -> Path:
    path.mkdir()
    (path / "config.yaml").write_text("recipe: sft\nmodel: {id: starter}\n")
    (path / "manifest.json").write_text('{"name": "run", "status": "stopped"}')
    held_out = {4: {"held_out_loss": 3.0}, 6: {"held_out_loss": 1.0, "asked": 1}, 8: {"held_out_loss": 2.0}}
    rows = [{"step": step, "loss": 2.0, "tokens": 9, **held_out.get(step, {})} for step in range(1, steps + 1)]
    write_lines(path / "metrics.jsonl", rows)
    lines = [{"step": step, "trains": trains} for step, trains in changes]
    if lines:
        lines[0]["layers"] = LAYERS  # type: ignore[assignment]
    write_lines(path / "layers.jsonl", lines)
    return path


def test_blocks_that_are_alike_share_a_row(tmp_path: Path) -> None:
    found = dynamics_section.layers(run_record.read(_run(tmp_path / "run", (0, "11111"))))
    assert found is not None and found.kinds == ("q", "head") and not found.changed
    assert found.frozen == ("embedding", "up")
    assert [(name, list(cells)) for name, cells, _ in found.rows] == [
        ("before the blocks", ["", ""]),
        ("blocks 1 to 3", ["1.0 k each", ""]),
        ("after the blocks", ["", "64"]),
    ]


def test_shares_of_steps_are_those_that_were_counted(tmp_path: Path) -> None:
    changes = ((0, "10111"), (4, "10011"), (9, "11011"))
    path = _run(tmp_path / "run", *changes)
    found = dynamics_section.layers(run_record.read(path))
    trained = [[now for begin, now in changes if begin <= step][-1] for step in range(1, 11)]
    assert found is not None and found.changed
    for name, layer in (("block 1", 1), ("block 2", 2), ("block 3", 3)):
        expected = sum(now[layer] == "1" for now in trained)
        assert next(share for row, _, share in found.rows if row == name) == f"{10 * expected} %"
    assert "Layers that trained" in report.write(path).read_text()


def test_a_run_without_that_file_has_no_table(tmp_path: Path) -> None:
    path = _run(tmp_path / "run")
    assert dynamics_section.layers(run_record.read(path)) is None
    (path / "layers.jsonl").unlink()
    assert dynamics_section.layers(run_record.read(path)) is None
    assert "Layers that trained" not in report.write(path).read_text()


@pytest.mark.parametrize("text", ["[]\n", "{}\n", '{"step": 0, "trains": "1", "layers": [3]}\n'])
def test_a_damaged_file_is_named(text: str, tmp_path: Path) -> None:
    path = _run(tmp_path / "run", (0, "11111"))
    (path / "layers.jsonl").write_text(text)
    with pytest.raises(FileError, match=r"layers\.jsonl: damaged"):
        dynamics_section.layers(run_record.read(path))


def test_an_evaluation_that_a_person_asked_for_is_not_the_best_one(tmp_path: Path) -> None:
    assert run_record.read(_run(tmp_path / "run", (0, "11111"))).best_step == (8, 2.0)
