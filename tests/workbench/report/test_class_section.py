"""The page of a run that classified: its tables are those of the predictions, whatever a class is called."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from workbench import report
from workbench.config.sections.classes_config import ClassesConfig
from workbench.config.yaml_text import dump_yaml
from workbench.report.class_section import WIDEST, classified, never_predicted
from workbench.report.findings import findings
from workbench.report.run_record import read


def make(
    folder: Path,
    rows: list[tuple[Any, Any]],
    names: list[str],
    *,
    kind: str = "one",
    settings: dict[str, Any] | None = None,
    **scores: float,
) -> Path:
    folder.mkdir()
    (folder / "config.yaml").write_text(
        dump_yaml({"recipe": "classify", "classes": {"kind": kind, **(settings or {})}})
    )
    (folder / "manifest.json").write_text(json.dumps({"name": "run", "status": "done"}))
    both = {"loss": 1.0, **scores}
    (folder / "scores.json").write_text(json.dumps({"before": both, "after": both}))
    table = {
        "row": [f"rows.csv, row {n + 1}" for n in range(len(rows))],
        "text": [f"text <{n}>" for n in range(len(rows))],
        "label": [label for label, _ in rows],
        "predicted": [said for _, said in rows],
    }
    for name in names:
        said = [row[1] if isinstance(row[1], list) else [row[1]] for row in rows]
        table[f"p_{name}"] = [0.9 - 0.01 * n if name in each else 0.05 for n, each in enumerate(said)]
    pd.DataFrame(table).to_parquet(folder / "predictions.parquet")
    return folder


def test_classes_confusions_and_mistakes(tmp_path: Path) -> None:
    rows = [("a", "a")] * 3 + [("a", "b")] * 2 + [("b", "b")] + [("<c>", "a")]
    run = make(tmp_path / "run", rows, ["a", "b", "<c>"], accuracy=4 / 7, accuracy_low=0.25, accuracy_high=0.84)
    found = classified(read(run))
    assert found is not None
    assert found.classes == [
        ("a", "0.75", "0.60", "0.67", "5"),
        ("b", "0.33", "1.00", "0.50", "1"),
        ("<c>", "0.00", "0.00", "0.00", "1"),
    ]
    assert {name: [cell.rows for cell in cells] for name, cells in found.matrix} == {
        "a": [3, 2, 0],
        "b": [0, 1, 0],
        "<c>": [1, 0, 0],
    }
    assert found.matrix[0][1][1].share == pytest.approx(0.4)
    assert found.confused == [("a", "b", "2 of 5"), ("<c>", "a", "1 of 1")]
    assert [mistake["row"] for mistake in found.mistakes] == [f"rows.csv, row {n}" for n in (4, 5, 7)]
    page = report.write(run).read_text()
    assert "Accuracy 0.571 (95 %: 0.250 to 0.840) on 7 held-out rows" in page.replace("&#39;", "'")
    assert "&lt;c&gt;" in page and "<c>" not in page and "text &lt;3&gt;" in page


def test_many_classes_have_no_matrix(tmp_path: Path) -> None:
    names = [f"c{n}" for n in range(WIDEST + 1)]
    run = make(tmp_path / "run", [(name, "c0") for name in names], names, accuracy=0.1)
    found = classified(read(run))
    assert found is not None and not found.matrix and len(found.classes) == WIDEST + 1 and found.confused
    assert "Most frequent confusions" in report.write(run).read_text()


def test_several_classes_and_numbers(tmp_path: Path) -> None:
    rows = [(["a"], ["a", "b"]), ([], []), (["b"], ["b"]), (["a", "b"], ["b"])]
    run = make(tmp_path / "several", rows, ["a", "b"], kind="several", micro_f1=0.8, exact_match=0.5)
    found = classified(read(run))
    assert found is not None and found.classes == [
        ("a", "1.00", "0.50", "0.67", "2"),
        ("b", "0.67", "1.00", "0.80", "2"),
    ]
    assert len(found.mistakes) == 2 and not found.matrix
    assert "Micro-F1 0.800 on 4 held-out rows; 0.500 of them are right" in report.write(run).read_text()
    run = make(tmp_path / "number", [(1.0, 1.5), (2.0, -3.0)], [], kind="number", rmse=3.55)
    found = classified(read(run))
    assert found is not None and [mistake["sure"] for mistake in found.mistakes] == ["off by 5.00", "off by 0.500"]
    page = report.write(run).read_text()
    assert "Largest errors" in page and "squared error in label variances" in page and "nats" not in page


def test_a_run_before_its_predictions(tmp_path: Path) -> None:
    run = make(tmp_path / "run", [("a", "a")], ["a", "b"], accuracy=1.0)
    for name in ("predictions.parquet", "scores.json"):
        (run / name).unlink()
    assert classified(read(run)) is None
    assert "Answers" not in report.write(run).read_text()


def test_classes_that_are_never_predicted_are_named(tmp_path: Path) -> None:
    rows = [("a", "a")] * 3 + [("b", "b")] * 2 + [("rare", "a")] * 2
    run = read(make(tmp_path / "run", rows, ["a", "b", "rare", "absent"], accuracy=5 / 7))
    assert never_predicted(run) == [("rare", 2)]
    (told,) = [each.text for each in findings(run) if each.text.startswith("Never predicted")]
    assert told.startswith("Never predicted: rare (2 rows).") and "classes.sampling=even" in told
    assert not never_predicted(read(make(tmp_path / "good", [("a", "a"), ("b", "b")], ["a", "b"], accuracy=1.0)))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"sampling": "auto", "weights": "none", "logit_adjustment": 0.0},
        {"logit_adjustment": 1.0},
        {"weights": "effective"},
        {"sampling": "over"},
        {"kind": "several"},
        {"kind": "several", "gamma": 2.0},
    ],
    ids=str,
)
def test_advice_on_never_predicted_classes_goes_with_the_settings_of_the_run(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    several = settings.get("kind") == "several"
    rows = [(["a", "rare"], ["a"]), (["a"], ["a"])] if several else [("a", "a"), ("rare", "a")]
    run = read(make(tmp_path / "run", rows, ["a", "rare"], settings=settings, accuracy=0.5))
    (text,) = [each.text for each in findings(run) if each.text.startswith("Never predicted")]
    advised = dict(re.findall(r"classes\.(\w+)=(\w+)", text))
    for key, value in advised.items():
        ClassesConfig.model_validate({**settings, key: value})
    chosen = {key for key, value in settings.items() if key != "kind" and value not in ("none", "auto", 0.0)}
    assert bool(advised) != bool(chosen)


@pytest.mark.parametrize(("rare", "balanced"), [(5, True), (90, False)])
def test_classes_that_the_default_balances_need_rows_and_no_setting(tmp_path: Path, rare: int, balanced: bool) -> None:
    run = make(
        tmp_path / "run", [("a", "a"), ("rare", "a")], ["a", "rare"], settings={"sampling": "auto"}, accuracy=0.5
    )
    counts = {"data": {"train": {"classes": {"a": 100, "b": 100, "rare": rare}}}}
    manifest = json.loads((run / "manifest.json").read_text()) | counts
    (run / "manifest.json").write_text(json.dumps(manifest))
    (text,) = [each.text for each in findings(read(run)) if each.text.startswith("Never predicted")]
    assert ("more rows" in text) == balanced and ("classes.sampling=even" in text) != balanced
