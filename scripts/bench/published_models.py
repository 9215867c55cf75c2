"""What `workbench init --model ... --device ...` would write for published models, by plans alone: recipes/models.md.

    python scripts/bench/published_models.py                   # writes recipes/models.md
    python scripts/bench/published_models.py --models Qwen/Qwen3-8B     # these rows anew, the others as they stand

No weight is read and no card is needed: a model is its config.json, of the shapes below; rows are those of `sft/chat`
in the starter's tokens. Whatever is left to choose is chosen by the plan, as `init` does.
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
import torch
from plan_table import Where, planned
from transformers import CONFIG_MAPPING, AutoTokenizer

from workbench.data import starter
from workbench.errors import WorkbenchError
from workbench.runs import units

PAGE = Path(__file__).parents[2] / "recipes" / "models.md"
CARDS = ("4090", "l40s", "h100")
"""Cards of 24, 48 and 80 GB."""
LITGPT = "litgpt's configurations"
DEFAULTS = "defaults of transformers 5.23"


class Published(NamedTuple):
    """The shape of a published model."""

    family: str
    """`model_type` of transformers."""
    source: str
    """Where these values stand in public."""
    values: Mapping[str, Any] = MappingProxyType({})
    """Of its config.json, where they differ from the family's defaults in transformers."""


def _of(layers: int, width: int, heads: int, groups: int, inner: int, words: int, **more: Any) -> dict[str, Any]:
    """Blocks, hidden size, heads, heads of keys and values, hidden size of the feed-forward layers, vocabulary."""
    names = ["num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads"]
    names += ["intermediate_size", "vocab_size"]
    return dict(zip(names, (layers, width, heads, groups, inner, words), strict=True)) | more


_QWEN3 = {"head_dim": 128, "vocab_size": 151_936, "max_position_embeddings": 40_960}
_GEMMA3 = {"head_dim": 256, "vocab_size": 262_208, "sliding_window": 1024}
_LLAMA3 = {"max_position_embeddings": 131_072}
_EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
MODELS = {
    "Qwen/Qwen3-0.6B": Published("qwen3", LITGPT, _of(28, 1024, 16, 8, 3072, 0, tie_word_embeddings=True) | _QWEN3),
    "Qwen/Qwen3-4B": Published("qwen3", LITGPT, _of(36, 2560, 32, 8, 9728, 0, tie_word_embeddings=True) | _QWEN3),
    "Qwen/Qwen3-8B": Published("qwen3", LITGPT, _of(36, 4096, 32, 8, 12_288, 0) | _QWEN3),
    "Qwen/Qwen3-32B": Published("qwen3", LITGPT, _of(64, 5120, 64, 8, 25_600, 0) | _QWEN3),
    "Qwen/Qwen3-30B-A3B": Published("qwen3_moe", LITGPT, _of(48, 2048, 32, 4, 6144, 0) | _QWEN3 | _EXPERTS),
    "Qwen/Qwen3.5-9B": Published("qwen3_5_text", DEFAULTS, {"max_position_embeddings": 262_144}),
    "openai/gpt-oss-20b": Published(
        "gpt_oss", "slime's script of it", {"num_hidden_layers": 24, "num_local_experts": 32}
    ),
    "meta-llama/Llama-3.2-1B": Published(
        "llama", LITGPT, _of(16, 2048, 32, 8, 8192, 128_256, tie_word_embeddings=True) | _LLAMA3
    ),
    "meta-llama/Llama-3.1-8B": Published("llama", LITGPT, _of(32, 4096, 32, 8, 14_336, 128_256) | _LLAMA3),
    "meta-llama/Llama-3.3-70B-Instruct": Published("llama", LITGPT, _of(80, 8192, 64, 8, 28_672, 128_256) | _LLAMA3),
    "google/gemma-3-4b-it": Published("gemma3_text", LITGPT, _of(34, 2560, 8, 4, 10_240, 0) | _GEMMA3),
    "google/gemma-3-27b-it": Published(
        "gemma3_text", LITGPT, _of(62, 5376, 32, 16, 21_504, 0) | _GEMMA3 | {"head_dim": 128}
    ),
    "mistralai/Mistral-7B-v0.3": Published(
        "mistral", LITGPT, _of(32, 4096, 32, 8, 14_336, 32_768, max_position_embeddings=32_768)
    ),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": Published(
        "qwen2", f"{LITGPT} (Qwen2.5-Math-7B)", _of(28, 3584, 28, 4, 18_944, 152_064, max_position_embeddings=131_072)
    ),
    "zai-org/GLM-4-9B-0414": Published("glm4", DEFAULTS, {"max_position_embeddings": 32_768}),
    "HuggingFaceTB/SmolLM3-3B": Published("smollm3", DEFAULTS, {"max_position_embeddings": 65_536}),
    "microsoft/phi-4": Published(
        "phi3", LITGPT, _of(40, 5120, 40, 10, 17_920, 100_352, max_position_embeddings=16_384)
    ),
}
HEADER = ["model", "card", "weights", "GB", "longest row", "tokens a second"]
ABOUT = """# Models and cards

<!-- Written by scripts/bench/published_models.py: change it there. -->

What `workbench init` writes for a model and a card, by its plan: whether LoRA on all linear layers fits, and how. **Not
run on these cards**: the bytes are those that a plan counts ([its errors](verbs/plan.md)), the time takes 35 % of a
card's products, and rows are those of `sft/chat`, in the starter's tokens. Your own rows and any other card:

<!-- needs: a network for the backbone -->
```sh
workbench init my.yaml --rows my.jsonl --model Qwen/Qwen3-8B --device 4090
```

The longest row has all tokens supervised, and every saving; it is no longer than the model was made for. Its cell is
empty where not even 2,048 tokens fit.
`python scripts/bench/published_models.py` made this page on {date}, from config.json alone.
"""


