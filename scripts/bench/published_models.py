"""What `workbench init --model ... --device ...` would write for published models, by plans alone: recipes/models.md,
and a recipe for each model and card that it fits, such as `models/qwen3-8b-4090`.

    python scripts/bench/published_models.py                   # writes the page and the recipes
    python scripts/bench/published_models.py --models Qwen/Qwen3-8B     # these rows anew, the others as they stand
    python scripts/bench/published_models.py --models          # the recipes alone, from the page as it stands

No weight is read and no card is needed: a model is its config.json, of the shapes below; rows are those of a shipped
recipe, such as `sft/chat`, in the starter's tokens. Whatever is left to choose is chosen by the plan, as `init` does.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import measuring
import plan_table
import random_vision_language
import torch
from plan_table import Where
from transformers import CONFIG_MAPPING, AutoTokenizer, GenerationConfig, WhisperFeatureExtractor

from workbench import recipes
from workbench.config.yaml_text import dump_yaml
from workbench.data import starter
from workbench.errors import WorkbenchError
from workbench.planning import cards
from workbench.recipes.load import load
from workbench.recipes.verbs.first_recipe import RATE
from workbench.runs import units

PAGE = Path(__file__).parents[2] / "recipes" / "models.md"
RECIPES = recipes.CONFIGS / "models"
CARDS = ("4090", "l40s", "h100")
"""Cards of 24, 48 and 80 GB."""
SMALL = ("4060", "t4", *CARDS)
"""With those of 8 and 16 GB."""
FIRST = ("train.epochs=1", "evaluate.answers=32", "evaluate.max_new_tokens=128")
OWN = {
    "sft/chat": ("data.train=my.jsonl", ()),
    "sft/vision-language": ("data.train=my.jsonl image.folder=my/", ("data.max_tokens=1024", *FIRST)),
    "sft/speech": (
        "data.train=my.csv audio.folder=my/ 'data.columns={text: transcript}'",
        ("audio.augment.speed=0.1", *FIRST),
    ),
}
"""What a user writes in place of the shipped rows of a recipe, and what it has for models that are not shipped."""
LITGPT = "litgpt's configurations"
DEFAULTS = "defaults of transformers 5.23"
OPENAI = "sherpa-onnx's table of them"


class Published(NamedTuple):
    """The shape of a published model."""

    family: str
    """`model_type` of transformers."""
    source: str
    """Where these values stand in public."""
    values: Mapping[str, Any] = MappingProxyType({})
    """Of its config.json, where they differ from the family's defaults in transformers."""
    cards: tuple[str, ...] = CARDS
    recipe: str = "sft/chat"
    """The shipped one that its own begin with."""
    sees: str = ""
    """Of a model that sees, its shape in random_vision_language.py."""


def _of(layers: int, width: int, heads: int, groups: int, inner: int, words: int, **more: Any) -> dict[str, Any]:
    """Blocks, hidden size, heads, heads of keys and values, hidden size of the feed-forward layers, vocabulary."""
    names = ["num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads"]
    names += ["intermediate_size", "vocab_size"]
    return dict(zip(names, (layers, width, heads, groups, inner, words), strict=True)) | more


def _heard(layers: int, width: int, heads: int, **more: Any) -> dict[str, Any]:
    """A Whisper's: blocks, hidden size and heads of encoder and decoder."""
    own = {"layers": layers, "attention_heads": heads, "ffn_dim": 4 * width}
    sides = {f"{side}_{key}": value for side in ("encoder", "decoder") for key, value in own.items()}
    return {"d_model": width, **sides} | more


