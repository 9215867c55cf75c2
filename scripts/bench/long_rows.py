"""Bytes of live tensors by the tokens of a row, planned and held, and the time of a step, as Markdown.

    python scripts/bench/long_rows.py [--tokens 2048 4096 8192] [--timed 4096] [--rounds 3]

A small Llama with random weights in bfloat16 learns a row of so many tokens, all of which have loss (LoRA of rank 8 on
all linear layers): as it is, with activations recomputed, and with MLPs in tiles besides. A step is planned, and then
taken twice while each storage of torch counts. Times are processor seconds of the gradients of one row, ways in turn.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import measuring
import numpy as np
import torch
from random_llama import _shape
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from workbench.config import RunConfig
from workbench.data import starter
from workbench.models import backbones
from workbench.planning.counters import MemoryLedger
from workbench.planning.dry_run import hold
from workbench.recipes.load import load
from workbench.recipes.task import implementation
from workbench.recipes.tasks.sft.text_run import TextRun
from workbench.recipes.verbs.plans import longest_rows, plan, plan_parts
from workbench.training.trainer import Trainer

SHAPE = _shape(2, 192, 3072, 6, 2, 8192, tied=True)
WAYS = {
    "as it is": ["train.checkpointing=false", "train.mlp_tile=null"],
    "recomputed": ["train.checkpointing=true", "train.mlp_tile=null"],
    "recomputed, tiles": ["train.checkpointing=true", "train.mlp_tile=auto"],
}
SETTINGS = [
    *("adapter={method: lora, rank: 8, targets: all-linear}", "model.weights=bfloat16", "model.compute=bfloat16"),
    *("batch.size=1", "train={epochs: null, steps: 2}", "evaluate={every: null, answers: 0}", "save.every=null"),
    "data.limit=20",
]


def main() -> None:
    arguments = _arguments()
    with tempfile.TemporaryDirectory() as folder:
        _write_model(Path(folder), most=max(*arguments.tokens, arguments.timed))
        print(measuring.markdown(_bytes(folder, arguments.tokens)), flush=True)
        print(measuring.markdown(_seconds(folder, arguments.timed, arguments.rounds)))


def _write_model(folder: Path, *, most: int) -> None:
    tokenizer = AutoTokenizer.from_pretrained(starter.FOLDER)
    config = LlamaConfig(**SHAPE, max_position_embeddings=most, pad_token_id=tokenizer.pad_token_id)
    config.dtype = torch.bfloat16
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)  # type: ignore[arg-type]
    tokenizer.save_pretrained(folder)


def _config(folder: str, tokens: int, words: list[str]) -> RunConfig:
    own = [f"model.id={folder}", *SETTINGS, f"batch.tokens_per_device={tokens}"]
    return load("sft/quickstart", [*own, *words])


def _bytes(folder: str, lengths: list[int]) -> list[list[object]]:
    """Planned and held bytes of each way and length, and what a further token takes."""
    rows: list[list[object]] = [["way", "tokens", "planned MB", "held MB", "error", "KiB a further token"]]
    for name, words in WAYS.items():
        before: tuple[int, int] | None = None
        for tokens in lengths:
            config = _config(folder, tokens, words)
            planned = sum(plan.of_row(config, tokens).dry_run.at_peak.values())
            with _training(config, tokens) as fit:
                held = _held(fit)
            slope = "" if before is None else f"{(held - before[1]) / (tokens - before[0]) / 1024:.1f}"
            error = f"{planned / held - 1:+.1%}"
            rows.append([name, f"{tokens:,}", f"{planned / 1e6:.1f}", f"{held / 1e6:.1f}", error, slope])
            print(" | ".join(map(str, rows[-1])), flush=True)
            before = tokens, held
    return rows


def _held(fit: Trainer) -> int:
    """The most bytes that two steps hold, weights included."""
    row = np.arange(1)
    with MemoryLedger() as ledger:
        hold(ledger, fit)
        for step in range(2):
            fit.gradients(row, step=step)
            fit.member.clip(row)
            fit.member.update(1.0, 1.0, row)
    return ledger.peak


def _seconds(folder: str, tokens: int, rounds: int) -> list[list[object]]:
    """Processor seconds of the gradients of a row, and their ratio to those of the way before, in turn."""
    seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    for _ in range(rounds):
        for name, words in WAYS.items():
            with _training(_config(folder, tokens, words), tokens) as fit:
                fit.gradients(np.arange(1), step=0)
                began = time.process_time()
                fit.gradients(np.arange(1), step=0)
                seconds[name].append(time.process_time() - began)
    rows: list[list[object]] = [["way", "tokens", "processor s", "to the way before"]]
    earlier: list[float] | None = None
    for name, found in seconds.items():
        ratios = [] if earlier is None else [a / b for a, b in zip(found, earlier, strict=True)]
        ratio = f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})" if ratios else ""
        rows.append([name, f"{tokens:,}", f"{median(found):.2f}", ratio])
        earlier = found
    return rows


@contextmanager
def _training(config: RunConfig, tokens: int) -> Iterator[Trainer]:
    """The training of one row, ready for its first step."""
    with tempfile.TemporaryDirectory() as folder, plan_parts.planned_run(config, Path(folder)) as run:
        prepared = implementation(config).dry(config, run)
        assert isinstance(prepared.single, TextRun)
        single = longest_rows.with_row(prepared.single, tokens)
        backbone = backbones.load(config.model, single.tokenizer)
        freezer = plan_parts.attached(backbone, config, single.data.train)
        fit = single.trainer(backbone, freezer, prepared.assemble(single, freezer.model, backbone))
        fit.prepare()
        freezer.follow(step=0, share=0)
        yield fit


def _arguments() -> argparse.Namespace:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--tokens", nargs="*", type=int, default=[2048, 4096, 8192], help="of the rows")
    found.add_argument("--timed", type=int, default=4096, help="tokens of the row whose step is timed")
    found.add_argument("--rounds", type=int, default=3, help="times that each way is timed, in turn")
    return found.parse_args()


if __name__ == "__main__":
    main()
