"""Recipe reinforce with answers of a server: weights reach it, tokens are weighed, what it does wrong is named."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
import torch
import uvicorn
from safetensors.torch import load_file
from starlette.testclient import TestClient

import workbench
from tests.recipes.tasks.reinforce.test_reinforce_run import REWARD
from tests.stopping import stop_after
from tests.workbench.evaluation.serving.conftest import SETTINGS, save_runs
from workbench.errors import BackboneError, ConfigError, Stopped, WorkbenchError
from workbench.evaluation.serving.app import Server, ServerLimits
from workbench.evaluation.serving.served_models import AdapterLoader, TextModel
from workbench.recipes.load import load
from workbench.recipes.tasks.reinforce import reinforce_run, rollout_server
from workbench.recipes.verbs import check, serving
from workbench.recipes.verbs.plans.plan import plan
from workbench.runs import openai_client
from workbench.runs.openai_client import OpenAIClient

RECIPE = """
recipe: reinforce
model: {{id: {model}, weights: float32, compute: float32}}
adapter: {{method: lora, rank: 4, alpha: 8}}
data: {{train: {folder}/prompts.jsonl, held_out: 0.2, max_tokens: 96}}
rewards: [{{file: {folder}/reward.py}}]
reinforce: {{answers: 4, max_new_tokens: 6, beta: 0, rollouts: {{url: "{url}", id: {model}}}}}
batch: {{size: 4}}
train: {{steps: 3, learning_rate: 2.0e-2}}
evaluate: {{every: null, answers: 3}}
save: {{every: null}}
"""


class Served:
    """A server of a backbone, over HTTP, that loads adapters; and what it was asked."""

    def __init__(self, run: Path) -> None:
        self.loaders: list[AdapterLoader] = []
        settings = replace(SETTINGS, rows=64, queue=256)
        self.models = serving.load(serving.named([str(run)], trust=False), settings, self.loaders)
        self.app = Server(self.models, ServerLimits(loads_adapters=True), self.loaders).app
        self.asked: list[tuple[str, dict[str, Any]]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            message = await receive()
            assert not message.get("more_body")
            self.asked.append((scope["path"].rpartition("/")[2], json.loads(message["body"])))
            messages = iter([message])

            async def again() -> Any:
                return next(messages, None) or await receive()

            return await self.app(scope, again, send)
        return await self.app(scope, receive, send)

    def close(self) -> None:
        for model in self.models:
            assert isinstance(model, TextModel)
            model.scheduler.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, short_stories: str) -> Iterator[tuple[Served, str]]:
    """A server and its address."""
    lora = [{"method": "lora", "rank": 2, "alpha": 8}]
    served = Served(save_runs(tmp_path_factory.mktemp("served"), short_stories, lora)[0])
    listening = socket.create_server(("127.0.0.1", 0))
    running = uvicorn.Server(uvicorn.Config(served, log_level="warning", lifespan="off"))
    thread = threading.Thread(target=running.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    while not running.started:
        time.sleep(0.01)
    yield served, f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
    running.should_exit = True
    thread.join()
    served.close()


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, short_stories: str, server: tuple[Served, str]) -> Path:
    folder = tmp_path_factory.mktemp("served_recipe")
    rows = [{"question": f"What comes after {n}?" + " Think." * (n % 3)} for n in range(20)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(REWARD)
    path = folder / "recipe.yaml"
    path.write_text(RECIPE.format(model=short_stories, folder=folder, url=server[1]))
    return path


def run(recipe: Path, out: Path, *words: str, resume: bool = False) -> Path:
    return workbench.run(recipe, words, out=out, resume=resume, quiet=True)


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def adapter(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "adapter" / "adapter_model.safetensors")


def listed(url: str) -> list[str]:
    return [each["id"] for each in httpx2.get(f"{url}/models").json()["data"]]


def test_each_rollout_is_written_by_the_weights_of_then(
    server: tuple[Served, str], recipe: Path, tmp_path: Path, short_stories: str
) -> None:
    """Their probabilities there and here differ by rounding."""
    served, url = server
    served.asked.clear()
    done = run(recipe, tmp_path / "run")
    found = metrics(done)
    assert all(line["update[importance]"] == pytest.approx(1, abs=1e-4) for line in found)
    assert all(line["update[capped]"] == 0 and line["answers[tokens]"] <= 6 for line in found)
    loaded = [body["lora_name"] for path, body in served.asked if path == "load_lora_adapter"]
    assert len(set(loaded)) == 3
    writing = [body["model"] for path, body in served.asked if path == "completions" and body.get("n") == 4]
    assert writing == [name for name in loaded for _ in range(4)]
    assert len({body["seed"] for path, body in served.asked if body.get("n") == 4}) == 12
    assert listed(url) == ["run0", short_stories] and not (done / "rollouts").exists()


@pytest.mark.slow
def test_weights_that_are_given_seldom_are_weighed(recipe: Path, tmp_path: Path) -> None:
    runs = [run(recipe, tmp_path / name) for name in ("one", "again")]
    assert all(torch.equal(each, adapter(runs[1])[name]) for name, each in adapter(runs[0]).items())
    stale = metrics(run(recipe, tmp_path / "stale", "reinforce.rollouts.sync_every=3"))
    assert stale[0]["update[importance]"] == pytest.approx(1, abs=1e-4)
    assert abs(stale[2]["update[importance]"] - 1) > 1e-3


AHEAD = ("reinforce.rollouts.staleness=2", "train.steps=5", "save.every=1")


@pytest.fixture(scope="module")
def ahead(server: tuple[Served, str], recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose server writes up to two updates ahead. Read only."""
    server[0].asked.clear()
    return run(recipe, tmp_path_factory.mktemp("ahead") / "run", *AHEAD)


