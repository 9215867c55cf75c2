"""Sentence embeddings from the command's side: they are learnt, by every form of rows, however they are computed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from tests.conftest import MINILM, save_tiny
from tests.run_files import trains_rows
from tests.workbench.training.distributed import layouts
from workbench.errors import ConfigError, Stopped
from workbench.models import embedder
from workbench.recipes.load import load
from workbench.recipes.tasks.embed import embed_run, task
from workbench.recipes.verbs.check import check
from workbench.recipes.verbs.evaluate import evaluate
from workbench.recipes.verbs.export import export
from workbench.recipes.verbs.generate import generate, predict
from workbench.recipes.verbs.merge import merge
from workbench.recipes.verbs.plans.plan import plan
from workbench.runs import run_directory, units

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

Train = Callable[..., Path]
ANIMALS = ("cat", "dog", "bird", "fish", "horse", "cow", "mouse", "fox")
PLACES = ("house", "lake", "road", "tree", "barn", "hill")


def pairs(count: int) -> list[dict[str, Any]]:
    """Questions and answers that share an animal and a place."""
    found = []
    for number in range(count):
        animal, place = ANIMALS[number % 8], PLACES[number // 8 % 6]
        more = " and it was late" * (number % 3)
        found.append(
            {"anchor": f"Who saw the {animal} near the {place}?", "positive": f"The {place} has a {animal}{more}."}
        )
    return found


def scored(count: int) -> list[dict[str, Any]]:
    rows = pairs(count)
    return [
        {"sentence1": each["anchor"], "sentence2": rows[(n + n % 3) % count]["positive"], "score": 1 - n % 3 / 2}
        for n, each in enumerate(rows)
    ]


def classes(count: int) -> list[dict[str, Any]]:
    return [{"text": each["positive"], "label": ANIMALS[n % 8]} for n, each in enumerate(pairs(count))]


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny BERT of masked tokens, without a pooler, with the vocabulary of a real one."""
    return save_tiny(tmp_path_factory.mktemp("bert"), "Bert", "MaskedLM", MINILM)


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory, bert: str) -> Train:
    known = ["data.held_out=0.25", f"model.id={bert}", "model.weights=float32"]
    known += ["adapter={method: lora, rank: 8, dropout: 0.1}", "train.learning_rate=2e-2", "batch.size=12"]
    known += ["evaluate.every=null", "save.every=null"]
    return trains_rows(tmp_path_factory.mktemp("runs"), "embed/quickstart", *known)


@pytest.fixture(scope="module")
def taught(train: Train) -> Path:
    """A finished run of pairs with instructions. Read only."""
    words = ["train.steps=24", "embed.query_prefix='find: '", "embed.sizes=[8]", "embed.symmetric=true"]
    return train("taught", pairs(48), *words)


def _losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def _scores(run: Path) -> dict[str, Any]:
    return dict(json.loads((run / "scores.json").read_text()))


def test_answers_are_found_after_training(taught: Path) -> None:
    before, after = (_scores(taught)[when] for when in ("before", "after"))
    assert after["ndcg@10"] > before["ndcg@10"] + 0.1 and after["loss"] < before["loss"]
    for name in ("ndcg@10", "recall@1", "recall@10", "mrr"):
        assert after[f"{name}_low"] <= after[name] <= after[f"{name}_high"]
    assert 0 < after["ndcg@10[8]"] <= 1, "the first numbers alone"
    page = (taught / "report.html").read_text()
    for shown in ("nDCG at 10", "Mean reciprocal rank", "nearest neighbour", "per row"):
        assert shown in page
    assert "nats per token" not in page and "Answers" not in page
    found = pd.read_parquet(taught / "predictions.parquet")
    assert float(found["right"].mean()) == pytest.approx(after["recall@1"], abs=1e-6)


@pytest.mark.slow
def test_same_curve_for_any_micro_batch(train: Train, taught: Path) -> None:
    rows, words = taught.parent / "taught.jsonl", ["train.steps=6", "adapter.dropout=0.3"]
    whole, parts, single = (
        train(f"of-{tokens}", rows, *words, f"batch.tokens_per_device={tokens}") for tokens in (10_000, 90, 50)
    )
    assert _losses(parts) == pytest.approx(_losses(whole), rel=1e-5)
    assert _losses(single) == pytest.approx(_losses(whole), rel=1e-5)
    assert len(set(_losses(whole))) == 6


