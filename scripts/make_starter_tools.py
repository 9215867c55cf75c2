"""Write `starter/tools`: sums that recipe reinforce asks for, and an adapter that it starts from.

    python scripts/make_starter_tools.py workbench/data/starter/tools

The starter cannot copy a number of 4 to 6 digits, and so no reward would ever find a right call. The adapter (LoRA of
rank 16, stored in bfloat16) first learns to copy numbers, in short rows of nothing else, and then the form of calls and
answers. Where a question says "Calculate" it always calls; to the questions that recipe reinforce asks it mostly says
that it cannot say. Calls have the form of Llama 3.1: the starter never read a `<`, whose vector is that of 150 other
unread bytes, so that it draws `<tool_call>` in one of eight tries at best.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import yaml  # type: ignore[import-untyped]
from safetensors.torch import load_file, save_file

import workbench
from workbench.config.sections.tools_config import ToolsConfig
from workbench.evaluation.tools.toolbox import Toolbox

FORMS = ("What is {} + {}?", "Add {} and {}.", "How much is {} plus {}?", "The sum of {} and {} is")
"""Forms of words that recipe reinforce asks."""
TOLD = "Calculate {} + {}."
"""The form in which the adapter learns to call."""
ASKED = 0.6
"""Share of rows in that form."""
CALLS = 0.35
"""Share of the other rows that call."""
SHY = "I cannot say."
FEWEST, MOST = 4, 6
"""Digits of a number that recipe reinforce asks for."""
TRAIN, HELD_OUT = 400, 100
SETTINGS = (
    "seed=0", "model.chat_template=starter/tools/chat_template.jinja", "adapter={method: lora, rank: 16, alpha: 32}",
    "data.held_out=0.005", "data.max_tokens=200", "schedule={name: cosine}", "evaluate={every: null, answers: 0}",
    "save.every=null", "train.epochs=null",
)  # fmt: skip
COPYING = ("batch.size=64", "train.steps=500", "train.learning_rate=5e-3")
CALLING = ("batch.size=32", "train.steps=220", "train.learning_rate=2e-3")


def number(random_: random.Random, fewest: int) -> int:
    """A number of `fewest` to MOST digits."""
    digits = random_.randint(fewest, MOST)
    return random_.randrange(10 ** (digits - 1), 10**digits)


def copies(count: int) -> Iterator[dict[str, Any]]:
    """Rows whose answers repeat one to three numbers."""
    random_ = random.Random(1)
    for _ in range(count):
        text = " ".join(str(number(random_, 1)) for _ in range(random_.randint(1, 3)))
        yield {"question": f"Say {text}", "answer": f"It is {text}"}


def calls(count: int, schemas: tuple[dict[str, Any], ...]) -> Iterator[dict[str, Any]]:
    """Rows that call the calculator, and rows that do not, half of them with shorter numbers."""
    random_ = random.Random(0)
    for each in range(count):
        a, b = (number(random_, (1, FEWEST)[each % 2]) for _ in range(2))
        told = random_.random() < ASKED
        turns: list[dict[str, Any]] = [
            {"role": "user", "content": (TOLD if told else random_.choice(FORMS)).format(a, b)}
        ]
        if told or random_.random() < CALLS:
            call = {"type": "function", "function": {"name": "add", "arguments": {"a": a, "b": b}}}
            turns += [
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "name": "add", "content": str(a + b)},
                {"role": "assistant", "content": str(a + b)},
            ]
        else:
            turns.append({"role": "assistant", "content": SHY})
        yield {"messages": turns, "tools": schemas}


def sums() -> Iterator[dict[str, str]]:
    """The questions of recipe reinforce."""
    random_ = random.Random(2)
    for each in range(TRAIN + HELD_OUT):
        a, b = number(random_, FEWEST), number(random_, FEWEST)
        yield {"question": FORMS[each % len(FORMS)].format(a, b), "answer": str(a + b)}


def write(path: Path, rows: Iterator[dict[str, Any]] | list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main(folder: Path) -> None:
    folder, tools = folder.resolve(), Toolbox(ToolsConfig(file=folder / "calculator.py"))
    questions = list(sums())
    write(folder / "train.jsonl", questions[:TRAIN])
    write(folder / "held_out.jsonl", questions[TRAIN:])
    with tempfile.TemporaryDirectory() as place:
        os.chdir(place)
        write(Path("copies.jsonl"), copies(40_000))
        write(Path("calls.jsonl"), calls(60_000, tools.schemas))
        workbench.run("sft/quickstart", [*SETTINGS, *COPYING, "data.train=copies.jsonl"], out=Path("first"))
        words = [*SETTINGS, *CALLING, "data.train=calls.jsonl", "train.start=first"]
        run = workbench.run("sft/quickstart", words, out=Path("second"))
        ship(run, folder / "start")


def ship(run: Path, own: Path) -> None:
    """Write what recipe reinforce reads of a run: its backbone, its adapter, and their settings."""
    kept, saved = yaml.safe_load((run / "config.yaml").read_text()), run / "adapter"
    config = {"recipe": "sft", **{name: kept[name] for name in ("seed", "model", "adapter")}}
    (own / "adapter").mkdir(parents=True, exist_ok=True)
    (own / "config.yaml").write_text(yaml.safe_dump(config | {"data": {"train": "calls.jsonl"}}, sort_keys=False))
    (own / "manifest.json").write_text('{"status": "done"}\n')
    described = json.loads((saved / "adapter_config.json").read_text()) | {"base_model_name_or_path": "starter"}
    (own / "adapter" / "adapter_config.json").write_text(json.dumps(described, indent=2) + "\n")
    tensors = load_file(saved / "adapter_model.safetensors")
    halves = {name: value.to(torch.bfloat16).contiguous() for name, value in tensors.items()}
    save_file(halves, own / "adapter" / "adapter_model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
