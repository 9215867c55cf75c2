"""Eight clients of `workbench serve --train` at once against one after another, by the Tinker SDK.

    pip install tinker
    python scripts/bench/training_server.py [--clients 8] [--steps 6] [--model starter]

Three loops: `supervised` has 8 rows of 48 tokens a step, `short` 2 rows of 16, `rewarded` samples 4 answers of 24
tokens and learns from them by PPO. Prints the wall clock of all loops and the server's processor time, both ways, and
whether each loop has the same losses both ways. The clients run in this process, beside the server's.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import psutil
import tinker
from measuring import machine
from tinker import types


def main(arguments: argparse.Namespace) -> None:
    states = tempfile.mkdtemp(prefix="states-")
    command = [sys.executable, "-m", "workbench.cli", "serve", arguments.model, "--train", "model.weights=float32"]
    command += ["model.compute=float32", "--port", "0", "--states", states]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        assert server.stdout is not None
        line = next(line for line in iter(server.stdout.readline, "") if "answers" in line)
        open_session = partial(tinker.ServiceClient, base_url=line.split()[0].partition("=")[2], api_key="tml-bench")
        process = psutil.Process(server.pid)
        print(machine("cpu", ["torch", "transformers", "tinker", "uvicorn"]))
        for name, rows, tokens in (("supervised", 8, 48), ("short", 2, 16), ("rewarded", 4, 24)):
            compare(name, partial(LOOPS[name], rows=rows, tokens=tokens), open_session, process, arguments)
    finally:
        server.terminate()
        server.wait()


def compare(
    name: str, loop: Callable[..., Any], open_session: Callable[[], Any], process: Any, arguments: argparse.Namespace
) -> None:
    """Both ways, the second time counted: the first one fills caches."""
    times, losses = dict[str, tuple[float, float]](), dict[str, list[list[float]]]()
    for steps in (1, arguments.steps):
        for way, threads in (("at once", arguments.clients), ("one after another", 1)):
            service = open_session()
            create = partial(service.create_lora_training_client, base_model=arguments.model, rank=8)
            clients = [create(seed=seed).result() for seed in range(arguments.clients)]
            before, began = sum(process.cpu_times()[:2]), time.perf_counter()
            with ThreadPoolExecutor(threads) as pool:
                losses[way] = list(pool.map(lambda each, many=steps: loop(*each, steps=many), enumerate(clients)))
            times[way] = time.perf_counter() - began, sum(process.cpu_times()[:2]) - before
            service.close("success").result()
    wall, processor = (times["one after another"][k] / times["at once"][k] for k in (0, 1))
    for way, (seconds, used) in times.items():
        print(f"{name}, {way}: {seconds:.1f} s, server's processor {used:.1f} s")
    same = losses["at once"] == losses["one after another"]
    print(f"{name}: {wall:.2f} times the speed, {processor:.2f} times less processor time; same losses: {same}")


def supervised(seed: int, client: Any, *, steps: int, rows: int, tokens: int) -> list[float]:
    """Losses of steps over fixed rows."""
    data = []
    for number in range(rows):
        ids = [(seed * 97 + number * 31 + 7 * place) % 5000 + 10 for place in range(tokens + 1)]
        inputs = {"target_tokens": ids[1:], "weights": [1.0] * tokens}
        data.append(types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs))
    losses = []
    for _ in range(steps):
        found = client.forward_backward(data, "cross_entropy")
        client.optim_step(types.AdamParams(learning_rate=1e-3)).result()
        losses.append(found.result().metrics["loss:sum"])
    return losses


def rewarded(seed: int, client: Any, *, steps: int, rows: int, tokens: int) -> list[float]:
    """Losses of steps over answers that were sampled just before; rewarded are even tokens."""
    prompt, losses = [10 + seed, *range(20, 35)], []
    for step in range(steps):
        sampler = client.save_weights_and_get_sampling_client().result()
        params = types.SamplingParams(max_tokens=tokens, seed=step, stop=[])
        asked = sampler.sample(prompt=types.ModelInput.from_ints(prompt), num_samples=rows, sampling_params=params)
        data, before = [], [0.0] * (len(prompt) - 1)
        for each in asked.result().sequences:
            ids, reward = [*prompt, *each.tokens], sum(token % 2 == 0 for token in each.tokens) / tokens - 0.5
            inputs = {"logprobs": [*before, *each.logprobs], "advantages": [*before, *[reward] * len(each.tokens)]}
            inputs["target_tokens"] = ids[1:]
            data.append(types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs))
        found = client.forward_backward(data, "ppo")
        client.optim_step(types.AdamParams(learning_rate=1e-3)).result()
        losses.append(found.result().metrics["loss:sum"])
    return losses


LOOPS = {"supervised": supervised, "short": supervised, "rewarded": rewarded}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--model", default="starter")
    main(parser.parse_args())
