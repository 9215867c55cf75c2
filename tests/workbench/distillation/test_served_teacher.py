"""A teacher behind an address says what it says here; whatever a server does wrong is named."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from starlette.testclient import TestClient

import workbench
from tests.workbench.distillation.cached import SMALL, Desk, Watching, batch, settings, taught
from tests.workbench.evaluation.serving.conftest import load, save_runs
from tests.workbench.evaluation.serving.test_openai_client import Process
from workbench.config import RunConfig
from workbench.config.sections.distill_config import DistillConfig
from workbench.data.text.chat import ChatEncoder
from workbench.data.text.row_encoder import row_encoder
from workbench.distillation import served_teacher, teacher_cache
from workbench.distillation.served_teacher import ServedQuestions, ServedTeacher
from workbench.errors import BackboneError, ConfigError
from workbench.evaluation.serving.app import Server, ServerLimits
from workbench.evaluation.serving.served_models import TextModel
from workbench.models import backbones
from workbench.runs import openai_client

URL = "http://127.0.0.1:8000/v1"
Changed = Callable[[httpx2.Request, Any], Any]
"""What a server makes of its answer to a request."""


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory, stories: str) -> Iterator[TestClient]:
    """A server of stories260K as it is, and of a run over it."""
    lora = [{"method": "lora", "rank": 2, "alpha": 8}]
    models = load(save_runs(tmp_path_factory.mktemp("served"), stories, lora))
    yield TestClient(Server(models, ServerLimits()).app, base_url="http://127.0.0.1:8000")
    for model in models:
        assert isinstance(model, TextModel)
        model.scheduler.close()


@pytest.fixture
def desk(stories: str, questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    monkeypatch.setattr(teacher_cache, "SHARD_POSITIONS", SMALL // 3)
    monkeypatch.setattr(served_teacher, "TOKENS", 256)
    return small(stories, questions, tmp_path / "cache")


def small(stories: str, questions: Path, folder: Path) -> Desk:
    desk = Desk(stories, questions, folder)
    desk.train = desk.train.subset(np.arange(30))
    return desk


def named(client: TestClient) -> str:
    """The backbone's name there."""
    return str(client.get("/v1/models").json()["data"][-1]["id"])


def served(name: str, **changes: Any) -> DistillConfig:
    """A configuration whose teacher has an address."""
    teacher = {"url": URL, "id": name}
    cache = {"folder": "unused", "dtype": "float32", "k": 8, **changes}
    return DistillConfig.model_validate({"teacher": teacher, "cache": cache})


def write(desk: Desk, client: Any, config: DistillConfig) -> None:
    wanted = teacher_cache.identity(config, None, desk.live.tokenizer)
    teacher = ServedTeacher(URL, str(config.teacher.id), client)
    questions = ServedQuestions(desk.train, teacher, config, vocabulary=512)
    teacher_cache.write(desk.folder, desk.train, questions, wanted, callback=Watching())


def passed_on(client: TestClient, changed: Changed) -> httpx2.Client:
    """A client of the same server, whose answers are changed on their way."""

    def handler(request: httpx2.Request) -> httpx2.Response:
        found = client.request(request.method, request.url.path, content=request.content)
        values = changed(request, found.json())
        return values if isinstance(values, httpx2.Response) else httpx2.Response(found.status_code, json=values)

    return httpx2.Client(transport=httpx2.MockTransport(handler))


def test_it_says_what_it_says_here(desk: Desk, client: TestClient, tmp_path: Path) -> None:
    config = served(named(client))
    write(desk, client, config)
    there = teacher_cache.CachedTeacher(
        desk.folder, desk.train, config, teacher_cache.identity(config, None, desk.live.tokenizer)
    )
    here = small(desk.backbone, desk.questions, tmp_path / "here")
    here.write(settings(k=8))
    seen = batch(desk.train, 7, 3, 29, 12, 3)
    signals = [
        there.signal(seen, config, temperature=1.0),
        here.open(settings(k=8)).signal(seen, config, temperature=1.0),
    ]
    (ids, logp), (wanted_ids, wanted_logp) = (signal.tensors for signal in signals)
    assert ids.tolist() == wanted_ids.tolist()
    assert logp.numpy() == pytest.approx(wanted_logp.numpy(), abs=1e-4)
    (loss, gradient), (wanted, wanted_gradient) = map(taught, signals)
    assert loss == pytest.approx(wanted, rel=1e-5) and gradient.numpy() == pytest.approx(
        wanted_gradient.numpy(), abs=1e-5
    )


