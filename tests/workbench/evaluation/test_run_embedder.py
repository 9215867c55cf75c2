"""Embeddings of a run of recipe embed tell which labelled texts are alike, in the place of frozen features."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file, save_file

import workbench
from tests.conftest import MINILM, save_tiny
from tests.recipes.weather import WORDS, weather, write
from workbench.config import RunConfig
from workbench.data.embedding import pair_set
from workbench.data.folds import duplicates
from workbench.errors import ConfigError, FileError, ResumeError, WorkbenchError
from workbench.evaluation import retrieval_scores, run_embedder
from workbench.evaluation.run_embedder import RunEmbedder
from workbench.models import backbones, classifier, embedder
from workbench.recipes.load import load
from workbench.recipes.over import crossval_verbs
from workbench.recipes.verbs.generate import predict
from workbench.runs import run_directory, trust
from workbench.runs.trust import Trust

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
SHORT = ["model.weights=float32", "evaluate.every=null", "save.every=null", "data.limit=null", "adapter.rank=8"]
CORRECTION = "correction={neighbours: 5, ask: labels, strength: 1.0, embedder: %s}"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny BERT with the vocabulary of a real one, and rows of three classes."""
    folder = tmp_path_factory.mktemp("embedder")
    save_tiny(folder / "bert", "Bert", "SequenceClassification", MINILM)
    write(folder / "train.jsonl", weather(45, seed=0))
    write(folder / "test.jsonl", weather(15, seed=1))
    write(folder / "other.jsonl", weather(120, seed=5))
    return folder


def embedded(home: Path, name: str, *words: str) -> Path:
    known = [f"data.train={home / 'other.jsonl'}", f"model.id={home / 'bert'}", "data.held_out=0.2"]
    known += ["train.learning_rate=7e-3", "batch.size=24", "embed.query_prefix='weather: '"]
    return workbench.run("embed/quickstart", [*known, *SHORT, *words], out=home / name, quiet=True)


@pytest.fixture(scope="module")
def taught(home: Path) -> Path:
    """An embedder that has learnt the classes. Read only."""
    return embedded(home, "taught", "train.epochs=10")


@pytest.fixture(scope="module")
def untaught(home: Path) -> Path:
    """One that has learnt next to nothing. Read only."""
    return embedded(home, "untaught", "train.epochs=null", "train.steps=1", "train.learning_rate=1e-6")


def words_of(home: Path, *more: str) -> list[str]:
    """Of a short cross-validation."""
    known = [f"data.{name}={home / f'{name}.jsonl'}" for name in ("train", "test")]
    known += [f"model.id={home / 'bert'}", "folds.k=3", "train.steps=4", "batch.size=8"]
    return [*known, *SHORT, "data.overlap=drop", *more]


def of(run: Path) -> RunEmbedder:
    config = RunConfig.model_validate(
        {
            "recipe": "crossval",
            "data": {"train": "rows.jsonl"},
            "correction": {"neighbours": 2, "embedder": str(run)},
        }
    )
    found = run_embedder.of(config, "correction")
    assert found is not None and run_embedder.of(config, "duplicates") is None
    return found


def test_embeddings_are_those_of_the_run_with_its_instruction(taught: Path) -> None:
    texts = [row["text"] for row in weather(9, seed=2)]
    found = of(taught).embed(texts)
    config = run_directory.read_config(taught)
    model = embedder.load(taught, config)
    units = pair_set.units([f"weather: {text}" for text in texts], model.tokenizer, max_tokens=config.data.max_tokens)
    wanted = torch.nn.functional.normalize(retrieval_scores.embed_texts(model, units), dim=1).numpy()
    np.testing.assert_array_equal(found, wanted)
    bare = pair_set.units(texts, model.tokenizer, max_tokens=config.data.max_tokens)
    assert np.abs(retrieval_scores.embed_texts(model, bare).numpy() - wanted).max() > 0.01, "the instruction counts"