@pytest.mark.slow
def test_answers_are_written_ahead_by_older_weights(server: tuple[Served, str], ahead: Path) -> None:
    """Never by older ones than the bound says; the server forgets what nobody asks any more."""
    loaded = [body["lora_name"] for path, body in server[0].asked if path == "load_lora_adapter"]
    writing = [body["model"] for path, body in server[0].asked if path == "completions" and body.get("n") == 4]
    assert writing == [loaded[max(0, number - 2)] for number in range(5) for _ in range(4)]
    found = metrics(ahead)
    assert [line["answers[staleness]"] for line in found] == [0, 1, 2, 2, 2]
    assert found[0]["update[importance]"] == pytest.approx(1, abs=1e-4)
    assert abs(found[4]["update[importance]"] - 1) > 1e-4
    assert listed(server[1])[0] == "run0" and len(listed(server[1])) == 2


@pytest.mark.slow
@pytest.mark.parametrize("killed", [False, True], ids=["stopped", "server killed"])
def test_what_was_written_ahead_is_in_checkpoints(
    server: tuple[Served, str], recipe: Path, tmp_path: Path, ahead: Path, killed: bool
) -> None:
    """A run goes on to the same bits, also where the server has forgotten every adapter meanwhile."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stopped):
        stop_after(patch, 2)
        run(recipe, tmp_path / "run", *AHEAD)
    if killed:
        for name in [each for each in listed(server[1]) if each.startswith("run-")]:
            httpx2.post(f"{server[1]}/unload_lora_adapter", json={"lora_name": name}).raise_for_status()
    server[0].asked.clear()
    again = run(recipe, tmp_path / "run", *AHEAD, resume=True)
    assert sum(body.get("n") == 4 for _, body in server[0].asked) == 4, "the last rollout alone is not there yet"
    assert all(torch.equal(each, adapter(again)[name]) for name, each in adapter(ahead).items())


TOOLS = '''
def add(a: int, b: int) -> int:
    """Adds.

    Args:
        a: One.
        b: Other.
    """
    return a + b


class Game:
    def reset(self, row):
        self.said = []

    def step(self, said):
        self.said.append(said)
        return "And then?", False

    def reward(self):
        return float(sum(map(len, map(str, self.said))))
'''


@pytest.mark.slow
def test_a_server_writes_the_turns_of_episodes(recipe: Path, tmp_path: Path) -> None:
    """Of a model that was taught short turns: each token has the probability there that it has here."""
    rows = [{"question": f"What comes after {n}?", "answer": str(n + 1)} for n in range(20)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "tools.py").write_text(TOOLS)
    words = [f"data.train={tmp_path}/rows.jsonl", "data.max_tokens=400", "rewards=[]", "reinforce.max_new_tokens=96"]
    words += [f"reinforce.warm_up={tmp_path}/rows.jsonl", "reinforce.rollouts.staleness=1", "train.steps=2"]
    words += [
        f"reinforce.tools={{file: {tmp_path}/tools.py, environment: Game, turns: 3}}",
        "train.learning_rate=1.0e-9",
        "reinforce.warm_up_rate=2.0e-2",
    ]
    found = metrics(run(recipe, tmp_path / "run", *words))
    assert all(line["update[importance]"] == pytest.approx(1, abs=1e-3) for line in found)
    assert max(line["episodes[turns]"] for line in found) > 1 and max(line["reward[spread]"] for line in found) > 0, (
        found
    )


@pytest.mark.slow
def test_goes_on_after_a_stop(server: tuple[Served, str], recipe: Path, tmp_path: Path) -> None:
    """Between two updates on a rollout, which its checkpoint holds; this server gives a seed's answer again."""
    words = ("reinforce.updates=2", "train.steps=4")
    whole = run(recipe, tmp_path / "whole", *words)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stopped):
        stop_after(patch, 3)
        run(recipe, tmp_path / "run", *words)
    assert len(list((tmp_path / "run" / "rollouts").glob("run-*"))) == 1
    server[0].asked.clear()
    again = run(recipe, tmp_path / "run", *words, resume=True)
    assert all(body.get("n") != 4 for _, body in server[0].asked)  # nothing is written again
    assert all(torch.equal(each, adapter(again)[name]) for name, each in adapter(whole).items())


