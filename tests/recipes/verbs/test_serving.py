"""Runs as `workbench serve` loads them: which share an engine, which have their own, which are refused and why."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from starlette.testclient import TestClient

import workbench
from tests.conftest import MINILM, save_tiny, write_animals
from tests.workbench.evaluation.serving.conftest import SETTINGS, Serve, save_runs
from tests.workbench.evaluation.serving.conftest import serve as serve
from workbench.adapters.banks import bank
from workbench.errors import ConfigError
from workbench.evaluation.serving.app import Server
from workbench.evaluation.serving.openai_format import ChatRequest
from workbench.evaluation.serving.training_server import TrainingLimits
from workbench.recipes.verbs import serving
from workbench.recipes.verbs.generate import predict
from workbench.recipes.verbs.serving import ServeSettings, serve_runs, serve_training
from workbench.runs.http_server import Address

# Stock PEFT uses what transformers calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")


def test_a_run_with_new_tokens_has_an_engine_of_its_own_beside_the_bank(
    trained: Path, tmp_path: Path, stories: str, serve: Serve
) -> None:
    loras = save_runs(tmp_path, stories, [{"method": "lora", "rank": 2}, {"method": "rslora", "rank": 4}])
    own, first, second, base = serve([trained, *loras])
    assert first.scheduler is second.scheduler is base.scheduler is not own.scheduler
    assert [own.name, first.name, second.name, base.name] == ["run", "run0", "run1", stories]
    asked = ChatRequest(model="run", messages=[{"role": "user", "content": "What comes after 7?"}])
    (prompt,) = own.prompts(asked)
    assert prompt != first.prompts(asked)[0]  # each by its own template
    assert own.stop != first.stop


@pytest.mark.nightly(but=["ia3", "full"])
@pytest.mark.parametrize("method", ["dora", "ia3", "houlsby", "last-layers", "full"])
def test_any_adapter_without_virtual_tokens_answers(method: str, tmp_path: Path, stories: str, serve: Serve) -> None:
    models = serve(save_runs(tmp_path, stories, [{"method": method}]))
    assert [model.root for model in models] == [stories] * (1 if method == "full" else 2)


@pytest.mark.parametrize("method", ["prompt", "prefix"])
def test_virtual_tokens_are_refused(method: str, tmp_path: Path, stories: str) -> None:
    runs = save_runs(tmp_path, stories, [{"method": method}])
    with pytest.raises(ConfigError, match=f"{method} puts virtual tokens in front of a prompt"):
        serving.load(serving.named([str(run) for run in runs], trust=False), SETTINGS)


def test_an_adapter_that_waits_for_its_invocation_is_refused(tmp_path: Path, stories: str) -> None:
    runs = save_runs(tmp_path, stories, [{"method": "alora", "invocation": [5, 7]}])
    with pytest.raises(ConfigError, match="alora acts from an invocation on"):
        serving.load(serving.named([str(run) for run in runs], trust=False), SETTINGS)


def test_mistakes_in_the_names_of_runs_are_told(tmp_path: Path, stories: str) -> None:
    run = str(save_runs(tmp_path, stories, [{"method": "lora"}])[0])
    assert [each.name for each in serving.named([f"a={run}", f"b={run}"], trust=False)] == ["a", "b"]
    with pytest.raises(ConfigError, match=r"a run is called 'run0' already. Write NAME="):
        serving.named([run, run], trust=False)
    for source in ("=a", "a="):
        with pytest.raises(ConfigError, match="expected a run directory, or NAME=DIRECTORY"):
            serving.named([source], trust=False)
    with pytest.raises(ConfigError, match="not a run directory"):
        serving.named(["nowhere"], trust=False)
    with pytest.raises(ConfigError, match=r"names a backbone and a run. Write NAME="):
        serving.named([f"{stories}={run}"], trust=False)


@pytest.fixture(scope="module")
def rows_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Short runs of embed, classify and crossval over a tiny BERT, and texts to ask them about."""
    folder = tmp_path_factory.mktemp("rows")
    asked = write_animals(folder / "asked.jsonl", range(7))
    write_animals(folder / "rows.jsonl", range(48))
    found = {"asked": asked}
    for recipe, head, words in (
        ("embed", "MaskedLM", ["embed.query_prefix='find: '", "embed.sizes=[8]"]),
        ("classify", "SequenceClassification", []),
        ("crossval", "SequenceClassification", ["folds.k=2"]),
    ):
        backbone = save_tiny(folder / f"bert-{recipe}", "Bert", head, MINILM)
        words += [f"data.train={folder / 'rows.jsonl'}", f"model.id={backbone}", "model.weights=float32"]
        words += ["data.limit=null", "train.steps=4", "evaluate.every=null", "save.every=null", "batch.size=8"]
        words += ["train.learning_rate=1e-2", *([] if recipe == "crossval" else ["data.held_out=0.25"])]
        found[recipe] = workbench.run(f"{recipe}/quickstart", words, out=folder / recipe, quiet=True)
    return found


@pytest.fixture(scope="module")
def rows_client(rows_runs: dict[str, Path]) -> TestClient:
    runs = [str(rows_runs[name]) for name in ("embed", "classify", "crossval")]
    models = serving.load(serving.named(runs, trust=False), SETTINGS)
    return TestClient(Server(models, SETTINGS.limits).app, base_url="http://127.0.0.1")


