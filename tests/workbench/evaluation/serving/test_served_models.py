"""Adapters that join a server while it answers say what they say where it began with them; mistakes are told."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from tests.workbench.evaluation.serving.conftest import SETTINGS, save_runs
from workbench.evaluation.serving.app import Server, ServerLimits
from workbench.evaluation.serving.served_models import AdapterLoader, TextModel
from workbench.recipes.verbs import serving

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


def opened(runs: list[Path], **limits: Any) -> Iterator[TestClient]:
    loaders: list[AdapterLoader] = []
    models = serving.load(serving.named([str(run) for run in runs], trust=False), replace(SETTINGS, rows=64), loaders)
    app = Server(models, ServerLimits(**limits), loaders).app
    yield TestClient(app, base_url="http://127.0.0.1")
    for model in models:
        assert isinstance(model, TextModel)
        model.scheduler.close()


@pytest.fixture(scope="module")
def client(lora_runs: list[Path]) -> Iterator[TestClient]:
    """A server of the first run alone, which loads adapters."""
    yield from opened(lora_runs[:1], loads_adapters=True)


def answer(client: TestClient, model: str, **words: Any) -> dict[str, Any]:
    asked = {"model": model, "prompt": [1, 403, 407], "max_tokens": 12, "logprobs": 1, "seed": 3, **words}
    response = client.post("/v1/completions", json={**asked, "return_tokens_as_token_ids": True})
    assert response.status_code == 200, response.text
    choices: dict[str, Any] = response.json()["choices"]
    return choices


@pytest.mark.slow
def test_a_loaded_adapter_says_what_it_says_from_the_start(client: TestClient, lora_runs: list[Path]) -> None:
    before = answer(client, "run0")
    for run in (1, 2):
        asked = {"lora_name": f"late{run}", "lora_path": str(lora_runs[run] / "adapter")}
        assert client.post(LOAD, json=asked).status_code == 200
    named = [each["id"] for each in client.get("/v1/models").json()["data"]]
    assert named[-2:] == ["late1", "late2"]
    late = [answer(client, f"late{run}") for run in (1, 2)]
    assert late[0] != late[1] != before
    assert client.post(UNLOAD, json={"lora_name": "late1"}).status_code == 200
    assert answer(client, "late2") == late[1] and answer(client, "run0") == before
    assert client.post("/v1/completions", json={"model": "late1", "prompt": "a"}).status_code == 404
    for direct in opened(lora_runs, loads_adapters=False):
        assert [answer(direct, f"run{run}") for run in (1, 2)] == late
        assert answer(direct, "run0") == before


def test_tokens_that_a_request_names_end_its_answers(client: TestClient) -> None:
    def ids(**words: Any) -> list[str]:
        (choice,) = answer(client, "run0", **words)
        tokens: list[str] = choice["logprobs"]["tokens"]
        return tokens

    whole = ids()
    stop = int(whole[4].removeprefix("token_id:"))
    assert ids(stop_token_ids=[stop]) == whole[: whole.index(whole[4]) + 1]
    assert ids(top_k=0, min_p=0, repetition_penalty=1, top_p=1) == whole
    assert client.post("/v1/completions", json={"model": "run0", "prompt": "a", "top_k": 5}).status_code == 400


@pytest.mark.parametrize("case", ["no folder", "pickle", "another backbone", "twice", "no name", "unknown"])
def test_mistakes_are_told(case: str, client: TestClient, lora_runs: list[Path], tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    if case != "no folder":
        shutil.copytree(lora_runs[1] / "adapter", folder)
    if case == "pickle":
        (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    if case == "another backbone":
        config = json.loads((folder / "adapter_config.json").read_text())
        (folder / "adapter_config.json").write_text(json.dumps({**config, "r": 3}))
    name = {"twice": "run0", "no name": ""}.get(case, "new")
    path, body = (UNLOAD, {"lora_name": "nobody"}) if case == "unknown" else (LOAD, {"lora_name": name})
    response = client.post(path, json=body if case == "unknown" else {**body, "lora_path": str(folder)})
    assert response.status_code == (404 if case == "unknown" else 400)
    wanted = {
        "no folder": "there is no adapter_config.json here",
        "pickle": "there is no adapter_model.safetensors here",
        "another backbone": "does not fit the backbone",
        "twice": "has already been loaded",
        "no name": "lora_name",
        "unknown": "No adapter that was loaded is called 'nobody'",
    }
    assert wanted[case] in response.json()["error"]["message"]
    assert "new" not in [each["id"] for each in client.get("/v1/models").json()["data"]]
    assert answer(client, "run0")


def test_nothing_is_loaded_unless_the_server_was_told_so(lora_runs: list[Path]) -> None:
    for client in opened(lora_runs[:1]):
        for path in (LOAD, UNLOAD):
            response = client.post(path, json={"lora_name": "a", "lora_path": str(lora_runs[1] / "adapter")})
            assert response.status_code == 403 and "--load-adapters" in response.json()["error"]["message"]


def test_one_backbone_is_needed(tmp_path: Path, stories: str) -> None:
    runs = save_runs(tmp_path, stories, [{"method": "ia3"}])
    for client in opened(runs, loads_adapters=True):
        response = client.post(LOAD, json={"lora_name": "a", "lora_path": str(runs[0] / "adapter")})
        assert response.status_code == 400 and "over one backbone" in response.json()["error"]["message"]


@pytest.mark.slow
def test_answers_go_on_while_adapters_come_and_go(client: TestClient, lora_runs: list[Path]) -> None:
    wanted, found = answer(client, "run0", max_tokens=60, n=4), []

    def ask() -> None:
        found.append(answer(client, "run0", max_tokens=60, n=4))

    asking = [threading.Thread(target=ask) for _ in range(3)]
    for thread in asking:
        thread.start()
    for _ in range(3):
        body = {"lora_name": "guest", "lora_path": str(lora_runs[2] / "adapter")}
        assert client.post(LOAD, json=body).status_code == 200
        assert client.post(UNLOAD, json={"lora_name": "guest"}).status_code == 200
    for thread in asking:
        thread.join()
    assert found == [wanted] * 3
