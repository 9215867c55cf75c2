"""Sentence embeddings of texts from several sources: exact draws, a held-out share of each, and the same bits again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import workbench
from tests.conftest import MINILM, save_tiny
from tests.run_files import read_losses, read_metrics, read_scores, write_lines
from tests.stopping import stop_after
from workbench.config import RunConfig
from workbench.data.batching import Examples, Indices
from workbench.data.mixture import OneSourceBatches
from workbench.errors import DataError, Stopped
from workbench.models.embedder import EmbeddingLoss
from workbench.recipes.tasks.embed import embed_run
from workbench.recipes.verbs import data_report
from workbench.recipes.verbs.check import check
from workbench.recipes.verbs.evaluate import evaluate
from workbench.recipes.verbs.plans.plan import plan

Config = Callable[..., RunConfig]
SIZES = {"news": 32, "mail": 12}
STILL = {"method": "lora", "rank": 4}
"""An adapter without dropout."""


def rows_of(name: str, count: int) -> list[dict[str, Any]]:
    return [
        {"anchor": f"Who wrote {name} {n}?", "positive": f"Author {n} of {name}." * (1 + n % 2)} for n in range(count)
    ]


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    write_lines(path, rows)
    return str(path)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """A recipe of two sources, of which the smaller one is half of the draws; further settings are those of `data`."""
    folder = tmp_path_factory.mktemp("pairs")
    bert = save_tiny(folder / "bert", "Bert", "MaskedLM", MINILM)
    paths = {name: write(folder / f"{name}.jsonl", rows_of(name, size)) for name, size in SIZES.items()}

    def make(
        embed: dict[str, Any] | None = None,
        batch: dict[str, Any] | None = None,
        adapter: dict[str, Any] | None = None,
        weights: dict[str, float] | None = None,
        **data: Any,
    ) -> RunConfig:
        sources = {name: {"path": path, "weight": (weights or {}).get(name, 1)} for name, path in paths.items()}
        values: dict[str, Any] = {
            "recipe": "embed",
            "model": {"id": bert, "weights": "float32", "dropout": False},
            "adapter": adapter or {"method": "lora", "rank": 4, "dropout": 0.1},
            "data": {"sources": sources, "held_out": 0.25, "mix": {"by": "weight"}, **data},
            "batch": batch or {"size": 8},
            "train": {"steps": 5, "learning_rate": 1e-2},
            "evaluate": {"every": 2},
            "embed": embed or {},
        }
        return RunConfig.model_validate(values)

    return make


@pytest.fixture(scope="module")
def taught(config: Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run. Read only."""
    return run(config(), tmp_path_factory.mktemp("taught") / "run")


def run(config: RunConfig, out: Path, *, resume: bool = False) -> Path:
    return workbench.run(config, out=out, resume=resume, quiet=True)


def test_a_source_that_has_all_the_weight_teaches_what_it_does_alone(config: Config, tmp_path: Path) -> None:
    """A step takes all of its rows, in any order."""
    held = write(tmp_path / "held.jsonl", rows_of("held", 6))
    all_of_it = {"by": "weight", "rows": SIZES["news"]}
    mixed = config(adapter=STILL, batch={"size": SIZES["news"]}, held_out=held, mix=all_of_it, weights={"news": 1e9})
    path = mixed.data.sources["news"].path
    alone = config(adapter=STILL, batch={"size": SIZES["news"]}, held_out=held, sources={}, mix={}, train=path)
    one, other = run(mixed, tmp_path / "mixed"), run(alone, tmp_path / "alone")
    assert read_losses(one) == pytest.approx(read_losses(other), rel=1e-5)


def test_each_source_holds_out_its_share_and_has_scores_of_its_own(taught: Path, config: Config) -> None:
    data = json.loads((taught / "manifest.json").read_text())["data"]
    assert data["train"]["sources"] == {"news": 24, "mail": 9}
    assert data["held_out"]["sources"] == {"news": 8, "mail": 3}
    scores = read_scores(taught)
    for found in scores.values():
        assert {"loss[news]", "loss[mail]"} <= found.keys()
    lines = read_metrics(taught)
    assert all(np.isfinite(line["held_out_loss[mail]"]) for line in lines if "held_out_loss" in line)
    assert evaluate(taught, []) == pytest.approx(scores["after"], abs=1e-5)
    rows = embed_run.prepare(config())[1]
    texts = [{text for record in each.records for text in record.texts} for each in (rows.train, rows.held_out)]
    assert not texts[0] & texts[1]


