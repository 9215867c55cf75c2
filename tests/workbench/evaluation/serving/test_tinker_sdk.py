"""The unmodified Tinker SDK against the server, where installed: eight clients at once, and the page's example."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from tests.scripts.shown_commands import ROOT, blocks
from workbench.config import ModelConfig
from workbench.evaluation.serving.training_bank import TrainingBank
from workbench.evaluation.serving.training_server import TrainingServer

tinker = pytest.importorskip("tinker", reason="the SDK is a package of its own")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@contextlib.contextmanager
def served(model: str, folder: Path) -> Iterator[str]:
    """The address of a server in a thread."""
    bank = TrainingBank(ModelConfig(id=model, weights="float32", compute="float32"), folder=folder)
    config = uvicorn.Config(TrainingServer(bank).app, port=0, log_level="error")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()))
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join()


@pytest.fixture(scope="module")
def address(stories: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with served(stories, tmp_path_factory.mktemp("states")) as found:
        yield found


def row(ids: list[int], many: int, **inputs: Any) -> Any:
    """A row whose last tokens are supervised."""
    before = [0.0] * (len(ids) - 1 - many)
    numbers = {name: [*before, *values] for name, values in (inputs or {"weights": [1.0] * many}).items()}
    return tinker.types.Datum(
        model_input=tinker.types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs={"target_tokens": ids[1:], **numbers}
    )


def supervised(address: str, model: str, seed: int, *, steps: int = 4) -> list[float]:
    """Losses of each step, and the log-probabilities at the end."""
    service = tinker.ServiceClient(base_url=address, api_key=f"tml-{seed}")
    client = service.create_lora_training_client(base_model=model, rank=2 + seed % 3, seed=seed).result()
    data = [row([(seed + 7 * n * k) % 500 + 3 for k in range(12 + 5 * n)], 8) for n in range(3)]
    found = []
    for _ in range(steps):
        losses = client.forward_backward(data, "cross_entropy")
        client.optim_step(tinker.types.AdamParams(learning_rate=1e-2)).result()
        found.append(losses.result().metrics["loss:sum"])
    last = client.forward(data, "cross_entropy").result()
    service.close("success").result()
    return found + [value for each in last.loss_fn_outputs for value in each["logprobs"].data]


def rewarded(address: str, model: str, seed: int, *, steps: int = 3) -> list[float]:
    """Sampled answers of each step and their losses: tokens from 300 on are wanted."""
    service = tinker.ServiceClient(base_url=address, api_key=f"tml-{seed}")
    client = service.create_lora_training_client(base_model=model, rank=4, seed=seed).result()
    prompt, found = [1, 403, 407, 261], list[float]()
    for step in range(steps):
        sampler = client.save_weights_and_get_sampling_client().result()
        params = tinker.types.SamplingParams(max_tokens=6, seed=step, stop=[])
        asked = sampler.sample(prompt=tinker.types.ModelInput.from_ints(prompt), num_samples=4, sampling_params=params)
        answers = [(each.tokens, each.logprobs) for each in asked.result().sequences]
        rewards = [sum(token >= 300 for token in tokens) for tokens, _ in answers]
        data = [
            row(prompt + tokens, len(tokens), logprobs=logprobs, advantages=[reward - 3.0] * len(tokens))
            for (tokens, logprobs), reward in zip(answers, rewards, strict=True)
        ]
        losses = client.forward_backward(data, "ppo" if seed % 2 else "importance_sampling")
        client.optim_step(tinker.types.AdamParams(learning_rate=1e-3)).result()
        found += [losses.result().metrics["loss:sum"], *(float(token) for tokens, _ in answers for token in tokens)]
    service.close("success").result()
    return found


def test_eight_clients_at_once_get_what_each_gets_alone(address: str, stories: str) -> None:
    """Supervised and rewarded loops, to the bit in float32."""
    loops = [(supervised if seed < 4 else rewarded, seed) for seed in range(8)]
    with ThreadPoolExecutor(8) as threads:
        together = list(threads.map(lambda each: each[0](address, stories, each[1]), loops))
    for (loop, seed), found in zip(loops, together, strict=True):
        assert loop(address, stories, seed) == found


def test_a_loss_of_ones_own_and_states(address: str, stories: str) -> None:
    """`forward_backward_custom` differentiates at the client; a state makes a client that goes on."""
    service = tinker.ServiceClient(base_url=address, api_key="tml-own")
    client, other = (service.create_lora_training_client(base_model=stories, rank=2, seed=3).result() for _ in range(2))
    data = [row([1, 403, 407, 261, 378], 2), row([1, 410, 352, 266], 2)]

    def negative(rows: Any, logprobs: Any) -> Any:
        weights = [each.loss_fn_inputs["weights"].to_torch() for each in rows]
        return -sum((p * w).sum() for p, w in zip(logprobs, weights, strict=True)), {"rows:sum": float(len(rows))}

    first = client.forward_backward_custom(data, negative).result()
    second = other.forward_backward(data, "cross_entropy").result()
    assert first.metrics["loss:sum"] == pytest.approx(second.metrics["loss:sum"])
    assert first.metrics["rows:sum"] == 2
    for each in (client, other):
        each.optim_step(tinker.types.AdamParams(learning_rate=1e-2)).result()
    path = client.save_state("after").result().path
    third = service.create_training_client_from_state_with_optimizer(path).result()
    losses = [each.forward(data, "cross_entropy").result().metrics["loss:sum"] for each in (client, other, third)]
    assert losses[0] == losses[2] == pytest.approx(losses[1])
    sampler = service.create_sampling_client(model_path=path).result()
    scores = sampler.compute_logprobs(tinker.types.ModelInput.from_ints([1, 403, 407, 261, 378])).result()
    wanted = third.forward(data, "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data
    assert scores[1:] == pytest.approx(wanted, abs=1e-4)
    with pytest.raises(tinker.TinkerError, match="target_tokens"):
        third.forward([tinker.types.Datum(data[0].model_input, {"weights": [1.0] * 4})], "cross_entropy").result()
    service.close("success").result()


def test_the_example_of_the_page_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = ROOT / "recipes" / "verbs" / "own_loops.md"
    code = next(each.text for each in blocks(page) if "ServiceClient" in each.text)
    with served("starter", tmp_path) as address:
        exec(compile(code.replace("http://127.0.0.1:8000", address), str(page), "exec"), {"__name__": "page"})
    said = capsys.readouterr().out.splitlines()
    assert float(said[9].split()[0]) < 0.2 * float(said[0].split()[0])
    assert said[-2].strip().startswith("A fox.") and said[-1].endswith("/weights/done")
