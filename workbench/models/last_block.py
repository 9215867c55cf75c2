"""The last block of a causal model, computed at supervised positions alone where nothing else reads what it gives.

Its keys and values are those of all tokens. Queries, the output of attention and the MLP, some five sixths of the
block's products, are computed for the positions whose next token carries loss; there they are what they would be.

Legend: B rows, L padded tokens of each, N supervised positions, M chosen tokens, Q queries of a row, D hidden, H heads
of queries, K of keys, E width of a head.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from workbench.adapters import anatomy
from workbench.adapters.banks.bank_layers import Routed, RoutedLora
from workbench.adapters.updates.lora_start_values import Shift

FAMILIES = ("gemma", "granite", "llama", "mistral", "qwen2", "qwen3")
"""Architectures by transformers' `model_type` whose last block is computed here as they compute it."""
MOST = 0.9
"""Share of the tokens that are computed up to which choosing them costs less than it saves."""
_AS_IT_IS = ContextVar("as_it_is", default=False)
STRETCH = 16
"""Queries of a row are as many as a multiple of this: oneDNN compiles a product for every number."""


class RowQueries(NamedTuple):
    """The chosen tokens as queries (B, Q) of their rows; what is over is for nobody."""

    column_BQ: Tensor
    """Place of each query in its row."""
    token_BQ: Tensor
    """Flat index of each query among the chosen tokens."""
    slot_M: Tensor
    """Flat index into B * Q of each chosen token."""


@dataclass
class Narrowing:
    """The tokens of a micro-batch that the last block computes."""

    shape: tuple[int, int]
    """B and L of what the block gets; 1 and all tokens where rows are packed."""
    places: Tensor
    """Flat indices into B * L (1, M), or (B, Q) where each row has as many."""
    slots_N: Tensor | None
    """Flat indices among the chosen tokens of the supervised positions; None: they are those."""
    queries: RowQueries | None = None
    """None: queries are computed for all tokens."""
    applied: bool = False
    """Whether the block has computed these alone."""

    def of(self, hidden_BLD: Tensor) -> Tensor:
        """The chosen tokens (..., D), as `places` has them, of all (B, L, D)."""
        chosen = hidden_BLD.flatten(0, 1).index_select(0, self.places.flatten())
        return chosen.view(*self.places.shape, -1)


@contextmanager
def left_as_it_is(condition: bool) -> Iterator[None]:
    """Inside, where the condition holds, no last block is computed here: a plan for devices that cut weights."""
    token = _AS_IT_IS.set(condition or _AS_IT_IS.get())
    try:
        yield
    finally:
        _AS_IT_IS.reset(token)


def of(backbone: PreTrainedModel) -> nn.Module | None:
    """The last block of a backbone of a family whose block is computed here; None of another."""
    if (
        _AS_IT_IS.get()
        or backbone.config.model_type not in FAMILIES
        or not (blocks := anatomy.decoder_layers(backbone))
    ):
        return None
    return blocks[-1]


@contextmanager
def narrowed(
    block: nn.Module | None, positions_N: Tensor, ids_BL: Tensor, *, packed: bool
) -> Iterator[Narrowing | None]:
    """Inside, the block computes what `positions_N` need; None where it computes everything.

    Where activations are recomputed, those of this block are kept: the backward pass would begin by computing them.

    Args:
        block: From `of`.
        positions_N: Flat indices into B * L.
        packed: Whether rows lie one after another in one sequence.
    """
    narrowing = None
    if block is not None and _plain(block):
        by_member = any(isinstance(each, RoutedLora) for each in block.modules())
        narrowing = _chosen(positions_N, ids_BL, packed=packed, by_member=by_member)
    if narrowing is None:
        yield None
        return
    own: Any = block
    checkpointing = getattr(own, "gradient_checkpointing", False)
    own.gradient_checkpointing = False
    own.forward = partial(_forward, own, narrowing)
    try:
        yield narrowing
    finally:
        del own.__dict__["forward"]
        own.gradient_checkpointing = checkpointing


