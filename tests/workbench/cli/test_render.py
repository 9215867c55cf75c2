"""What the verbs print says what they found, whatever characters stand in it."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from workbench import report
from workbench.adapters import METHODS, NOT_OFFERED
from workbench.cli import check_output, render
from workbench.config import ModelConfig, RunConfig
from workbench.errors import ConfigError
from workbench.evaluation.perplexity import Agreement
from workbench.models.model_sizes import AdapterSize, SizeTable
from workbench.recipes import shipped
from workbench.recipes.verbs.check import check
from workbench.recipes.verbs.merge import Merged
from workbench.report import pages, run_record


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal on which nothing is wrapped."""
    for module in (render, check_output):
        monkeypatch.setattr(module, "OUT", Console(highlight=False, width=300))


def _cells(text: str, start: str) -> list[str]:
    """The cells of the table row that starts with this text."""
    row = next(line for line in text.splitlines() if line.strip("│┃ ").startswith(start))
    return [cell.strip() for cell in row.strip("│┃ ").replace("┃", "│").split("│")]


def test_outcome_begins_with_whether_it_got_better(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    render.outcome(trained)
    first = " ".join(capsys.readouterr().out.split()).partition("Held-out scores")[0]
    before, after = (json.loads((trained / "scores.json").read_text())[when]["loss"] for when in ("before", "after"))
    assert f"from {before:.2f} to {after:.2f} nats per token" in first and "95 % over" in first


def test_outcome_ends_with_what_to_do_next(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    render.outcome(trained)
    commands = capsys.readouterr().out.rpartition("Next:")[2]
    for verb in ("generate", "predict", "evaluate", "merge"):
        assert f"workbench {verb} {trained}" in commands


def test_outcome_shows_scores_and_three_answers_beside_their_references(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    render.outcome(trained)
    text = capsys.readouterr().out
    scores = json.loads((trained / "scores.json").read_text())
    for row in pages.scores(run_record.read(trained)):
        before, after = (scores[when][row["name"]] for when in ("before", "after"))
        wanted = [row["label"], f"{before:.4f}", f"{after:.4f}", *filter(None, [row["interval"]])]
        assert _cells(text, row["label"]) == wanted
    for label in ("reference", "before", "after"):
        assert text.count(f"{label}  ") == 3
    assert "What comes after" in text and "after  It is" in text
    assert f"Report: {trained / 'report.html'}" in text and f"Adapter: {trained / 'adapter'}" in text


@pytest.mark.parametrize("on_a_terminal", [True, False])
def test_inspection_marks_what_carries_loss(
    stories: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    on_a_terminal: bool,
) -> None:
    console = Console(highlight=False, width=300, force_terminal=on_a_terminal, color_system="standard")
    monkeypatch.setattr(check_output, "OUT", console)
    rows = [{"question": f"Is [red]{n}[/] red?", "answer": "No [bold]" + " no" * n} for n in range(30)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sections: dict[str, Any] = {
        "model": {"id": stories},
        "data": {"train": str(path), "held_out": 0.1, "max_tokens": 64},
    }
    found = check(RunConfig.model_validate({"recipe": "sft", "batch": {"size": 9}, **sections}))
    check_output.inspection(found)
    text = capsys.readouterr().out
    if on_a_terminal:
        assert "\x1b[1;32mNo [bold]" in text and "\x1b[1;32mUser" not in text
        return
    assert "[red]0[/] red?" in text and "No [bold]" in text
    train = found.data.train
    cut = f"{train.truncated} ({train.truncated / 27:.1%})"
    counts = [f"{int(each.sum()):,}" for each in (train.lengths, train.supervised)]
    assert _cells(text, "train") == ["train", "27", *counts, "64", cut, "0"] and train.truncated > 0
    assert _cells(text, "held-out")[1] == "3"
    assert "Lengths of the training rows" in text
    assert "3 steps of 9 examples, training 7 kinds of module: down_proj, gate_proj" in text


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ({}, "Steps of 9 examples until the budget is used up, training 7 kinds of module"),
        ({"steps": 40}, "At most 40 steps of 9 examples, training 7 kinds of module"),
    ],
)
def test_steps_that_a_budget_decides_about_are_told_in_words(
    train: dict[str, int], message: str, stories: str, questions: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sections = {"model": {"id": stories}, "data": {"train": str(questions)}, "batch": {"size": 9}, "train": train}
    paced = {"budget": {"tokens": 50_000}, "freeze": {"policy": "static", "layers": 1}, "optimizer": {"name": "muon"}}
    check_output.inspection(check(RunConfig.model_validate({"recipe": "sft", **sections, **paced})))
    text = capsys.readouterr().out
    assert message in text and "50,000 tokens" in text and "Optimizer: muon." in text
    assert "freeze.policy=static: the embeddings and block 1 of 5 never train" in text


def test_the_histogram_counts_every_row(stories: str, questions: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = check(
        RunConfig.model_validate({"recipe": "sft", "model": {"id": stories}, "data": {"train": str(questions)}})
    )
    check_output.inspection(found)
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.rstrip().endswith("#")]
    assert sum(int(line[1]) for line in lines) == len(found.data.train)
    assert max(len(line[2]) for line in lines) == 40


def test_scores_and_merged(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    render.scores({"loss": 1.2, "loss[without copies]": 1.3})
    assert "[without copies] leave them out" in " ".join(capsys.readouterr().out.split())
    render.scores({"loss": 1.23456, "f1": 0.5})
    text = capsys.readouterr().out
    assert _cells(text, "loss") == ["loss", "1.2346"] and _cells(text, "f1") == ["f1", "0.5000"]
    render.merged(Merged(Agreement(kl=3.2e-6, top1=0.9987, positions=12345), "Added in float32."), tmp_path / "[out]")
    text = capsys.readouterr().out
    assert "Added in float32." in text and f"Model: {tmp_path / '[out]'}" in text
    assert "12,345 held-out tokens" in text and "3.20e-06 nats per token" in text and "99.87%" in text


def test_comparison_puts_runs_side_by_side(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = Path(shutil.copytree(trained, tmp_path / "other"))
    config = (other / "config.yaml").read_text()
    (other / "config.yaml").write_text(config.replace("learning_rate: 0.01", "learning_rate: 0.02"))
    manifest = json.loads((other / "manifest.json").read_text())
    (other / "manifest.json").write_text(json.dumps({**manifest, "name": "[other]"}))
    render.comparison(report.compare([trained, other], tmp_path / "page.html"), tmp_path / "page.html")
    text = capsys.readouterr().out
    assert "run" in text and "[other]" in text
    assert _cells(text, "train.learning_rate")[1:] == ["0.01", "0.02"]
    assert "On the same rows" in text and "f1" in text and "paired t-test" in " ".join(text.split())
    assert f"Plots: {tmp_path / 'page.html'}" in text and (tmp_path / "page.html").stat().st_size > 10_000


def test_the_list_of_recipes_has_each_command_or_a_group_that_lists_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    render.listing("recipes", tmp_path)
    listed = capsys.readouterr().out
    groups = set(re.findall(r"^workbench ls (\S+)$", listed, re.M))
    assert groups == {"models"} and len(listed.splitlines()) < 150
    for group in groups:
        render.listing(group, tmp_path)
    listed += capsys.readouterr().out
    assert set(re.findall(r"^workbench run (\S+)", listed, re.M)) == {*shipped()}, "whole names, to copy"
    said = [line for line in listed.splitlines() if line.startswith(" ")]
    assert "schema" not in listed and max(map(len, said)) <= render.OUT.width
    with pytest.raises(ConfigError, match=r"ls modles: expected recipes, a group .* Did you mean `models`"):
        render.listing("modles", tmp_path)


SURVEY = SizeTable(
    ModelConfig(id="[some]/model"),
    1_000_000,
    {
        "lora": AdapterSize(1_250_000, 250_000, 1_001_000),
        "full": AdapterSize(1_000_000, 1_000_000, 4_000_100),
        "prompt": "Take [x].",
    },
)


def test_the_table_of_methods(capsys: pytest.CaptureFixture[str]) -> None:
    render.methods(SURVEY)
    text = capsys.readouterr().out
    about, sizes, refused, absent = text.split(" method ")[1:]
    for name in SURVEY.sizes:
        row = next(line for line in about.splitlines() if line.split()[:1] == [name])
        assert METHODS[name].about[name].trains in row and METHODS[name].about[name].paper in row
    assert "On [some]/model, 1,000,000 parameters" in about
    rows = {line.split()[0]: line.split() for line in sizes.splitlines()[1:] if line.strip()}
    assert rows["lora"] == ["lora", "250,000", "20", "%", "1.0", "MB", "yes", "all"]
    assert rows["full"] == ["full", "1,000,000", "100", "%", "4.0", "MB", "yes", "float32", "bfloat16", "float16"]
    assert "prompt" not in rows and "Take [x]." in refused
    assert all(name in absent for name in NOT_OFFERED) and "needs the task of each row" in absent


def test_the_methods_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    render.methods_json(SURVEY)
    found = json.loads(capsys.readouterr().out)
    assert (found["model"], found["parameters"]) == ("[some]/model", 1_000_000)
    lora, prompt = found["methods"]["lora"], found["methods"]["prompt"]
    sizes = {"total": 1_250_000, "trainable": 250_000, "file_bytes": 1_001_000, "share": 0.2}
    assert sizes.items() <= lora.items() and lora["paper"] == METHODS["lora"].about["lora"].paper
    assert prompt["refusal"] == "Take [x]." and "total" not in prompt and prompt["no_merge"]


def test_the_list_of_runs_says_how_each_ended(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, status in (("[a]", "done"), ("b", "failed"), ("c", None)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_text(json.dumps({"status": status} if status else {}))
    shutil.copy(trained / "scores.json", tmp_path / "[a]" / "scores.json")
    render.listing("runs", tmp_path)
    text = capsys.readouterr().out
    scores = json.loads((trained / "scores.json").read_text())
    losses = [f"{scores[when]['loss']:.4f}" for when in ("before", "after")]
    assert _cells(text, str(tmp_path / "[a]")) == [str(tmp_path / "[a]"), "done", *losses]
    assert _cells(text, str(tmp_path / "b")) == [str(tmp_path / "b"), "failed"]
    assert _cells(text, str(tmp_path / "c")) == [str(tmp_path / "c")]


def question(number: int) -> str:
    """No two are alike."""
    draws = np.random.default_rng(number)
    return " ".join("".join(draws.choice(list("abcdefgh"), 6)) for _ in range(5))


@pytest.mark.parametrize("kind", ["one", "number"])
def test_check_shows_folds_duplicates_and_what_they_would_leak(
    stories: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    texts = [question(number) for number in range(130)]
    texts += texts[:20]
    labels: list[Any] = [float(n) if kind == "number" else f"[b]{n % 13}" for n in range(150)]
    lines = [json.dumps({"text": text, "label": label}) + "\n" for text, label in zip(texts, labels, strict=True)]
    (tmp_path / "rows.jsonl").write_text("".join(lines))
    sections = {
        "recipe": "crossval",
        "model": {"id": stories},
        "data": {"train": str(tmp_path / "rows.jsonl"), "max_tokens": 64},
        "classes": {"kind": kind},
        "folds": {"k": 3, "repeats": 2, "seeds": 2},
    }
    found = check(RunConfig.model_validate(sections))
    check_output.inspection(found)
    text = capsys.readouterr().out
    cells = {line.split()[0]: line.split()[1:] for line in text.splitlines() if line.strip()}
    assert cells["rows"] == ["50", "50", "50"]
    assert "20 equal rows, 20 clusters of near-duplicates with 40 rows (largest 2, least similar rows 1.00)" in text
    assert re.search(r"Folds that ignore them would validate \d+ rows \(\d+\.\d%\) beside", text)
    assert "12 adapters (3 folds, 2 deals of the rows, 2 seeds), each trained as follows." in text
    assert "steps of 32 examples, training 7 kinds of module" in text
    if kind == "number":
        assert "mean label" in text and "carry different labels" in text
        return
    assert "Folds, with the 12 rarest of 13 classes" in " ".join(text.split())
    rarest = [name for name in cells if name.startswith("[b]")]
    assert len(rarest) == 12 and all(sum(map(int, cells[name])) in (11, 12) for name in rarest)
