"""Rerankers from the command's side: they are learnt, by every form of rows, however they are computed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file

import workbench
from tests.conftest import MINILM, save_tiny
from tests.run_files import read_losses, read_scores, trains_rows, write_lines
from workbench.data.embedding import rerank_candidates
from workbench.errors import ConfigError, Stopped
from workbench.models import reranker
from workbench.recipes.load import load
from workbench.recipes.tasks.classify.task import Gap
from workbench.recipes.tasks.embed import embed_run
from workbench.recipes.tasks.embed.task import EmbedInspection
from workbench.recipes.tasks.rerank import task
from workbench.recipes.verbs.check import check
from workbench.recipes.verbs.evaluate import evaluate
from workbench.recipes.verbs.generate import predict
from workbench.recipes.verbs.merge import merge
from workbench.recipes.verbs.plans.plan import plan
from workbench.runs import run_directory

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

Train = Callable[..., Path]
ANIMALS = ("cat", "dog", "bird", "fish", "horse", "cow", "mouse", "fox")
PLACES = ("house", "lake", "road", "tree", "barn", "hill")


def questions(count: int) -> list[dict[str, Any]]:
    """Questions and answers that share a place or do not, each with one given negative."""
    found = []
    for number in range(count):
        animal, place = ANIMALS[number % 8], PLACES[number % 6]
        other = PLACES[(number + 1 + number // 24) % 6]
        found.append(
            {
                "anchor": f"Who saw the {animal} near the {place}, number {number}?",
                "positive": f"The {place} is where {number} of them were seen.",
                "negatives": [f"The {other} is where {number} of them were not seen."],
            }
        )
    return found


def scored(count: int) -> list[dict[str, Any]]:
    return [
        {"sentence1": f"the {PLACES[n % 6]} {n}", "sentence2": f"a {PLACES[(n + n % 2) % 6]} {n}", "score": 1 - n % 2}
        for n in range(count)
    ]


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny BERT with the vocabulary of a real one."""
    return save_tiny(tmp_path_factory.mktemp("bert"), "Bert", "SequenceClassification", MINILM)


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory, bert: str) -> Train:
    known = ["data.held_out=0.25", "data.columns={}", f"model.id={bert}"]
    known += ["model.weights=float32", "adapter={method: lora, rank: 8}", "train.learning_rate=5e-3"]
    known += [
        "batch.size=12",
        "evaluate.every=null",
        "save.every=null",
        "rerank.candidates=6",
        "rerank.passage_prefix=''",
    ]
    return trains_rows(tmp_path_factory.mktemp("runs"), "rerank/quickstart", *known)


@pytest.fixture(scope="module")
def taught(train: Train) -> Path:
    """A run that learnt which place is asked for. Read only."""
    return train("taught", questions(96), "train.epochs=16")


def test_passages_are_ranked_after_training(taught: Path) -> None:
    before, after = (read_scores(taught)[when] for when in ("before", "after"))
    assert after["loss"] < 0.8 * before["loss"] and after["ndcg@10_low"] > before["ndcg@10"]
    for name in ("ndcg@10", "recall@1", "recall@10", "mrr"):
        assert after[f"{name}_low"] <= after[name] <= after[f"{name}_high"]
    found = pd.read_parquet(taught / "predictions.parquet")
    assert float(found["right"].mean()) == pytest.approx(after["recall@1"], abs=1e-6), "one passage belongs to each"
    page = (taught / "report.html").read_text()
    for shown in ("nDCG at 10", "Mean reciprocal rank", "nearest neighbour", "per row"):
        assert shown in page


def test_scores_are_those_of_the_candidates_ranked_one_by_one(taught: Path) -> None:
    """nDCG and reciprocal rank, a second time, from scores of pairs that are read alone."""
    config = run_directory.read_config(taught)
    model = reranker.load(taught, config)
    rows = rerank_candidates.load(config, model.tokenizer).held_out
    gains, ranks, losses = [], [], []
    order = rerank_candidates.ranking(rows, candidates=6)
    texts = rows.pairs.units.texts
    with torch.no_grad():
        for row, passages, relevant in zip(order.row_Q, order.passages, order.relevant, strict=True):
            query = texts[rows.pairs.anchor_N[row]]
            scores = [float(model.scores(model.joins.batch([query], [texts[each]]))) for each in passages]
            rank = 1 + sum(score > scores[int(relevant.argmax())] for score in scores)
            gains.append(1 / np.log2(1 + rank))
            ranks.append(1 / rank)
        for row in range(len(rows)):
            query = texts[rows.pairs.anchor_N[row]]
            scores = [float(model.scores(model.joins.batch([query], [texts[each]]))) for each in rows.passage_NC[row]]
            losses.append(np.log(np.exp(np.asarray(scores)).sum()) - scores[0])
    after = read_scores(taught)["after"]
    assert after["ndcg@10"] == pytest.approx(np.mean(gains), abs=1e-5)
    assert after["mrr"] == pytest.approx(np.mean(ranks), abs=1e-5)
    assert after["loss"] == pytest.approx(np.mean(losses), abs=1e-5)


