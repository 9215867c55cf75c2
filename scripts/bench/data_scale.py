"""Data of any size: tokens a second against `datasets.map`, memory and time to the first step, near-duplicates.

    python scripts/bench/data_scale.py [--rows 5000000] [--texts 1000000] [--rate-rows 20000] [--only rate]
    python scripts/bench/data_scale.py --only labelled --labelled 1000000

Rows are made from the words of the shipped stories, or of --words FILE: each word follows the one before it as often as
it does there, and every twentieth row is an earlier one with a word changed. Tokenising is pinned to one core, counted
in processor time, and in turns with `datasets.map(batched=True)` and the same tokenizer; both read the same jsonl file
and leave an Arrow file. With masks, the other side asks the chat template for what carries loss, which the workbench
always finds. Imports do not count. Memory is the most that was resident, mapped files included.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from measuring import machine, ratio

from workbench.data import starter
from workbench.data.text.chat import DEFAULT_TEMPLATE

Figures = dict[str, float]

PLANTED = 20
"""One in so many rows is an earlier one with a word changed."""
AT_ONCE = 100_000
MASKS = DEFAULT_TEMPLATE.replace("'Assistant:\\n' }}", "'Assistant:\\n' }}{% generation %}", 1).replace(
    "{{- eos_token }}", "{{- eos_token }}{% endgeneration %}"
)


def main(arguments: argparse.Namespace) -> None:
    print(machine("cpu", ("datasets", "tokenizers", "transformers")), flush=True)
    parts: dict[str, Callable[[argparse.Namespace, Path], None]] = {
        "rate": _rate,
        "memory": _memory,
        "labelled": _labelled,
        "duplicates": _duplicates,
    }
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        for part in [arguments.only] if arguments.only else parts:
            parts[part](arguments, Path(folder))


def _rate(arguments: argparse.Namespace, folder: Path) -> None:
    """Tokens a second on one core, of raw text and of conversations."""
    against = {"text": ["map"], "chat": ["map-with-masks", "map"]}
    for kind, sides in ((kind, against[kind]) for kind in arguments.kinds):
        rows = _rows(arguments.words, arguments.rate_rows, length=80)
        path = _written(folder / f"{kind}.jsonl", rows, kind)
        for theirs in sides:
            speeds: dict[str, list[float]] = {"workbench": [], theirs: []}
            for _ in range(arguments.pairs):
                for side, found in speeds.items():
                    figures = _inside("tokenise", side, kind, str(path), core=True)
                    found.append(figures["tokens"] / figures["cpu_s"])
            ours, other = (median(found) for found in speeds.values())
            print(
                f"{kind}, {arguments.rate_rows:,} rows: {ours:,.0f} tokens a second of one core, "
                f"{theirs} {other:,.0f}: {ratio(*speeds.values())} times",
                flush=True,
            )


def _memory(arguments: argparse.Namespace, folder: Path) -> None:
    """Peak memory of a run over many short rows, and the time from its start to its first step."""
    rows = _written(folder / "rows.jsonl", _rows(arguments.words, arguments.rows, length=8), "text")
    held = _written(folder / "held.jsonl", _rows(arguments.words, 100, length=9, seed=1), "text")
    settings = f"data.train={rows} data.held_out={held} data.format=text data.overlap=drop train.steps=3 batch.size=8"
    for cache in ("cold", "warm"):
        out = folder / cache
        command = f"run sft/quickstart {settings} evaluate.answers=0 --out {out}"
        took_s, peak = _command(command, folder, until=out / "metrics.jsonl")
        print(f"{arguments.rows:,} rows, {cache} cache: first step after {took_s:.1f} s, at most {peak}", flush=True)


def _labelled(arguments: argparse.Namespace, folder: Path) -> None:
    """Time and peak memory of a check of labelled rows, and of a run over them."""
    rows = _classes(folder / "rows.csv", _rows(arguments.words, arguments.labelled, length=9))
    held = _classes(folder / "held.csv", _rows(arguments.words, 200, length=10, seed=1))
    settings = f"classify/quickstart data.train={rows} data.held_out={held} data.overlap=drop train.steps=3"
    took_s, peak = _command(f"check {settings}", folder)
    print(f"{arguments.labelled:,} labelled rows: check in {took_s:.1f} s, at most {peak}", flush=True)
    out = folder / "run"
    took_s, peak = _command(f"run {settings} --out {out}", folder, until=out / "metrics.jsonl")
    print(f"the same, run: first step after {took_s:.1f} s, at most {peak}", flush=True)


def _command(command: str, folder: Path, *, until: Path | None = None) -> tuple[float, str]:
    """Seconds that a command takes, up to when a file is there where one is named, and its peak memory in words."""
    environment, began = os.environ | {"WORKBENCH_CACHE": str(folder / "cache")}, time.monotonic()
    with (folder / "log").open("w") as log:
        whole = [sys.executable, "-m", "workbench.cli", *command.split()]
        process = subprocess.Popen(whole, stdout=log, stderr=log, env=environment)
        while os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            if until is not None and until.exists():
                break
            time.sleep(0.05)
        took_s = time.monotonic() - began
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)  # reaped here, where Popen does not see it
    if status:
        sys.exit((folder / "log").read_text()[-4000:])
    return took_s, f"{usage.ru_maxrss * 1024 / 1e9:.2f} GB resident"


def _duplicates(arguments: argparse.Namespace, folder: Path) -> None:
    """Time and memory of a search for near-duplicates."""
    found = _inside("duplicates", str(arguments.words), str(arguments.texts), core=False)
    print(
        f"{arguments.texts:,} texts of 12 words: near-duplicates in {found['seconds']:.1f} s ({found['cpu_s']:.1f} s "
        f"of processors), {found['pairs']:,.0f} pairs, at most {found['peak_bytes'] / 1e9:.2f} GB resident",
        flush=True,
    )


def _inside(*task: str, core: bool) -> Figures:
    """The figures of a task in a process of its own, on one core or on all."""
    pinned = ["taskset", "-c", str(min(os.sched_getaffinity(0)))] if core else []
    command = [*pinned, sys.executable, __file__, "--task", *task]
    environment = os.environ | {"HF_HUB_OFFLINE": "1"} | ({"TOKENIZERS_PARALLELISM": "false"} if core else {})
    done = subprocess.run(command, capture_output=True, env=environment, check=False)
    if done.returncode:
        sys.exit(done.stderr.decode()[-4000:])
    figures: Figures = json.loads(done.stdout.decode().splitlines()[-1])
    return figures


def _task(name: str, *settings: str) -> Figures:
    """Run one task here, and measure it."""
    tasks: dict[str, Callable[..., Figures]] = {"tokenise": _tokenise, "duplicates": _find}
    found = tasks[name](*settings)
    return {**found, "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}


def _tokenise(side: str, kind: str, path: str) -> Figures:
    import datasets  # noqa: F401 - imports are no part of the rate, of either side
    from transformers import AutoTokenizer

    from workbench.data.text import tokenized  # noqa: F401

    tokenizer = AutoTokenizer.from_pretrained(starter.FOLDER)
    with tempfile.TemporaryDirectory(dir=Path(path).parent) as cache:
        os.environ["WORKBENCH_CACHE"] = cache
        tokenise = _by_workbench if side == "workbench" else _by_map
        began = time.process_time()
        tokens = tokenise(tokenizer, path, kind, side, cache)
        return {"tokens": tokens, "cpu_s": time.process_time() - began}


def _by_workbench(tokenizer: Any, path: str, kind: str, side: str, cache: str) -> int:
    from workbench.config import DataConfig
    from workbench.data.text import tokenized
    from workbench.data.text.chat import ChatEncoder

    found = tokenized.read(path, DataConfig(train=path), tokenizer, ChatEncoder(tokenizer))
    return int(found.lengths.sum())


def _by_map(tokenizer: Any, path: str, kind: str, side: str, cache: str) -> int:
    from datasets import Dataset

    def encoded(batch: dict[str, list[Any]]) -> dict[str, Any]:
        if kind == "text":
            return dict(tokenizer(batch["text"], verbose=False))
        masks = side == "map-with-masks"
        template = MASKS if masks else DEFAULT_TEMPLATE
        return dict(
            tokenizer.apply_chat_template(
                batch["messages"], chat_template=template, return_dict=True, return_assistant_tokens_mask=masks
            )
        )

    rows: Any = Dataset.from_json(path, cache_dir=cache)
    found = rows.map(encoded, batched=True, remove_columns=rows.column_names)
    return sum(map(len, found["input_ids"]))


def _find(words: str, count: str) -> Figures:
    from workbench.data.folds import duplicates

    texts = list(_rows(Path(words), int(count), length=12))
    began, cpu = time.perf_counter(), time.process_time()
    found = duplicates.find(texts)
    took = {"seconds": time.perf_counter() - began, "cpu_s": time.process_time() - cpu}
    return {**took, "pairs": len(found.pairs_P2)}


def _rows(words: Path, count: int, *, length: int, seed: int = 0) -> Iterator[str]:
    """Texts in which each word follows the one before as in the file; one in PLANTED repeats an earlier one."""
    text = re.findall(r"[\w',.!?;]+", words.read_text(encoding="utf-8"))
    known = {word: number for number, word in enumerate(dict.fromkeys(text))}
    number = np.array([known[word] for word in text])
    # Where each word stands, sorted by word: the word after a random one of its places follows.
    places, count_V = np.argsort(number[:-1], kind="stable"), np.bincount(number[:-1], minlength=len(known))
    first_V = np.cumsum(count_V) - count_V
    names = np.array(list(known), dtype=object)
    rng = np.random.default_rng(seed)
    for start in range(0, count, AT_ONCE):
        chosen = number[rng.integers(len(number), size=(min(AT_ONCE, count - start), length))]
        for at in range(1, length):
            before = chosen[:, at - 1]
            follows = first_V[before] + rng.integers(np.maximum(1, count_V[before]))
            chosen[:, at] = number[places[np.minimum(follows, len(places) - 1)] + 1]
        copies = np.arange(PLANTED - 1, len(chosen), PLANTED)
        chosen[copies] = chosen[copies - PLANTED // 2]
        chosen[copies, rng.integers(length, size=len(copies))] = rng.integers(len(names), size=len(copies))
        for row in names[chosen]:
            yield " ".join(row)


def _written(path: Path, rows: Iterator[str], kind: str) -> Path:
    """The rows as a jsonl file of raw text, or of conversations that ask with a third of the words."""
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            cut = len(row) // 3
            asked, said = {"role": "user", "content": row[:cut]}, {"role": "assistant", "content": row[cut:]}
            file.write(json.dumps({"text": row} if kind == "text" else {"messages": [asked, said]}) + "\n")
    return path


def _classes(path: Path, rows: Iterator[str]) -> Path:
    """The rows as a csv file, with 20 classes in turn."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "label"])
        writer.writerows((row, f"class {number % 20}") for number, row in enumerate(rows))
    return path


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000, help="short rows of the run")
    parser.add_argument("--labelled", type=int, default=50_000, help="labelled rows of the check and of a run")
    parser.add_argument("--texts", type=int, default=50_000, help="texts among which near-duplicates are found")
    parser.add_argument("--rate-rows", type=int, default=5_000, help="rows that are tokenised on one core")
    parser.add_argument("--pairs", type=int, default=2, help="runs of each side of the rate")
    parser.add_argument("--kinds", nargs="+", choices=("text", "chat"), default=["text", "chat"], help="of the rate")
    parser.add_argument("--words", type=Path, default=starter.FOLDER / "fairytaleqa_train.jsonl")
    parser.add_argument("--only", choices=("rate", "memory", "labelled", "duplicates"))
    parser.add_argument("--folder", type=Path, help="where files of the benchmark stand, instead of the temporary ones")
    parser.add_argument("--task", nargs="+", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.task:
        print(json.dumps(_task(*chosen.task)))
    else:
        main(chosen)
