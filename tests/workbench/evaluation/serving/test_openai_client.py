"""The official client of OpenAI against `workbench serve` in a process of its own."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import APITimeoutError, AsyncOpenAI, AuthenticationError, BadRequestError, NotFoundError, OpenAI

from tests import forked
from tests.workbench.evaluation.serving.conftest import save_runs

pytestmark = pytest.mark.slow
ADAPTERS, STREAMS, TOKENS = 8, 64, 10
WORDS = ("king", "fox", "sea", "old well", "moon", "bread", "wolf", "day")
QUESTIONS = [f"Tell me about the {word}." for word in WORDS]


class Process:
    """A server over the starter with eight LoRA adapters, and its address."""

    def __init__(self, runs: list[Path], *words: str) -> None:
        self.runs = runs
        command = [forked.python(), "-m", "workbench.cli", "serve", *map(str, runs), "--port", "0", *words]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "WORKBENCH_API_KEY": "sesame"}
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        assert self.process.stdout is not None
        lines = iter(self.process.stdout.readline, "")
        self.address = next(line for line in lines if " answers. " in line).split()[0]

    @property
    def running(self) -> int:
        with urllib.request.urlopen(f"{self.address}/health") as response:
            return int(json.load(response)["running"])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    method = {"method": "lora", "rank": 4, "alpha": 16}
    runs = save_runs(tmp_path_factory.mktemp("eight"), "starter", [method] * ADAPTERS, weights="bfloat16")
    started = Process(runs, "--load-adapters")
    yield started
    started.process.kill()
    started.process.communicate()


def _asked(number: int) -> dict[str, Any]:
    content = QUESTIONS[number // ADAPTERS % len(QUESTIONS)]
    return {
        "model": f"run{number % ADAPTERS}",
        "messages": [{"role": "user", "content": content}],
        "temperature": 0,
        "max_tokens": TOKENS,
    }


async def _streamed(client: AsyncOpenAI, number: int) -> str:
    stream = await client.chat.completions.create(**_asked(number), stream=True)
    return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])


async def _all(address: str) -> list[str]:
    async with AsyncOpenAI(base_url=f"{address}/v1", api_key="sesame", max_retries=0) as client:
        return list(await asyncio.gather(*(_streamed(client, number) for number in range(STREAMS))))


def test_64_streams_over_8_adapters_are_what_each_is_alone(server: Process) -> None:
    together = asyncio.run(_all(server.address))
    with OpenAI(base_url=f"{server.address}/v1", api_key="sesame", max_retries=0) as client:
        for number in range(0, STREAMS, 5):  # each adapter and each question
            alone = client.chat.completions.create(**_asked(number)).choices[0].message.content
            assert together[number] == alone
    assert len(set(together)) > STREAMS * 0.7  # neither adapters nor questions were mixed up


def test_the_client_knows_the_errors(server: Process) -> None:
    with OpenAI(base_url=f"{server.address}/v1", api_key="sesame", max_retries=0) as client:
        assert len(client.models.list().data) == ADAPTERS + 1
        with pytest.raises(NotFoundError, match="No model is called"):
            client.completions.create(model="nobody", prompt="a")
        with pytest.raises(BadRequestError, match="reads and writes at most"):
            client.completions.create(model="run0", prompt="a", max_tokens=10**6)
        with pytest.raises(BadRequestError, match="is asked by"):
            client.embeddings.create(model="run0", input="a")
    with OpenAI(base_url=f"{server.address}/v1", api_key="wrong") as client, pytest.raises(AuthenticationError):
        client.models.list()


def test_an_adapter_is_loaded_and_forgotten(server: Process) -> None:
    with OpenAI(base_url=f"{server.address}/v1", api_key="sesame", max_retries=0) as client:
        client.post(
            "/load_lora_adapter", cast_to=str, body={"lora_name": "new", "lora_path": f"{server.runs[3]}/adapter"}
        )
        asked: dict[str, Any] = {"prompt": "The", "temperature": 0, "max_tokens": 8}
        new, known = (client.completions.create(model=name, **asked).choices[0].text for name in ("new", "run3"))
        assert new == known
        client.post("/unload_lora_adapter", cast_to=str, body={"lora_name": "new"})
        with pytest.raises(NotFoundError, match="No model is called"):
            client.completions.create(model="new", **asked)


def _until_running(server: Process, answers: int) -> None:
    """Wait: a stream's first event says who speaks, and comes before its answers have a slot."""
    end = time.monotonic() + 15
    while server.running != answers:
        assert time.monotonic() < end, f"{server.running} running, {answers} expected"
        time.sleep(0.02)


def test_a_client_that_hangs_up_frees_its_slot(server: Process) -> None:
    with OpenAI(base_url=f"{server.address}/v1", api_key="sesame", max_retries=0) as client:
        asked = {**_asked(0), "max_tokens": 900}
        stream = client.chat.completions.create(**asked, logit_bias={}, stream=True, n=4)
        next(iter(stream))
        _until_running(server, 4)
        stream.close()
        _until_running(server, 0)
        with pytest.raises(APITimeoutError):
            client.chat.completions.create(**asked, timeout=0.5)
        _until_running(server, 0)


def test_what_has_begun_ends_after_sigterm(server: Process) -> None:
    with OpenAI(base_url=f"{server.address}/v1", api_key="sesame", max_retries=0) as client:
        stream = iter(client.completions.create(model="starter", prompt="A", max_tokens=40, temperature=0, stream=True))
        texts = [next(stream).choices[0].text]
        server.process.send_signal(signal.SIGTERM)
        reasons = []
        for chunk in stream:
            texts.append(chunk.choices[0].text)
            reasons.append(chunk.choices[0].finish_reason)
    assert reasons[-1] in ("length", "stop") and len("".join(texts)) > 10
    assert server.process.wait(timeout=20) == 0
