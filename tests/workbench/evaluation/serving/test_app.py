"""The addresses of a server: what it answers, and that it refuses whatever is malformed in OpenAI's form."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from starlette.requests import Request
from starlette.testclient import TestClient

from workbench.evaluation.serving.app import Server, ServerLimits
from workbench.evaluation.serving.openai_format import _NEUTRAL, CompletionRequest, Refusal
from workbench.evaluation.serving.served_models import TextModel
from workbench.models import exported
from workbench.runs import run_directory

CHAT = {"model": "run0", "messages": [{"role": "user", "content": "Once upon"}], "temperature": 0, "max_tokens": 8}
RAW = {"model": "run0", "prompt": "Once upon a", "temperature": 0, "max_tokens": 8}


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[TestClient]:
    # Without its context the application does not end its engines: they are the module's.
    yield TestClient(server.app, base_url="http://127.0.0.1:8000", raise_server_exceptions=False)


def _events(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@pytest.mark.parametrize(
    ("address", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", RAW)], ids=["chat", "raw"]
)
def test_a_stream_is_the_whole_answer_in_pieces(client: TestClient, address: str, body: dict[str, Any]) -> None:
    whole = client.post(address, json={**body, "n": 2}).json()
    options = {"stream": True, "stream_options": {"include_usage": True}, "n": 2}
    *chunks, last = _events(client.post(address, json={**body, **options}).text)
    assert last["choices"] == [] and last["usage"] == whole["usage"]
    assert whole["usage"]["total_tokens"] == whole["usage"]["prompt_tokens"] + whole["usage"]["completion_tokens"]
    for choice in whole["choices"]:
        mine = [each for chunk in chunks for each in chunk["choices"] if each["index"] == choice["index"]]
        text = "".join(each["delta"].get("content", "") if "delta" in each else each["text"] for each in mine)
        assert text == (choice["message"]["content"] if "message" in choice else choice["text"]) != ""
        assert [each["finish_reason"] for each in mine if each["finish_reason"]] == [choice["finish_reason"]]


def test_models_answer_by_name_and_differ(client: TestClient) -> None:
    names = [model["id"] for model in client.get("/v1/models").json()["data"]]
    assert names[:3] == ["run0", "run1", "run2"] and len(names) == 4
    assert client.get(f"/v1/models/{names[3]}").json()["parent"] is None
    asked = [{**RAW, "model": name, "max_tokens": 40} for name in names]
    answers = [client.post("/v1/completions", json=each).json()["choices"][0]["text"] for each in asked]
    assert len(set(answers)) == 4


def test_an_answer_ends_before_a_stop_word_and_with_its_reason(client: TestClient) -> None:
    whole = client.post("/v1/completions", json=RAW).json()["choices"][0]
    assert whole["finish_reason"] == "length"
    stop = whole["text"][3:6]
    cut = client.post("/v1/completions", json={**RAW, "stop": [stop, "@@"]}).json()
    assert cut["choices"][0]["text"] == whole["text"][: whole["text"].find(stop)]
    assert cut["choices"][0]["finish_reason"] == "stop" and cut["usage"]["completion_tokens"] < 8


def test_log_probabilities_are_those_of_the_tokens(client: TestClient) -> None:
    asked = {**CHAT, "logprobs": True, "top_logprobs": 3}
    choice = client.post("/v1/chat/completions", json=asked).json()["choices"][0]
    scores = choice["logprobs"]["content"]
    assert len(scores) == 8
    for each in scores:
        best = each["top_logprobs"]
        assert best[0]["token"] == each["token"] and best[0]["logprob"] == each["logprob"] <= 0
        assert [one["logprob"] for one in best] == sorted((one["logprob"] for one in best), reverse=True)
    tokens = client.post("/v1/completions", json={**RAW, "logprobs": 0}).json()["choices"][0]["logprobs"]
    assert len(tokens["tokens"]) == len(tokens["token_logprobs"]) == 8


def test_an_echo_scores_the_prompt_as_the_run_does(client: TestClient, lora_runs: list[Path]) -> None:
    model = exported.load(lora_runs[0], run_directory.read_config(lora_runs[0])).model
    ids = [5, 9, 30, 7] * 20  # more than one chunk
    asked = {"model": "run0", "prompt": ids, "echo": True, "logprobs": 2, "max_tokens": 1, "temperature": 0}
    (choice,) = client.post("/v1/completions", json={**asked, "return_tokens_as_token_ids": True}).json()["choices"]
    with torch.no_grad():
        logp_LV = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
    told = choice["logprobs"]
    assert told["tokens"] == [f"token_id:{token}" for token in [*ids, int(logp_LV[-1].argmax())]]
    assert told["token_logprobs"][0] is told["top_logprobs"][0] is None
    wanted = [float(logp_V[token]) for logp_V, token in zip(logp_LV, ids[1:], strict=False)]
    assert told["token_logprobs"][1:-1] == pytest.approx(wanted, abs=1e-4)
    for top, logp_V in zip(told["top_logprobs"][1:], logp_LV, strict=True):
        best = logp_V.topk(2)
        assert list(top) == [f"token_id:{token}" for token in best.indices]
        assert list(top.values()) == pytest.approx(best.values.tolist(), abs=1e-4)


def test_an_echo_begins_with_the_prompt(client: TestClient) -> None:
    asked = [{**RAW, "n": 2, "echo": echo} for echo in (False, True)]
    plain, echoed = (client.post("/v1/completions", json=each).json() for each in asked)
    for one, other in zip(plain["choices"], echoed["choices"], strict=True):
        assert other["text"] == RAW["prompt"] + one["text"] and other["logprobs"] is None
    assert plain["usage"] == echoed["usage"]


MALFORMED: list[tuple[str, Any, str]] = [
    ("/v1/chat/completions", b"", "Invalid JSON"),
    ("/v1/chat/completions", b'{"model": "run0"', "Invalid JSON"),
    ("/v1/chat/completions", b"[1, 2]", "should be an object"),
    ("/v1/chat/completions", b'{"model": "run0", "messages": [{"role": "user", "content": "\\ud800"}]}', "JSON"),
    ("/v1/chat/completions", b"[" * 10_000, "JSON"),
    ("/v1/chat/completions", {**CHAT, "messages": []}, "messages"),
    ("/v1/chat/completions", {**CHAT, "messages": [{"role": "king", "content": "a"}]}, "unknown role"),
    ("/v1/chat/completions", {**CHAT, "messages": [{"role": "user"}]}, "has no content"),
    ("/v1/chat/completions", {**CHAT, "messages": ["hello"]}, "must be an object"),
    (
        "/v1/chat/completions",
        {**CHAT, "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "empty `image_url`",
    ),
    (
        "/v1/chat/completions",
        {**CHAT, "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a.png"}}]}]},
        "has a picture, and",
    ),
    ("/v1/chat/completions", {**CHAT, "temprature": 1}, "Did you mean `temperature`"),
    ("/v1/chat/completions", {**CHAT, "temperature": -1}, "temperature"),
    ("/v1/chat/completions", b'{"model": "run0", "messages": [{}], "temperature": NaN}', "temperature"),
    ("/v1/chat/completions", {**CHAT, "temperature": "hot"}, "temperature"),
    ("/v1/chat/completions", {**CHAT, "top_p": 0}, "top_p"),
    ("/v1/chat/completions", {**CHAT, "n": 0}, "n"),
    ("/v1/chat/completions", {**CHAT, "n": 10**30}, "n"),
    ("/v1/chat/completions", {**CHAT, "max_tokens": 0}, "max_tokens"),
    ("/v1/chat/completions", {**CHAT, "max_tokens": 1000}, "at most 96 tokens"),
    ("/v1/chat/completions", {**CHAT, "top_logprobs": 21}, "top_logprobs"),
    ("/v1/chat/completions", {**CHAT, "tools": [{"type": "function"}]}, "tools is not supported"),
    ("/v1/chat/completions", {**CHAT, "response_format": {"type": "json_object"}}, "response_format is not supported"),
    ("/v1/completions", {**RAW, "prompt": []}, "prompt"),
    ("/v1/completions", {**RAW, "prompt": [10**9]}, "none of"),
    ("/v1/completions", {**RAW, "prompt": [-1]}, "prompt"),
    ("/v1/completions", {**RAW, "prompt": "word " * 200}, "at most 96 tokens"),
    ("/v1/completions", {**RAW, "prompt": ["a"] * 100, "n": 2}, "at most 128 answers"),
    ("/v1/completions", {**RAW, "echo": True, "stream": True}, "sent whole"),
    ("/v1/embeddings", {"model": "run0", "input": "a"}, "is asked by /v1/chat/completions"),
    ("/classify", {"model": "run0", "input": "a"}, "is asked by /v1/chat/completions"),
]


@pytest.mark.parametrize(("address", "body", "message"), MALFORMED)
def test_malformed_requests_are_refused_with_what_is_wrong(
    client: TestClient, address: str, body: Any, message: str
) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body)
    response = client.post(address, content=content)
    error = response.json()["error"]
    assert response.status_code == 400 and error["type"] == "invalid_request_error"
    assert set(error) == {"message", "type", "param", "code"} and message in error["message"]


def test_other_refusals_have_their_status(client: TestClient, server: Server) -> None:
    unknown = client.post("/v1/completions", json={**RAW, "model": "nobody"})
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
    assert client.get("/v1/nothing").json()["error"]["type"] == "not_found_error"
    assert client.get("/v1/completions").status_code == 405
    large = client.post("/v1/completions", json={**RAW, "prompt": "a" * 30_000})
    assert (large.status_code, large.json()["error"]["code"]) == (413, "too_large")
    many = client.post("/v1/completions", json={**RAW, "n": 50})
    assert (many.status_code, many.headers["Retry-After"]) == (429, "1")
    assert client.get("/v1/models", headers={"Host": "evil.example"}).status_code == 403
    for origin in ("http://evil.example", "null"):
        assert client.get("/v1/models", headers={"Origin": origin}).status_code == 403
    assert client.get("/health").json() == {"status": "ok", "running": 0, "waiting": 0}


def test_a_key_is_asked_for(server: Server) -> None:
    kept = Server(list(server._models.values()), ServerLimits(api_key="sesame"))
    client = TestClient(kept.app, base_url="http://elsewhere")
    for header in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "sesame"}, {"Authorization": "Bearer é"}):
        response = client.get("/v1/models", headers={name: value.encode() for name, value in header.items()})
        assert response.status_code == 401 and response.json()["error"]["type"] == "authentication_error"
    assert client.get("/v1/models", headers={"Authorization": "Bearer sesame"}).status_code == 200
    assert client.get("/health").status_code == 200


def test_requests_that_take_too_long_end_with_504(server: Server) -> None:
    hasty = Server(list(server._models.values()), ServerLimits(seconds=1e-6))
    client = TestClient(hasty.app, base_url="http://127.0.0.1")
    response = client.post("/v1/completions", json=RAW)
    assert (response.status_code, response.json()["error"]["code"]) == (504, "timeout")
    stream = client.post("/v1/completions", json={**RAW, "stream": True}).text
    assert json.loads(stream.removeprefix("data: "))["error"]["code"] == "timeout"


ADDRESSES = ["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/classify", "/v1/models/run0", "/health"]
VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3.5, 1e308, 10**40, "", "a", "run1", "é漢🙂", "\x00", "{{ 7 * 7 }}", "</s>", [], {},
    [[]], [None], [1, 2], ["a", 1], [["a"]], {"a": {"a": []}}, [{"role": "user", "content": "a"}], {"type": "text"},
    [{"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "\"\\ud800\""}}]}],
    [{"role": "tool", "content": ""}], [{"from": "human", "value": "a"}], [{"role": "user", "content": "a" * 500}],
]  # fmt: skip


def _fuzzed(client: TestClient, requests: int) -> None:
    """Damaged requests of all kinds: none may end in a failure of the server."""
    draw, seen = random.Random(0), set()
    names = [
        *CHAT,
        *RAW,
        *_NEUTRAL,
        "n",
        "seed",
        "stop",
        "stream",
        "stream_options",
        "logprobs",
        "top_logprobs",
        "top_p",
    ]
    names += ["input", "dimensions", "encoding_format", "input_type", "echo", "max_completion_tokens", "unknown"]
    for number in range(requests):
        body: dict[str, Any] = dict(draw.choice([CHAT, RAW, {"model": "run0", "input": "a"}]))
        for _ in range(draw.randint(0, 3)):
            body[draw.choice(names)] = draw.choice(VALUES)
        content = bytearray(json.dumps(body, ensure_ascii=draw.random() < 0.5).encode())
        if draw.random() < 0.3:
            for _ in range(draw.randint(1, 4)):
                content[draw.randrange(len(content))] = draw.randrange(256)
        if draw.random() < 0.05:
            content = content[: draw.randrange(len(content))]
        method = draw.choice(["POST"] * 9 + ["GET", "PUT", "DELETE"])
        response = client.request(method, draw.choice(ADDRESSES), content=bytes(content))
        assert response.status_code < 500, (number, bytes(content), response.text)
        assert response.status_code < 300 or set(response.json()["error"]) == {"message", "type", "param", "code"}
        seen.add(response.status_code)
    assert {200, 400, 405} <= seen
    assert client.get("/health").json() == {"status": "ok", "running": 0, "waiting": 0}


def test_damaged_requests_never_make_it_fail(client: TestClient) -> None:
    _fuzzed(client, 300)


@pytest.mark.nightly
def test_ten_thousand_damaged_requests_never_make_it_fail(client: TestClient) -> None:
    _fuzzed(client, 10_000)


def test_a_request_that_does_not_come_is_given_up() -> None:
    async def receive() -> Any:
        await asyncio.sleep(0.02)
        return {"type": "http.request", "body": b" ", "more_body": True}

    async def asked() -> None:
        await Server([], ServerLimits(body_seconds=0.05))._body(Request({"type": "http", "headers": []}, receive))

    with pytest.raises(Refusal, match=r"has not come in 0\.05 seconds") as refused:
        asyncio.run(asyncio.wait_for(asked(), 20))
    assert refused.value.response.status_code == 408


def test_a_prompt_of_more_characters_than_the_context_holds_is_not_tokenised(server: Server) -> None:
    model = next(iter(server._models.values()))
    assert isinstance(model, TextModel)
    started = time.perf_counter()
    with pytest.raises(Refusal, match=r"cannot hold the 50,000,000 characters"):
        model.prompts(CompletionRequest(model=model.name, prompt="a" * 50_000_000))
    assert time.perf_counter() - started < 2
