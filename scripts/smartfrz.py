"""Trains the predictor of freeze.policy=smartfrz, and measures on tasks that it has not seen how often it is right.

    python scripts/smartfrz.py --small tests/files/stories260k --encoder FOLDER --out runs/smartfrz [--write]

It learns from runs of two causal backbones over questions about passages, with LoRA and with all weights, at several
learning rates. It is tried on intents of questions to a bank: with these backbones, and with an encoder. A block counts
as settled from the interval on in which its outputs never again differ more than --remaining of the most that they
differed before from what they are at the end of the run; they differ by 1 - CKA (Kornblith et al. 2019) over some
held-out texts. Runs stand below --out, and what is finished is not run again; --write puts the weights into the
package.

accuracy   share of decisions, one for each block and interval, that are right
one answer the same of who always says what is right more often
clock      the same of who freezes all blocks after the interval that is best for the runs that are learnt from, and so
           knows how long a run is, as the predictor does not
early      mean number of intervals by which a block is frozen before it has settled
late       mean number of intervals that a block trains on after it has settled

Legend: T intervals, N tokens, D hidden, F features, S samples.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.numpy import save_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

import workbench
from workbench.config import RunConfig, freezing_predictor, model_heads
from workbench.config.freeze_policies import SMARTFRZ_INTERVALS
from workbench.config.freezing_predictor import FEATURES, SHIPPED, WIDTH, WINDOW, histories, settled
from workbench.data import starter
from workbench.models import backbones
from workbench.recipes.load import load
from workbench.training import checkpoints
from workbench.training.freezing import freezer as freezing
from workbench.training.freezing.observers import ValueWays

Floats = npt.NDArray[np.float64]
INTERVALS = 20
NOISE = 0.3
"""Standard deviation of what is added to the features while the predictor learns."""
PROBES = 6
"""Held-out texts whose hidden states are compared."""
SHARED = ("evaluate.every=null", "save.every=0.05", "save.keep=1000", "model.weights=float32", "model.compute=float32")
SFT = ("evaluate.answers=0", "data.limit=600", "data.max_tokens=160", "batch.size=8")
CLASSIFY = ("evaluate.probe=0", "batch.size=16")
METHOD = {"lora": ["adapter.rank=16"], "full": ["adapter={method: full}"]}


@dataclass(frozen=True)
class Example:
    """A block of one run: its history, and from which interval on it has settled."""

    history_TF: Floats
    settles: int


def main() -> None:
    arguments = _arguments()
    seen = [_run(name, *words, out=arguments.out) for name, words in _trained_on(arguments)]
    unseen = {name: _examples(_run(name, *words, out=arguments.out), arguments) for name, words in _tried_on(arguments)}
    learnt = [example for run in seen for example in _examples(run, arguments)]
    weights = _trained(learnt)
    if arguments.write:
        save_file({name: each.astype(np.float32) for name, each in weights.items()}, SHIPPED)
        freezing_predictor.shipped.cache_clear()
    clock = max(range(SMARTFRZ_INTERVALS, INTERVALS + 1), key=lambda count: _share(learnt, lambda _, now: now >= count))
    print("| runs | decisions | accuracy | one answer | clock | early | late |\n|---|---|---|---|---|---|---|")
    together = [*chain.from_iterable(unseen.values())]
    for name, examples in {"learnt from": learnt, **unseen, "all unseen": together}.items():
        print(f"| {name} | {_score(examples, weights, clock)} |")


def _trained_on(arguments: argparse.Namespace) -> Iterator[tuple[str, list[str]]]:
    """Runs over questions about passages, by name."""
    for name, backbone, method, rate in (
        *(("small", arguments.small, "lora", rate) for rate in (5e-4, 2e-3, 8e-3)),
        *(("small", arguments.small, "full", rate) for rate in (2e-4, 1e-3)),
        ("starter", "starter", "lora", 2e-3),
        ("starter", "starter", "full", 1e-3),
    ):
        steps = 120 if name == "small" else 60
        words = [f"model.id={backbone}", *METHOD[method], f"train.learning_rate={rate}", f"train.steps={steps}"]
        yield f"questions, {name}, {method}, {rate:g}", ["sft/quickstart", *words, *SFT]


def _tried_on(arguments: argparse.Namespace) -> Iterator[tuple[str, list[str]]]:
    """Runs over intents, by name."""
    for name, backbone, method, rate in (
        ("small", arguments.small, "lora", 2e-3),
        ("small", arguments.small, "full", 3e-4),
        ("starter", "starter", "lora", 2e-3),
        ("encoder", arguments.encoder, "lora", 2e-3),
    ):
        steps = 100 if name == "small" else 60
        words = [f"model.id={backbone}", *METHOD[method], f"train.learning_rate={rate}", f"train.steps={steps}"]
        yield f"intents, {name}, {method}", ["classify/quickstart", *words, *CLASSIFY]


def _run(name: str, recipe: str, *words: str, out: Path) -> Path:
    folder = out / name.replace(", ", "-")
    if not (folder / "scores.json").exists():
        workbench.run(recipe, [*SHARED, *words], out=folder, resume=(folder / "config.yaml").exists(), quiet=True)
    return folder


def _examples(run: Path, arguments: argparse.Namespace) -> list[Example]:
    """Each block of a run, from its checkpoints."""
    config = load(run / "config.yaml", [])
    # The head's size does not matter: only blocks are looked at.
    task = model_heads.classes(["one", "other"], seed=0) if config.recipe == "classify" else model_heads.of(config)
    backbone = backbones.load(config.model, backbones.tokenizer(config.model), task=task)
    freezer = freezing.attach(backbone.model, config, seed=config.seed)
    named = {name: each for name, each in freezer.model.named_parameters() if each.requires_grad}
    texts = _texts(config)
    ways = ValueWays(freezer.layers, named, blocks=len(freezer.blocks))
    ways.begin()
    outputs, values = [_outputs(freezer.backbone, freezer.blocks, texts, config)], []
    steps = sorted(path for path in (run / "checkpoints").iterdir() if path.name.startswith("step-"))
    for path in steps:
        tensors = checkpoints.read_tensors(path, "trainable")
        with torch.no_grad():
            for name, parameter in named.items():
                if name in tensors and tensors[name].shape == parameter.shape:
                    parameter.copy_(tensors[name])
        values.append(ways.finish(freezer.plan.trains))
        outputs.append(_outputs(freezer.backbone, freezer.blocks, texts, config))
    known = histories(np.array(values))
    return [
        Example(history_TF, _settles([each[block] for each in outputs], arguments.remaining))
        for block, history_TF in known.items()
    ]


def _texts(config: RunConfig) -> list[str]:
    path = Path(starter.resolve(str(config.data.held_out)))
    lines = path.read_text(encoding="utf-8").splitlines()
    rows: list[dict[str, Any]] = list(csv.DictReader(lines)) if path.suffix == ".csv" else [*map(json.loads, lines)]
    return [" ".join(str(value) for value in row.values())[:400] for row in rows[:PROBES]]


@torch.no_grad()
def _outputs(
    backbone: PreTrainedModel, blocks: Sequence[nn.Module], texts: Sequence[str], config: RunConfig
) -> list[Tensor]:
    """Outputs of each block for all tokens of the texts (N, D)."""
    tokenizer, found = backbones.tokenizer(config.model), [list[Tensor]() for _ in blocks]
    handles = [
        block.register_forward_hook(
            lambda _, __, output, own=own: own.append((output if isinstance(output, Tensor) else output[0])[0].float())
        )
        for block, own in zip(blocks, found, strict=True)
    ]
    for text in texts:
        backbone.eval()(**tokenizer(text, return_tensors="pt", truncation=True, max_length=128))
    for handle in handles:
        handle.remove()
    return [torch.cat(own) for own in found]


def _settles(outputs: Sequence[Tensor], remaining: float) -> int:
    """The first interval after which a block's outputs stay as near to those of the end as is asked for.

    Args:
        outputs: At the start, and after each interval.
    """
    apart = np.array([1 - _cka(each, outputs[-1]) for each in outputs])
    far = np.flatnonzero(apart > remaining * apart.max())
    return int(far[-1]) if len(far) else 0


def _cka(x_ND: Tensor, y_ND: Tensor) -> float:
    """Linear centred kernel alignment."""
    x_ND, y_ND = (each.double() - each.double().mean(0) for each in (x_ND, y_ND))
    cross, own, other = (float((a.T @ b).norm()) for a, b in ((x_ND, y_ND), (x_ND, x_ND), (y_ND, y_ND)))
    return cross**2 / (own * other)


def _trained(examples: Sequence[Example]) -> dict[str, Floats]:
    """Weights of the predictor, fitted to the decisions of all examples."""
    windows_STF, recent_ST, settled_S = _windows(examples)
    generator = torch.Generator().manual_seed(0)
    shapes = {"E": (FEATURES, WIDTH), "e": (WIDTH,), "p": (WINDOW, WIDTH), "Q": (WIDTH, WIDTH), "K": (WIDTH, WIDTH)}
    shapes |= {"V": (WIDTH, WIDTH), "A": (WIDTH, WIDTH), "b": (WIDTH,), "c": (WIDTH,), "d": (1,)}
    weights = {
        name: (torch.randn(shape, generator=generator) * shape[0] ** -0.5 * (name not in "ebd")).requires_grad_()
        for name, shape in shapes.items()
    }
    optimizer = torch.optim.AdamW(weights.values(), lr=3e-3, weight_decay=1.0)
    for _ in range(300):  # with noise, few steps and much decay: there are few runs to learn from
        optimizer.zero_grad()
        noise_STF = NOISE * torch.randn(windows_STF.shape, generator=generator)
        logits_S = _logits(windows_STF + noise_STF, recent_ST, weights)
        F.binary_cross_entropy_with_logits(logits_S, settled_S).backward()
        optimizer.step()
    return {name: each.detach().double().numpy() for name, each in weights.items()}


def _logits(windows_STF: Tensor, recent_ST: Tensor, weights: dict[str, Tensor]) -> Tensor:
    """`freezing_predictor.settled` for many histories at once, before the sigmoid."""
    z_STD = windows_STF @ weights["E"] + weights["e"] + weights["p"]
    scores_ST = ((z_STD @ weights["K"]) @ (z_STD[:, -1] @ weights["Q"])[..., None])[..., 0] / WIDTH**0.5
    answers_ST = scores_ST.masked_fill(~recent_ST, -torch.inf).softmax(1)
    heard_SD = (answers_ST[:, None] @ (z_STD @ weights["V"]))[:, 0]
    return F.relu((z_STD[:, -1] + heard_SD) @ weights["A"] + weights["b"]) @ weights["c"] + weights["d"]


def _windows(examples: Sequence[Example]) -> tuple[Tensor, Tensor, Tensor]:
    """Latest intervals of each decision, which of them there are, and whether the block has settled then."""
    windows, recent, answers = [], [], []
    for example in examples:
        for count in range(SMARTFRZ_INTERVALS, len(example.history_TF) + 1):
            own_TF = example.history_TF[max(0, count - WINDOW) : count]
            missing = WINDOW - len(own_TF)
            windows.append(np.concatenate([np.zeros((missing, FEATURES)), own_TF]))
            recent.append([False] * missing + [True] * len(own_TF))
            answers.append(float(count >= example.settles + 1))
    return torch.tensor(np.array(windows)).float(), torch.tensor(recent), torch.tensor(answers)


def _score(examples: Sequence[Example], weights: dict[str, Floats], clock: int) -> str:
    yes = _share(examples, lambda *_: True)
    right = _share(examples, lambda history_TF, now: settled(history_TF[:now], weights) >= 0.5)
    early, late, total = list[int](), list[int](), 0
    for example in examples:
        counts = range(SMARTFRZ_INTERVALS, len(example.history_TF) + 1)
        total += len(counts)
        frozen = next((now for now in counts if settled(example.history_TF[:now], weights) >= 0.5), counts[-1])
        early.append(max(0, example.settles + 1 - frozen))
        late.append(max(0, frozen - max(SMARTFRZ_INTERVALS, example.settles + 1)))
    shares = [right, max(yes, 1 - yes), _share(examples, lambda _, now: now >= clock)]
    means = [f"{np.mean(each):.1f} of {INTERVALS}" for each in (early, late)]
    return " | ".join([f"{total:,}", *(f"{share:.1%}" for share in shares), *means])


def _share(examples: Sequence[Example], says: Callable[[Floats, int], bool]) -> float:
    """Share of the decisions that are right."""
    return float(
        np.mean(
            [
                says(each.history_TF, now) == (now >= each.settles + 1)
                for each in examples
                for now in range(SMARTFRZ_INTERVALS, len(each.history_TF) + 1)
            ]
        )
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", required=True, help="folder of a small causal backbone, such as stories260k")
    parser.add_argument("--encoder", required=True, help="folder of a small encoder, such as all-MiniLM-L6-v2")
    parser.add_argument("--remaining", type=float, default=0.2, help="share of the difference that settled blocks have")
    parser.add_argument("--out", type=Path, default=Path("runs/smartfrz"))
    parser.add_argument("--write", action="store_true", help="put the weights into the package")
    return parser.parse_args()


if __name__ == "__main__":
    main()
