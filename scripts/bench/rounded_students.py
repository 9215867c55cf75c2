"""Students in 4 bits: exported as they are, and trained knowing that they will be (`train.rounded`), over seeds.

    python scripts/bench/rounded_students.py --out runs/rounded [--seeds 3] [--set KEY=VALUE ...]

A teacher is trained once, `classify/quickstart`; students have a half of its layers and learn from it, all weights.
Each is scored as it was saved, and exported `--to onnx --weights int4`, where onnxruntime reads all held-out rows.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import measuring
import numpy as np
import pandas as pd
from measuring import Spread, Wanted

from workbench import recipes
from workbench.config.yaml_text import read_yaml
from workbench.data import starter

HELD_OUT = "starter/banking77_held_out.csv"
WAYS = {"as it is": [], "rounded in training": ["train.rounded=int4"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="where runs and exports stand")
    parser.add_argument("--seeds", type=int, default=3, help="from 0 on")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="overrides of all students")
    parser.add_argument("--json", type=Path, help="write everything that was measured to this file")
    arguments = parser.parse_args()
    recipe = read_yaml(recipes.find("classify/quickstart"))
    teacher = measuring.finish({"teacher": Wanted(recipe, [])}, arguments.out, jobs=1, device="cpu")["teacher"]
    words = ["recipe=distill", "of=classify", "model.id=teacher", f"distill.teacher.id={teacher.resolve()}"]
    words += ["distill.student.layers=important-50%", "distill.control=false", "adapter={method: full}"]
    words += ["train.learning_rate=5e-4", *arguments.set]
    wanted = {
        f"{way.replace(' ', '-')}/seed-{seed}": Wanted(recipe, [*words, *more, f"seed={seed}"])
        for seed in range(arguments.seeds)
        for way, more in WAYS.items()
    }
    runs = measuring.finish(wanted, arguments.out, jobs=1, device="cpu")
    found: dict[str, dict[str, Spread]] = {}
    for way in WAYS:
        own = [runs[f"{way.replace(' ', '-')}/seed-{seed}"] for seed in range(arguments.seeds)]
        saved = [measuring.scores(run)["after"] for run in own]
        for weights, scored in {"as saved": saved, "int4": [_scores(_exported(run)) for run in own]}.items():
            found[f"{way}, {weights}"] = {
                key: Spread.of([each[key] for each in scored]) for key in ("accuracy", "loss")
            }
    rows = [["student, exported", "accuracy", "log-loss"]]
    print(measuring.markdown([*rows, *([name, each["accuracy"], each["loss"]] for name, each in found.items())]))
    machine = measuring.machine("cpu", ("torch", "transformers", "onnxruntime"))
    measuring.write_report(arguments, machine=machine, found=found)


def _exported(run: Path) -> Path:
    """The folder of an export in int4, made where it is not there."""
    folder = run.with_name(f"{run.name}-int4")
    if not folder.exists():
        command = [sys.executable, "-m", "workbench.cli.verbs", "export", str(run), "--to", "onnx"]
        measuring.run([*command, "--weights", "int4", "--out", str(folder)], folder.with_suffix(".log"), "cpu")
    return folder


def _scores(folder: Path) -> dict[str, float]:
    """Accuracy and log-loss in nats of the held-out rows, by onnxruntime."""
    import onnxruntime
    from transformers import AutoConfig, AutoTokenizer

    session = onnxruntime.InferenceSession(str(folder / "model.onnx"), providers=["CPUExecutionProvider"])
    tokenizer, numbers = AutoTokenizer.from_pretrained(folder), AutoConfig.from_pretrained(folder).label2id
    hits, losses = [], []
    for row in pd.read_csv(starter.resolve(HELD_OUT)).itertuples():
        inputs = tokenizer(row.text, return_tensors="np", max_length=128, truncation=True)
        given = {each.name: inputs[each.name] for each in session.get_inputs()}
        logits_C = session.run(["logits"], given)[0][0].astype(np.float64)
        number = numbers[row.label]
        hits.append(float(logits_C.argmax() == number))
        losses.append(float(np.logaddexp.reduce(logits_C) - logits_C[number]))
    return {"accuracy": float(np.mean(hits)), "loss": float(np.mean(losses))}


if __name__ == "__main__":
    main()