def _texts(rows_runs: dict[str, Path]) -> list[str]:
    return [json.loads(line)["text"] for line in rows_runs["asked"].read_text().splitlines()]


@pytest.mark.slow
def test_embeddings_are_those_of_predict(rows_runs: dict[str, Path], rows_client: TestClient, tmp_path: Path) -> None:
    out = tmp_path / "out.parquet"
    predict(rows_runs["embed"], str(rows_runs["asked"]), out=out, max_new_tokens=1)
    wanted = np.stack(pd.read_parquet(out)["embedding"].to_list())
    body = {"model": "embed", "input": _texts(rows_runs)}
    answer = rows_client.post("/v1/embeddings", json=body).json()
    assert np.allclose([each["embedding"] for each in answer["data"]], wanted, atol=1e-6)
    assert answer["usage"]["total_tokens"] > 7
    asked = {**body, "encoding_format": "base64"}
    packed = rows_client.post("/v1/embeddings", json=asked).json()["data"][0]["embedding"]
    assert np.allclose(np.frombuffer(base64.b64decode(packed), "<f4"), wanted[0], atol=1e-6)
    short = rows_client.post("/v1/embeddings", json={**body, "dimensions": 8}).json()["data"][0]["embedding"]
    assert np.allclose(short, wanted[0, :8] / np.linalg.norm(wanted[0, :8]), atol=1e-6)
    assert rows_client.post("/v1/embeddings", json={**body, "dimensions": 9}).status_code == 400
    assert rows_client.post("/v1/embeddings", json={**body, "input": [""]}).status_code in (200, 400)
    other = rows_client.post("/v1/embeddings", json={**body, "input_type": "passage"}).json()["data"][0]["embedding"]
    assert not np.allclose(other, wanted[0], atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["classify", "crossval"])
def test_classes_are_those_of_predict(
    name: str, rows_runs: dict[str, Path], rows_client: TestClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.jsonl"
    predict(rows_runs[name], str(rows_runs["asked"]), out=out, max_new_tokens=1)
    wanted = pd.read_json(out, lines=True)
    monkeypatch.setattr(bank, "load", None)  # everything was read when the server began
    answer = rows_client.post("/classify", json={"model": name, "input": _texts(rows_runs)}).json()["data"]
    assert [each["label"] for each in answer] == wanted["predicted"].to_list()
    names = [column for column in wanted if str(column).startswith("p_")]
    assert np.allclose([each["probs"] for each in answer], wanted[names].to_numpy(), atol=1e-6)
    (one,) = rows_client.post("/classify", json={"model": name, "input": {"text": _texts(rows_runs)[0]}}).json()["data"]
    assert np.allclose(one["probs"], answer[0]["probs"], atol=1e-6) and one["num_classes"] == 3
    refused = rows_client.post("/classify", json={"model": name, "input": {"txt": "a"}})
    assert refused.status_code == 400 and "expected an object with text" in refused.json()["error"]["message"]


def test_code_that_a_run_names_is_not_executed(tmp_path: Path, stories: str) -> None:
    (run,) = save_runs(tmp_path, stories, [{"method": "lora"}])
    (tmp_path / "code.py").write_text(f"from pathlib import Path\nPath({str(tmp_path / 'executed')!r}).touch()")
    text = (run / "config.yaml").read_text()
    assert "plugins: []" in text
    (run / "config.yaml").write_text(text.replace("plugins: []", f"plugins: [{tmp_path / 'code.py'}]"))
    assert serving.named([str(run)], trust=False)[0].config.plugins == ()
    assert not (tmp_path / "executed").exists()
    serving.named([str(run)], trust=True)
    assert (tmp_path / "executed").exists()


def _never(*_: object) -> None:
    raise AssertionError("nothing is served")


def test_others_are_let_in_with_a_key_only(tmp_path: Path) -> None:
    settings: ServeSettings = replace(SETTINGS, address=Address("0.0.0.0", 0))
    with pytest.raises(ConfigError, match=r"--host 0.0.0.0 lets others in. Set WORKBENCH_API_KEY"):
        serve_runs([str(tmp_path)], settings, trust=False, ready=_never)


def test_mistakes_of_training_are_told_before_anything_is_loaded(tmp_path: Path) -> None:
    asked = partial(serve_training, limits=TrainingLimits(), folder=tmp_path, rows=1, queue=1, grace=1, ready=_never)
    for words in (["one", "two"], ["model.id=one"], ["one", "train.epochs=2"]):
        with pytest.raises(ConfigError, match=r"name one backbone, then settings such as model\.weights=nf4"):
            asked(words, Address(port=0))
    with pytest.raises(ConfigError, match=r"lets others in\. Write --api-key tml-KEY"):
        asked(["starter"], Address("0.0.0.0", 0))
    with pytest.raises(ConfigError, match=r"model\.weights: expected 'auto'"):
        asked(["starter", "model.weights=int5"], Address(port=0))


def test_a_port_in_use_is_told() -> None:
    with Address(port=0).bound() as taken, pytest.raises(ConfigError, match="Write another --port"):
        Address(port=taken.getsockname()[1]).bound()
    with pytest.raises(ConfigError, match="or --host"):
        Address("no.such.host.invalid").bound()