_QWEN3 = {"head_dim": 128, "vocab_size": 151_936, "max_position_embeddings": 40_960}
_GEMMA3 = {"head_dim": 256, "vocab_size": 262_208, "sliding_window": 1024}
_LLAMA3 = {"max_position_embeddings": 131_072}
_EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
MODELS = {
    "Qwen/Qwen3-0.6B": Published(
        "qwen3", LITGPT, _of(28, 1024, 16, 8, 3072, 0, tie_word_embeddings=True) | _QWEN3, SMALL
    ),
    "Qwen/Qwen3-4B": Published(
        "qwen3", LITGPT, _of(36, 2560, 32, 8, 9728, 0, tie_word_embeddings=True) | _QWEN3, SMALL
    ),
    "Qwen/Qwen3-8B": Published("qwen3", LITGPT, _of(36, 4096, 32, 8, 12_288, 0) | _QWEN3, SMALL),
    "Qwen/Qwen3-32B": Published("qwen3", LITGPT, _of(64, 5120, 64, 8, 25_600, 0) | _QWEN3),
    "Qwen/Qwen3-30B-A3B": Published("qwen3_moe", LITGPT, _of(48, 2048, 32, 4, 6144, 0) | _QWEN3 | _EXPERTS),
    "Qwen/Qwen3.5-9B": Published("qwen3_5_text", DEFAULTS, {"max_position_embeddings": 262_144}),
    "Qwen/Qwen3-VL-8B-Instruct": Published(
        "qwen3_vl", "random_vision_language.py", recipe="sft/vision-language", sees="qwen3-vl-8b"
    ),
    "openai/gpt-oss-20b": Published(
        "gpt_oss", "slime's script of it", {"num_hidden_layers": 24, "num_local_experts": 32}
    ),
    "openai/whisper-small": Published("whisper", OPENAI, _heard(12, 768, 12), SMALL[:3], "sft/speech"),
    "openai/whisper-large-v3": Published(
        "whisper", OPENAI, _heard(32, 1280, 20, num_mel_bins=128, vocab_size=51_866), SMALL, "sft/speech"
    ),
    "meta-llama/Llama-3.2-1B": Published(
        "llama", LITGPT, _of(16, 2048, 32, 8, 8192, 128_256, tie_word_embeddings=True) | _LLAMA3, SMALL
    ),
    "meta-llama/Llama-3.1-8B": Published("llama", LITGPT, _of(32, 4096, 32, 8, 14_336, 128_256) | _LLAMA3),
    "meta-llama/Llama-3.3-70B-Instruct": Published("llama", LITGPT, _of(80, 8192, 64, 8, 28_672, 128_256) | _LLAMA3),
    "google/gemma-3-4b-it": Published("gemma3_text", LITGPT, _of(34, 2560, 8, 4, 10_240, 0) | _GEMMA3),
    "google/gemma-3-27b-it": Published(
        "gemma3_text", LITGPT, _of(62, 5376, 32, 16, 21_504, 0) | _GEMMA3 | {"head_dim": 128}
    ),
    "google/gemma-4-E4B-it": Published(
        "gemma4", "random_vision_language.py", recipe="sft/vision-language", sees="gemma-4-e4b"
    ),
    "mistralai/Mistral-7B-v0.3": Published(
        "mistral", LITGPT, _of(32, 4096, 32, 8, 14_336, 32_768, max_position_embeddings=32_768, sliding_window=None)
    ),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": Published(
        "qwen2", f"{LITGPT} (Qwen2.5-Math-7B)", _of(28, 3584, 28, 4, 18_944, 152_064, max_position_embeddings=131_072)
    ),
    "zai-org/GLM-4-9B-0414": Published("glm4", DEFAULTS, {"max_position_embeddings": 32_768}),
    "HuggingFaceTB/SmolLM3-3B": Published("smollm3", DEFAULTS, {"max_position_embeddings": 65_536}, SMALL),
    "microsoft/phi-4": Published(
        "phi3", LITGPT, _of(40, 5120, 40, 10, 17_920, 100_352, max_position_embeddings=16_384)
    ),
}
HEADER = ["model", "card", "weights", "GB", "longest row", "tokens a second", "planned on"]
ABOUT = """# Models and cards

<!-- Written by scripts/bench/published_models.py: change it there. -->

What `workbench init` writes for a model and a card, by its plan: whether LoRA on all linear layers fits, and how. **Not
run on these cards**: the bytes are those that a plan counts ([its errors](verbs/plan.md)), the time takes 35 % of a
card's products, and rows are those of `sft/chat`, of `sft/vision-language` with 256 tokens a picture, or of
`sft/speech`, in the starter's tokens.

What fits is a recipe, by the names of the model and the card, such as `models/qwen3-8b-4090`. Or with your own rows
planned, for any other card:

<!-- needs: a network for the backbone -->
```sh
workbench run models/qwen3-8b-4090 data.train=my.jsonl
workbench init my.yaml --rows my.jsonl --model Qwen/Qwen3-8B --device 4090
```

The longest row has all tokens supervised, and every saving; it is no longer than the model was made for. Its cell is
empty where not even 2,048 tokens fit, and for pictures and sound. Cards of 8 GB (4060), 16 (t4, which computes in
float32), 24 (4090), 48 (l40s) and 80 (h100); small ones where it is in question.
`python scripts/bench/published_models.py` made this page and the recipes, from config.json alone.
"""