@pytest.mark.slow
def test_pairs_and_replaced_prompts_come_from_there_too(recipe: Path, tmp_path: Path) -> None:
    words = ("reinforce.method=online_dpo", "reinforce.beta=0.1", "reinforce.resample=1", "train.steps=2")
    first, second = metrics(run(recipe, tmp_path / "run", *words))
    assert first["grad_norm"] > 0 and second["update[kl]"] > 0 and "update[importance]" not in first


@pytest.mark.slow
def test_rewards_rise(recipe: Path, tmp_path: Path) -> None:
    words = ["train.steps=10", "batch.size=8", "schedule.name=constant"]
    found = [line["reward[mean]"] for line in metrics(run(recipe, tmp_path / "run", *words))]
    assert np.mean(found[-5:]) > 1.3 * np.mean(found[:3])


def test_check_and_plan_say_who_writes(server: tuple[Served, str], recipe: Path) -> None:
    notes = "\n".join(check.check(load(str(recipe), [])).notes)
    assert f"at {server[1]}, which loads the adapter before every rollout" in notes
    assert plan(load(str(recipe), ["reinforce.rollouts.url=http://127.0.0.1:9/v1"])).steps == 3  # asks nobody


Changed = Callable[[httpx2.Request, Any], Any]
"""What a server makes of its answer to a request."""


def passed_on(served: Served, changed: Changed) -> httpx2.Client:
    """A client of a server whose answers are changed on their way."""
    client = TestClient(served.app, base_url="http://127.0.0.1")

    def handler(request: httpx2.Request) -> httpx2.Response:
        found = client.request(request.method, request.url.path, content=request.content)
        body = found.json() if found.headers["content-type"].endswith("json") else found.text
        values = changed(request, body)
        if isinstance(values, httpx2.Response):
            return values
        return httpx2.Response(found.status_code, **({"text": values} if isinstance(values, str) else {"json": values}))

    return httpx2.Client(transport=httpx2.MockTransport(handler))


def _scores(made: Callable[[Any], Any], *, echo: bool = False) -> Changed:
    """Other log-probabilities, of answers, or of prompts that are echoed."""

    def changed(request: httpx2.Request, answer: Any) -> Any:
        if request.url.path.endswith("/completions") and bool(json.loads(request.content).get("echo")) == echo:
            for choice in answer.get("choices", []):
                choice["logprobs"] = made(choice["logprobs"])
        return answer

    return changed


def _at(end: str, status: int, body: Any) -> Changed:
    """Another answer at an address."""

    def changed(request: httpx2.Request, answer: Any) -> Any:
        return httpx2.Response(status, json=body) if request.url.path.endswith(end) else answer

    return changed


def _one_less(request: httpx2.Request, answer: Any) -> Any:
    return {**answer, "choices": answer["choices"][:1]} if request.url.path.endswith("/completions") else answer


