"""Streams of several adapters at once against one at a time, by the official client, on `workbench serve`.

    python scripts/bench/serve.py [--adapters 8] [--streams 64] [--tokens 32] [--out FOLDER]

The adapters are LoRA over the starter with random values: they answer different things and take the time that trained
ones take. Every stream's answer is compared with its own alone. Prints tokens a second both ways, and the longest wait
for a first token. The client runs in this process, beside the server's.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch
from measuring import machine
from openai import AsyncOpenAI

from workbench import adapters
from workbench.config import RunConfig
from workbench.data.text.chat import ChatEncoder
from workbench.models import backbones, exported
from workbench.runs import run_directory

TOPICS = ("the king", "a fox", "the sea", "an old well", "the moon", "bread", "a wolf", "the day")


class Stream(NamedTuple):
    """One answer."""

    text: str
    tokens: int
    first_s: float
    """Until its first token."""


def main(arguments: argparse.Namespace) -> None:
    folder = arguments.out or Path(tempfile.mkdtemp(prefix="serve-"))
    runs = [save(folder / f"run{number}", number) for number in range(arguments.adapters)]
    command = [sys.executable, "-m", "workbench.cli", "serve", *map(str, runs), "--port", "0"]
    command += ["--rows", str(arguments.streams)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        assert server.stdout is not None
        address = next(line for line in iter(server.stdout.readline, "") if "answers" in line).split()[0]
        asyncio.run(compare(f"{address}/v1", arguments))
    finally:
        server.terminate()
        server.wait()
    print(machine("cpu", ["torch", "transformers", "openai", "uvicorn"]))


async def compare(address: str, arguments: argparse.Namespace) -> None:
    """Both ways in turn, twice, the second time counted: the first one fills caches."""
    numbers = range(arguments.streams)
    async with AsyncOpenAI(base_url=address, api_key="none", max_retries=0, timeout=600) as client:
        for counted in (False, True):
            began = time.perf_counter()
            together = await asyncio.gather(*(answer(client, number, arguments) for number in numbers))
            between = time.perf_counter()
            alone = [await answer(client, number, arguments) for number in (numbers if counted else numbers[:4])]
            ended = time.perf_counter()
    assert len(alone) == len(together)
    same = sum(one.text == other.text for one, other in zip(together, alone, strict=True))
    rates = [sum(each.tokens for each in found) for found in (together, alone)]
    many, one = rates[0] / (between - began), rates[1] / (ended - between)
    waits = [max(each.first_s for each in found) for found in (together, alone)]
    print(f"{arguments.streams} streams over {arguments.adapters} adapters: {many:.0f} tokens/s at once,", end=" ")
    print(f"{one:.0f} one at a time, {many / one:.1f} times")
    print(f"{same} of {len(alone)} answers as alone; {len({each.text for each in alone})} different ones")
    print(f"first token after at most {waits[0]:.2f} s, alone {waits[1]:.2f} s")


async def answer(client: AsyncOpenAI, number: int, arguments: argparse.Namespace) -> Stream:
    """One streamed greedy answer."""
    began, first, text, tokens = time.perf_counter(), 0.0, "", 0
    stream = await client.chat.completions.create(
        model=f"run{number % arguments.adapters}",
        messages=[{"role": "user", "content": f"Tell me about {TOPICS[number // arguments.adapters % len(TOPICS)]}."}],
        temperature=0,
        max_tokens=arguments.tokens,
        stream=True,
        stream_options={"include_usage": True},
    )
    async for chunk in stream:
        if chunk.usage is not None:
            tokens = chunk.usage.completion_tokens
        for choice in chunk.choices:
            text += choice.delta.content or ""
            first = first or (time.perf_counter() - began if choice.delta.content else 0.0)
    return Stream(text, tokens, first)


def save(path: Path, seed: int) -> Path:
    """A run directory with an adapter of random values."""
    config = RunConfig.model_validate(
        {"recipe": "sft", "adapter": {"method": "lora", "rank": 16, "alpha": 32}, "data": {"train": "rows.jsonl"}}
    )
    run = run_directory.start(path, config, resume=False)
    tokenizer = backbones.tokenizer(config.model)
    model = adapters.attach(backbones.load(config.model, tokenizer).model, config.adapter, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.03 * torch.randn(parameter.shape, generator=generator)
    template = ChatEncoder(tokenizer)
    exported.save(model, run.adapter, tokenizer, template, template.stops())
    run.close()
    return path


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--adapters", type=int, default=8)
    options.add_argument("--streams", type=int, default=64)
    options.add_argument("--tokens", type=int, default=32)
    options.add_argument("--out", type=Path)
    main(options.parse_args())
