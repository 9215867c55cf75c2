"""Predictions of `workbench plan` against the bytes of tensors that the same runs hold, as Markdown and JSON.

    python scripts/bench/planner.py --encoder FOLDER --chat FOLDER [--json planner.json] [--only WORD ...]

Every configuration is planned, and then trained for some steps while each storage of torch counts from where it is
made to where it is freed (workbench/planning/counters.py); the weights count too, as stored. --encoder is a
sentence encoder such as all-MiniLM-L6-v2.

Then commands with default settings, probe, evaluations and answers included, but of three steps: `workbench plan`
against the resident memory of `workbench run` at its peak. --chat is a chat model such as SmolLM2-135M-Instruct.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import measuring
from torch._subclasses.fake_tensor import FakeTensor
from transformers import PreTrainedModel

import workbench
from workbench.planning.counters import MemoryLedger
from workbench.planning.dry_run import hold
from workbench.recipes.load import load
from workbench.recipes.verbs.plans.plan import plan
from workbench.training.bank_trainer import BankTrainer
from workbench.training.trainer import Trainer

WHOLE = ["model.id=starter", "distill.student={layers: all}"]
METHODS = {
    "lora": "{method: lora, rank: 16}",
    "dora": "{method: dora, rank: 8}",
    "bottleneck": "{method: houlsby}",
    "prefix": "{method: prefix}",
    "full": "{method: full}",
    "layernorm": "{method: layernorm}",
}
WEIGHTS = ("float32", "bfloat16", "nf4", "int8")
DISTILLATIONS = {
    "half of the layers, full": ["distill.teacher.id=starter"],
    "its own backbone, lora": ["distill.teacher.id=backbone", *WHOLE, "adapter={method: lora, rank: 16}"],
    "nf4 beside bfloat16, lora": [
        "distill.teacher={id: starter, weights: bfloat16}",
        *WHOLE,
        "model.weights=nf4",
        "adapter={method: lora, rank: 16}",
    ],
    "hidden states, bottleneck, checkpointing": [
        "distill.teacher.id=starter",
        "distill.match=[{what: hidden_mse, layers: uniform}]",
        "adapter={method: houlsby}",
        "train.checkpointing=true",
    ],
    "its own backbone, jsd, prefix, 32 rows": [
        "distill.teacher.id=backbone",
        "distill.loss=jsd",
        *WHOLE,
        "adapter={method: prefix}",
        "batch={size: 32, tokens_per_device: 2048}",
    ],
}
"""Overrides of distill/quickstart, whose student has half of the teacher's layers."""
DEFAULTS = ("sft", "embed", "tag", "crossval", "classify", "rerank", "prefer")
"""Recipes whose quickstart is planned and run as it is."""
HELD = """import resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL)
print(1024 * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"""
"""Runs a command and prints its peak: Linux counts the memory of who forks as its child's, and this one is small."""
SHORT = ["train.steps=6", "train.epochs=null", "evaluate.answers=0", "evaluate.every=3", "save.every=null"]


def main() -> None:
    arguments = _arguments()
    rows: list[list[object]] = [["configuration", "planned MB", "measured MB", "error", "planned in s"]]
    errors, found = [], {}
    for name, (recipe, words) in _configurations(arguments.encoder).items():
        if arguments.only and not any(word in name for word in arguments.only):
            continue
        began = time.monotonic()
        planned = plan(load(recipe, [*words, *SHORT])).dry_run.peak
        took = time.monotonic() - began
        measured = _measured(recipe, [*words, *SHORT])
        errors.append(planned / measured - 1)
        found[name] = {"planned": planned, "measured": measured, "seconds": took}
        rows.append([name, f"{planned / 1e6:.1f}", f"{measured / 1e6:.1f}", f"{errors[-1]:+.1%}", f"{took:.1f}"])
        print(" | ".join(str(cell) for cell in rows[-1]), flush=True)
    _summarise(rows, errors)
    rows, errors = [["default settings, 3 steps", "planned MB", "held MB", "error"]], []
    for recipe, words in _defaults(arguments.chat).items():
        name = f"default settings, {recipe}"
        if arguments.only and not any(word in name for word in arguments.only):
            continue
        planned, measured = _commanded(words)
        errors.append(planned / measured - 1)
        found[name] = {"planned": planned, "held": measured}
        rows.append([recipe, f"{planned / 1e6:,.0f}", f"{measured / 1e6:,.0f}", f"{errors[-1]:+.1%}"])
        print(" | ".join(str(cell) for cell in rows[-1]), flush=True)
    _summarise(rows, errors)
    measuring.write_report(arguments, machine=measuring.machine("cpu", ("torch", "transformers", "peft")), found=found)


def _summarise(rows: list[list[object]], errors: list[float]) -> None:
    if not errors:
        return
    print(measuring.markdown(rows))
    print(
        f"Of {len(errors)} configurations: median of the errors' sizes {median(map(abs, errors)):.1%}, worst "
        f"{max(errors, key=abs):+.1%}, lowest {min(errors):+.1%}."
    )