def write_config(name: str, folder: Path, *, tiny: bool = False) -> None:
    """The starter's tokenizer and the config.json of a model, enough for a plan; `tiny`: four blocks of 64 units."""
    published = MODELS[name]
    family, values = published.family, published.values
    if published.sees:
        return random_vision_language.configuration(published.sees, folder)
    if tiny:
        small = _of(4, 64, 4, 2, 64, 8192) | {"head_dim": 16, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
        small |= {"layer_types": None} if hasattr(CONFIG_MAPPING[family](), "layer_types") else {}
        values = {**values, **small} | {key: 8 for key in ("num_experts", "num_local_experts") if key in values}
    config = CONFIG_MAPPING[family](**values)
    config.dtype = torch.float32 if tiny else torch.bfloat16
    config.save_pretrained(folder)
    if family == "whisper":
        WhisperFeatureExtractor(feature_size=config.num_mel_bins).save_pretrained(folder)
        GenerationConfig.from_pretrained(starter.FOLDER / "sound").save_pretrained(folder)
    AutoTokenizer.from_pretrained(starter.FOLDER / ("sound" if family == "whisper" else "")).save_pretrained(folder)


def main() -> None:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    found.add_argument("--out", type=Path, default=PAGE, help="the page to write")
    found.add_argument("--recipes", type=Path, default=RECIPES, help="the folder of the recipes to write")
    arguments = found.parse_args()
    with tempfile.TemporaryDirectory() as name:
        for model in arguments.models:
            folder, published = Path(name) / model, MODELS[model]
            write_config(model, folder)
            for card in published.cards:
                cells = [*_cells(_planned(str(folder), published.recipe, card)), time.strftime("%Y-%m-%d")]
                write_page(arguments.out, read_page(arguments.out) | {(model, card): cells})
                print(model, card, cells, flush=True)
    write_recipes(arguments.recipes, read_page(arguments.out))


Rows = dict[tuple[str, str], list[str]]
"""The other cells of the page, by model and card."""


def read_page(page: Path = PAGE) -> Rows:
    """What stands on the page already."""
    lines = page.read_text(encoding="utf-8").splitlines() if page.exists() else []
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| `")]
    return {(model.strip("`"), card): rest for model, card, *rest in cells if card in cards.CARDS}


def write_page(page: Path, found: Rows) -> None:
    """Write the rows in the order of MODELS, with what is missing."""
    keys = [(model, card) for model, published in MODELS.items() for card in published.cards]
    table = measuring.markdown([HEADER, *([f"`{key[0]}`", key[1], *found[key]] for key in keys if key in found)])
    there = [model for model in MODELS if any((model, card) in found for card in MODELS[model].cards)]
    missing = [f"`{model}`" for model in MODELS if model not in there]
    later = f"\nNot in the table yet, though the command knows their shapes: {', '.join(missing)}.\n" if missing else ""
    shapes = [[f"`{model}`", MODELS[model].family, MODELS[model].source] for model in there]
    source = measuring.markdown([["model", "`model_type`", "shape from"], *shapes])
    page.write_text(f"{ABOUT}\n{table}\n{later}\n{source}\n", encoding="utf-8")


def write_recipes(folder: Path, found: Rows) -> None:
    """Write a recipe for each row of the page that fits, and no other."""
    folder.mkdir(exist_ok=True)
    for path in folder.glob("*.yaml"):
        path.unlink()
    for (model, card), cells in found.items():
        if cells[3]:
            (folder / f"{recipe_name(model, card)}.yaml").write_text(recipe(model, card, cells), encoding="utf-8")


def recipe_name(model: str, card: str) -> str:
    """The name of a recipe below models/."""
    return f"{model.rpartition('/')[2].lower()}-{card}"


def recipe(model: str, card: str, cells: list[str]) -> str:
    """A recipe as its row of the page says: the one that it begins with, over this model, in the planned way.

    How devices share a run, and what waits on the host, is left to the run, which plans it for the devices that it has.
    """
    way, size, longest, rate, date = cells
    ways, _, host = way.partition(" (")
    needs = f"{size} GB ({host}" if host else f"{size} GB"
    weights, *savings = ways.split(", ")
    words = [f"model.id={model}", f"model.weights={weights}", f"train.learning_rate={RATE}"]
    for saving in savings:
        if saving.startswith("checkpointing"):
            words.append(f"train.checkpointing={saving.partition('=')[2] or 'true'}")
        elif saving == plan_table.WAITING:
            words.append("train.offload_activations=true")
    base = MODELS[model].recipe
    rows, own = OWN[base]
    values = load(base, [*words, *own]).model_dump(mode="json", exclude_unset=True)
    upto = f", rows of up to {longest} tokens" if longest else ""
    lines = [
        f"workbench run models/{recipe_name(model, card)} {rows}",
        f"By a plan of {date}: {needs}, {rate} tokens a second{upto}. Not run on this card.",
    ]
    schema = f"{recipes.FOR_EDITORS}../recipe.schema.json"
    return "\n".join([*(f"# {line}" for line in lines), schema, dump_yaml(values)])


def _planned(model: str, recipe: str, card: str) -> dict[str, Any]:
    try:
        return plan_table.planned(model, Where.of(card), [], recipe=recipe)
    except WorkbenchError as error:
        return {"fits": False, "refused": str(error)}


def _cells(facts: dict[str, Any]) -> list[str]:
    if "refused" in facts:
        return [f"refused: {facts['refused'].splitlines()[0]}", "", "", ""]
    size, longest = f"{facts['bytes'] / 1e9:.1f}", facts["longest_row"]
    if not facts["fits"]:
        return ["does not fit", f"{size} at least", "", ""]
    host = f" (host {units.size(facts['host_bytes'])})" if " to cpu" in facts["way"] else ""
    longest = min(longest or 0, facts["made_for"] or longest or 0)
    return [f"{facts['way']}{host}", size, f"{longest:,}" if longest else "", f"{facts['tokens_per_second']:,.0f}"]


if __name__ == "__main__":
    main()
