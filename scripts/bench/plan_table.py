"""What fits where, by plans alone: for each model, card and method whether a step fits and how, the longest row and the
tokens a second, as Markdown and JSON.

    python scripts/bench/plan_table.py [--models 8b ...] [--cards 4090 8xh100 ...] [--methods lora ...] [--json FILE]

No weight is read and no card is needed: models are the config.json of random_llama.py, rows those of `sft/chat`; of
random_vision_language.py, rows those of `sft/vision-language`, 256 tokens a picture. Cards are those of `workbench plan
--device`. Whatever is left to choose is chosen by the plan. Longest rows are those of one card, with every saving
(`plan --longest-row`), also beyond what the model was made for; time is assumed, as plans for cards say.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import measuring
import random_llama
import random_vision_language

from workbench.planning import cards
from workbench.planning.plan import Plan
from workbench.recipes.load import load
from workbench.recipes.verbs.plans import plan as plans
from workbench.runs import units

METHODS = {
    "lora": [],
    "lora, nf4": ["model.weights=nf4"],
    "all weights": ["adapter={method: full}"],
}
"""Words beside the model; precisions and layouts of the first and the last are chosen."""
FEW = {"sft/vision-language": ["data.limit=64", "data.held_out=0.25", "data.max_tokens=1024"]}
"""What a recipe's plan needs of its rows."""
WAITING = "inputs of blocks to cpu"
"""Of `train.offload_activations`, in words."""
MODELS, CARDS = ("8b", "32b", "70b"), ("4090", "h100", "8xh100")
HEADER = ["model", "cards", "method", "fits", "way", "GB a card", "longest row", "tokens a second", "planned in s"]


class Where(NamedTuple):
    """So many cards of a name."""

    many: int
    name: str

    @classmethod
    def of(cls, words: str) -> Where:
        """From `h100` or `8xh100`."""
        count, _, name = words.rpartition("x")
        return cls(int(count or 1), cards.find(name).name)


def main() -> None:
    arguments = _arguments()
    rows: list[list[object]] = [[*HEADER]]
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for shape in arguments.models:
            sees = shape in random_vision_language.SHAPES
            (random_vision_language if sees else random_llama).configuration(shape, Path(folder) / shape)
            recipe = "sft/vision-language" if sees else "sft/chat"
            for where in map(Where.of, arguments.cards):
                for method in arguments.methods:
                    facts = planned(str(Path(folder) / shape), where, METHODS[method], recipe=recipe)
                    told = f"{where.many} x {where.name}" if where.many > 1 else where.name
                    found.append({"model": shape, "cards": told, "method": method, **facts})
                    rows.append([shape, told, method, *_cells(facts)])
                    print(" | ".join(str(cell) for cell in rows[-1]), flush=True)
    print(measuring.markdown(rows))
    measuring.write_report(arguments, machine=measuring.machine("cpu", ("torch", "transformers", "peft")), found=found)


def planned(model: str, where: Where, words: list[str], *, recipe: str = "sft/chat") -> dict[str, Any]:
    """What a plan says of a model on these cards, over the rows of a shipped recipe."""
    own = [f"model.id={model}", *words, *FEW.get(recipe, [])]
    began = time.process_time()
    choice = plans.solve(recipe, own, devices=where.many, device=where.name)
    plan, took = choice.plan, time.process_time() - began
    longest = limit = None
    if where.many == 1 and not plan.distributed.sharded and recipe == "sft/chat":
        memory = cards.find(where.name).memory
        stored = load("sft/chat", own).model_copy(update={"model": choice.config.model})
        found = plans.longest_row(stored, memory=memory, elsewhere=True)
        longest, limit = found.tokens, found.limit
    return {
        "fits": plan.fits,
        "cure": choice.cure,
        "way": _way(plan),
        "bytes": plan.needed,
        "host_bytes": plan.host_needed,
        "longest_row": longest,
        "made_for": limit,
        "tokens_per_second": plan.work.tokens * plan.devices / (plan.seconds or 1.0),
        "took": took,
    }


def _way(plan: Plan) -> str:
    """How it is carried out, in words."""
    share = "" if plan.checkpointing is True else f"={plan.checkpointing}"
    recomputed = [f"checkpointing{share}"] * (plan.checkpointing is not False)
    waiting = [WAITING] if plan.offloaded else []
    return ", ".join([plan.weights, *recomputed, *waiting, *([plan.distributed.words] * plan.distributed.sharded)])


def _cells(facts: dict[str, Any]) -> list[str]:
    size, longest = f"{facts['bytes'] / 1e9:.1f}", facts["longest_row"]
    host = f" (host {units.size(facts['host_bytes'])})" if " to cpu" in facts["way"] else ""
    row = "" if longest is None else f"{longest:,}" if longest else "none"
    if not facts["fits"]:
        return ["no", "", f"{size} at least", row, "", f"{facts['took']:.1f}"]
    return ["yes", f"{facts['way']}{host}", size, row, f"{facts['tokens_per_second']:,.0f}", f"{facts['took']:.1f}"]


def _arguments() -> argparse.Namespace:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument(
        "--models", nargs="*", default=MODELS, choices=[*random_llama.SHAPES, *random_vision_language.SHAPES]
    )
    found.add_argument("--cards", nargs="*", default=CARDS, help="names of `plan --device`, after `8x` eight of them")
    found.add_argument("--methods", nargs="*", default=list(METHODS), choices=list(METHODS))
    found.add_argument("--json", type=Path, help="a file to write")
    return found.parse_args()


if __name__ == "__main__":
    main()