def _defaults(chat: str) -> dict[str, list[str]]:
    """Words of each command with default settings, by name."""
    short = "train.steps=3"
    found = {f"{recipe}/quickstart": [f"{recipe}/quickstart", short] for recipe in DEFAULTS}
    return {**found, "sft/quickstart, chat model": ["sft/quickstart", f"model.id={chat}", short]}


def _commanded(words: list[str]) -> tuple[int, int]:
    """Bytes of a process that `workbench plan` foretells, and that `workbench run` holds at its peak."""
    command = [sys.executable, "-m", "workbench.cli"]
    plan = json.loads(subprocess.run([*command, "plan", *words, "--json"], capture_output=True, check=True).stdout)
    with tempfile.TemporaryDirectory() as folder:
        run = [sys.executable, "-c", HELD, *command, "run", *words, "--out", f"{folder}/run"]
        held = int(subprocess.run(run, capture_output=True, check=True).stdout)
    return plan["bytes"]["peak"] + plan["process_bytes"] + plan["host_bytes"], held


def _configurations(encoder: str) -> dict[str, tuple[str, list[str]]]:
    """Recipe and overrides by name."""
    found: dict[str, tuple[str, list[str]]] = {}
    for weights in WEIGHTS:
        for method, section in METHODS.items():
            if weights in ("float32", "bfloat16") or method in ("lora", "bottleneck", "prefix"):
                words = [f"model.weights={weights}", f"adapter={section}"]
                found[f"starter, {method}, {weights}"] = ("sft/quickstart", words)
    for weights in ("bfloat16", "nf4"):
        for way, name in (("true", ""), ("elementwise", " elementwise"), ("0.5", " half of the blocks")):
            words = [f"model.weights={weights}", f"train.checkpointing={way}"]
            found[f"starter, lora, {weights}, checkpointing{name}"] = ("sft/quickstart", words)
    for size, tokens in ((4, 1024), (32, 4096)):
        words = [f"batch.size={size}", f"batch.tokens_per_device={tokens}"]
        found[f"starter, lora, auto, {size} rows, {tokens} tokens"] = ("sft/quickstart", words)
    found["starter, lora, half frozen"] = (
        "sft/quickstart",
        ["freeze={policy: static, layers: 0.5, cache: 'off'}"],
    )
    for name, words in DISTILLATIONS.items():
        found[f"starter, distillation, {name}"] = ("distill/quickstart", words)
    found["starter, bank of 5 folds, lora"] = ("crossval/quickstart", [])
    found["starter, bank of 8, lora"] = ("sweep/quickstart", [])
    found["starter, bank of 8, lora, bfloat16"] = ("sweep/quickstart", ["model.weights=bfloat16"])
    found["starter, classes, lora"] = ("classify/quickstart", [])
    for method in ("lora", "full"):
        for weights in ("float32", "bfloat16"):
            words = [f"model.id={encoder}", f"model.weights={weights}", f"adapter={METHODS[method]}"]
            found[f"MiniLM, classes, {method}, {weights}"] = ("classify/quickstart", words)
    return found


def _measured(recipe: str, words: list[str]) -> int:
    """The most bytes that training holds, evaluations included."""
    with _counting() as ledgers, tempfile.TemporaryDirectory() as folder:
        workbench.run(recipe, words, out=Path(folder) / "run", quiet=True)
    return max(ledger.peak for ledger in ledgers)


@contextmanager
def _counting() -> Iterator[list[MemoryLedger]]:
    """Inside the block, every training is counted, of one model or of a bank."""
    ledgers: list[MemoryLedger] = []
    with ExitStack() as patches:
        for kind in (Trainer, BankTrainer):
            patches.enter_context(patch.object(kind, "work", _counted(kind.work, ledgers)))
        yield ledgers


def _counted(work: Callable[[Any], None], ledgers: list[MemoryLedger]) -> Callable[[Any], None]:
    def counted(training: Any) -> None:
        with MemoryLedger() as ledger:
            hold(ledger, training, others=_backbones())
            work(training)
        ledgers.append(ledger)

    return counted


def _backbones() -> list[PreTrainedModel]:
    """All that are in memory: a teacher beside its student, too."""
    gc.collect()
    # By its type: some objects warn, or import something, where they are asked what they are.
    models = [each for each in gc.get_objects() if issubclass(type(each), PreTrainedModel)]
    return [each for each in models if not isinstance(next(each.parameters()), FakeTensor)]


def _arguments() -> argparse.Namespace:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--encoder", required=True, help="folder or hub id")
    found.add_argument("--chat", required=True, help="folder or hub id")
    found.add_argument("--only", nargs="*", default=[], help="configurations with one of these words in their name")
    found.add_argument("--json", type=Path, help="a file to write")
    return found.parse_args()


if __name__ == "__main__":
    main()
