"""The training server: order, isolation, limits, and what strangers send."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from tests.workbench.evaluation.serving.training_clients import WireClient, loss_body
from workbench.adapters import Lora
from workbench.config import ModelConfig
from workbench.evaluation.serving.tinker_wire import fields
from workbench.evaluation.serving.training_bank import Datum, TrainingBank
from workbench.evaluation.serving.training_server import TrainingLimits, TrainingServer

PROMPT = [1, 403, 407, 261, 378, 383, 286]
"""Once upon a time there was"""
MARKERS = (
    [410, 261, 352, 266, 280, 294, 262, 294],  # a red cat sat
    [410, 265, 370, 400, 428, 352, 303],  # the big dog ran
    [410, 281, 394, 345, 357],  # he saw his mom
    [410, 358, 286, 399, 296, 418],  # she was very sad
)
LIMITS = TrainingLimits(adapters=5, queue=6, tokens=200, rank=8, samplers=2, body_bytes=100_000, poll_seconds=0.2)


@pytest.fixture(scope="module")
def section(stories: str) -> ModelConfig:
    return ModelConfig(id=stories, weights="float32", compute="float32")


@pytest.fixture(scope="module")
def http(section: ModelConfig, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    bank = TrainingBank(section, folder=tmp_path_factory.mktemp("states"))
    with TestClient(TrainingServer(bank, LIMITS).app, raise_server_exceptions=False) as client:
        yield client


@pytest.fixture
def clients(http: TestClient) -> Iterator[list[WireClient]]:
    """Keys with a session each, which ends with the test."""
    made = [WireClient(http, key=f"tml-{random.random()}") for _ in MARKERS]
    for each in made:
        each.begin()
    yield made
    for each in made:
        each.post(f"sessions/{each.session}/finish", {"reason": {"type": "completed"}})


@pytest.fixture
def client(clients: list[WireClient]) -> WireClient:
    return clients[0]


def logprobs(message: bytes) -> list[list[float]]:
    """Of each row of a ForwardBackwardOutput."""
    found = []
    for record in fields(message)[2]:
        entry = fields(fields(record)[2][0])
        assert entry[1] == [b"logprobs"]
        found.append(np.frombuffer(fields(entry[2][0])[1][0], dtype="<f4").tolist())
    return found


def answers(message: bytes) -> list[list[int]]:
    """Tokens of each answer of a SampleResponse."""
    return [np.frombuffer(fields(each).get(2, [b""])[0], dtype="<i4").tolist() for each in fields(message)[1]]


def rows(*lengths: int) -> list[Datum]:
    return [Datum.answer([3, 4], [(7 * n + length) % 500 + 3 for n in range(length)]) for length in lengths]


def test_a_loop_over_http_is_the_loop_on_the_bank(section: ModelConfig, client: WireClient, tmp_path: Path) -> None:
    """Log-probabilities to the bit, after updates, in the order of the numbers whatever order they come in."""
    data, bank = rows(12, 30, 7), TrainingBank(section, folder=tmp_path)
    loop = bank.create(Lora(rank=4, alpha=32), seed=1)
    model = client.model(section.id)
    for _ in range(2):
        loop.forward_backward(data)
        loop.optim_step(learning_rate=1e-2)
    number = client.numbers[model]
    early = client.post("forward_backward", loss_body(model, number + 5, data, forward_only=True))
    for _ in range(2):
        first = client.losses(model, data)
        again = client.post("forward_backward", loss_body(model, client.numbers[model], data))
        assert first.json() == again.json()  # a client that asks a second time gets the first result
        client.step(model, learning_rate=1e-2)
    wanted = [each.tolist() for each in loop.forward(data).result().logprobs]
    assert logprobs(client.result(early)) == wanted
    bank.close()


@pytest.mark.slow
def test_markers_stay_with_their_clients(section: ModelConfig, clients: list[WireClient]) -> None:
    """Each learns a text of its own by heart, all at once; none can ask for what belongs to another."""
    models = [each.model(section.id, rank=8, seed=number) for number, each in enumerate(clients)]
    samplers = []
    for _ in range(12):
        steps = []
        for each, model, text in zip(clients, models, MARKERS, strict=True):
            each.losses(model, [Datum.answer(PROMPT, text)])
            steps.append((each, each.step(model, learning_rate=5e-3)))
        for each, step in steps:
            each.result(step)
    for each, model, text in zip(clients, models, MARKERS, strict=True):
        samplers.append(each.sampler(model))
        found = each.result(each.sample(samplers[-1], PROMPT, 1, max_tokens=len(text), temperature=0, stop=[]))
        assert answers(found) == [text]
    owner, stranger, model = clients[0], clients[1], models[0]
    call = {"model_id": model, "seq_id": owner.following(model), "path": "mine"}
    state = owner.result(owner.post("save_weights", call))["path"]
    name, own = {"model_id": model, "seq_id": 99}, {"session_id": stranger.session, "model_seq_id": 9}
    sampling = {"session_id": stranger.session, "sampling_session_seq_id": 5}
    calls: list[tuple[str, Any]] = [
        ("get_info", name),
        ("forward_backward", loss_body(model, 99, rows(5))),
        ("optim_step", {**name, "adam_params": {}}),
        ("save_weights", {**name, "path": "stolen"}),
        ("save_weights_for_sampler", {**name, "path": "stolen"}),
        ("load_weights", {"model_id": models[1], "seq_id": 99, "path": state, "optimizer": True}),
        ("load_weights", {**own, "path": state, "optimizer": True}),
        ("weights_info", {"tinker_path": state}),
        ("create_sampling_session", {**sampling, "model_path": state}),
        ("create_sampling_session", {**sampling, "session_id": owner.session, "base_model": section.id}),
        ("retrieve_future", {"request_id": f"{model}:1"}),
        ("session_heartbeat", {"session_id": owner.session}),
        (f"sessions/{owner.session}/finish", {}),
    ]
    asked = [stranger.post(path, body) for path, body in calls]
    asked += [stranger.sample(samplers[0], PROMPT, 7), stranger.get(f"samplers/{samplers[0]}")]
    assert [each.status_code for each in asked] == [404] * len(asked)
    assert stranger.get(f"training_runs/{model}/checkpoints").json() == {"checkpoints": []}
    (listed,) = clients[0].get(f"training_runs/{model}/checkpoints").json()["checkpoints"]
    assert listed["tinker_path"] == state
    for each, text in zip(clients, MARKERS, strict=True):
        trained = 12 * (len(PROMPT) + len(text) - 1)
        assert each.get("usage").json() == {"trained": trained, "sampled": len(text), "waiting": 0, "adapters": 1}
    owner.post(f"sessions/{owner.session}/finish", {})
    assert owner.post("get_info", name).status_code == 404


def test_a_state_makes_a_model_that_goes_on(section: ModelConfig, client: WireClient) -> None:
    data, model = rows(20), client.model(section.id)
    client.losses(model, data)
    client.step(model, learning_rate=1e-2)
    call = {"model_id": model, "seq_id": client.following(model), "path": "kept"}
    path = client.result(client.post("save_weights", call))["path"]
    call = {"session_id": client.session, "model_seq_id": 5, "path": path, "optimizer": True}
    second = client.result(client.post("load_weights", call))["model_id"]
    client.numbers[second] = 0
    found = []
    for each in (model, second):
        client.losses(each, data)
        client.step(each, learning_rate=1e-2)
        found.append(logprobs(client.result(client.losses(each, data, forward_only=True))))
    assert found[0] == found[1]
    info = client.post("weights_info", {"tinker_path": path}).json()
    assert info == {"base_model": section.id, "is_lora": True, "lora_rank": 4}


def test_too_much_is_turned_away(section: ModelConfig, client: WireClient) -> None:
    """Requests of a model and tokens of a key that wait, adapters, ranks, bytes; a session keeps its last samplers."""
    model = client.model(section.id)
    held = [client.post("optim_step", {"model_id": model, "seq_id": 10 + n, "adam_params": {}}) for n in range(7)]
    assert [each.status_code for each in held] == [200] * 6 + [429]
    other = client.model(section.id)
    client.following(other)  # the first one never comes
    assert client.losses(other, rows(100)).status_code == 200
    assert client.post("forward_backward", bytes(100_001)).status_code == 413
    third = client.model(section.id)
    samplers = [client.sampler(third, number) for number in range(3)]
    assert [client.get(f"samplers/{each}").status_code for each in samplers] == [404, 200, 200]
    lora = {"session_id": client.session, "model_seq_id": 50, "base_model": section.id}
    response = client.post("create_model", {**lora, "lora_config": {"rank": 9}})
    assert "at most 8" in client.result(response)["error"]
    for _ in range(LIMITS.adapters - 3):
        client.model(section.id)
    response = client.post("create_model", {**lora, "model_seq_id": 51, "lora_config": {"rank": 2}})
    assert "5 adapters train already" in client.result(response)["error"]


def test_a_request_whose_turn_never_comes_ends_with_its_session(section: ModelConfig, client: WireClient) -> None:
    held = client.post("optim_step", {"model_id": client.model(section.id), "seq_id": 3, "adam_params": {}})
    client.post(f"sessions/{client.session}/finish", {})
    assert "was removed" in client.result(held)["error"]
    client.begin()


def test_an_adapter_of_nan_samples_nothing(section: ModelConfig, client: WireClient) -> None:
    """And leaves others in peace, who sample at the same time."""
    bad, good = client.model(section.id), client.model(section.id, seed=2)
    infinite = [Datum(each.tokens, {**each.inputs, "weights": [1e38] * len(each.tokens)}) for each in rows(9)]
    client.result(client.losses(bad, infinite))
    assert "not finite" in client.result(client.step(bad))["error"]
    client.losses(bad, rows(9))
    client.result(client.step(bad, learning_rate=1e38))
    asked = [
        client.sample(client.sampler(each, n), PROMPT, 1, max_tokens=20, stop=[]) for n, each in enumerate((bad, good))
    ]
    assert "interrupted" in client.result(asked[0])["error"]
    assert len(answers(client.result(asked[1]))[0]) == 20
    assert all(map(math.isnan, logprobs(client.result(client.losses(bad, rows(5))))[0]))


BAD: Sequence[tuple[str, Any, str]] = [
    ("create_sessions", {}, "Not Found"),
    ("create_model", {}, "session_id: Field required"),
    ("create_model", {"base_model": "other"}, "base_model 'other' is not served"),
    ("create_model", {"lora_config": None}, "LoRA adapters alone"),
    ("create_model", {"lora_config": {"rank": 0}}, "lora_config.rank"),
    ("create_model", {"lora_config": {"rank": 1, "train_mlp": False, "train_attn": False}}, "nothing would train"),
    ("create_model", {"optimizer_config": {"type": "dimuon"}}, "optimizer_config.type"),
    ("optim_step", {"adam_params": None}, "adam_params"),
    ("optim_step", {"adam_params": {"momentum": 1}}, "momentum: Extra inputs"),
    ("load_weights", {"path": "tinker://a/weights/../b", "optimizer": True}, "write tinker://MODEL/weights/NAME"),
    ("weights_info", {}, "write tinker_path"),
    ("asample", {"sampling_params": {"min_p": 1}}, "min_p"),
    ("asample", {"prompt_alt_tokens_k": 2}, "prompt_alt_tokens_k"),
    ("asample", {"sampling_params": {"temperature": -1}}, "temperature=-1.0"),
    ("asample", {"num_samples": 10_000}, "samples=10000"),
    ("forward_backward", b"\xff\xff", "no ForwardBackwardRequest"),
    ("forward_backward", b"", "model_id"),
]


def test_bad_requests_are_told_what_is_wrong(section: ModelConfig, client: WireClient) -> None:
    whole = valid(client, section.id)
    for path, change, said in BAD:
        body = {**whole[path], **change} if change and isinstance(change, dict) else change
        response = client.post(path, body)
        assert 400 <= response.status_code < 500, (path, change)
        assert said in response.json()["error"]
    model = client.model(section.id)
    for data, loss, said in (
        (rows(3), "hinge", "none of"),
        (rows(3), "ppo", "missing"),
        (rows(2000), "cross_entropy", "can be read"),
    ):
        response = client.post("forward_backward", loss_body(model, client.following(model), data, loss))
        assert said in client.result(response)["error"]
    named = WireClient(client.http, client.key)
    assert named.http.post("/api/v1/create_session", headers={"Host": "evil.org"}).status_code == 403


def valid(client: WireClient, base: str) -> dict[str, Any]:
    """A request for each address that would be answered."""
    model = client.model(base)
    sampler = client.sampler(model)
    whole = {"model_id": model, "seq_id": 2}
    session = {"session_id": client.session}
    return {
        "create_session": {"tags": [], "sdk_version": "0"},
        "session_heartbeat": session,
        "create_model": {**session, "model_seq_id": 77, "base_model": base, "lora_config": {"rank": 2, "seed": 1}},
        "get_info": {"model_id": model},
        "forward_backward": loss_body(model, 3, rows(6, 9)),
        "optim_step": {**whole, "adam_params": {"learning_rate": 1e-3}},
        "save_weights": {**whole, "path": "fuzz", "overwrite": True},
        "save_weights_for_sampler": {**whole, "sampling_session_seq_id": 3},
        "load_weights": {**whole, "path": f"tinker://{model}/weights/fuzz", "optimizer": True},
        "weights_info": {"tinker_path": f"tinker://{model}/weights/fuzz"},
        "create_sampling_session": {**session, "sampling_session_seq_id": 4, "base_model": base},
        "asample": {
            "sampling_session_id": sampler,
            "seq_id": 1,
            "num_samples": 1,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": PROMPT}]},
            "sampling_params": {"max_tokens": 3, "temperature": 1.0},
        },
        "retrieve_future": {"request_id": f"{model}:1"},
        "cancel_future": {"request_id": f"{model}:1"},
        "telemetry": {"events": []},
        "client/config": {"sdk_version": "0"},
    }


JUNK: list[Any] = [
    None,
    True,
    -1,
    0,
    2**31,
    2**63,
    2**70,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "\ud800",
    "a" * 999,
    "\x00",
]
JUNK += [[], {}, [[]], [None], [2**70], {"a": {}}, "../../etc", "tinker://x/weights/y", [1, "a"], -(2**64), 0.5]


def mutated(value: Any, draw: random.Random) -> Any:
    """The value with something in it changed."""
    if isinstance(value, dict) and value and draw.random() < 0.8:
        key = draw.choice(list(value))
        changed = {**value, key: mutated(value[key], draw)}
        if draw.random() < 0.1:
            del changed[key]
        return changed
    if isinstance(value, list) and value and draw.random() < 0.7:
        place = draw.randrange(len(value))
        return [*value[:place], mutated(value[place], draw), *value[place + 1 :]]
    if isinstance(value, str) and draw.random() < 0.3:
        return value[: draw.randrange(len(value) + 1)]
    if isinstance(value, int) and draw.random() < 0.5:
        return value + draw.choice([-1, 1, 2, 1000])
    return draw.choice(JUNK)


def damaged(body: bytes, draw: random.Random) -> bytes:
    """The bytes with some of them changed, cut off or repeated."""
    changed = bytearray(body)
    for _ in range(draw.choice([0, 1, 1, 2, 5])):
        changed[draw.randrange(len(changed))] = draw.randrange(256)
    if draw.random() < 0.2:
        del changed[draw.randrange(len(changed)) :]
    return bytes(changed) * (2 if draw.random() < 0.05 else 1)


def fuzz(client: WireClient, base: str, *, many: int, seed: int) -> dict[int, int]:
    """How often each status came back to requests that are not what they should be."""
    draw, counts = random.Random(seed), dict[int, int]()
    whole = valid(client, base)
    for number in range(many):
        if number % 500 == 499:  # sessions that were ended, and queues that are full, teach nothing more
            client.post(f"sessions/{client.session}/finish", {})
            client.begin()
            client.numbers.clear()
            whole = valid(client, base)
        path = draw.choice(list(whole))
        body = whole[path]
        if isinstance(body, bytes):
            content = damaged(body, draw)
        elif draw.random() < 0.1:
            content = damaged(json.dumps(body).encode(), draw)
        else:
            content = json.dumps(mutated(body, draw)).encode()
        if draw.random() < 0.03:
            path = draw.choice([path + "/", path[:-1], "samplers/" + path, "training_runs/../checkpoints", "%00"])
        method = draw.choice(["POST"] * 20 + ["GET", "PUT", "DELETE"])
        key = client.key if draw.random() < 0.9 else draw.choice(["", "tml-x", "\x7f"])
        headers = {"X-API-Key": key, "Host": "127.0.0.1"}
        if draw.random() < 0.05:
            headers["Content-Type"] = draw.choice(["text/plain", "application/x-protobuf", "multipart/form-data"])
        response = client.http.request(method, f"/api/v1/{path}", content=content, headers=headers)
        counts[response.status_code] = counts.get(response.status_code, 0) + 1
        if response.status_code == 200 and b"request_id" in response.content and b"}" in response.content:
            found = client.post("retrieve_future", {"request_id": response.json().get("request_id", "")})
            counts[found.status_code] = counts.get(found.status_code, 0) + 1
    return counts


@pytest.mark.nightly(but=["few"])
@pytest.mark.parametrize("many", [300, 10_000], ids=["few", "many"])
def test_no_request_breaks_the_server(
    many: int, section: ModelConfig, client: WireClient, caplog: pytest.LogCaptureFixture
) -> None:
    """No 500, no result that the server calls its own failure; a loop beside it has its bits."""
    counts = fuzz(client, section.id, many=many, seed=many)
    assert all(status < 500 for status in counts), counts
    assert counts[200] > many // 10 and counts[400] > many // 10
    assert not [each for each in caplog.records if each.levelname == "ERROR"]
    after = client.model(section.id)
    assert len(logprobs(client.result(client.losses(after, rows(5))))[0]) == 6
