"""The page of a cross-validation comes of its directory alone, whatever stage it came to."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from rich.console import Console
from scipy import special

from tests.run_files import read_scores
from workbench import report
from workbench.cli import render
from workbench.config.yaml_text import dump_yaml, load_yaml
from workbench.evaluation.metrics import calibration_error
from workbench.report import crossval_section
from workbench.report.crossval_section import CONFLICTS, crossvalidated, gains
from workbench.report.findings import findings, verdict
from workbench.report.run_record import read

NAMES = ("card", "loan & <b>", "fee")
ROWS, FOLDS, STEPS = 60, 3, 8
SPLIT = {"source": "rows.csv", "fingerprint": "ab", "rows": ROWS, "tokens": 900, "truncated": 0, "skipped": 0}
SPLIT |= {"lengths": [5, 10, 20], "counts": [20, 40]}
SCORES: dict[str, dict[str, float]] = {
    "one": {"loss": 0.61, "accuracy": 0.8, "accuracy_low": 0.68, "accuracy_high": 0.88, "macro_f1": 0.79},
    "several": {"loss": 0.9, "exact_match": 0.6, "micro_f1": 0.77, "macro_f1": 0.7},
    "number": {"loss": 0.4, "rmse": 12.5, "mae": 9.0},
}
DUPLICATES: dict[str, Any] = {"rows": ROWS, "exact": 4, "clusters": 13, "clustered": 28, "largest": 3, "leak": 9}
DUPLICATES |= {
    "least_similar": 0.5,
    "conflicts": [[f"rows.csv, row {n}", f"rows.csv, row {n + 1}"] for n in range(1, 24, 2)],
    "left_out": ["2 rows in a cluster of near-duplicates with rows of test.csv"],
}


def worse(scores: dict[str, float], by: float) -> dict[str, float]:
    return {name: value * (1 + (by if name in ("loss", "rmse", "mae") else -by)) for name, value in scores.items()}


def gain(before: dict[str, float], after: dict[str, float], *, accepted: bool) -> dict[str, Any]:
    difference = after["loss"] - before["loss"]
    found = {"loss_before": before["loss"], "loss_after": after["loss"], "difference": difference}
    found |= {"low": difference - 0.01, "high": difference + 0.01, "accuracy_before": before.get("accuracy")}
    return {**found, "accuracy_after": after.get("accuracy"), "accepted": accepted, "reason": ""}


def stages(kind: str) -> list[dict[str, Any]]:
    last = SCORES[kind]
    first, refused = worse(last, 0.1), worse(last, 0.2)
    of_class = {"classes": {name: 5 + n for n, name in enumerate(NAMES)}, "thresholds": dict.fromkeys(NAMES, 0.95)}
    views = {"names": ["plain", "lower_case"], "weights": [0.7, 0.3], "gate": {"of": {"low": 0.1}, "share": 0.25}}
    views |= {"order": ["a", "b", "c"], "gain": {"low": -0.1, "high": 0.1}}
    return [
        {"name": "supervised", "title": "Supervised", "accepted": True, "why": "Always kept.", "seconds": 95.0,
         "oof": first, "test": worse(first, 0.05), "gain": None, "facts": {}},
        {"name": "pseudo_label 1", "title": "Pseudo-labels, round 1", "accepted": False, "why": "The loss rises.",
         "seconds": 61.0, "oof": refused, "test": refused, "gain": gain(first, refused, accepted=False),
         "facts": {"rows": 18, "confidence": 0.97} | of_class},
        {"name": "tta", "title": "Views", "accepted": True, "why": "The loss falls.", "seconds": 7.0, "oof": last,
         "passes": 1.25, "test": last, "gain": gain(first, last, accepted=True), "facts": views},
        {"name": "calibration", "title": "Temperature", "accepted": True, "why": "", "seconds": 0.1, "oof": last,
         "test": last, "gain": None, "facts": {"temperature": 2.0}},
        {"name": "refit", "title": "One adapter on all rows", "accepted": True, "why": "", "seconds": 20.0,
         "oof": None, "test": None, "gain": None, "facts": {}},
    ]  # fmt: skip


def folds(kind: str, repeats: int) -> list[dict[str, Any]]:
    return [
        {"member": f"repeat-{repeat}-fold-{fold}-seed-{seed}", "repeat": repeat, "fold": f"fold {fold}", "seed": seed,
         "train_rows": 40, "rows": 20, "scores": worse(SCORES[kind], 0.01 * (fold + seed + repeat))}
        for repeat in range(repeats) for fold in range(FOLDS) for seed in range(2)
    ]  # fmt: skip


def out_of_fold(kind: str, repeats: int) -> pd.DataFrame:
    draws = np.random.default_rng(0)
    parts = []
    for repeat in range(repeats):
        logits_NC = draws.normal(size=(ROWS, len(NAMES))) * 2
        found: dict[str, Any] = {"row": [f"rows.csv, row {n + 1}" for n in range(ROWS)]}
        found |= {"text": [f"text <{n}>" for n in range(ROWS)], "repeat": repeat, "fold": np.arange(ROWS) % FOLDS}
        if kind == "number":
            found |= {"label": draws.normal(size=ROWS), "predicted": logits_NC[:, 0]}
        else:
            p_NC = np.exp(logits_NC)
            p_NC = p_NC / (1 + p_NC) if kind == "several" else p_NC / p_NC.sum(1, keepdims=True)
            true_N = draws.integers(len(NAMES), size=ROWS)
            found["label"] = [[NAMES[n]] if kind == "several" else NAMES[n] for n in true_N]
            said = [[name for name, p in zip(NAMES, row, strict=True) if p >= 0.5] for row in p_NC]
            found["predicted"] = said if kind == "several" else [NAMES[n] for n in p_NC.argmax(1)]
            found |= {f"p_{name}": p_NC[:, n] for n, name in enumerate(NAMES)}
        parts.append(pd.DataFrame(found))
    return pd.concat(parts, ignore_index=True)


def lines(member: int) -> str:
    found = [
        {"step": step, "loss": 2.0 - 0.1 * step + 0.01 * member, "learning_rate": 1e-3, "grad_norm": 0.5 + member,
         "tokens": 100, "supervised_tokens": 10, "tokens_per_second": 50.0, "peak_bytes": 1e9 + member,
         "elapsed_s": 2.0 * step} | ({"held_out_loss": 1.5} if step == STEPS else {})
        for step in range(1, STEPS + 1)
    ]  # fmt: skip
    return "".join(json.dumps(line) + "\n" for line in found)


def make(folder: Path, kind: str = "one", *, repeats: int = 1, status: str = "done") -> Path:
    """A directory as recipe crossval writes it, whole where the status is done, else only what training left."""
    folder.mkdir()
    config = {"recipe": "crossval", "classes": {"kind": kind}, "batch": {"size": 4}, "train": {"max_grad_norm": 1.0}}
    (folder / "config.yaml").write_text(dump_yaml(config))
    data = {"train": SPLIT, "test": SPLIT | {"rows": 20, "fingerprint": "cd"}, "unlabelled": SPLIT | {"rows": 99}}
    manifest = {"name": folder.name, "status": status, "data": data}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    (folder / "before.json").write_text(json.dumps({"scores": worse(SCORES[kind], 0.5)}))
    for round_number in range(2):
        for number, fold in enumerate(folds(kind, repeats)):
            path = folder / "members" / f"round-{round_number}" / fold["member"]
            path.mkdir(parents=True)
            (path / "metrics.jsonl").write_text(lines(number))
    if status != "done":
        return folder
    test = SCORES[kind] | ({"accuracy": 0.85, "accuracy_low": 0.6, "accuracy_high": 0.95} if kind == "one" else {})
    scores = {"before": worse(SCORES[kind], 0.5), "after": SCORES[kind], "test": test, "refit": worse(test, 0.1)}
    (folder / "scores.json").write_text(json.dumps(scores))
    summary = {
        name: {"mean": value, "spread": 0.0321, "low": value * 0.9, "high": value * 1.1}
        for name, value in SCORES[kind].items()
    }
    found = {"stages": stages(kind), "folds": folds(kind, repeats), "summary": summary, "duplicates": DUPLICATES}
    (folder / "stages.json").write_text(json.dumps(found))
    table = out_of_fold(kind, repeats)
    table.to_parquet(folder / "out_of_fold.parquet")
    table.iloc[:20].drop(columns=["repeat", "fold"]).to_parquet(folder / "predictions.parquet")
    return folder


def rewrite(run: Path, **changes: Any) -> None:
    path = run / "stages.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def words(path: Path) -> str:
    """What stands on the page, without tags, drawings and line breaks."""
    body = path.read_text(encoding="utf-8").split("</style>")[1]
    return " ".join(re.sub(r"<[^>]*>", " ", re.sub(r"<svg.*?</svg>", "", body, flags=re.DOTALL)).split())


@pytest.mark.parametrize("kind", ["one", "several", "number"])
def test_every_part_stands_on_the_page(tmp_path: Path, kind: str) -> None:
    run = make(tmp_path / "run", kind, repeats=2)
    path = report.write(run)
    text, html = words(path), path.read_text()
    assert "not there yet" not in text.replace("Model not there yet", "")
    for stage in stages(kind):
        assert stage["title"] in text and stage["why"] in text
    assert "Test scores were looked at once, at the end; no decision used them." in text
    assert text.count("not kept") == 4  # the finding, the table, and two lines of a legend
    for member in folds(kind, 2):
        assert member["member"] in text
    assert "Mean" in text and "0.032" in text and "Nadeau and Bengio" in text
    assert "temperature 2.00" in text and "lower_case 0.700" not in text and "lower_case 0.300" in text
    assert "gate: of" in text and "gate: share 0.250" in text and "a, b, c" in text
    assert "Rows that ungrouped folds would leak 9 (15 %)" in text
    assert "rows.csv, row 1, rows.csv, row 2" in text and f"and {12 - CONFLICTS} more" in text
    assert ("Calibration" in text) == (kind != "number")
    assert ("Largest errors" if kind == "number" else "Surest mistakes") in text
    assert "Loss of the adapters" in text and "mean, round-1" in text
    assert html.count("<svg") == (8 if kind != "number" else 7)
    assert not re.search(r"https?:|@import|url\((?!#)|<script|<link", html)
    assert "<b>" not in html and "loan &amp; &lt;b&gt;" in html


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            "one",
            "Accuracy 0.850 (95 %: 0.600 to 0.950) on 20 test rows by all adapters together and 0.765 by one adapter "
            "that trained on all rows. Out-of-fold accuracy 0.800 (95 %: 0.680 to 0.880) on 60 rows, spread 0.032 "
            "over 3 folds, 2 seeds. Always naming the likeliest class gives 0.400.",
        ),
        (
            "several",
            "Micro-F1 0.770 on 20 test rows by all adapters together and 0.693 by one adapter that trained on all "
            "rows. Out-of-fold micro-F1 0.770 (95 %: 0.693 to 0.847) on 60 rows, spread 0.032 over 3 folds, 2 seeds. "
            "Always saying the same gives 0.385.",
        ),
        (
            "number",
            "Root mean squared error 12.5 on 20 test rows by all adapters together and 13.8 by one adapter that "
            "trained on all rows. Out-of-fold root mean squared error 12.5 (95 %: 11.2 to 13.8) on 60 rows, spread "
            "0.032 over 3 folds, 2 seeds. "
            "Always naming the mean gives 18.8.",
        ),
    ],
)
def test_the_verdict_is_made_of_the_numbers(tmp_path: Path, kind: str, message: str) -> None:
    assert verdict(read(make(tmp_path / "run", kind))) == message


@pytest.mark.parametrize(("kind", "main", "value"), [("one", "accuracy", 0.9), ("number", "rmse", 11.0)])
def test_a_single_adapter_that_did_better_is_told(tmp_path: Path, kind: str, main: str, value: float) -> None:
    path = make(tmp_path / "run", kind) / "scores.json"
    scores = json.loads(path.read_text())
    scores["refit"][main] = value
    path.write_text(json.dumps(scores))
    assert "all rows, which costs a fraction to serve and did better here." in verdict(read(path.parent))


def test_a_stage_is_held_against_the_last_one_that_was_kept(tmp_path: Path) -> None:
    run = read(make(tmp_path / "run"))
    found = crossvalidated(run)
    assert found is not None and found.tested
    assert [stage.kept for stage in found.stages] == [True, False, True, True, True]
    assert [stage.score for stage in found.stages] == ["0.720", "0.640", "0.800", "0.800", "-"]
    assert [stage.score_change for stage in found.stages] == ["-", "-0.080", "+0.080", "0", "-"]
    assert [stage.change for stage in found.stages] == ["-", "+0.0610", "-0.0610", "-", "-"]
    assert found.stages[1].chance == "+0.0510 to +0.0710"
    assert found.stages[0].test == ("0.7046", "0.684") and found.stages[4].test == ("-", "-")
    said = [(finding.tone, finding.text) for finding in findings(run)]
    assert said[1] == (
        "plain",
        "Pseudo-labels, round 1, not kept: loss 0.6710 to 0.7320 (+0.0610; 95 %: +0.0510 to +0.0710), accuracy 0.720 "
        "to 0.640 out of fold; 0.640 on test.",
    )
    assert said[2][0] == "good" and "Views, kept" in said[2][1]
    assert said[4] == ("plain", "One adapter on all rows, kept.")
    assert said[5][0] == "warning" and said[5][1].startswith("12 clusters of near-duplicates carry different labels")
    assert said[6][0] == "good" and "kept 9 rows from being validated beside" in said[6][1]


def test_gains_are_drawn_from_stage_to_stage(tmp_path: Path) -> None:
    drawing = gains(read(make(tmp_path / "run")))
    assert drawing is not None and [each.label for each in drawing.legend] == [
        "out of fold",
        "out of fold, not kept",
        "test",
        "test, not kept",
    ]
    assert "1 Pseudo-labels, round 1 (1 min 1 s)" in drawing.caption and "One adapter" not in drawing.caption


def test_facts_of_the_classes_share_a_table(tmp_path: Path) -> None:
    found = crossvalidated(read(make(tmp_path / "run")))
    assert found is not None
    facts = found.stages[1].facts
    assert facts.lines == [("rows", "18"), ("confidence", "0.970")]
    (table,) = facts.tables
    assert table.columns == ("", "classes", "thresholds") and table.rows[1] == ("loan & <b>", "6", "0.950")


def test_members_are_averaged_round_after_round(tmp_path: Path) -> None:
    run = read(make(tmp_path / "run"))
    assert len(run.members) == 2 * 2 * FOLDS
    assert run.metrics["step"].tolist() == list(range(1, 2 * STEPS + 1))
    assert run.metrics["loss"][0] == pytest.approx(1.9 + 0.025) and run.metrics["loss"][STEPS] == run.metrics["loss"][0]
    assert set(run.metrics["tokens"]) == {600.0} and run.metrics["elapsed_s"].iloc[-1] == 2 * 2.0 * STEPS
    assert run.clipped == pytest.approx(5 / 6)  # all but the member whose gradients are 0.5 long
    text = words(report.write(run.folder))
    assert "96 steps of 12 adapters" in text and "Tokens seen 9.6 k" in text and "Speed 300" in text


@pytest.mark.parametrize("kept", [True, False])
def test_the_diagram_measures_what_the_scores_measure(tmp_path: Path, kept: bool) -> None:
    folder = make(tmp_path / "run", repeats=2)
    rewrite(folder, stages=[stage | {"accepted": kept} for stage in stages("one")])
    run = read(folder)
    assert len(run.labelled) == ROWS
    p_NC = run.labelled[[f"p_{name}" for name in NAMES]].to_numpy()
    plot = crossval_section.reliability_diagram(run)
    assert plot is not None and len(plot.legend) == 3
    label_N = np.array([NAMES.index(name) for name in run.labelled["label"]])
    e_NC = p_NC**2.0 if kept else p_NC**0.5  # a temperature of 2 taken back, or applied
    gaps = [calibration_error(each_NC, label_N) for each_NC in (p_NC, e_NC / e_NC.sum(1, keepdims=True))]
    assert [float(said) for said in re.findall(r"0\.\d+", plot.caption)] == pytest.approx(gaps, abs=1e-3)
    words = "without the temperature" if kept else "with the temperature that was not kept"
    assert plot.legend[2].label == f"{words}, 2.00"


def test_a_temperature_divides_outputs() -> None:
    outputs_NC = np.random.default_rng(0).normal(size=(20, 3))
    for several in (True, False):
        values = special.expit if several else partial(special.softmax, axis=1)
        found_NC = crossval_section.tempered(values(outputs_NC), 2.5, several=several)
        assert found_NC == pytest.approx(values(outputs_NC / 2.5))


def test_sure_probabilities_stay_finite() -> None:
    p_NC = np.array([[1.0, 0.0], [0.5, 0.5]])
    for several in (True, False):
        found_NC = crossval_section.tempered(p_NC, 3.0, several=several)
        assert np.isfinite(found_NC).all() and found_NC[1] == pytest.approx([0.5, 0.5])


@pytest.mark.parametrize("status", ["running", "stopped", "failed"])
def test_a_run_before_its_first_stage_has_a_page(tmp_path: Path, status: str) -> None:
    run = make(tmp_path / "run", status=status)
    text = words(report.write(run))
    assert "at step 16" in text and "no stage is done" in text
    for section in ("Stages", "Folds", "Duplicates"):
        assert f"{section} not there yet" in text
    assert "Loss of the adapters" in text and "12 adapters" in text


def test_a_run_before_its_first_step_has_a_page(tmp_path: Path) -> None:
    run = make(tmp_path / "run", status="failed")
    for path in (run / "members").glob("**/metrics.jsonl"):
        path.write_text("")
    assert "The run failed before its first step; no stage is done." in words(report.write(run))
    for path in (run / "members").glob("**/metrics.jsonl"):
        path.unlink()
    assert "The run failed before its first step; no stage is done." in words(report.write(run))


def test_a_run_that_stopped_between_stages(tmp_path: Path) -> None:
    run = make(tmp_path / "run")
    (run / "scores.json").unlink()
    rewrite(run, stages=stages("one")[:2], folds=folds("one", 1)[:2], summary={}, duplicates=None)
    text = words(report.write(run))
    assert "stages done: Supervised, Pseudo-labels, round 1." in text
    assert "Duplicates none were looked for" in text and "repeat-0-fold-0-seed-1" in text and "Mean - -" not in text


def test_folds_without_near_duplicates_tell_nothing_of_clusters(tmp_path: Path) -> None:
    run = make(tmp_path / "run")
    none = DUPLICATES | {"exact": 0, "clusters": 0, "clustered": 0, "largest": 1, "leak": 0, "least_similar": 1.0}
    rewrite(run, duplicates=none | {"conflicts": [], "left_out": []})
    text = words(report.write(run))
    assert "Clusters of near-duplicates none" in text and "Largest cluster" not in text


def test_a_narrow_screen_shows_the_heading_beside_each_cell(tmp_path: Path) -> None:
    html = report.write(make(tmp_path / "run")).read_text()
    stage = re.search(r'<tr><th data-label="Stage" scope="row">.*?</tr>', html)
    assert stage is not None
    assert re.findall('data-label="(.*?)"', stage[0]) == [
        *("Stage", "Decision", "Accuracy", "Change", "Loss", "Change, 95 %", "Test accuracy", "Test loss"),
        *("Time", "A prediction"),
    ]
    assert 'data-label="Test accuracy">0.684<' in stage[0] and 'data-label="Test loss">0.7046<' in stage[0]


def test_everything_is_escaped(tmp_path: Path) -> None:
    places = ("title", "why", "fact", "value", "thing", "listed", "member", "fold", "conflict", "left")
    attacks = {place: f"</td></style><script>{place}('&')</script>" for place in places}
    run = make(tmp_path / "run")
    first, *others = stages("one")
    facts = {attacks["fact"]: attacks["value"], "of": {attacks["thing"]: 1}, "list": [attacks["listed"]]}
    first |= {"title": attacks["title"], "why": attacks["why"], "facts": facts}
    members = [fold | {"member": attacks["member"], "fold": attacks["fold"]} for fold in folds("one", 1)]
    duplicates = DUPLICATES | {"conflicts": [[attacks["conflict"], "row 1"]], "left_out": [attacks["left"]]}
    rewrite(run, stages=[first, *others], folds=members, duplicates=duplicates)
    html = report.write(run).read_text()
    assert "<script" not in html
    assert all(f"&lt;script&gt;{place}(" in html for place in places)


def test_runs_are_compared_by_out_of_fold_and_test_scores(tmp_path: Path) -> None:
    runs = [make(tmp_path / "first"), make(tmp_path / "other")]
    scores = read_scores(runs[1])
    scores["test"]["accuracy"] = 0.9
    (runs[1] / "scores.json").write_text(json.dumps(scores))
    found = report.compare(runs, tmp_path / "compare.html")
    rows = {row[0]: row[1:] for row in found.rows}
    assert rows["held-out loss after"] == ("0.610", "0.610")
    assert rows["accuracy after"] == ("0.800", "0.800") and rows["test accuracy"] == ("0.850", "0.900")
    assert "F1 after" not in rows and not found.notes
    html = (tmp_path / "compare.html").read_text()
    assert re.search(r'test accuracy</th><td>0.850</td><td class="strong best" title="best">0.900<', html)
    manifest = json.loads((runs[1] / "manifest.json").read_text())
    manifest["data"]["train"]["fingerprint"] = "other"
    (runs[1] / "manifest.json").write_text(json.dumps(manifest))
    assert "held-out rows differ" in report.compare(runs, tmp_path / "compare.html").notes[0]


@pytest.mark.parametrize(
    ("metric", "better", "label"),
    [("qwk", None, "Quadratic weighted kappa"), ("mine.py:cost", "lower", "cost"), ("map@3", None, "Mean average")],
)
def test_the_metric_that_runs_name_is_compared(tmp_path: Path, metric: str, better: str | None, label: str) -> None:
    runs = [make(tmp_path / "first"), make(tmp_path / "other")]
    for run, value in zip(runs, (0.5, 0.75), strict=True):
        config = load_yaml((run / "config.yaml").read_text())
        config["evaluate"] = {"metric": metric, "better": better}
        (run / "config.yaml").write_text(dump_yaml(config))
        name, scores = metric.rpartition(":")[2], read_scores(run)
        scores["after"][name] = scores["test"][name] = scores["test"][f"{name}[web]"] = value
        (run / "scores.json").write_text(json.dumps(scores))
    found = report.compare(runs, tmp_path / "compare.html")
    rows = {row[0]: row[1:] for row in found.rows if label in row[0]}
    assert list(rows.values()) == [("0.500", "0.750")] * 3
    assert [name.partition(label)[0] for name in rows] == ["", "test ", "test "]
    html = (tmp_path / "compare.html").read_text()
    best = "0.500" if better == "lower" else "0.750"
    assert len(re.findall(rf'class="strong best" title="best">{best}<', html)) >= 3


def test_the_terminal_shows_stages_and_the_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(render, "OUT", Console(highlight=False, width=300))
    run = make(tmp_path / "[run]")
    rewrite(run, stages=[stages("one")[0] | {"title": "[red]Supervised"}, *stages("one")[1:]])
    render.outcome(run)
    text = capsys.readouterr().out
    found = next(line for line in text.splitlines() if "Pseudo-labels" in line)
    cells = re.split("  +", found.strip())
    assert cells[:5] == ["Pseudo-labels, round 1", "no", "0.7320", "+0.0510 to +0.0710", "0.640"]
    assert cells[5:] == ["0.640", "1 min 1 s"]
    views = next(line for line in text.splitlines() if line.strip().startswith("Views"))
    assert re.split("  +", views.strip())[-1] == "7.0 s, 1.2x later"
    assert "[red]Supervised" in text
    assert verdict(read(run)) in text
    assert f"Report: {run / 'report.html'}" in text and f"Adapters: {run / 'members'}" in text
