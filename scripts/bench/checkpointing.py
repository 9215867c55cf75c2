"""Time and bytes of a training step for each way to keep activations, step by step in turns: a table.

    python scripts/bench/checkpointing.py --llama FOLDER [--rounds 4] [--json checkpointing.json]

--llama is a model that random_llama.py wrote. One training of sft/quickstart takes the same step in every way of
`train.checkpointing`, so that whoever else uses the machine slows all ways alike: of each step's processor time the
ratio to that of the step without recomputing counts. The bytes are those of the tensors that the step makes and holds
at its peak, weights and the optimizer left out; the gradients of every way must be equal to the last bit.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import measuring
import torch
from torch import Tensor, nn

from workbench.config.sections.basic_sections import Checkpointing
from workbench.planning.counters import LiveBytes
from workbench.recipes.load import load
from workbench.training import activation_checkpointing
from workbench.training.trainer import Trainer

WAYS: tuple[Checkpointing, ...] = (False, "elementwise", 0.5, True)
WEIGHTS = ("bfloat16", "nf4")
SHORT = ["data.limit=80", "evaluate.answers=0", "evaluate.every=null", "batch={size: 4, tokens_per_device: 1024}"]


class Found(NamedTuple):
    """One way's figures."""

    peak: int
    """Bytes that a step makes and holds at once."""
    share: float
    """Processor time as a share of that of a step without recomputing, the median of several."""
    equal: bool
    """Whether its gradients are those without recomputing, to the last bit."""


def main() -> None:
    arguments = _arguments()
    rows: list[list[object]] = [["weights", "train.checkpointing", "peak MB", "bytes", "time", "gradients"]]
    found = {}
    for weights in WEIGHTS:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as own:
            ways = own.submit(_measured, arguments.llama, weights, arguments.rounds).result()
        for way, figures in ways.items():
            cells = [f"{figures.peak / 1e6:.1f}", f"{figures.peak / ways['False'].peak:.0%}", f"{figures.share:.3f}"]
            rows.append([weights, way.lower(), *cells, "equal" if figures.equal else "other"])
            print(" | ".join(map(str, rows[-1])), flush=True)
        found[weights] = {way: figures._asdict() for way, figures in ways.items()}
    print(measuring.markdown(rows))
    measuring.write_report(arguments, machine=measuring.machine("cpu", ("torch", "transformers", "peft")), found=found)


def _measured(llama: str, weights: str, rounds: int) -> dict[str, Found]:
    config = load("sft/quickstart", [f"model={{id: {llama}, weights: {weights}}}", *SHORT])
    found: dict[str, Found] = {}

    measuring.intercepted(config, lambda fit: found.update(_of_training(fit, rounds)))
    return found


def _of_training(fit: Trainer, rounds: int) -> dict[str, Found]:
    fit.freezer.follow(step=0, share=0.0)
    fit.prepare()
    rows = fit.member.batch()
    peaks: dict[str, int] = {}
    gradients: dict[str, list[Tensor]] = {}
    seconds: dict[str, list[float]] = defaultdict(list)

    def step(way: Checkpointing) -> None:
        _keep(fit.freezer.backbone, way)
        for master in fit.masters:
            master.grad = None
        fit.gradients(rows, step=0)

    with torch.no_grad():
        for master in fit.masters:
            master.add_(torch.randn_like(master), alpha=0.01)  # a fresh adapter has no gradient for half of its weights
    fit.masters.refresh()
    for way in WAYS:
        with LiveBytes() as alive:
            step(way)
        peaks[str(way)] = alive.peak
        gradients[str(way)] = [master.grad.clone() for master in fit.masters if master.grad is not None]
    for _ in range(rounds):
        for way in WAYS:
            began = time.process_time()
            step(way)
            seconds[str(way)].append(time.process_time() - began)
    base = seconds["False"]
    return {
        way: Found(
            peak,
            median(own / plain for own, plain in zip(seconds[way], base, strict=True)),
            all(map(torch.equal, gradients[way], gradients["False"])),
        )
        for way, peak in peaks.items()
    }


def _keep(backbone: nn.Module, way: Checkpointing) -> None:
    modules: Iterable[Any] = backbone.modules()
    for module in modules:
        if hasattr(module, "gradient_checkpointing"):
            module.gradient_checkpointing = False
    activation_checkpointing.keep(backbone, way)


def _arguments() -> argparse.Namespace:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--llama", required=True, help="folder of a causal model")
    found.add_argument("--rounds", type=int, default=4, help="steps that are timed in each way")
    found.add_argument("--json", type=Path, help="a file to write")
    return found.parse_args()


if __name__ == "__main__":
    main()
