"""Losses of rows are those of the model, and their paired difference is that of the equation written out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from transformers import PreTrainedModel

import workbench
from tests.run_files import read_scores
from workbench import evaluation, report
from workbench.data.text.tokenized_set import TokenizedSet, TokenTable
from workbench.evaluation import held_out_losses
from workbench.evaluation.comparison import PairedScore
from workbench.evaluation.held_out_losses import KeptLosses
from workbench.evaluation.perplexity import SummedLosses
from workbench.models import output_heads


def _kept(folder: Path, rows: TokenizedSet, losses: list[float], name: str = "run") -> KeptLosses:
    (folder / name).mkdir(exist_ok=True)
    held_out_losses.write(folder / name, rows, SummedLosses(np.asarray(losses), rows.supervised))
    found = held_out_losses.read(folder / name)
    assert found is not None
    return found


def test_the_losses_of_rows_add_up_to_that_of_the_set(
    llama: PreTrainedModel, rows: TokenizedSet, tmp_path: Path
) -> None:
    found = evaluation.likelihood(llama, output_heads.find(llama, llama), rows)
    assert found.rows is not None
    held_out_losses.write(tmp_path, rows, found.rows)
    table = pq.read_table(tmp_path / held_out_losses.FILE)
    assert table["row"].to_pylist() == list(rows.places()) and table["tokens"].to_pylist() == rows.supervised.tolist()
    assert sum(table["loss"].to_pylist()) / sum(table["tokens"].to_pylist()) == pytest.approx(found.loss, rel=1e-12)
    for number in range(len(rows)):
        alone = evaluation.likelihood(llama, output_heads.find(llama, llama), rows.subset(np.asarray([number])))
        assert table["loss"][number].as_py() == pytest.approx(alone.loss * rows.supervised[number], rel=1e-6)


@given(
    rows=st.lists(st.tuples(st.floats(0, 50), st.floats(0, 50), st.integers(1, 40)), min_size=3, max_size=30).filter(
        lambda rows: len({round(b - a, 3) for a, b, _ in rows}) > 1
    )
)
def test_the_interval_is_that_of_the_ratio_estimator_written_out(rows: list[tuple[float, float, int]]) -> None:
    first, second, tokens = (np.asarray(column, dtype=np.float64) for column in zip(*rows, strict=True))
    found = held_out_losses.paired(first, second, tokens)
    total = sum(row[2] for row in rows)
    difference = sum(b - a for a, b, _ in rows) / total
    squares = sum((b - a - difference * t) ** 2 for a, b, t in rows)
    assert found.difference == pytest.approx(difference, abs=1e-9)
    if found.interval is not None:
        half = stats.t.ppf(0.975, len(rows) - 1) * (len(rows) / (len(rows) - 1) * squares) ** 0.5 / total
        assert found.interval == pytest.approx((difference - half, difference + half), abs=1e-9)


def test_the_interval_of_one_run_is_students_over_rows_of_one_length(rows: TokenizedSet, tmp_path: Path) -> None:
    alike = rows.subset(np.flatnonzero(rows.supervised == rows.supervised[0]).repeat(4)[:4])
    losses = [1.0, 2.0, 3.0, 5.0]
    found = held_out_losses.intervals(_kept(tmp_path, alike, losses))
    wanted = stats.ttest_1samp(np.asarray(losses) / alike.supervised[0], 0).confidence_interval(0.95)
    assert found["loss"] == pytest.approx(tuple(wanted)) and found["perplexity"] == pytest.approx(np.exp(wanted))
    assert held_out_losses.intervals(_kept(tmp_path, alike.subset(np.arange(1)), [1.0], "one")) == {}


def test_rows_of_one_length_have_the_paired_t_test() -> None:
    chance = np.random.default_rng(0)
    first, second = chance.normal(2, 1, (2, 30))
    found = held_out_losses.paired(first * 7, second * 7, np.full(30, 7.0))
    textbook = stats.ttest_rel(second, first)
    assert found.p == pytest.approx(textbook.pvalue) and found.interval is not None
    assert found.interval == pytest.approx(tuple(textbook.confidence_interval(0.95)))


def test_the_interval_covers_the_difference_of_all_rows() -> None:
    """Of 400 samples from rows whose length goes with their difference, about 95 % hold the true one."""
    chance = np.random.default_rng(1)
    covered = 0
    for _ in range(400):
        tokens = chance.integers(1, 200, 150).astype(np.float64)
        first = chance.normal(2, 0.5, 150) * tokens
        second = first + tokens * (0.1 - 0.001 * tokens + chance.normal(0, 0.2, 150))
        low, high = held_out_losses.paired(first, second, tokens).interval or (0.0, 0.0)
        lengths = np.arange(1, 200)
        covered += low <= 0.1 - 0.001 * (lengths**2).sum() / lengths.sum() <= high
    assert 365 <= covered <= 395


def test_rows_are_paired_in_any_order_and_refused_where_they_differ(rows: TokenizedSet, tmp_path: Path) -> None:
    losses = [1.0, 2.0, 3.0, 4.0, 5.0]
    first = _kept(tmp_path, rows, losses)
    order = np.asarray([3, 1, 4, 0, 2])
    turned = _kept(tmp_path, rows.subset(order), [losses[row] + 0.5 * row for row in order], "turned")
    found = held_out_losses.compare(first, turned)
    assert isinstance(found, PairedScore) and found.rows == 5 and found.name == "loss"
    assert found.difference == pytest.approx(0.5 * sum(range(5)) / rows.supervised.sum())
    assert held_out_losses.compare(first, first) == replace(found, second=found.first, interval=None, p=None)
    fewer = _kept(tmp_path, rows.subset(np.arange(4)), losses[:4], "fewer")
    assert "not the same (5 and 4)" in str(held_out_losses.compare(first, fewer))
    written = rows.table.data.to_pylist()
    others = [row | {"input_ids": [(each + 1) % 64 for each in row["input_ids"]]} for row in written]
    other = replace(rows, table=TokenTable(pyarrow.Table.from_pylist(others)))
    assert "other tokens" in str(held_out_losses.compare(first, _kept(tmp_path, other, losses, "other")))
    assert held_out_losses.read(tmp_path / "nothing") is None


def test_of_many_rows_some_are_kept_the_same_in_each_run(
    rows: TokenizedSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held_out_losses, "MOST", 3)
    monkeypatch.setattr(held_out_losses, "_AT_ONCE", 2)
    kept = _kept(tmp_path, rows, [1.0, 2.0, 3.0, 4.0, 5.0])
    assert kept.rows == 5 and kept.loss_S.tolist() == [1.0, 3.0, 5.0]
    assert kept.table["row"].to_pylist() == [f"rows.jsonl, row {number}" for number in (1, 3, 5)]


def test_how_many_rows_are_laid_out_together_changes_no_hash(
    rows: TokenizedSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = _kept(tmp_path, rows, [1.0] * 5).table["labels"]
    monkeypatch.setattr(held_out_losses, "_PADDED", 2)
    assert _kept(tmp_path, rows, [1.0] * 5, "parts").table["labels"].equals(together)
    assert len(set(together.to_pylist())) == 5


SHORT = ["data.limit=24", "train.steps=2", "batch.size=4", "data.max_tokens=64", "evaluate.every=null"]
SHORT += ["evaluate.answers=0", "evaluate.samples=0"]


def test_runs_keep_the_losses_of_what_they_ship_and_are_compared_by_them(tmp_path: Path, stories: str) -> None:
    def run(name: str, *words: str) -> Path:
        given = [f"model.id={stories}", *SHORT, "data.held_out=0.5", *words]
        return workbench.run("sft/quickstart", given, out=tmp_path / name, quiet=True)

    first, second = run("first"), run("second", "train.learning_rate=1e-2")
    losses = [held_out_losses.read(each) for each in (first, second)]
    for path, kept in zip((first, second), losses, strict=True):
        scores = read_scores(path)["after"]
        assert kept is not None and kept.loss_S.sum() / kept.tokens_S.sum() == pytest.approx(scores["loss"], abs=1e-6)
        learnt = held_out_losses.learnt(path)
        assert learnt is not None and learnt.rows == 12
        assert learnt.first == pytest.approx(read_scores(path)["before"]["loss"], abs=1e-6)
        assert learnt.second == pytest.approx(scores["loss"], abs=1e-6)
    comparison = report.compare([first, second], tmp_path / "page.html")
    (row,) = comparison.paired
    assert row[:3] == ("second", "loss", "12") and comparison.notes == ()
    cut = run("cut", "data.max_tokens=32")
    notes = report.compare([first, cut], tmp_path / "page.html").notes
    assert any("no paired difference of the loss, for other tokens of the held-out rows" in note for note in notes)
    (second / held_out_losses.FILE).unlink()
    (note,) = report.compare([first, second], tmp_path / "page.html").notes
    assert note == "first and second: no paired difference of the loss, for second keeps none of rows."
