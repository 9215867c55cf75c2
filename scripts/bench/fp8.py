"""What rounding to FP8 changes: the error of products, and the distance of loss curves, beside int8 and nf4.

    python scripts/bench/fp8.py OUT [--steps 200] [--set KEY=VALUE ...]

Products are those of the starter's layers with the inputs that they get from a row of the quickstart, against float32.
Curves are runs of `sft/quickstart`, alike in all but `model.weights`; finished runs are not run again.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import workbench
from workbench.adapters.precision import fp8_layers
from workbench.config import ModelConfig

FORMATS = ("bfloat16", "fp8", "int8", "nf4")
TEXT = "Write a friendly reply to a customer whose parcel has been on its way for two weeks, and offer them a refund."


def _off(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def _rounded(rows: Tensor) -> Tensor:
    values, scale = fp8_layers.rounded(rows)
    return values.float() * scale


WAYS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "weights alone": lambda x, weight: F.linear(x, _rounded(weight)),
    "inputs alone": lambda x, weight: F.linear(_rounded(x), weight),
    "both": lambda x, weight: F.linear(_rounded(x), _rounded(weight)),
    "both in bfloat16": lambda x, weight: F.linear(x.bfloat16(), weight.bfloat16()).float(),
}


def products() -> dict[str, list[float]]:
    """Relative errors of the products of all linear layers in the blocks."""
    section = ModelConfig(weights="float32")
    tokenizer = workbench.load_tokenizer(section)
    model = workbench.load_backbone(section, tokenizer).model
    found = defaultdict(list)

    def look(layer: nn.Linear, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        for name, way in WAYS.items():
            found[name].append(_off(way(inputs[0], layer.weight), output))

    for path, layer in model.named_modules():
        if type(layer) is nn.Linear and ".layers." in path:
            layer.register_forward_hook(look)
    with torch.no_grad():
        model(input_ids=torch.tensor([tokenizer(TEXT).input_ids]))
    return dict(found)


def curve(out: Path, weights: str, steps: int, more: list[str]) -> tuple[list[float], dict[str, dict[str, float]]]:
    """Losses by step, and held-out scores before and after."""
    folder = out / weights
    if not (folder / "scores.json").exists():
        words = [f"model.weights={weights}", f"train.steps={steps}", "train.epochs=null", "evaluate.answers=0", *more]
        workbench.run("sft/quickstart", words, out=folder, quiet=True)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line], json.loads((folder / "scores.json").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", dest="more")
    arguments = parser.parse_args()
    print("| rounded | relative error of a product: mean | largest of the layers |\n|---|---|---|")
    for name, errors in products().items():
        print(f"| {name} | {fmean(errors):.4f} | {max(errors):.4f} |")
    print("\n| weights | held-out loss before | after | steps apart: mean | largest | the last 20 |")
    print("|---|---|---|---|---|---|")
    plain: list[float] = []
    for weights in FORMATS:
        losses, scores = curve(arguments.out, weights, arguments.steps, arguments.more)
        plain = plain or losses
        apart = [abs(one - other) for one, other in zip(losses, plain, strict=True)]
        moved = " | ".join(f"{scores[moment]['loss']:.4f}" for moment in ("before", "after"))
        print(f"| {weights} | {moved} | {fmean(apart):.4f} | {max(apart):.4f} | {fmean(apart[-20:]):.4f} |", flush=True)


if __name__ == "__main__":
    main()
