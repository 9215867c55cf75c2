"""Tags of real sentences by an encoder: one adapter or all weights, alone and in five folds, over seeds.

    python scripts/bench/tags.py --train FILE --held-out FILE --model FOLDER [--seeds 3] [key=value ...]

One run is scored on the held-out file. The folds deal the training file; their out-of-fold score is of all its rows
together, and all five together (the mean of their probabilities) are scored on the held-out file, which no fold saw.
What is finished is not run again. WNUT 17: Derczynski et al. 2017, CC BY 4.0.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import mean, stdev

import workbench

RATES = {"lora": 5e-4, "full": 1e-4}
"""Learning rate by method; at 1e-3 a LoRA of MiniLM finds no entity at all in WNUT 17."""


def main(arguments: argparse.Namespace) -> None:
    found: dict[str, list[float]] = {}
    for seed in range(arguments.seeds):
        for method in arguments.only.split(","):
            words = [
                f"model.id={arguments.model}",
                f"data.train={arguments.train}",
                f"adapter.method={method}",
                f"train.learning_rate={RATES[method]}",
                f"seed={seed}",
                *arguments.overrides,
            ]
            alone = _run([*words, f"data.held_out={arguments.held_out}"], arguments.out / f"{method}-{seed}")
            folds = [*words, "recipe=crossval", "of=tag", "data.held_out=0.05", f"data.test={arguments.held_out}"]
            dealt = _run(folds, arguments.out / f"{method}-folds-{seed}")
            name = "f1" if "f1" in alone["after"] else "accuracy"
            found.setdefault(f"{method}, one run", []).append(alone["after"][name])
            found.setdefault(f"{method}, out of fold", []).append(dealt["after"][name])
            found.setdefault(f"{method}, five folds together", []).append(dealt["test"][name])
        for what, values in found.items():
            spread = f" (sd {stdev(values):.3f})" if len(values) > 1 else ""
            print(f"{what:28} {mean(values):.3f}{spread}  {', '.join(f'{value:.3f}' for value in values)}", flush=True)


def _run(words: list[str], out: Path) -> dict[str, dict[str, float]]:
    if not (out / "scores.json").exists():
        workbench.run("tag/quickstart", words, out=out, resume=(out / "config.yaml").exists(), quiet=True)
    return dict(json.loads((out / "scores.json").read_text()))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", required=True)
    parser.add_argument("--held-out", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default=",".join(RATES))
    parser.add_argument("--out", type=Path, default=Path("runs/tags"))
    parser.add_argument("overrides", nargs="*")
    main(parser.parse_args())
