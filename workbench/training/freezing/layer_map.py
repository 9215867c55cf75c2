"""The layers of a backbone: which one a parameter belongs to, and the kinds of parts in each.

Layers: 0 what is computed before the blocks, 1 to n the blocks, n + 1 what is computed after them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
from torch import nn
from transformers import PreTrainedModel

from workbench.adapters import anatomy
from workbench.errors import BackboneError


@dataclass(frozen=True)
class LayerMap:
    """The layers of a bare backbone, by the paths of its modules; an adapter's parameters follow their module."""

    blocks: tuple[str, ...]
    """Paths of the transformer blocks, in the order in which they compute."""
    between: Mapping[str, int]
    """Layer of each module outside of the blocks that first computes after one of them: of the next block (such as the
    step to the next resolution of a picture), or of what comes after all blocks."""

    def of(self, parameter: str) -> int:
        """The layer of a parameter, by its name in the backbone or in what PEFT made of it.

        A tensor that is used twice, such as an embedding that is also the head, belongs to its first use. A tensor that
        no module's call shows, such as a table that the blocks read, belongs to layer 0: whatever the outputs of a
        frozen prefix may depend on freezes with it.
        """
        path = parameter.removeprefix("base_model.model.")
        for number, block in enumerate(self.blocks, start=1):
            if path.startswith(f"{block}."):
                return number
        return next((self.between[module] for module in _modules_around(path) if module in self.between), 0)


def survey(backbone: PreTrainedModel, *, needed: bool = True) -> LayerMap:
    """The layers of a bare backbone, found by calling it once.

    Args:
        needed: Whether something depends on them; if not, a backbone with two stacks of blocks, or none, is one layer.

    Raises:
        BackboneError: it has two stacks of blocks, or none.
    """
    if not needed and len(anatomy.blocks(backbone)) != 1:
        return LayerMap((), {})
    blocks, done, first = stack(backbone), 0, dict[str, int]()

    def computed(number: int, *_: object) -> None:
        nonlocal done
        done = max(done, number)

    def seen(name: str, *_: object) -> None:
        first.setdefault(name, done)

    inside = tuple(f"{block}." for block in blocks)
    handles = [
        module.register_forward_pre_hook(partial(seen, name))
        for name, module in backbone.named_modules()
        if not f"{name}.".startswith(inside) and next(module.parameters(recurse=False), None) is not None
    ]
    for number, block in enumerate(blocks, start=1):
        handles.append(backbone.get_submodule(block).register_forward_hook(partial(computed, number)))
    settings = {"use_cache": False} if backbone.can_generate() else {}
    try:
        with torch.no_grad():
            backbone(**anatomy.trial_inputs(backbone), **settings)
    finally:
        for handle in handles:
            handle.remove()
    return LayerMap(tuple(blocks), {name: behind + 1 for name, behind in first.items() if behind})


def stack(backbone: PreTrainedModel) -> list[str]:
    """Paths of the transformer blocks; raises BackboneError where there are two stacks, or none."""
    stacks = anatomy.blocks(backbone)
    if len(stacks) != 1:
        raise BackboneError(
            f"{type(backbone).__name__} has {len(stacks)} stacks of blocks; freeze, layer_drop, grow, "
            "optimizer.layer_decay, regularise.stochastic_depth and optimizer.name=muon|shampoo|galore|apollo are for "
            "one. Leave them out, or take an encoder or a causal backbone."
        )
    return stacks[0]


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
"""Names of output projections, both of attention and of the MLP."""
ORDER = (*list(_NAMES)[:-1], "norm", "other", "head")
"""The kinds of parts, in the order in which a block computes them."""
_BEFORE, _AFTER = "before the blocks", "after the blocks"


@dataclass(frozen=True)
class LayerParts:
    """The parts of one block of a backbone, or of what comes before or after its blocks."""

    name: str
    layer: int
    """Layer of a freezing policy."""
    parts: Mapping[str, int]
    """Number of values that the method lets train, by kind in the order of ORDER; 0 for a part that is frozen."""


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
    """The parts of a model, block by block; an adapter's values count for the part that they change.

    Args:
        model: The backbone with its adapter, whose values require gradients where the method lets them train.
        backbone: The same without the adapter around it.
    """
    stacks = [list(layers.blocks)] if layers.blocks else anatomy.blocks(backbone)
    # What tells the stacks of an encoder-decoder apart: `encoder` of `model.encoder.layers.0`.
    places = zip(*(stack[0].split(".") for stack in stacks), strict=False)
    names = next((each for each in places if len(set(each)) == len(stacks) > 1), ("",) * len(stacks))
    blocks = {
        path: f"{name} block {place}".lstrip()
        for name, stack in zip(names, stacks, strict=True)
        for place, path in enumerate(stack, start=1)
    }
    number = {path: place for place, path in enumerate(layers.blocks, start=1)}
    counts: dict[str, Counter[str]] = {}
    layer: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        path = name.removeprefix("base_model.model.")
        block = next((module for module in _modules_around(path) if module in blocks), None)
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


def _modules_around(path: str) -> Iterator[str]:
    """Paths of the modules that a parameter is in, the outermost first."""
    names = path.split(".")
    return (".".join(names[:end]) for end in range(1, len(names)))