def test_known_texts_need_no_model_and_a_changed_run_is_read_again(
    taught: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path / "cache"))
    copy, texts = tmp_path / "copy", [row["text"] for row in weather(6, seed=3)]
    shutil.copytree(taught, copy)
    first, digest = of(copy).embed(texts), of(copy).digest
    assert digest == of(taught).digest, "wherever the folder is"
    with monkeypatch.context() as without:
        without.delattr(embedder, "load")
        np.testing.assert_array_equal(of(copy).embed([texts[4], texts[0], texts[0]]), first[[4, 0, 0]])
    path = copy / "adapter" / "adapter_model.safetensors"
    save_file({name: 2 * tensor for name, tensor in load_file(path).items()}, path, {"format": "pt"})
    assert of(copy).digest != digest and np.abs(of(copy).embed(texts) - first).max() > 1e-3


def test_duplicates_are_those_of_the_embedder_and_check_says_so(home: Path, taught: Path, untaught: Path) -> None:
    same_class = {}
    for name, run in {"taught": taught, "untaught": untaught}.items():
        own = ["data.test=null", f"duplicates.embedder={run}", "duplicates.features=1"]
        config = load("crossval/quickstart", words_of(home, *own))
        notes = crossval_verbs.inspect(config).notes
        assert any(each.startswith(f"Near-duplicates have like embeddings of {run} (") for each in notes)
        reader = classifier.reader_of_backbone(config)
        source = reader.read(str(home / "train.jsonl"))
        found = duplicates.joined(
            reader.duplicates([source]), run_embedder.of_sources(config, reader)([source]), threshold=0.9
        )
        pairs = [(source.labels[one], source.labels[other]) for one, other in found.pairs_P2.tolist()]
        same_class[name] = sum(one == other for one, other in pairs)
    assert same_class["taught"] > same_class["untaught"] + 20, "texts of one class are alike to who knows classes"