def test_same_curve_for_any_micro_batch(train: Train, taught: Path) -> None:
    rows, words = taught.parent / "taught.jsonl", ["train.steps=3", "adapter.dropout=0.3"]
    whole, parts = (
        train(f"of-{tokens}", rows, *words, f"batch.tokens_per_device={tokens}") for tokens in (10_000, 200)
    )
    assert read_losses(parts) == pytest.approx(read_losses(whole), rel=1e-5)
    assert len(set(read_losses(whole))) == 3


@pytest.mark.slow
def test_a_stopped_run_resumes_to_the_same_bits(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    """With mined negatives, and others that each pass draws."""
    from workbench.cli.console import Terminal

    words = ["train.steps=9", "rerank.mine=1", "rerank.negatives=3"]
    unbroken = train("unbroken", questions(48), *words)
    with monkeypatch.context() as patch:
        begun = unbroken.parent / "broken" / "metrics.jsonl"
        patch.setattr(Terminal, "stop_requested", lambda _: begun.exists())
        with pytest.raises(Stopped, match="after step 1 of 9"):
            train("broken", unbroken.parent / "unbroken.jsonl", *words)
    resumed = train("broken", unbroken.parent / "unbroken.jsonl", *words, resume=True)
    assert read_losses(resumed) == read_losses(unbroken)
    assert read_scores(resumed) == read_scores(unbroken)


@pytest.mark.parametrize("loss", ["bce", "mse"])
def test_scored_pairs_follow_their_scores(train: Train, loss: str) -> None:
    """Over layers that are frozen, whose outputs are not kept."""
    frozen = "freeze={policy: static, layers: 1}"
    run = train(f"scored-{loss}", scored(36), "train.steps=2", f"rerank={{loss: {loss}}}", frozen)
    assert {"loss", "spearman", "spearman_low", "pearson"} <= set(read_scores(run)["after"])
    assert list(pd.read_parquet(run / "predictions.parquet"))[-2:] == ["score", "similarity"]


@pytest.mark.slow
def test_candidates_by_themselves_are_learnt_with_binary_cross_entropy(train: Train, taught: Path) -> None:
    run = train("bce", taught.parent / "taught.jsonl", "train.epochs=3", "rerank.loss=bce")
    assert read_scores(run)["after"]["loss"] < read_scores(run)["before"]["loss"]


def test_mined_negatives_are_of_the_backbone_or_of_a_run_of_embed(train: Train, taught: Path, bert: str) -> None:
    rows = taught.parent / "taught.jsonl"
    words = [f"data.train={rows}", "data.held_out=0.25", f"model.id={bert}", "model.weights=float32"]
    words += ["train.steps=1", "evaluate.every=null", "save.every=null", "data.max_tokens=64"]
    embeds = workbench.run("embed/quickstart", words, out=taught.parent / "embeds", quiet=True)
    mined = {}
    for name, more in {"backbone": [], "run": [f"rerank.embedder={embeds}"]}.items():
        run = train(
            f"mined-{name}", rows, "train.steps=1", "rerank.mine=2", "rerank.negatives=3", "rerank.mine_below=1", *more
        )
        mined[name] = load_file(run / embed_run.FILE)["unit_NK"]
        assert (mined[name] >= 0).any() and mined[name].shape[1] == 2
        config = run_directory.read_config(run)
        known = "embedder" in json.loads((run / "manifest.json").read_text())["inputs"]
        assert known == (name == "run")
        notes = task.TASK.inspect(config).notes
        assert any(note.startswith(f"Negatives are mined by embeddings of {embeds}") for note in notes) == known


def test_verbs_agree_with_the_run(taught: Path, tmp_path: Path) -> None:
    assert evaluate(taught, []) == read_scores(taught)["after"]
    first = questions(96)[0]
    asked = tmp_path / "asked.jsonl"
    listed = {"query": first["anchor"], "passages": [*first["negatives"], first["positive"]]}
    asked.write_text(json.dumps(listed) + "\n")
    assert predict(taught, str(asked), out=tmp_path / "said.parquet", max_new_tokens=1).rows == 2
    said = pd.read_parquet(tmp_path / "said.parquet")
    assert list(said) == ["index", "row", "passages", "query", "passage", "score", "rank"]
    assert said["rank"].tolist() == (2 - (said["score"].rank() - 1)).tolist()
    write_lines(asked, ({"query": first["anchor"], "passage": p} for p in listed["passages"]))
    predict(taught, str(asked), out=tmp_path / "again.parquet", max_new_tokens=1)
    np.testing.assert_allclose(pd.read_parquet(tmp_path / "again.parquet")["score"], said["score"], atol=1e-5)
    with pytest.raises(ConfigError, match="cannot change rerank"):
        evaluate(taught, ["rerank.candidates=9"])


def test_a_merged_model_scores_alike(taught: Path, tmp_path: Path) -> None:
    found = merge(taught, out=tmp_path / "merged", weights="float32")
    assert isinstance(found.agreement, Gap) and found.agreement.same == 1


@pytest.mark.slow
def test_sentence_transformers_scores_alike(taught: Path, train: Train, short_stories: str, tmp_path: Path) -> None:
    """What is merged loads there and gives our scores, of an encoder and of a causal backbone."""
    from sentence_transformers import CrossEncoder

    causal = train("causal", questions(24), f"model.id={short_stories}", "train.steps=2")
    for run in (taught, causal):
        asked = tmp_path / f"{run.name}.jsonl"
        rows = [{"query": each["anchor"], "passage": each["positive"]} for each in questions(9)]
        write_lines(asked, rows)
        predict(run, str(asked), out=tmp_path / f"{run.name}.parquet", max_new_tokens=1)
        merge(run, out=tmp_path / run.name, weights="float32")
        theirs = CrossEncoder(str(tmp_path / run.name), device="cpu", local_files_only=True)
        found = theirs.predict([(row["query"], row["passage"]) for row in rows])
        ours = pd.read_parquet(tmp_path / f"{run.name}.parquet")["score"]
        np.testing.assert_allclose(found, ours, atol=1e-4)
        assert theirs.tokenizer.model_max_length <= run_directory.read_config(run).data.max_tokens


@pytest.mark.nightly(but=["full", "houlsby"])
@pytest.mark.slow
@pytest.mark.parametrize("method", ["full", "ia3", "houlsby", "last-layers"])
def test_methods_and_causal_backbones(train: Train, short_stories: str, method: str) -> None:
    words = [f"model.id={short_stories}", f"adapter={{method: {method}}}", "train.steps=2", "train.learning_rate=1e-4"]
    run = train(f"method-{method}", questions(24), *words)
    assert evaluate(run, []) == read_scores(run)["after"]


def test_check_tells_of_negatives_and_candidates(taught: Path) -> None:
    words = [f"data.train={taught.parent / 'taught.jsonl'}", "data.held_out=0.25", "data.columns={}"]
    found = check(load("rerank/quickstart", [*words, "rerank.candidates=7", "rerank.negatives=3"]))
    assert isinstance(found, EmbedInspection)
    assert [name for name, _ in found.examples[0][1]] == ["positive", "negative", "negative", "negative"]
    told = " ".join(found.notes)
    assert "its positive among 3 negatives (72 are given" in told and "rank 7 passages each" in told


@pytest.mark.slow
def test_a_plan_counts_all_candidates(taught: Path, bert: str) -> None:
    words = [f"data.train={taught.parent / 'taught.jsonl'}", "data.held_out=0.25", "data.columns={}", "batch.size=12"]
    words += [f"model.id={bert}", "model.weights=float32", "train.steps=4", "batch.tokens_per_device=100000"]
    few, many = (plan(load("rerank/quickstart", [*words, f"rerank.negatives={count}"])) for count in (1, 7))
    assert few.dry_run.micro_batches == 1 and many.dry_run.peak > few.dry_run.peak