def write_config(name: str, folder: Path, *, tiny: bool = False) -> None:
    """The starter's tokenizer and the config.json of a model, enough for a plan; `tiny`: four blocks of 64 units."""
    family, _, values = MODELS[name]
    if tiny:
        small = _of(4, 64, 4, 2, 64, 8192) | {"head_dim": 16, "layer_types": None}
        small |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
        values = {**values, **small} | {key: 8 for key in ("num_experts", "num_local_experts") if key in values}
    config = CONFIG_MAPPING[family](**values)
    config.dtype = torch.float32 if tiny else torch.bfloat16
    config.save_pretrained(folder)
    AutoTokenizer.from_pretrained(starter.FOLDER).save_pretrained(folder)


def main() -> None:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    found.add_argument("--out", type=Path, default=PAGE, help="the page to write")
    arguments = found.parse_args()
    with tempfile.TemporaryDirectory() as name:
        for model in arguments.models:
            folder = Path(name) / model
            write_config(model, folder)
            told = {card: _cells(_planned(str(folder), Where.of(card))) for card in CARDS}
            rows = _rows(arguments.out) | {(model, card): cells for card, cells in told.items()}
            _write(
                arguments.out, {key: rows[key] for model in MODELS for card in CARDS if (key := (model, card)) in rows}
            )
            print(model, told, flush=True)


def _rows(page: Path) -> dict[tuple[str, str], list[str]]:
    """What stands on the page already."""
    lines = page.read_text(encoding="utf-8").splitlines() if page.exists() else []
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| `")]
    return {(model.strip("`"), card): rest for model, card, *rest in cells if card in CARDS}


def _write(page: Path, rows: dict[tuple[str, str], list[str]]) -> None:
    table = measuring.markdown([HEADER, *([f"`{model}`", card, *cells] for (model, card), cells in rows.items())])
    shapes = [[f"`{model}`", MODELS[model].family, MODELS[model].source] for model, card in rows if card == CARDS[0]]
    missing = [f"`{model}`" for model in MODELS if (model, CARDS[0]) not in rows]
    later = f"\nNot in the table yet, though the command knows their shapes: {', '.join(missing)}.\n" if missing else ""
    source = measuring.markdown([["model", "`model_type`", "shape from"], *shapes])
    page.write_text(f"{ABOUT.format(date=time.strftime('%Y-%m-%d'))}\n{table}\n{later}\n{source}\n", encoding="utf-8")


def _planned(model: str, where: Where) -> dict[str, Any]:
    try:
        return planned(model, where, [])
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