def _chosen(positions_N: Tensor, ids_BL: Tensor, *, packed: bool, by_member: bool) -> Narrowing | None:
    """None where nearly everything is needed, or where it would have to be counted on a device.

    Args:
        by_member: Whether layers count the tokens of each row, as those of a bank do.
    """
    rows, length = ids_BL.shape
    if not 0 < len(positions_N) <= MOST * rows * length:
        return None
    if packed or positions_N.device.type != "cpu":  # the device alone knows how many each row has
        return None if by_member else Narrowing((rows, length), positions_N[None], None)
    kept_M, number_N = positions_N.unique(return_inverse=True)
    row_M = kept_M // length
    count_B = row_M.bincount(minlength=rows)
    most = min(length, -(-int(count_B.max()) // STRETCH) * STRETCH)
    slot_M = row_M * most + torch.arange(len(kept_M)) - (count_B.cumsum(0) - count_B)[row_M]
    token_BQ = torch.zeros(rows, most, dtype=torch.long)
    token_BQ.view(-1)[slot_M] = torch.arange(len(kept_M))
    if not by_member:
        queries = RowQueries(kept_M[token_BQ] % length, token_BQ, slot_M)
        return Narrowing((rows, length), kept_M[None], number_N, queries)
    if most > MOST * length:
        return None
    places_BQ = (torch.arange(rows) * length)[:, None].repeat(1, most)
    places_BQ.view(-1)[slot_M] = kept_M
    alike = torch.arange(rows * most)
    queries = RowQueries(places_BQ % length, alike.view(rows, most), alike)
    return Narrowing((rows, length), places_BQ, slot_M[number_N], queries)


def _plain(block: Any) -> bool:
    """Whether the block is its family's own, each token's products are its own, and nobody else reads its outputs."""
    attention: Any = block.self_attn
    own = type(block).__module__ == type(attention).__module__ and hasattr(_code(attention), "apply_rotary_pos_emb")
    if not own or attention.config._attn_implementation != "sdpa" or (block.training and attention.attention_dropout):
        return False
    parts: tuple[nn.Module, ...] = (block, attention, block.mlp)
    for part in parts:
        read = part._forward_hooks.keys() - part._forward_hooks_always_called.keys()  # these clean up: a plan's
        if read or "forward" in part.__dict__ or part._compiled_call_impl is not None:
            return False
    return all(_by_token(each) for each in block.modules())


def _by_token(module: nn.Module) -> bool:
    """Whether a layer gives each token the same whatever others are beside it, and wherever it stands among them."""
    if isinstance(module, Routed) and module.own:
        return False
    if isinstance(module, BaseTunerLayer):
        variants = getattr(module, "lora_variant", {}).values()
        return isinstance(module, LoraLayer) and all(isinstance(each, Shift) for each in variants)
    if isinstance(module, nn.Dropout):
        return not (module.training and module.p)
    return type(module).__name__ != "Linear8bitLt"  # whose outliers of one token are those of all


def _forward(
    block: Any,
    narrowing: Narrowing,
    hidden_BLD: Tensor,
    *,
    attention_mask: Tensor | None = None,
    position_embeddings: tuple[Tensor, Tensor],
    past_key_values: Any = None,
    **settings: Any,
) -> Tensor:
    """The block's forward pass: (..., D) of the chosen tokens; of all where there are others than in the batch."""
    settings |= {"attention_mask": attention_mask, "position_embeddings": position_embeddings}
    if past_key_values is not None or tuple(hidden_BLD.shape[:2]) != narrowing.shape or settings.get("sequence"):
        whole: Tensor = type(block).forward(block, hidden_BLD, past_key_values=past_key_values, **settings)
        return whole
    narrowing.applied = True
    factor = getattr(block, "residual_multiplier", 1.0)  # Granite

    def added(residual: Tensor, update: Tensor) -> Tensor:
        return residual + (update if factor == 1 else update * factor)

    attended = _attention(block.self_attn, block.input_layernorm(hidden_BLD), narrowing, **settings)
    hidden = added(narrowing.of(hidden_BLD), attended)
    return added(hidden, block.mlp(block.post_attention_layernorm(hidden)))


def _attention(
    attention: Any,
    hidden_BLD: Tensor,
    narrowing: Narrowing,
    *,
    attention_mask: Tensor | None,
    position_embeddings: tuple[Tensor, Tensor],
    **settings: Any,
) -> Tensor:
    """The output of attention (..., D) at the chosen tokens, which see what comes before them in their rows."""
    rows, queries, rotate = narrowing.shape[0], narrowing.queries, _code(attention).apply_rotary_pos_emb

    def heads(name: str, hidden: Tensor) -> Tensor:
        parts: Tensor = getattr(attention, f"{name}_proj")(hidden).view(*hidden.shape[:2], -1, attention.head_dim)
        norm = getattr(attention, f"{name}_norm", None)  # Qwen 3
        parts = parts if norm is None else norm(parts)
        return parts.transpose(1, 2)

    query = heads("q", hidden_BLD if queries is None else narrowing.of(hidden_BLD))
    key_BKLE, value_BKLE = heads("k", hidden_BLD), heads("v", hidden_BLD)
    cos, sin = position_embeddings
    key_BKLE = rotate(key_BKLE[:, :0], key_BKLE, cos, sin)[1]
    if queries is not None:
        cos, sin = (narrowing.of(each.expand(rows, -1, -1)) for each in (cos, sin))
        attention_mask = _seen(attention_mask, narrowing.shape, queries.column_BQ)
    query = rotate(query, query[:, :0], cos, sin)[0]
    if queries is not None:
        query_MHE = query.transpose(1, 2).flatten(0, 1)
        query = (
            query_MHE.index_select(0, queries.token_BQ.flatten()).unflatten(0, queries.token_BQ.shape).transpose(1, 2)
        )
    attend = ALL_ATTENTION_FUNCTIONS["sdpa"]
    attended, _ = attend(attention, query, key_BKLE, value_BKLE, attention_mask, scaling=attention.scaling, **settings)
    flat = attended.flatten(2)
    chosen = narrowing.of(flat) if queries is None else flat.flatten(0, 1).index_select(0, queries.slot_M)
    output: Tensor = attention.o_proj(chosen.view(*narrowing.places.shape, -1))
    return output


def _seen(attention_mask: Tensor | None, shape: tuple[int, int], column_BQ: Tensor) -> Tensor:
    """Mask of the chosen queries (B, 1, Q, L); without one of all, they see up to themselves."""
    rows, length = shape
    if attention_mask is None:
        return torch.le(torch.arange(length), column_BQ[..., None])[:, None]
    return attention_mask.expand(rows, 1, length, length)[torch.arange(rows)[:, None], 0, column_BQ][:, None]


def _code(attention: nn.Module) -> Any:
    """The module that a family's attention is defined in."""
    return sys.modules[type(attention).__module__]
