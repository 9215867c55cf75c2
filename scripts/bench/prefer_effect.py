"""Preferences after SFT: how often held-out pairs are judged as people did, by the SFT model and after DPO from it.

    python scripts/bench/prefer_effect.py PAIRS [PAIRS ...] [--seeds 0 1 2] [key=value ...]
    python scripts/bench/prefer_effect.py PAIRS --model CHAT_MODEL --start backbone    # which went through SFT

PAIRS are files of judged answers in any form that recipe prefer reads. Their prompts are cut into four parts; seed s
holds out the s-th, so that no pair is held out twice, trains SFT on the chosen answers of the others, and DPO from that
adapter on their pairs, by the settings of prefer/quickstart. `key=value` words are for both. Prints two accuracies on
held-out pairs with Wilson's 95 % intervals: of rewards (log-ratios to the SFT model, which tells no pair apart by
itself: 0.5), and of likelihoods per token, of which the SFT model has its own.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import measuring

import workbench
from workbench.config import DataConfig
from workbench.data.text import formats, preference_pairs
from workbench.data.text.formats import Example
from workbench.evaluation import metrics

PARTS = 4
BOTH = (
    "data.truncate=right",
    "data.max_tokens=512",
    "data.on_bad_row=skip",
    "data.overlap=drop",
    "evaluate.answers=0",
    "evaluate.every=null",
    "save.every=null",
)
SFT = ("train.epochs=2",)
Row = dict[str, Any]


def main(arguments: argparse.Namespace) -> None:
    print(measuring.machine("cpu", ("torch", "transformers", "peft")))
    rows = [_row(example) for path in arguments.pairs for example in _read(path)]
    prompts = sorted({_prompt(row) for row in rows})
    random.Random(0).shuffle(prompts)
    print(f"{len(rows)} pairs to {len(prompts)} prompts from {', '.join(Path(path).name for path in arguments.pairs)}")
    hits = {"reward": 0, "likelier before": 0, "likelier after": 0}
    count = 0
    for seed in arguments.seeds:
        began = time.process_time()
        held_out = set(prompts[seed::PARTS])
        scores, own = _train(arguments, rows, held_out, seed)
        found = {
            "reward": scores["after"]["accuracy"],
            "likelier before": scores["before"]["likelier"],
            "likelier after": scores["after"]["likelier"],
        }
        for name, share in found.items():
            hits[name] += round(share * own)
        count += own
        shown = ", ".join(f"{name} {share:.3f}" for name, share in found.items())
        print(f"seed {seed}: {own} held-out pairs, {shown}; {time.process_time() - began:.0f} s of a core", flush=True)
        _show(hits, count)


def _read(path: str) -> list[Example]:
    config = DataConfig(train=path, on_bad_row="skip")
    return list(formats.read(path, config, skipped=[], conversion=preference_pairs.convert))


def _row(example: Example) -> Row:
    """A pair as recipe prefer reads it."""
    assert example.rejected is not None and example.messages, "pairs of conversations are compared"
    *before, chosen = ({key: turn[key] for key in ("role", "content")} for turn in example.messages)
    rejected = {key: example.rejected.messages[-1][key] for key in ("role", "content")}
    return {"messages": before, "chosen": chosen, "rejected": rejected}


def _prompt(row: Row) -> str:
    return json.dumps(row["messages"], sort_keys=True)


def _train(
    arguments: argparse.Namespace, rows: list[Row], held_out: set[str], seed: int
) -> tuple[Mapping[str, Any], int]:
    """Scores of both models, and how many pairs were held out; some prompts are too long."""
    folder = arguments.out / f"seed-{seed}"
    folder.mkdir(parents=True)
    sides = {"train": [row for row in rows if _prompt(row) not in held_out]}
    sides["held_out"] = [row for row in rows if _prompt(row) in held_out]
    for side, own in sides.items():
        _write(folder / f"{side}_pairs.jsonl", own)
        good = {json.dumps({"messages": [*row["messages"], row["chosen"]]}): None for row in own}
        (folder / f"{side}_good.jsonl").write_text("\n".join(good) + "\n")
    words = [*BOTH, f"model.id={arguments.model}", f"seed={seed}"]
    dpo = [*_files(folder, "pairs"), *words]
    if arguments.start == "sft":
        sft = [*_files(folder, "good"), *words, *SFT, *arguments.overrides]
        run = workbench.run("sft/quickstart", sft, out=folder / "sft", quiet=True)
        dpo += ["prefer.reference=null", f"prefer.start={run}"]
    run = workbench.run("prefer/quickstart", [*dpo, *arguments.overrides], out=folder / "dpo", quiet=True)
    scores, manifest = (json.loads((run / name).read_text()) for name in ("scores.json", "manifest.json"))
    return scores, int(manifest["data"]["held_out"]["rows"]) // 2  # of a pair, two answers


def _files(folder: Path, kind: str) -> list[str]:
    return [f"data.train={folder}/train_{kind}.jsonl", f"data.held_out={folder}/held_out_{kind}.jsonl"]


def _write(path: Path, rows: list[Row]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _show(hits: Mapping[str, int], count: int) -> None:
    for name, own in hits.items():
        found = metrics.accuracy_interval(own, count)
        print(f"  {name:16} {own:4} of {count}: {found.mean:.3f} ({found.low:.3f} to {found.high:.3f})", flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pairs", nargs="+", help="files of judged answers, then key=value words")
    parser.add_argument("--model", default="starter", help="folder of a causal backbone")
    parser.add_argument("--start", default="sft", choices=("sft", "backbone"), help="of DPO: SFT of it, or as it is")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], choices=range(PARTS))
    parser.add_argument("--out", type=Path, default=Path("runs/prefer-effect"))
    arguments = parser.parse_intermixed_args()
    arguments.overrides = [word for word in arguments.pairs if "=" in word]
    arguments.pairs = [word for word in arguments.pairs if "=" not in word]
    return arguments


if __name__ == "__main__":
    main(_arguments())
