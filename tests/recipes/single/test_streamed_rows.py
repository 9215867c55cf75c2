"""Runs over streamed rows: those of a run over the same rows as a file, also after a stop."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import workbench
from tests.run_files import read_metrics, read_scores, write_lines
from tests.stopping import stop_after
from workbench.errors import Stopped
from workbench.recipes.load import load
from workbench.recipes.single.streamed_rows import local
from workbench.recipes.verbs.check import check
from workbench.recipes.verbs.evaluate import evaluate
from workbench.runs.run_directory import read_config


@pytest.fixture
def words(tmp_path: Path, short_stories: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path / "cache"))
    (tmp_path / "shards").mkdir()
    for shard in range(3):
        rows = [{"question": f"{shard} and {n}?", "answer": f"It is {shard + n}."} for n in range(50)]
        write_lines(tmp_path / "shards" / f"{shard}.jsonl", rows)
    found = [f"data.train={tmp_path}/shards", f"model.id={short_stories}", "model.weights=float32", "data.held_out=0.2"]
    return [*found, "train.epochs=null", "train.steps=8", "batch.size=4", "evaluate.every=4", "evaluate.answers=0"]


def losses(run: Path) -> list[tuple[Any, Any]]:
    lines = read_metrics(run)
    return [(line["loss"], line.get("held_out_loss")) for line in lines]


@pytest.mark.slow
def test_a_run_is_that_over_the_same_rows_as_a_file_and_goes_on_to_the_same_bits(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on = [*words, "data.streaming.on=true"]

    def train(out: str, words: list[str], *, resume: bool = False) -> Path:
        return workbench.run("sft/quickstart", words, out=tmp_path / out, resume=resume, quiet=True)

    streamed = train("streamed", on)
    folder = local(load("sft/quickstart", on)).data.train
    assert losses(streamed) == losses(train("file", [*words, f"data.train={folder}"]))
    data = json.loads((streamed / "manifest.json").read_text())["data"]
    assert data["train"]["rows"] >= 8 * 4 and data["train"]["rows"] + data["held_out"]["rows"] == 41, "32 / 0.8 + 1"
    config = read_config(streamed)
    assert config.data.train == f"{tmp_path}/shards" and config.data.streaming.on, "what was asked for"
    assert evaluate(streamed, [])["loss"] == read_scores(streamed)["after"]["loss"]
    with monkeypatch.context() as patch:
        stop_after(patch, 5)
        with pytest.raises(Stopped):
            train("broken", on)
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path / "another"))  # the rows are streamed again
    assert losses(train("broken", on, resume=True)) == losses(streamed)


def test_sources_and_limits_are_streamed_too(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "other.jsonl").write_text(
        '{"question": "Who?", "answer": "Nobody."}\n{"question": "So?", "answer": "No."}\n'
    )
    own = [f"data.sources.a.path={tmp_path}/shards", f"data.sources.b.path={tmp_path}/other.jsonl"]
    own += ["data.sources.a.limit=30", "data.sources.b.limit=9", "data.streaming.on=true", "data.held_out=0.2"]
    found = check(load("sft/quickstart", [*words[1:], *own]))
    sets = (found.data.train.rows_by_source, found.data.held_out.rows_by_source)  # type: ignore[union-attr]
    assert [sum(each[name] for each in sets) for name in "ab"] == [30, 2]


def test_labelled_rows_and_folds_are_streamed_too(
    tmp_path: Path, short_stories: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path / "cache"))
    rows = [{"text": f"The {name} said {n} words.", "label": name} for n in range(40) for name in ("cat", "dog")]
    write_lines(tmp_path / "rows.jsonl", rows)
    words = [
        f"data.train={tmp_path}/rows.jsonl",
        f"model.id={short_stories}",
        "data.streaming.on=true",
        "data.limit=50",
    ]
    assert len(check(load("classify/quickstart", words)).data.train) < 50  # type: ignore[union-attr]
    assert len(check(load("crossval/quickstart", [*words, "duplicates.on_duplicate=ignore"])).data.rows) == 50  # type: ignore[union-attr]
