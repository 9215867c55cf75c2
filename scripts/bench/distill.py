"""Costs of distillation: against plain fine-tuning with a cached teacher, and against TRL's GKD with a live one.

    python scripts/bench/distill.py                                # all parts, 32 steps, 2 pairs of runs
    python scripts/bench/distill.py --only live --peer best --pairs 3 --json live.json
    python scripts/bench/distill.py --only cached --k 16 --weights float32

cached  a student on labels, and the same student on labels and a cached teacher; the cache is made before, apart
live    forward KL from a teacher in memory, with this workbench and with TRL's GKDTrainer
shared  a student on labels, and the same student taught by its own backbone, of which there is one copy in memory; on
        a CPU also the bytes of tensors that were alive at once, which the resident memory of a process blurs

Random Llamas of one vocabulary, GSM8K as prompt and completion, LoRA of rank 16 on all linear layers of the student,
8 examples a step. Every run is a process of its own, both sides in turn; both must see the same number of tokens, and
of tokens with loss, or no ratio is printed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import gsm8k
import measuring
from random_llama import SHAPES

TARGETS = {"cached": 1.15, "speed": 1.5, "memory": 0.6, "shared": 1.03}
"""Training time with a cached teacher through that without one; tokens/s and peak memory of ours through GKD's; peak
memory with a teacher on the student's backbone through that without one."""

# TRL 1.16 as read in trl/experimental/gkd/{gkd_config,gkd_trainer}.py; gsm8k.py says what GKDConfig inherits:
# - beta=0.0 is forward KL: kl_div(student, teacher), the temperature in it 1 whatever GKDConfig.temperature says.
# - lmbda=0.0: no answer is sampled; seq_kd=False (its default): nor by the teacher. The rows' own completions teach.
# - 8 rows a device and no accumulation are its defaults, and just one global batch of ours.
# - It projects all positions of both models, padding too, and compares them all before it drops those without loss.
GKD = {"beta": 0.0, "lmbda": 0.0}


def main() -> None:
    arguments = _arguments()
    print(machine := measuring.machine(arguments.device, ("torch", "transformers", "peft", "trl")))
    parts = {"cached": _cached, "live": _live, "shared": _shared}
    found = {}
    with tempfile.TemporaryDirectory(prefix="bench-distill-") as name:
        folder = Path(name)
        for role in ("teacher", "student"):
            gsm8k.write_model(getattr(arguments, role), folder / role, arguments.device)
        gsm8k.write_rows(folder, arguments.steps)
        for part in [arguments.only] if arguments.only else parts:
            found[part] = parts[part](folder, arguments)
    print("", *gsm8k.notes(arguments, version("trl")), sep="\n")
    measuring.write_report(arguments, machine=machine, **found)


def _arguments() -> argparse.Namespace:
    parser = gsm8k.parser(__doc__)
    parser.add_argument("--only", choices=("cached", "live", "shared"), help="by default all")
    parser.add_argument("--teacher", choices=SHAPES, default="100m", help="shape")
    parser.add_argument("--student", choices=SHAPES, default="42m", help="shape; with as many words as the teacher's")
    parser.add_argument("--weights", choices=("float32", "bfloat16"), default="bfloat16", help="of both models")
    parser.add_argument("--k", type=int, default=64, help="likeliest tokens that the cache keeps of a position")
    arguments = gsm8k.arguments_of(parser)
    if len({SHAPES[shape]["vocab_size"] for shape in (arguments.teacher, arguments.student)}) > 1:
        parser.error("--teacher and --student have different vocabularies, which TRL's GKD refuses.")
    return arguments