def test_stopped_or_cut_off_it_ends_with_the_same_files(desk: Desk, client: TestClient, tmp_path: Path) -> None:
    config, whole = served(named(client)), small(desk.backbone, desk.questions, tmp_path / "whole")
    write(whole, client, config)
    asked = 0

    def gone(request: httpx2.Request, answer: Any) -> Any:
        nonlocal asked
        asked += 1
        return answer if asked < 4 else httpx2.Response(404, json={"error": {"message": "gone"}})

    with pytest.raises(BackboneError, match="status 404: gone"):
        write(desk, passed_on(client, gone), config)
    begun = desk.files()
    assert 0 < len(begun) < len(whole.files()) and "cache.json" not in begun
    write(desk, client, config)
    assert desk.files() == whole.files() and begun.items() <= desk.files().items()


def test_a_request_has_no_more_rows_than_a_server_takes(
    desk: Desk, client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served_teacher, "TOKENS", 10**6)
    monkeypatch.setattr(served_teacher, "ROWS", 4)
    sent = []

    def counted(request: httpx2.Request, answer: Any) -> Any:
        sent.append(len(json.loads(request.content)["prompt"]))
        return answer

    write(desk, passed_on(client, counted), served(named(client)))
    assert max(sent) == 4 and sum(sent) == len(desk.train)


