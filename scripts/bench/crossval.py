"""Train the folds of a cross-validation as a bank, one after another, and with transformers' Trainer; print the ratios.

    python scripts/bench/crossval.py --model FOLDER --rows banking77/train.csv
    python scripts/bench/crossval.py --model FOLDER --rows train.csv --weights nf4 --pairs 3 --json folds.json
    python scripts/bench/crossval.py --model random:100m --rows train.csv --limit 200    # a Llama with random weights
    python scripts/bench/crossval.py --model FOLDER --rows train.csv --freeze 0.5 --epochs 5 --against Trainer
    python scripts/bench/crossval.py --model FOLDER --rows train.csv --weights bfloat16 --against Trainer plain default

Arms in turn, each in processes of its own, on the same rows and folds:
bank        all folds at once over one frozen backbone
sequential  the folds one after another, over one loaded backbone
one         fold 0 alone, with as many rows a step as all members of the bank together: what a step's memory is held to
Trainer     peer_trainer.py with PEFT, a process for each fold, in the precision of ours, rows grouped by length
plain       the same, rows in random order, which is the Trainer's own default
default     the same in float32, which is the Trainer's own default, rows in random order
grouped     the same in float32, rows grouped by length

LoRA of the same rank on the same layers, the same steps of as many rows, the backbone's dropout off; every arm scores
the rows that its folds held out. All arms but `one` must see the same number of tokens and train the same number of
parameters, or no ratio is printed. With --freeze ours train fewer: the first blocks have no adapter, and what they give
for a row is kept in memory; the Trainer stays as it is.
"""

from __future__ import annotations

import argparse
import csv
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import measuring
from measuring import Ratio, Usage

HERE = Path(__file__).parent
PEERS = {"Trainer": (False, False), "plain": (True, False), "default": (True, True), "grouped": (False, True)}
"""Whether the Trainer draws rows in random order, and whether it computes in float32 whatever ours does."""
ARMS = ("bank", "sequential", "one", *PEERS)
TARGETS = {"time": 0.35, "memory": 1.15}
"""Wall time of the bank through the Trainer's, and its peak memory through that of `one`."""


@dataclass(frozen=True)
class Result:
    """One arm: its processes together, measured from outside and by what they say."""

    arm: str
    wall_s: float
    """Whole processes: imports, loading, tokenising, training, scoring, saving."""
    cpu_s: float
    """Processor time of the same; on a busy machine it says more than the wall."""
    train_s: float
    """Training alone."""
    train_cpu_s: float
    """Processor time of the same."""
    peak_bytes: int
    """Most memory of one process: resident; on a GPU what torch had allocated there."""
    tokens: int
    """Trained on, without padding."""
    trainable: int
    """Parameters of one fold."""
    accuracy: float
    """Accuracy on the rows that the folds held out."""
    losses: list[float]
    """Losses of each step of fold 0."""


def main() -> None:
    arguments = _arguments()
    print(machine := measuring.machine(arguments.device, ("torch", "transformers", "peft")))
    with tempfile.TemporaryDirectory(prefix="bench-crossval-") as name:
        folder = Path(name)
        model = _prepare(folder, arguments)
        targets = _targets(model)
        results: list[Result] = []
        for number, arm in enumerate(("bank", *arguments.against) * arguments.pairs):
            out = folder / f"run{number}"
            out.mkdir()
            if arm in PEERS:
                results.append(_trainer(arm, model, targets, out, arguments))
            else:
                results.append(_ours(arm, model, out, arguments))
            print(_line(results[-1]) if number else f"{_HEADER}\n{_line(results[-1])}", flush=True)
            _require_same_work(results, frozen=arguments.freeze is not None)
    fields = ("wall_s", "cpu_s", "train_s", "train_cpu_s", "peak_bytes")
    ratios = {field: _ratios(results, field, arguments.against) for field in fields}
    print(*_summary(ratios, arguments), sep="\n")
    measuring.write_report(arguments, machine=machine, runs=results, ratios=ratios)


