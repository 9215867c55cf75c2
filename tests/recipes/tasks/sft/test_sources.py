"""A run over several sources: figures of each beside the whole, and the same bits after a stop."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import workbench
from tests.run_files import read_metrics, read_scores, write_lines
from tests.stopping import stop_after
from workbench.data.batching import Indices, MicroBatch
from workbench.data.text.preference_pairs import PreferenceSet
from workbench.errors import Stopped
from workbench.recipes.load import load
from workbench.recipes.verbs.check import check
from workbench.recipes.verbs.evaluate import evaluate

Train = Callable[..., Path]
NAMES = ("sums", "tales")


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory, short_stories: str) -> Train:
    folder = tmp_path_factory.mktemp("sources")
    for name, size in zip(NAMES, (40, 12), strict=True):
        rows = [{"question": f"{name} {n}?", "answer": f"{name} says {n * n}."} for n in range(size)]
        write_lines(folder / f"{name}.jsonl", rows)

    def run(out: str, *words: str, resume: bool = False) -> Path:
        known = [f"data.sources.{name}.path={folder}/{name}.jsonl" for name in NAMES]
        known += [
            f"model.id={short_stories}",
            "model.weights=float32",
            "data.held_out=0.25",
            "data.sources.tales.weight=3",
        ]
        known += ["train.epochs=null", "train.steps=12", "batch.size=6", "evaluate.every=4", "evaluate.answers=0"]
        return workbench.run("sft/quickstart", [*known, *words], out=folder / out, resume=resume, quiet=True)

    return run


@pytest.fixture(scope="module")
def taught(train: Train) -> Path:
    """A finished run. Read only."""
    return train("taught", "batch.tokens_per_device=100000")


def test_each_source_has_its_loss_in_every_evaluation_and_the_whole_is_their_mean_by_tokens(taught: Path) -> None:
    manifest = json.loads((taught / "manifest.json").read_text())
    assert manifest["data"]["train"]["sources"] == {"sums": 30, "tales": 9}
    assert manifest["data"]["held_out"]["sources"] == {"sums": 10, "tales": 3}
    scores = read_scores(taught)
    evaluated = [line for line in read_metrics(taught) if "held_out_loss" in line]
    assert len(evaluated) == 3
    told = [(each["loss"], [each[f"loss[{name}]"] for name in NAMES]) for each in scores.values()]
    told += [(each["held_out_loss"], [each[f"held_out_loss[{name}]"] for name in NAMES]) for each in evaluated]
    whole, parts = np.asarray([each[0] for each in told]), np.asarray([each[1] for each in told])
    # One share of the tokens explains all of them: whole = share * sums + (1 - share) * tales.
    share = (whole - parts[:, 1]) / (parts[:, 0] - parts[:, 1])
    assert np.ptp(share) < 1e-3 and 0.5 < share.mean() < 0.95
    page = (taught / "report.html").read_text()
    assert "Loss, tales" in page and "held-out loss, tales" in page
    told = pd.read_parquet(taught / "dynamics.parquet").dropna(subset=["text"])
    assert len(told) == 12
    for row, text in zip(told["row"], told["text"], strict=True):
        name, number = row.split(".jsonl, row ")
        question = f"{name} {int(number) - 1}?"
        assert question in text and question in page


def test_a_stopped_run_in_small_micro_batches_goes_on_to_the_same_losses(
    train: Train, taught: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        stop_after(patch)
        with pytest.raises(Stopped):
            train("broken", "batch.tokens_per_device=100000")
    assert [line["loss"] for line in read_metrics(train("broken", "batch.tokens_per_device=100000", resume=True))] == [
        line["loss"] for line in read_metrics(taught)
    ]
    small = [line["loss"] for line in read_metrics(train("small", "batch.tokens_per_device=60"))]
    assert small == pytest.approx([line["loss"] for line in read_metrics(taught)], rel=1e-5)


@pytest.mark.nightly(but=["reward"])
@pytest.mark.parametrize("recipe", ["prefer", "reward"])
def test_pairs_of_several_sources_are_drawn_by_their_weights_also_after_a_stop(
    recipe: str, tmp_path: Path, stories: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, size in zip((*NAMES, "held"), (30, 9, 4), strict=True):
        rows = [{"prompt": f"{name} {n}?", "chosen": f"{n * n} it is", "rejected": "No" * (n % 3)} for n in range(size)]
        rows = [row | {"rejected": row["rejected"] or "I do not know"} for row in rows]
        write_lines(tmp_path / f"{name}.jsonl", rows)
    words = [f"data.sources.{name}.path={tmp_path}/{name}.jsonl" for name in NAMES]
    words += [f"model.id={stories}", "model.weights=float32", "model.compute=float32", "data.mix.by=weight"]
    words += [f"data.held_out={tmp_path}/held.jsonl"]
    words += ["data.sources.tales.weight=2", "train.epochs=null", "train.steps=6", "batch.size=6", "data.mix.rows=18"]
    words += ["evaluate.every=null", "evaluate.answers=0", "batch.tokens_per_device=100000"]
    taken, batch = list[str](), PreferenceSet.batch

    def seen(rows: PreferenceSet, indices: Indices, *, epoch: int = 0) -> MicroBatch:
        taken.extend(rows.place(int(index)).split(".jsonl")[0] for index in indices)
        return batch(rows, indices, epoch=epoch)

    notes = "\n".join(check(load(f"{recipe}/quickstart", words)).notes)
    assert "sums: 30 rows" in notes and "tales: 9 rows" in notes and "66.7% of the draws, 2.67 passes" in notes
    with monkeypatch.context() as patch:
        patch.setattr(PreferenceSet, "batch", seen)
        whole = workbench.run(f"{recipe}/quickstart", words, out=tmp_path / "whole", quiet=True)
    assert {name: taken.count(name) / len(taken) for name in NAMES} == pytest.approx({"sums": 1 / 3, "tales": 2 / 3})
    with monkeypatch.context() as patch:
        stop_after(patch, 2)
        with pytest.raises(Stopped):
            workbench.run(f"{recipe}/quickstart", words, out=tmp_path / "broken", quiet=True)
    broken = workbench.run(f"{recipe}/quickstart", words, out=tmp_path / "broken", quiet=True, resume=True)
    assert [line["loss"] for line in read_metrics(broken)] == [line["loss"] for line in read_metrics(whole)]
    small = [
        line["loss"]
        for line in read_metrics(
            workbench.run(
                f"{recipe}/quickstart", [*words, "batch.tokens_per_device=90"], out=tmp_path / "small", quiet=True
            )
        )
    ]
    assert small == pytest.approx([line["loss"] for line in read_metrics(whole)], rel=1e-4)


@pytest.mark.slow
def test_a_learned_mixture_is_the_same_after_a_stop_and_in_small_micro_batches(
    train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    learned = ["data.mix.by=learned", "data.mix.every=3", "data.sources.tales.passes=5", "evaluate.every=null"]
    learned += ["batch.tokens_per_device=100000"]
    whole = train("learned", *learned)
    with monkeypatch.context() as patch:
        stop_after(patch, 5)  # in the middle of a window
        with pytest.raises(Stopped):
            train("learned broken", *learned)
    wanted = [(line["loss"], line["mix_share[tales]"]) for line in read_metrics(whole)]
    broken = read_metrics(train("learned broken", *learned, resume=True))
    assert [(line["loss"], line["mix_share[tales]"]) for line in broken] == wanted
    small = read_metrics(train("learned small", *learned, "batch.tokens_per_device=60"))
    found = [(line["loss"], line["mix_share[tales]"]) for line in small]
    np.testing.assert_allclose(found, wanted, rtol=1e-4)
    assert len({share for _, share in wanted}) == 4, "12 steps, 3 a window"
    visits = pd.read_parquet(whole / "dynamics.parquet")
    assert visits["visits"][visits["row"].str.startswith("tales")].sum() <= 5 * 9
    page = (whole / "report.html").read_text()
    assert "Share of each source" in page and "Mean over the run: sums" in page


def test_evaluation_sets_have_names_and_scores_of_their_own_beside_a_single_source(
    tmp_path: Path, short_stories: str
) -> None:
    for name in ("train", *NAMES):
        rows = [{"question": f"{name} {n}?", "answer": f"{name} says {n * n}."} for n in range(9)]
        write_lines(tmp_path / f"{name}.jsonl", rows)
    named = "{" + ", ".join(f"{name}: {tmp_path}/{name}.jsonl" for name in NAMES) + "}"
    words = [f"data.train={tmp_path}/train.jsonl", f"model.id={short_stories}", "evaluate.answers=0", "train.steps=2"]
    words += [f"data.held_out={named}", "batch.size=3"]
    assert "Held-out rows: sums 9, tales 9." in check(load("sft/quickstart", words)).notes
    run = workbench.run("sft/quickstart", words, out=tmp_path / "run", quiet=True)
    after = read_scores(run)["after"]
    alone = {name: evaluate(run, [f"data.test={tmp_path}/{name}.jsonl"])["loss"] for name in NAMES}
    together = evaluate(run, [f"data.test={named}"])
    for name in NAMES:
        assert after[f"loss[{name}]"] == together[f"loss[{name}]"] == alone[name]


def test_check_tells_of_each_source_and_of_what_is_learned(tmp_path: Path) -> None:
    for name, size in zip(NAMES, (30, 10), strict=True):
        rows = [{"question": f"{name} {n}?", "answer": "I cannot help with that."} for n in range(size)]
        write_lines(tmp_path / f"{name}.jsonl", rows)
    words = [f"data.sources.{name}.path={tmp_path}/{name}.jsonl" for name in NAMES]
    notes = "\n".join(check(load("sft/quickstart", [*words, "data.held_out=0.2", "data.mix.by=learned"])).notes)
    assert "sums: 24 rows" in notes and "75.0% of the draws" in notes and "Mixture (learned)" in notes
    assert "tales: Of the first 8 training rows 100% are flagged (refusal 8" in notes


def test_sources_take_the_place_of_a_recipes_own_rows(tmp_path: Path) -> None:
    words = [f"data.sources.{name}.path={name}.jsonl" for name in NAMES]
    config = load("sft/quickstart", words)
    assert config.data.train == "" and config.data.held_out == 0.05, "its held-out rows measure another task"
    own = tmp_path / "own.yaml"
    own.write_text(
        "recipe: sft\ndata: {sources: {a: {path: a.jsonl}, b: {path: b.jsonl}}, held_out: other.jsonl}\n"
        "model: {id: starter}\n"
    )
    config = load(str(own), ["data.sources.b.weight=2"])
    assert config.data.held_out == "other.jsonl" and config.data.sources["b"].weight == 2