def test_a_request_that_fails_in_passing_is_sent_again(
    desk: Desk, client: TestClient, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(openai_client, "WAITS", (0.0,) * 5)
    config, failures = served(named(client)), iter([429, None, 503, 500, None, 429] * 2)

    def busy(request: httpx2.Request, answer: Any) -> Any:
        status = next(failures, None)
        return answer if status is None else httpx2.Response(status, json={"error": {"message": "busy"}})

    write(desk, passed_on(client, busy), config)
    calm = small(desk.backbone, desk.questions, tmp_path / "calm")
    write(calm, client, config)
    assert desk.files() == calm.files()


def test_a_server_that_stays_away_is_named(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai_client, "WAITS", (0.0,) * 2)
    with httpx2.Client() as client, pytest.raises(BackboneError, match=r"does not answer.*Start the server"):
        ServedTeacher("http://127.0.0.1:9/v1", "any", client).likeliest([[1, 2, 3]], 4)


def _require(desk: Desk, client: Any, name: str, *, template: str | None = None, limit: int = 20) -> None:
    """Ask whether the server reads the rows as a student with this chat template does."""
    data = {"train": str(desk.questions), "limit": limit}
    config = RunConfig.model_validate({"recipe": "sft", "model": {"id": desk.backbone}, "data": data})
    encoder = row_encoder(config, backbones.hub_config(config.model), desk.live.tokenizer, template=template)
    assert isinstance(encoder, ChatEncoder)
    rows = desk.read(limit=limit)
    ServedTeacher(URL, name, client).require_comparable(config.data, desk.live.tokenizer, encoder, rows)


def test_one_that_reads_as_the_student_does_is_taken(desk: Desk, client: TestClient) -> None:
    _require(desk, client, named(client))
    _require(desk, client, "run0")


def _tokens(made: Callable[[list[Any]], list[Any]]) -> Changed:
    def changed(request: httpx2.Request, answer: Any) -> Any:
        for choice in answer.get("choices", []):
            if choice.get("logprobs"):
                choice["logprobs"]["tokens"] = made(choice["logprobs"]["tokens"])
        return answer

    return changed


def _probabilities(made: Callable[[Any], Any]) -> Changed:
    def changed(request: httpx2.Request, answer: Any) -> Any:
        for choice in answer.get("choices", []):
            if choice.get("logprobs"):
                choice["logprobs"] = made(choice["logprobs"])
        return answer

    return changed


def _text_is_cut_otherwise(request: httpx2.Request, answer: Any) -> Any:
    if request.url.path.endswith("/completions") and isinstance(json.loads(request.content).get("prompt", [0])[0], str):
        return _tokens(lambda tokens: [*tokens[:2], *tokens[3:]])(request, answer)
    return answer


def _longer_chat(request: httpx2.Request, answer: Any) -> Any:
    if request.url.path.endswith("/chat/completions"):
        answer["usage"]["prompt_tokens"] += 3
    return answer


WRONG: dict[str, tuple[Changed, str]] = {
    "tokens as texts": (_tokens(lambda tokens: ["word"] * len(tokens)), "written as text"),
    "no echo": (_tokens(lambda tokens: tokens[-1:]), "echoes other tokens"),
    "other tokens": (_tokens(lambda tokens: [*tokens[:2], "token_id:7", *tokens[3:]]), "echoes other tokens"),
    "no probabilities": (_probabilities(lambda answer: None), "no log-probabilities"),
    "no likeliest": (_probabilities(lambda answer: {**answer, "top_logprobs": None}), "no log-probabilities"),
    "another tokenizer": (_text_is_cut_otherwise, "Name a teacher with the student's tokenizer"),
    "another template": (_longer_chat, "model.chat_template=FILE"),
    "a key": (lambda *_: httpx2.Response(401, json={"error": {"message": "No key."}}), "Set OPENAI_API_KEY"),
    "no such path": (lambda *_: httpx2.Response(404, text="<html>nothing"), "Write the address up to /v1"),
    "no JSON": (lambda *_: httpx2.Response(200, text="<html>"), "Write the address up to /v1"),
    "no object": (lambda *_: httpx2.Response(200, json=[1]), "Write the address up to /v1"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_server_that_cannot_teach_is_refused(desk: Desk, client: TestClient, case: str) -> None:
    changed, message = WRONG[case]
    with pytest.raises((BackboneError, ConfigError), match=message):
        _require(desk, passed_on(client, changed), named(client))


def test_a_model_that_is_not_there_is_refused_with_those_that_are(desk: Desk, client: TestClient) -> None:
    with pytest.raises(ConfigError, match=r"distill\.teacher\.id=nobody is no model.*run0"):
        _require(desk, client, "nobody")


def test_more_tokens_than_the_server_tells_are_refused(desk: Desk, client: TestClient) -> None:
    with pytest.raises(ConfigError, match="k up to 20"):
        write(desk, client, served(named(client), k=21))
    fewer = _probabilities(
        lambda answer: {
            **answer,
            "top_logprobs": [each and dict(list(each.items())[:5]) for each in answer["top_logprobs"]],
        }
    )
    with pytest.raises(ConfigError, match=r"Write distill\.cache\.k=5"):
        write(desk, passed_on(client, fewer), served(named(client)))


def test_tokens_that_the_student_lacks_are_refused(desk: Desk, client: TestClient) -> None:
    config = served(named(client))
    questions = ServedQuestions(desk.train, ServedTeacher(URL, named(client), client), config, vocabulary=300)
    with pytest.raises(ConfigError, match="pad the teacher's head"):
        questions._pack([{token: -3.0 for token in range(295, 303)}])


def test_what_a_server_rounds_up_leaves_a_rest(desk: Desk, client: TestClient) -> None:
    questions = ServedQuestions(desk.train, ServedTeacher(URL, "any", client), served("any"), vocabulary=512)
    packed = questions._pack([{token: np.log(0.1251) for token in range(8)}])
    assert np.isfinite(packed["rest"]).all() and packed["rest"] < -10


@pytest.mark.slow
def test_from_the_command_line_a_run_teaches_through_an_address(
    tmp_path: Path, stories: str, questions: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses of a student are those of one whose teacher, the same run, was loaded here."""
    (run,) = save_runs(tmp_path, stories, [{"method": "lora", "rank": 4, "alpha": 8}])
    started = Process([run])
    monkeypatch.setenv("OPENAI_API_KEY", "sesame")
    section = {"model": {"id": stories, "weights": "float32", "compute": "float32"}, "train": {"steps": 6}}
    cached = ["distill.cache.k=8", "distill.cache.dtype=float32", "evaluate.every=null", "evaluate.answers=0"]
    recipe = RunConfig.model_validate(
        {
            "recipe": "distill",
            "data": {"train": str(questions), "held_out": 0.1},
            **section,
            "distill": {"teacher": {"id": "x"}},
        }
    )
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps({**recipe.model_dump(mode="json", exclude_unset=True)}))
    try:
        ways = {
            "there": [f"distill.teacher.url={started.address}/v1", "distill.teacher.id=run0"],
            "here": [f"distill.teacher.id={run}"],
        }
        for name, words in ways.items():
            words = [*words, *cached, f"distill.cache.folder={tmp_path / ('cache ' + name)}"]
            workbench.run(path, words, out=tmp_path / name, quiet=True)
    finally:
        started.process.kill()
        started.process.communicate()
    lines = {name: (tmp_path / name / "metrics.jsonl").read_text().splitlines() for name in ways}
    losses = {name: [json.loads(line)["loss"] for line in each] for name, each in lines.items()}
    assert len(losses["there"]) == 6 and losses["there"] == pytest.approx(losses["here"], rel=1e-4)
    noted = json.loads((tmp_path / "there" / "manifest.json").read_text())["distill"]
    assert noted["teacher"] == "run0" and noted["url"].endswith("/v1")