def _arguments() -> argparse.Namespace:
    parser = measuring.parser(__doc__)
    parser.add_argument("--model", required=True, help="folder or hub id; random:100m, random:1b or random:8b")
    parser.add_argument("--rows", type=Path, required=True, help="csv with a column `text` and the label's")
    parser.add_argument("--label", default="category", help="column with the class")
    parser.add_argument("--limit", type=int, default=1000, help="rows taken, evenly from the whole file")
    parser.add_argument("--folds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=1, help="whole ones, so that all arms see the same rows")
    parser.add_argument("--batch", type=int, default=32, help="rows of a step of a fold")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--weights", choices=("float32", "bfloat16", "nf4"), default="float32")
    parser.add_argument(
        "--compute", choices=("float32", "bfloat16"), help="of all arms; by default what the device has units for"
    )
    parser.add_argument("--tokens", type=int, help="of a micro-batch of ours; by default as the workbench decides")
    parser.add_argument("--freeze", type=float, help="share of the blocks that ours freeze and keep the outputs of")
    parser.add_argument(
        "--against", nargs="+", choices=ARMS[1:], default=ARMS[1:4], help="arms that the bank is compared with"
    )
    arguments = parser.parse_args()
    if arguments.compute is None:
        units = arguments.device == "cuda" or measuring.has_bfloat16_units()
        arguments.compute = "bfloat16" if units and arguments.weights != "float32" else "float32"
    return arguments


def _prepare(folder: Path, arguments: argparse.Namespace) -> str:
    """Write rows.csv with a column `fold`, each class dealt evenly; returns the backbone's folder."""
    with arguments.rows.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    count = min(arguments.limit, len(rows))
    rows = [rows[number * len(rows) // count] for number in range(count)]
    rows.sort(key=lambda row: row[arguments.label])
    with (folder / "rows.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, ["text", arguments.label, "fold"], extrasaction="ignore")
        writer.writeheader()
        writer.writerows(row | {"fold": number % arguments.folds} for number, row in enumerate(rows))
    model: str = arguments.model
    if model.startswith("random:"):
        shape, model = model.removeprefix("random:"), str(folder / "model")
        command = [sys.executable, str(HERE / "random_llama.py"), shape, model, arguments.device]
        measuring.run(command, folder / "model.log", arguments.device)
    return model


def _targets(model: str) -> list[str]:
    """The layers that get an adapter: PEFT's own all-linear adds BERT's pooler, which ours leaves alone."""
    from workbench.adapters import Lora
    from workbench.config import ModelConfig
    from workbench.config.model_heads import classes
    from workbench.models import backbones

    return Lora().modules(backbones.skeleton(ModelConfig(id=model), task=classes(("a", "b"), seed=0)))


def _shared(arguments: argparse.Namespace) -> list[str]:
    """Settings that ours and the peer's script call the same."""
    named = ("label", "rank", "lr", "epochs", "max_tokens", "weights", "compute")
    words = [word for name in named for word in (f"--{name.replace('_', '-')}", str(getattr(arguments, name)))]
    return [*words, "--alpha", str(2 * arguments.rank)]


def _ours(arm: str, model: str, out: Path, arguments: argparse.Namespace) -> Result:
    rows = arguments.batch * (arguments.folds if arm == "one" else 1)
    command = [sys.executable, str(HERE / "our_folds.py"), arm, model, str(out.parent / "rows.csv"), str(out / "runs")]
    command += ["--folds", str(arguments.folds), "--batch", str(rows), *_shared(arguments)]
    for name in ("tokens", "freeze"):
        if value := getattr(arguments, name):
            command += [f"--{name}", str(value)]
    usage = measuring.run(command, out / "log", arguments.device)
    return _result(arm, [(usage, measuring.last_line(out / "log"))], arguments)


def _trainer(arm: str, model: str, targets: Sequence[str], out: Path, arguments: argparse.Namespace) -> Result:
    plain, in_float32 = PEERS[arm]
    done = []
    for fold in range(arguments.folds):
        command = [sys.executable, str(HERE / "peer_trainer.py"), model, str(out.parent / "rows.csv")]
        command += ["--fold", f"{fold}/{arguments.folds}", "--no-dropout", "--targets", ",".join(targets)]
        command += ["--batch", str(arguments.batch), "--seed", str(fold), "--out", str(out / f"fold-{fold}")]
        command += ["--plain"] if plain else []
        log, precision = out / f"log-{fold}", ["--weights", "float32", "--compute", "float32"] if in_float32 else []
        usage = measuring.run([*command, *_shared(arguments), *precision], log, arguments.device)
        done.append((usage, measuring.last_line(log)))
    return _result(arm, done, arguments)


def _result(arm: str, done: Sequence[tuple[Usage, dict[str, Any]]], arguments: argparse.Namespace) -> Result:
    usages, said = [usage for usage, _ in done], [each for _, each in done]
    held = sum(each["held_out_rows"] for each in said)
    return Result(
        arm=arm,
        wall_s=sum(usage.wall_s for usage in usages),
        cpu_s=sum(usage.cpu_s for usage in usages),
        train_s=sum(each["train_s"] for each in said),
        train_cpu_s=sum(each["train_cpu_s"] for each in said),
        peak_bytes=max(
            usage.peak_bytes if arguments.device == "cpu" else each["peak_bytes"]
            for usage, each in zip(usages, said, strict=True)
        ),
        tokens=sum(each["tokens"] for each in said),
        trainable=said[0]["trainable"],
        accuracy=sum(each["accuracy"] * each["held_out_rows"] for each in said) / held,
        losses=said[0]["losses"],
    )


def _require_same_work(results: Sequence[Result], *, frozen: bool) -> None:
    counts = {each.arm: (each.tokens, 0 if frozen else each.trainable) for each in results if each.arm != "one"}
    if len(set(counts.values())) > 1:
        sys.exit(f"not the same work, so no ratio (tokens, trainable parameters of a fold): {counts}")


def _ratios(results: Sequence[Result], field: str, others: Sequence[str]) -> dict[str, Ratio]:
    """The bank through each of the other arms."""
    values = {arm: [float(getattr(each, field)) for each in results if each.arm == arm] for arm in ARMS}
    return {arm: measuring.ratio(values["bank"], values[arm]) for arm in others}


_HEADER = (
    f"{'':10} {'wall s':>8} {'cpu s':>8} {'training s':>10} {'tokens/s':>9} {'peak GB':>8} {'tokens':>9} "
    f"{'accuracy':>8} {'last loss':>9}"
)


def _line(result: Result) -> str:
    return (
        f"{result.arm:10} {result.wall_s:8.1f} {result.cpu_s:8.1f} {result.train_s:10.1f} "
        f"{result.tokens / result.train_s:9,.0f} {result.peak_bytes / 1e9:8.2f} {result.tokens:9,} "
        f"{result.accuracy:8.3f} {result.losses[-1]:9.3f}"
    )


def _summary(ratios: dict[str, dict[str, Ratio]], arguments: argparse.Namespace) -> list[str]:
    wanted = {("wall_s", peer): TARGETS["time"] for peer in PEERS}
    wanted["peak_bytes", "one"] = TARGETS["memory"]
    lines = ["", f"The bank through:{'':13} {'ratio':>6} {'rounds':>13} {'target':>7}"]
    names = {"wall_s": "wall", "cpu_s": "cpu", "train_s": "training", "train_cpu_s": "training, cpu"}
    for field, name in {**names, "peak_bytes": "peak memory"}.items():
        for arm, (ratio, low, high) in ratios[field].items():
            if arm == "one" and field != "peak_bytes":  # one fold, of five: no time to hold a bank to
                continue
            target = wanted.get((field, arm))
            said = "" if target is None else f"{target:.2f}"
            lines.append(f"{arm + ', ' + name:30} {ratio:6.2f} {low:6.2f}-{high:.2f} {said:>8}")
    return [*lines, "", f"Medians of {arguments.pairs}. Weights {arguments.weights}, computed in {arguments.compute}."]


if __name__ == "__main__":
    main()