def _cached(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Training beside a cache, through training on labels alone."""
    cache = folder / "cache"
    settings = {"alpha": 0.5, "cache": {"folder": str(cache), "k": arguments.k}}
    _write_recipe(folder / "cached.yaml", arguments, distill=settings)
    _write_recipe(folder / "labels.yaml", arguments)
    # The same overrides as in the runs: they may say which rows there are.
    command = [
        sys.executable,
        "-m",
        "workbench.cli.verbs",
        "distill-cache",
        str(folder / "cached.yaml"),
        *arguments.ours,
    ]
    usage = measuring.run(command, folder / "cache.log", arguments.device)
    sides = {name: partial(gsm8k.our_command, folder / f"{name}.yaml", arguments) for name in ("cached", "labels")}
    results = measuring.in_turn(sides, folder, arguments)
    ratios = measuring.ratios(results)
    size = sum(path.stat().st_size for path in cache.rglob("*") if path.is_file())
    # A cache holds each position with loss once, however many epochs there are.
    positions = results[0].supervised_tokens // max(1, arguments.steps // gsm8k.epoch())
    print(measuring.summary(ratios, results))
    print(f"Training takes {ratios['train_s']} times as long beside a cache (target at most {TARGETS['cached']}).")
    print(
        f"Before that, the cache: {usage.wall_s:.1f} s, {usage.peak_bytes / 1e9:.2f} GB resident; {size / 1e6:.1f} MB, "
        f"{size / positions:.0f} bytes for each of {positions:,} tokens with loss ({arguments.k} kept).\n"
    )
    facts = {"wall_s": usage.wall_s, "peak_bytes": usage.peak_bytes, "bytes": size, "tokens": positions}
    return {"cache": facts, "runs": results, "ratios": ratios}


def _live(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Ours through TRL's GKDTrainer."""
    _write_recipe(folder / "live.yaml", arguments, distill={"alpha": 1.0})
    sides = {
        "workbench": partial(gsm8k.our_command, folder / "live.yaml", arguments),
        "GKD": partial(_gkd_command, folder, arguments),
    }
    results = measuring.in_turn(sides, folder, arguments)
    ratios = measuring.ratios(results)
    print(measuring.summary(ratios, results))
    print(
        f"Targets: at least {TARGETS['speed']} times the tokens/s, at most {TARGETS['memory']} times the peak memory."
    )
    return {"runs": results, "ratios": ratios}


def _shared(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """A student of the larger shape taught by its own backbone, through the same student on labels alone."""
    _write_recipe(folder / "shared.yaml", arguments, role="teacher", distill={"teacher": {"id": "backbone"}})
    _write_recipe(folder / "alone.yaml", arguments, role="teacher")
    sides = {name: partial(gsm8k.our_command, folder / f"{name}.yaml", arguments) for name in ("shared", "alone")}
    results = measuring.in_turn(sides, folder, arguments)
    ratios = measuring.ratios(results)
    print(measuring.summary(ratios, results))
    print(f"Target: at most {TARGETS['shared']} times the memory, beside what the teacher's own pass needs.")
    facts: dict[str, Any] = {"runs": results, "ratios": ratios}
    if arguments.device == "cpu":  # what torch had allocated on a GPU is exact already
        facts["live"] = {name: _live_bytes(folder / f"{name}.yaml", arguments) for name in sides}
        print(_live_summary(**facts["live"]))
    return facts


def _live_bytes(recipe: Path, arguments: argparse.Namespace) -> dict[str, int]:
    """Live bytes that live_run.py counts of one run."""
    out = recipe.with_suffix(".live")
    command = [sys.executable, str(gsm8k.HERE / "live_run.py"), str(recipe), str(out), *arguments.ours]
    measuring.run(command, out.with_suffix(".log"), arguments.device)
    found: dict[str, int] = json.loads((out / "live.json").read_text(encoding="utf-8"))
    return found


def _live_summary(*, shared: dict[str, int], alone: dict[str, int]) -> str:
    """One side through the other in bytes of live tensors, with the teacher's pass beside the student alone."""
    taught, heard, plain = shared["peak"], shared["teacher_pass"], alone["peak"]
    return (
        f"Tensors alive at once, beside {alone['weights'] / 1e6:.1f} MB of frozen weights: alone {plain / 1e6:.1f} MB, "
        f"shared {taught / 1e6:.1f} MB, {taught / plain:.3f} times as much.\n"
        f"The teacher's own pass holds {heard / 1e6:.1f} MB; through alone and that pass: "
        f"{taught / (plain + heard):.3f} (target at most {TARGETS['shared']})."
    )


def _write_recipe(
    path: Path, arguments: argparse.Namespace, *, role: str = "student", distill: dict[str, Any] | None = None
) -> None:
    sections: dict[str, Any] = {"model": {"id": str(path.parent / role), "weights": arguments.weights}}
    if distill is not None:
        teacher = {"id": str(path.parent / "teacher"), "weights": arguments.weights}
        sections |= {"recipe": "distill", "distill": {"teacher": teacher, "loss": "forward_kl", **distill}}
    gsm8k.write_recipe(path, arguments.steps, sections)


def _gkd_command(folder: Path, arguments: argparse.Namespace, out: Path) -> Sequence[str]:
    settings = GKD | gsm8k.trl_settings(arguments, weights=arguments.weights)
    settings["teacher_model_init_kwargs"] = settings["model_init_kwargs"]
    out.mkdir()
    script, rows = str(gsm8k.HERE / "peer_gkd.py"), str(folder / "train.jsonl")
    models = [str(folder / "student"), str(folder / "teacher")]
    return [sys.executable, script, *models, rows, str(out), json.dumps(settings)]


if __name__ == "__main__":
    main()
