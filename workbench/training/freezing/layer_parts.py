"""The parts of each layer of a backbone by their kind, and how many values of each an adapter's method lets train."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain

from torch import nn
from transformers import PreTrainedModel

from workbench.adapters import anatomy
from workbench.training.freezing.layer_map import LayerMap

_NAMES: Mapping[str, str] = {
    "embedding": "embed_tokens wte wpe word_embeddings position_embeddings token_type_embeddings embed_positions "
    "embeddings patch_embed patch_embeddings shared tok_embeddings embed_in",
    "virtual tokens": "prompt_encoder",
    "q": "q_proj q query q_lin wq q_attn",
    "k": "k_proj k key k_lin wk",
    "v": "v_proj v value v_lin wv",
    "qkv": "qkv qkv_proj query_key_value c_attn wqkv in_proj",
    "o": "o_proj out_proj o out_lin",
    "gate": "gate_proj wi_0 w1",
    "gate, up": "gate_up_proj",
    "up": "up_proj fc1 c_fc wi wi_1 w3 lin1 dense_h_to_4h fc_in intermediate",
    "down": "down_proj fc2 wo w2 lin2 dense_4h_to_h fc_out",
    "router": "gate router",
    "head": "lm_head embed_out score classifier cls fc_norm_head",
}
_KINDS = {name: kind for kind, names in _NAMES.items() for name in names.split()}
_BY_PLACE = ("dense", "proj", "c_proj")
"""Names of what gives a part's output, of attention and of the rest of a block."""
ORDER = (*list(_NAMES)[:-1], "norm", "other", "head")
"""The kinds of parts, as they follow one another in a block."""


_BEFORE, _AFTER = "before the blocks", "after the blocks"


@dataclass(frozen=True)
class LayerParts:
    """Everything with values in one block of a backbone, or before or after its blocks."""

    name: str
    layer: int
    """Layer of a freezing policy: 0 before the blocks, 1 to n the blocks, n + 1 after them."""
    parts: Mapping[str, int]
    """Values that the method lets train by kind, in the order of ORDER; 0 where a part is there and frozen."""


@lru_cache(maxsize=4096)
def kind(path: str) -> str:
    """The kind of the part that a parameter belongs to or changes.

    Args:
        path: The parameter's name inside its block, or in the backbone where it is in none.
    """
    names = path.lower().split(".")
    for place, name in enumerate(names):
        if "norm" in name or name.startswith("ln_") or name == "ln":
            return "norm"
        if name in _BY_PLACE:
            return "o" if any("att" in before for before in names[:place]) else "down"
        if name in _KINDS:
            return _KINDS[name]
    return "other"


def survey_parts(model: nn.Module, backbone: PreTrainedModel, layers: LayerMap) -> tuple[LayerParts, ...]:
    """The parts of a model, block by block; a method's own values count for the part that they change.

    Args:
        model: The backbone with its adapter, whose values require gradients where the method lets them train.
        backbone: The same without the adapter around it.
    """
    stacks = [list(layers.blocks)] if layers.blocks else anatomy.blocks(backbone)
    blocks = dict(_named(stacks))
    number = {path: place for place, path in enumerate(layers.blocks, start=1)}
    counts: dict[str, Counter[str]] = {}
    layer: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        path = name.removeprefix("base_model.model.")
        block = next((lead for lead in _leads(path) if lead in blocks), None)
        own = kind(path if block is None else path.removeprefix(f"{block}."))
        if block is not None:
            where, at = blocks[block], number.get(block, 0)
        else:
            at = layers.of(name)
            last = at > len(layers.blocks) if layers.blocks else own == "head"
            where = _AFTER if last else _BEFORE
        layer[where] = at
        counts.setdefault(where, Counter())[own] += parameter.numel() * parameter.requires_grad
    order = [name for name in (_BEFORE, *blocks.values(), _AFTER) if name in counts]
    return tuple(
        LayerParts(name, layer[name], {each: counts[name][each] for each in ORDER if each in counts[name]})
        for name in order
    )


def _leads(path: str) -> Iterator[str]:
    """The modules that a parameter is in, by their paths, the outermost first."""
    names = path.split(".")
    return (".".join(names[:end]) for end in range(1, len(names)))


def _named(stacks: list[list[str]]) -> Iterator[tuple[str, str]]:
    """Paths and names of all blocks."""
    if len(stacks) == 1:
        return ((path, f"block {number}") for number, path in enumerate(stacks[0], start=1))
    return chain.from_iterable(
        ((path, f"{path.split('.')[0]} block {number}") for number, path in enumerate(stack, start=1))
        for stack in stacks
    )