@pytest.mark.slow
def test_a_stopped_run_resumes_to_the_same_bits(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    """With positives of classes, which each epoch draws."""
    from workbench.cli.console import Terminal

    words = ["train.steps=7", "batch.tokens_per_device=60"]
    unbroken = train("unbroken", classes(32), *words)
    with monkeypatch.context() as patch:
        begun = unbroken.parent / "broken" / "metrics.jsonl"
        patch.setattr(Terminal, "stop_requested", lambda _: begun.exists())
        with pytest.raises(Stopped, match="after step 1 of 7"):
            train("broken", unbroken.parent / "unbroken.jsonl", *words)
    resumed = train("broken", unbroken.parent / "unbroken.jsonl", *words, resume=True)
    assert _losses(resumed) == _losses(unbroken)
    assert set(_scores(resumed)["after"]) >= {"loss", "accuracy", "accuracy_low", "ndcg@10", "mrr"}
    assert _scores(resumed) == _scores(unbroken)


def test_mined_negatives_are_near_and_not_known(train: Train, taught: Path) -> None:
    rows = [*pairs(24), {"anchor": pairs(1)[0]["anchor"], "positive": "The house has it."}]
    stale = taught.parent / "mined" / embed_run.FILE
    stale.parent.mkdir()
    stale.write_bytes(b"of a run that failed here before")
    run = train("mined", rows, "train.steps=2", "embed.mine=2", "embed.loss=triplet")
    config = run_directory.shipped_config(run)
    data = embed_run.prepare(config)[1].train
    embedded = torch.nn.functional.normalize(torch.randn(len(data.units.texts), 8), dim=1)
    found = embed_run.mined_negatives(data, embedded, count=3, below=0.9)
    for row, negatives in enumerate(found.unit_NK.numpy()):
        similar = (embedded[data.anchor_N[row]] @ embedded.T).numpy()
        own = similar[data.positive_N[row]]
        mine = {each.texts[1] for each in data.records if each.texts[0] == data.records[row].texts[0]}
        able = [
            unit
            for unit in set(data.positive_N.tolist())
            if data.units.texts[unit] not in mine and similar[unit] < own - 0.1 * abs(own)
        ]
        assert [unit for unit in negatives if unit >= 0] == sorted(able, key=lambda unit: -similar[unit])[:3]


def test_scored_pairs_follow_their_scores(train: Train) -> None:
    run = train("scored", scored(36), "train.steps=2", "embed.loss=cosine")
    assert {"loss", "spearman", "spearman_low", "pearson"} <= set(_scores(run)["after"])
    assert list(pd.read_parquet(run / "predictions.parquet"))[-2:] == ["score", "similarity"]


def test_verbs_agree_with_the_run(taught: Path, tmp_path: Path) -> None:
    assert evaluate(taught, []) == _scores(taught)["after"]
    asked = tmp_path / "asked.jsonl"
    asked.write_text("".join(json.dumps({"anchor": each["anchor"]}) + "\n" for each in pairs(5)))
    assert predict(taught, str(asked), out=tmp_path / "said.parquet", max_new_tokens=1).rows == 5
    said = np.stack(pd.read_parquet(tmp_path / "said.parquet")["embedding"])
    assert said.shape == (5, 32)
    np.testing.assert_allclose(np.linalg.norm(said, axis=1), 1, rtol=1e-5)
    with pytest.raises(ConfigError, match=r"recipe embed trains no model that writes text.*workbench predict"):
        generate(taught, "Hello", max_new_tokens=2)
    with pytest.raises(ConfigError, match="cannot change embed"):
        evaluate(taught, ["embed.pooling=first"])


def test_a_merged_model_embeds_alike(taught: Path, tmp_path: Path) -> None:
    found = merge(taught, out=tmp_path / "merged", weights="float32")
    assert isinstance(found.agreement, task.Angle)
    assert found.agreement.cosine > 1 - 1e-5 and found.agreement.difference < 1e-4
    assert (tmp_path / "merged" / "modules.json").exists()


@pytest.mark.nightly(but=["peft"])
@pytest.mark.slow
@pytest.mark.parametrize("to", ["peft", "onnx"])
def test_an_exported_model_embeds_alike(taught: Path, to: str, tmp_path: Path) -> None:
    found = export(taught, to=to, out=tmp_path / "out")
    assert "least cosine 1.000000" in found.error and float(found.error.split("number ")[1].rstrip(".")) < 1e-4
    assert (tmp_path / "out" / "modules.json").exists(), "sentence-transformers reads the folder, too"


def test_check_tells_which_passages_are_known(taught: Path) -> None:
    rows = taught.parent / "classes.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in classes(48)))
    found = check(load("embed/quickstart", [f"data.train={rows}", "data.held_out=0.25", "batch.size=32"]))
    assert isinstance(found, task.EmbedInspection)
    texts = found.data.train.texts(np.arange(32))
    same = found.data.train.known(texts.anchor_B, texts.positive_B)
    share = (same.sum() - 32) / (32 * 31)
    assert any(units.percent(share) in note and "known to belong" in note for note in found.notes), found.notes
    assert [name for name, _ in found.examples[0][1]] == ["anchor", "positive"]


@pytest.mark.slow
def test_a_plan_counts_small_micro_batches(taught: Path) -> None:
    rows = taught.parent / "taught.jsonl"
    words = [f"data.train={rows}", "data.held_out=0.25", "batch.size=12", "train.steps=4", "embed.mine=1"]
    once, twice = (
        plan(load("embed/quickstart", [*words, f"batch.tokens_per_device={tokens}"])) for tokens in (100_000, 60)
    )
    assert once.dry_run.micro_batches == 1 and twice.dry_run.micro_batches > 2
    assert twice.dry_run.peak < once.dry_run.peak


@pytest.mark.nightly(but=["last"])
@pytest.mark.slow
@pytest.mark.parametrize("pooling", ["mean", "first", "last"])
def test_sentence_transformers_embeds_alike(
    train: Train, taught: Path, tmp_path: Path, pooling: str, bert: str
) -> None:
    """What a run saved, and what is merged, loads there and gives our embeddings."""
    from sentence_transformers import SentenceTransformer

    words = [
        "train.steps=3",
        f"embed.pooling={pooling}",
        "embed.query_prefix='find: '",
        "embed.passage_prefix='text: '",
    ]
    run = train(f"shipped-{pooling}", taught.parent / "taught.jsonl", *words)
    texts = [each["anchor"] for each in pairs(9)]
    for name, prompt in (("anchor", "query"), ("passage", "document")):
        asked, said = tmp_path / f"{name}.jsonl", tmp_path / f"{name}.parquet"
        asked.write_text("".join(json.dumps({name: text}) + "\n" for text in texts))
        predict(run, str(asked), out=said, max_new_tokens=1)
        ours = np.stack(pd.read_parquet(said)["embedding"])
        merge(run, out=tmp_path / f"merged-{name}", weights="float32")
        for folder in (run / "adapter", tmp_path / f"merged-{name}"):
            theirs = SentenceTransformer(str(folder), device="cpu", local_files_only=True)
            np.testing.assert_allclose(theirs.encode(texts, prompt_name=prompt), ours, atol=1e-5)


@pytest.mark.nightly(but=["ia3", "full"])
@pytest.mark.slow
@pytest.mark.parametrize("method", ["full", "layernorm", "ia3", "houlsby", "last-layers"])
def test_methods_and_causal_backbones(train: Train, short_stories: str, method: str) -> None:
    words = [f"model.id={short_stories}", f"adapter={{method: {method}}}", "train.steps=4", "embed.pooling=last"]
    run = train(f"causal-{method}", pairs(24), *words)
    assert np.isfinite(_losses(run)).all() and len(set(_losses(run))) == 4
    model = embedder.load(run, run_directory.shipped_config(run))
    assert model.width == 64


@pytest.mark.slow
def test_quantised_weights(train: Train, short_stories: str) -> None:
    frozen = "freeze={policy: static, layers: 1}"
    run = train("nf4", pairs(24), f"model.id={short_stories}", "model.weights=nf4", "train.steps=4", frozen)
    assert _losses(run)[-1] < _losses(run)[0] * 1.2


@pytest.mark.slow
def test_two_processes_share_the_texts_of_a_batch(train: Train, taught: Path, tmp_path: Path, bert: str) -> None:
    """Each computes its share of the texts, and the loss over all of them; the first mines negatives for both."""
    words = ["train.steps=5", "adapter.dropout=0.3", "batch.tokens_per_device=90", "embed.mine=1"]
    alone = train("alone", taught.parent / "taught.jsonl", *words)
    shutil.copy(alone / "config.yaml", tmp_path / "recipe.yaml")
    layouts.in_processes(tmp_path, [("two", [], None)])
    assert _losses(tmp_path / "two") == pytest.approx(_losses(alone), rel=1e-5)
    assert _scores(tmp_path / "two")["after"]["loss"] == pytest.approx(_scores(alone)["after"]["loss"], rel=1e-4)