def test_embeddings_of_another_kind_of_device_are_others(taught: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = of(taught)._store()
    monkeypatch.setattr(backbones, "device", lambda: torch.device("cuda"))
    assert of(taught)._store().folder != own.folder


@pytest.fixture(scope="module")
def corrected(home: Path, taught: Path) -> Path:
    """A finished cross-validation whose predictions follow neighbours by the embedder of a copy. Read only."""
    shutil.copytree(taught, home / "own")
    words = words_of(home, CORRECTION % (home / "own"))
    return workbench.run("crossval/quickstart", words, out=home / "corrected", quiet=True)


@pytest.mark.slow
def test_a_correction_is_by_the_embeddings_of_the_run(home: Path, corrected: Path, untaught: Path) -> None:
    words = words_of(home, CORRECTION % untaught)
    other = workbench.run("crossval/quickstart", words, out=home / "other", quiet=True)
    near, far = (json.loads((run / "stages.json").read_text())["stages"][-1] for run in (corrected, other))
    assert near["facts"]["similarity"] > far["facts"]["similarity"] + 0.1, "rows of a class are nearer to each other"
    assert near["oof"]["loss"] < far["oof"]["loss"]
    inputs = json.loads((corrected / "manifest.json").read_text())["inputs"]
    assert any(name.endswith("adapter/adapter_model.safetensors") for name in inputs["embedder"])


def test_predict_embeds_with_the_same_run_or_refuses(home: Path, corrected: Path, tmp_path: Path) -> None:
    predict(corrected, str(home / "test.jsonl"), out=tmp_path / "all.parquet", max_new_tokens=1)
    said, known = (
        pd.read_parquet(path / name) for path, name in ((tmp_path, "all.parquet"), (corrected, "predictions.parquet"))
    )
    columns = [f"p_{name}" for name in WORDS]
    np.testing.assert_allclose(said[columns], known[columns], atol=1e-5)
    path = home / "own" / "adapter" / "adapter_model.safetensors"
    sound = path.read_bytes()
    try:
        save_file({name: 2 * tensor for name, tensor in load_file(path).items()}, path, {"format": "pt"})
        with pytest.raises(FileError, match=r"correction\.embedder=.*not what it was then\. Put back"):
            predict(corrected, str(home / "test.jsonl"), out=tmp_path / "two.parquet", max_new_tokens=1)
        with pytest.raises(ResumeError, match=r"adapter_model\.safetensors \(embedder\): other content"):
            words = words_of(home, CORRECTION % (home / "own"))
            workbench.run("crossval/quickstart", words, out=corrected, resume=True, quiet=True)
    finally:
        path.write_bytes(sound)


def _classifier(home: Path) -> Path:
    words = [f"data.train={home / 'train.jsonl'}", f"model.id={home / 'bert'}", "train.steps=1", *SHORT]
    return workbench.run("classify/quickstart", [*words, "data.test=null"], out=home / "classifier", quiet=True)


def test_what_embeds_no_texts_is_refused_with_the_cure(home: Path, taught: Path, tmp_path: Path) -> None:
    unfinished = tmp_path / "unfinished"
    shutil.copytree(taught, unfinished, ignore=shutil.ignore_patterns("adapter"))
    mistakes = {
        tmp_path: "not a run directory (no config.yaml). Name a run of recipe=embed",
        taught / "adapter": "It is the adapter of a run. Write",
        _classifier(home): "its run is of recipe=classify, which embeds no texts. Name a run of recipe=embed",
        unfinished: "no adapter there yet. Finish the run first",
    }
    for path, told in mistakes.items():
        with pytest.raises(WorkbenchError, match=re.escape(told)):
            of(path)


@pytest.mark.parametrize("section", run_embedder.SECTIONS)
def test_code_of_an_embedder_runs_only_where_a_person_says_so(section: str, taught: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(taught, copy)
    (copy / "code.py").write_text("raise RuntimeError('executed')\n")
    text = (copy / "config.yaml").read_text()
    plugins = f"plugins: [{copy / 'code.py'}]\n"
    (copy / "config.yaml").write_text(re.sub(r"^plugins:.*\n", "", text, flags=re.MULTILINE) + plugins)
    own: dict[str, Any] = {"embedder": str(copy)}
    own |= {"correction": {"neighbours": 2}, "duplicates": {"features": 0.9}, "rerank": {"mine": 1}}[section]
    values = {"recipe": "rerank" if section == "rerank" else "crossval", "data": {"train": "rows.jsonl"}, section: own}
    found = run_embedder.of(RunConfig.model_validate(values), section)
    assert found is not None and list(found.config.plugins) == []
    values[section] = own | {"trust": True}
    with pytest.raises(WorkbenchError, match="executed"):
        run_embedder.of(RunConfig.model_validate(values), section)
    assert trust.code(values) == {f"{section}.trust": True}
    assert trust.without(values, tmp_path, Trust())[section].get("trust", False) is False, (
        "nor where the run is read again"
    )


@pytest.mark.parametrize(
    ("section", "told"),
    [
        ({"duplicates": {"embedder": "run"}}, "features is null. Write features: 0.9"),
        ({"duplicates": {"trust": True}}, "trust is for the code of embedder"),
        ({"correction": {"embedder": "run"}}, "without neighbours nothing is corrected, and embedder is given"),
        ({"correction": {"neighbours": 2, "trust": True}}, "trust is for the code of embedder"),
    ],
)
def test_settings_without_each_other_are_refused(section: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=re.escape(told)):
        RunConfig.model_validate({"recipe": "crossval", "data": {"train": "rows.jsonl"}, **section})


def test_pictures_have_no_embedder(tmp_path: Path) -> None:
    words = ["duplicates={features: 0.9, embedder: run}"]
    with pytest.raises(ConfigError, match=r"duplicates\.embedder embeds texts, and data\.format=image"):
        load("crossval/pictures", words)
