"""Fine-tune the quickstart with every adapter method and print one table: loss, size, speed, memory.

    python scripts/bench/methods.py                              # every method, 60 steps each
    python scripts/bench/methods.py lora ia3 --steps 30 --markdown table.md

Same backbone, rows, steps and batch; the learning rate is each method's own (RATES). Every run is a process of its
own, one after the other. `lora` runs first and last as well: how far its two speeds are apart says how far any two
rows can be compared on this machine.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from workbench.adapters import METHODS

RATE = 2e-3
RATES = {
    "adalora": 1e-2,
    "block-expansion": 1e-3,
    "full": 5e-4,
    "ia3": 2e-2,
    "last-layers": 1e-3,
    "layernorm": 1e-2,
    "lora-ga": 5e-4,
    "linear-probe": 1e-3,
    "p-tuning": 1e-2,
    "p-tuning-v2": 1e-1,
    "prefix": 5e-3,
    "prompt": 3e-2,
    "vera": 2e-2,
}
"""Peak learning rates where RATE, which suits LoRA of this backbone, is not a good one; by a run or two, not tuned."""
OVER = {"glora": "bfloat16", "loftq": "nf4"}
"""Weights of the backbone, for methods that need others than the quickstart's."""
COLUMNS = ("method", "learning rate", "held-out loss", "trainable", "share", "tokens/s", "peak GB", "adapter KB")


class Result(NamedTuple):
    """One run, as its directory tells it."""

    method: str
    rate: float
    before: float
    """Held-out loss of the backbone, nats per token."""
    after: float
    """Held-out loss of the saved adapter, loaded again."""
    trainable: int
    total: int
    tokens_per_second: float
    """Median over the steps after the first two."""
    peak_bytes: int
    """Most memory resident in the process."""
    adapter_bytes: int
    """Size of the weights' files in adapter/."""


def main() -> None:
    arguments = _arguments()
    names = arguments.methods or ["lora", *sorted(METHODS), "lora"]
    results = []
    with tempfile.TemporaryDirectory(prefix="bench-methods-") as folder:
        for number, name in enumerate(names):
            found = _measure(name, Path(folder) / f"{number}", arguments)
            if found is not None:
                results.append(found)
                print(*_cells(found), sep="  ", flush=True)
    table = _markdown(results)
    print("", table, sep="\n")
    if arguments.markdown:
        arguments.markdown.write_text(table + "\n", encoding="utf-8")
    worse = [result.method for result in results if result.after >= result.before]
    if worse:
        sys.exit(f"The held-out loss did not fall: {', '.join(worse)}.")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("methods", nargs="*", choices=[*METHODS, []], help="all of them where none is named")
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps of 16 examples")
    parser.add_argument("--overrides", nargs="*", default=[], metavar="KEY=VALUE", help="of `workbench run`")
    parser.add_argument("--markdown", type=Path, help="write the table to this file")
    return parser.parse_args()


def _measure(method: str, out: Path, arguments: argparse.Namespace) -> Result | None:
    """None where the method does not work on this backbone: it says why."""
    rate = RATES.get(method, RATE)
    settings = {
        "adapter.method": method,
        "train.steps": arguments.steps,
        "train.learning_rate": rate,
        "evaluate.every": "null",
        "evaluate.answers": 0,
        "model.weights": OVER.get(method, "auto"),
    }
    words = [f"{key}={value}" for key, value in settings.items()]
    command = [sys.executable, "-m", "workbench.cli.verbs", "run", "sft/quickstart", *words, *arguments.overrides]
    done = subprocess.run([*command, "--out", str(out)], capture_output=True, text=True)
    if done.returncode == 2:
        print(f"{method}: {done.stderr.strip()}")
        return None
    if done.returncode:
        sys.exit(f"{method}: exit {done.returncode}\n{done.stderr[-2000:]}")
    scores, manifest = (_json(out / name) for name in ("scores.json", "manifest.json"))
    steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return Result(
        method=method,
        rate=rate,
        before=scores["before"]["loss"],
        after=scores["after"]["loss"],
        trainable=manifest["model"]["trainable"],
        total=manifest["model"]["parameters"],
        tokens_per_second=median(step["tokens_per_second"] for step in steps[2:]),
        peak_bytes=manifest["peak_bytes"],
        adapter_bytes=sum(path.stat().st_size for path in (out / "adapter").glob("*model*.safetensors")),
    )


def _json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _cells(result: Result) -> list[str]:
    return [
        result.method,
        f"{result.rate:g}",
        f"{result.before:.3f} to {result.after:.3f}",
        f"{result.trainable:,}",
        f"{result.trainable / result.total:.2%}",
        f"{result.tokens_per_second:,.0f}",
        f"{result.peak_bytes / 1e9:.2f}",
        f"{result.adapter_bytes / 1e3:,.0f}",
    ]


def _markdown(results: list[Result]) -> str:
    ordered = sorted(results, key=lambda result: result.after)
    rows = [COLUMNS, tuple("---" for _ in COLUMNS), *map(_cells, ordered)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


if __name__ == "__main__":
    main()