@pytest.mark.nightly
def test_a_stopped_run_goes_on_to_the_same_bits_and_micro_batches_do_not_matter(
    config: Config, taught: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        stop_after(patch, 3)
        with pytest.raises(Stopped):
            run(config(), tmp_path / "broken")
    broken = run(config(), tmp_path / "broken", resume=True)
    assert read_losses(broken) == read_losses(taught)
    assert (broken / "scores.json").read_bytes() == (taught / "scores.json").read_bytes()
    small = run(config(batch={"size": 8, "tokens_per_device": 64}), tmp_path / "small")
    assert read_losses(small) == pytest.approx(read_losses(taught), rel=1e-4)


def test_batches_of_one_source_are_learnt_from_also_after_a_stop(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, taken, of = config(mix={"by": "weight", "batches": "one_source"}), list[set[int]](), EmbeddingLoss.of

    def seen(loss: EmbeddingLoss, rows: Examples, batch: Indices) -> Any:
        assert isinstance(rows, OneSourceBatches)
        taken.append(set(rows.rows.source_N[batch].tolist()))
        return of(loss, rows, batch)

    with monkeypatch.context() as patch:
        patch.setattr(EmbeddingLoss, "of", seen)
        whole = run(wanted, tmp_path / "whole")
    assert {0} in taken and {1} in taken and {0, 1} not in taken
    with monkeypatch.context() as patch:
        stop_after(patch, 3)
        with pytest.raises(Stopped):
            run(wanted, tmp_path / "broken")
    assert read_losses(run(wanted, tmp_path / "broken", resume=True)) == read_losses(whole)
    assert "Batches are of one source each; shares are of batches." in check(wanted).notes


def test_mined_negatives_check_plan_and_data_know_all_sources(config: Config, tmp_path: Path) -> None:
    wanted = config(embed={"mine": 2})
    assert len(read_losses(run(wanted, tmp_path / "mined"))) == 5
    notes = "\n".join(check(wanted).notes)
    assert "news: 24 rows" in notes and "50.0% of the draws, 2.22 passes" in notes
    assert "Held-out rows: news 8, mail 3." in notes
    assert plan(wanted).steps == 5
    found = data_report.data_report(wanted, out=tmp_path / "page")
    assert [each.read.title for each in found.findings] == ["Train: news", "Train: mail"]


def test_a_text_of_two_sources_stays_on_one_side_and_a_row_of_two_in_the_first(config: Config, tmp_path: Path) -> None:
    copied = rows_of("news", 6)
    both = {"twin": {"path": write(tmp_path / "twin.jsonl", [*copied, *rows_of("twin", 14)])}}
    sources = {"news": {"path": config().data.sources["news"].path}, **both}
    rows = embed_run.prepare(config(sources=sources))[1]
    keys = [{record.key for record in each.records} for each in (rows.train, rows.held_out)]
    assert not keys[0] & keys[1]
    held = write(tmp_path / "held.jsonl", rows_of("held", 4))
    train = embed_run.prepare(config(sources=sources, held_out=held, clean=["exact_duplicate"]))[1].train
    assert train.rows_by_source == {"news": 32, "twin": 14}
    assert train.cleaning is not None and len(train.cleaning.places) == 6


@pytest.mark.nightly(but=["labelled"])
@pytest.mark.parametrize("form", ["scored", "labelled"])
def test_scores_and_classes_of_several_sources_are_learnt(config: Config, tmp_path: Path, form: str) -> None:
    sources = {}
    for name, size in SIZES.items():
        pairs = [(each["anchor"], each["positive"]) for each in rows_of(name, size)]
        scored = [{"sentence1": a, "sentence2": b, "score": n % 3 / 2} for n, (a, b) in enumerate(pairs)]
        labelled = [{"text": text, "label": f"{name} {n % 2}"} for n, (_, text) in enumerate(pairs)]
        sources[name] = {"path": write(tmp_path / f"{name}.jsonl", scored if form == "scored" else labelled)}
    found = run(config(sources=sources), tmp_path / "run")
    after = read_scores(found)["after"]
    assert {"loss[news]", "loss[mail]"} <= after.keys() and all(np.isfinite(read_losses(found)))


def test_rows_of_another_form_are_refused(config: Config, tmp_path: Path) -> None:
    labelled = write(tmp_path / "labelled.jsonl", [{"text": f"text {n}", "label": "a"} for n in range(4)])
    sources = {"news": {"path": config().data.sources["news"].path}, "other": {"path": labelled}}
    with pytest.raises(DataError, match="has columns of labelled rows, and the training rows are pairs ones"):
        embed_run.prepare(config(sources=sources))