WRONG: dict[str, tuple[Changed, str]] = {
    "no probabilities": (_scores(lambda scored: None), "cannot write rollouts: its answer has no log-probabilities"),
    "no numbers": (
        _scores(lambda scored: {**scored, "token_logprobs": [None] * len(scored["tokens"])}),
        "cannot write rollouts: it told",
    ),
    "fewer probabilities": (
        _scores(lambda scored: {**scored, "token_logprobs": scored["token_logprobs"][1:]}),
        r"it told \d+ log-probabilities of \d+ tokens",
    ),
    "tokens as texts": (
        _scores(lambda scored: {**scored, "tokens": ["word"] * len(scored["tokens"])}),
        "written as text, not as token_id:NUMBER",
    ),
    "unknown tokens": (
        _scores(lambda scored: {**scored, "tokens": ["token_id:99999"] * len(scored["tokens"])}),
        r"it wrote token 99999.*Serve the model that model\.id names",
    ),
    "fewer answers": (_one_less, "it gave 1 answers where 2 were asked for"),
    "refused parameters": (_at("/completions", 400, {"error": {"message": "No seed here."}}), "No seed here"),
    "another tokenizer": (
        _scores(lambda scored: {**scored, "tokens": [*scored["tokens"][:2], *scored["tokens"][3:]]}, echo=True),
        r"cuts a prompt of .*Serve the model that model\.id names",
    ),
    "no echo": (_scores(lambda scored: None, echo=True), "no log-probabilities of the prompt's tokens"),
    "a key": (_at("/models", 401, {"error": {"message": "No key."}}), "Set OPENAI_API_KEY"),
    "not up to v1": (_at("/models", 404, {"detail": "Not Found"}), "Write the address up to /v1"),
    "no loading": (
        _at("/unload_lora_adapter", 404, {"detail": "Not Found"}),
        "loads no adapters while it answers.*VLLM_ALLOW_RUNTIME_LORA_UPDATING=True.*--load-adapters",
    ),
    "loading is off": (_at("/unload_lora_adapter", 403, {"error": {"message": "Off."}}), "Off.*--load-adapters"),
}


def _require(served: Served, recipe: Path, client: Any, *words: str) -> None:
    config = load(str(recipe), list(words))
    tokenizer, _, data, _ = reinforce_run.prepare(config)
    there = OpenAIClient("http://127.0.0.1/v1", "reinforce.rollouts.url", client, "nothing is lost")
    rollout_server.require(there, config, tokenizer, data.train)


def test_a_server_that_can_write_is_taken(server: tuple[Served, str], recipe: Path) -> None:
    _require(server[0], recipe, passed_on(server[0], lambda request, answer: answer))


@pytest.mark.parametrize("case", WRONG)
def test_a_server_that_cannot_write_is_refused(server: tuple[Served, str], recipe: Path, case: str) -> None:
    changed, message = WRONG[case]
    with pytest.raises((ConfigError, BackboneError), match=f"(?s){message}"):
        _require(server[0], recipe, passed_on(server[0], changed))


def test_a_model_that_is_not_there_is_refused_with_those_that_are(recipe: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"reinforce\.rollouts\.id=nobody is no model of .*run0"):
        run(recipe, tmp_path / "run", "reinforce.rollouts.id=nobody")


def test_a_server_that_is_not_there_is_named(recipe: Path, tmp_path: Path) -> None:
    with pytest.raises(BackboneError, match=r"reinforce\.rollouts\.url=http://127\.0\.0\.1:9/v1 does not answer"):
        run(recipe, tmp_path / "run", "reinforce.rollouts.url=http://127.0.0.1:9/v1")


@pytest.mark.parametrize("case", [pytest.param("folder", marks=pytest.mark.slow), "gone"])
def test_a_server_that_fails_in_a_rollout_is_named_and_the_run_goes_on(
    server: tuple[Served, str], recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """It cannot read the adapter, or has forgotten it, in the second step; what was learnt is there."""
    monkeypatch.setattr(openai_client, "WAITS", ())
    sent, loads = OpenAIClient.sent, list[str]()

    def failing(self: OpenAIClient, method: str, path: str, body: Any, **words: Any) -> httpx2.Response:
        loads.extend([path] * (path == "load_lora_adapter"))
        if len(loads) == 2 and path == ("load_lora_adapter" if case == "folder" else "completions"):
            body = {**body, "lora_path": "/nowhere"} if case == "folder" else {**body, "model": "gone"}
        return sent(self, method, path, body, **words)

    message = (
        "does not load .*there is no adapter_config.json" if case == "folder" else "is not there any more.*--resume"
    )
    with monkeypatch.context() as patch, pytest.raises(WorkbenchError, match=message):
        patch.setattr(OpenAIClient, "sent", failing)
        run(recipe, tmp_path / "run")
    assert (tmp_path / "run" / "checkpoints" / "step-00000001").is_dir()
    again = run(recipe, tmp_path / "run", resume=True)
    assert len(metrics(again)) == 3 and listed(server[1])[0] == "run0" and len(listed(server[1])) == 2
