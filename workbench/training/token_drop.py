"""Tokens that the middle blocks of a backbone pass by: random layerwise token dropping (random-LTD), patch dropout.

A middle block computes ceil(share * n) of a row's n tokens, and passes the others on as they are (Yao et al. 2022,
arXiv:2211.11586, section 3; for patches as Liu et al. 2022, arXiv:2208.07220). Tokens that compute keep their order,
their rotary positions and what the attention mask says of them and of each other. Each block draws anew. The draws are
a hash of seed, step, row, block and the token's place, so that padding and micro-batches change nothing. The first and
the last blocks see everything, so that every position has logits. With a share of 1 nothing changes.

Legend: B rows, L padded tokens, K tokens that compute, Q queries of a mask (1 or L), H heads of a mask, D width.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from workbench.adapters import anatomy
from workbench.adapters.row_dropout import row_hash, row_keys
from workbench.config.sections.token_drop_config import TokenDropConfig
from workbench.data.batching import Indices
from workbench.errors import BackboneError
from workbench.models import rerouting
from workbench.training import block_calls

_PLACE = 1 << 20
"""Place of the first block in a hash; other noise of a step has places of its own."""
_MASK, _POSITIONS, _ROTATIONS = "attention_mask", "position_ids", "position_embeddings"
_CACHES = ("past_key_values", "past_key_value", "layer_past")
_SETTINGS = ("use_cache", "output_attentions", "output_router_logits", *_CACHES)
"""Arguments of a block that do not depend on its tokens; caches are empty in training."""
_KERNELS = ("flash_attention_2", "flex_attention")
"""Attention that finds its mask by counting tokens."""


class TokenDrop:
    """Lets the middle blocks of a backbone pass tokens by during steps."""

    def __init__(self, backbone: PreTrainedModel, blocks: Sequence[nn.Module], config: TokenDropConfig) -> None:
        self._backbone, self._config = backbone, config
        self._blocks = blocks
        self._pictures = anatomy.reads_pictures(backbone)
        self._share = 1.0
        self._lengths_B: Indices | None = None

    def install(self) -> None:
        """Put this in the way of the middle blocks' calls; nothing where it is off.

        Raises:
            BackboneError: As `middle` does.
        """
        for number, block in enumerate(middle(self._backbone, self._blocks, self._config)):
            rerouting.reroute(block, partial(self._forward, number, block, block.forward))

    @contextmanager
    def during(self, share: float) -> Iterator[None]:
        """Inside, tokens are passed by as they are after a share of the run."""
        self._share = self._config.share(share)
        try:
            yield
        finally:
            self._share = 1.0

    @contextmanager
    def of(self, lengths_B: Indices | None) -> Iterator[None]:
        """Inside, rows of so many tokens compute; of pictures all have as many as the block gets."""
        self._lengths_B = lengths_B
        try:
            yield
        finally:
            self._lengths_B = None

    def _forward(self, number: int, block: nn.Module, own: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """The forward pass of a block over some of the tokens."""
        keys_B = row_keys()
        if self._share == 1 or keys_B is None:
            return own(*arguments, **named)
        bound = _bound(block, arguments, named)
        before_BLD: Tensor = bound[rerouting.HIDDEN]
        rows, length, width = before_BLD.shape
        assert rows == len(keys_B) and self._lengths_B is not None, "rows are not laid out one by one"
        lengths_B = np.full(rows, length) if self._pictures else np.resize(self._lengths_B, rows)
        hash_BL = row_hash(keys_B, _PLACE + number, tokens=length, units=1)[..., 0]
        index_BK = chosen(hash_BL, lengths_B, share=self._share)
        output = own(**{name: _thinned(name, value, index_BK) for name, value in bound.items()})
        after_BKD = output[0] if isinstance(output, tuple) else output
        places_BKD = index_BK[..., None].expand(-1, -1, width)
        return block_calls.like(output, before_BLD.scatter(1, places_BKD, after_BKD.to(before_BLD.dtype)))


def middle(backbone: PreTrainedModel, blocks: Sequence[nn.Module], config: TokenDropConfig) -> Sequence[nn.Module]:
    """The blocks of all that can pass tokens by; none where it is off. The backbone is called once, as by a survey.

    Raises:
        BackboneError: There is none, or it reads something of which it is not known which part belongs to a token.
    """
    if not config.is_on:
        return []
    if reason := config.refusal(len(blocks)):
        raise BackboneError(reason)
    inner_blocks, name = blocks[config.outer : len(blocks) - config.outer], type(backbone).__name__
    if (kernel := getattr(backbone.config, "_attn_implementation", "")) in _KERNELS:
        raise BackboneError(f"token_drop needs sdpa, and {kernel} counts tokens. Write model.attention=sdpa.")
    for block, call in zip(inner_blocks, block_calls.survey(backbone, inner_blocks), strict=True):
        unknown = _unknown(_bound(block, call.arguments, call.named))
        in_rows = call.adds and call.before.ndim == 3
        if unknown or not in_rows:
            why = f"reads `{unknown[0]}`" if in_rows else "has no tokens in rows"
            raise BackboneError(
                f"{name}: its {type(block).__name__} {why}, so that token_drop cannot leave tokens out. "
                "Leave token_drop out, or take layer_drop.rate=0.5, which leaves out blocks."
            )
    return inner_blocks


def chosen(hash_BL: Tensor, lengths_B: Indices, *, share: float) -> Tensor:
    """Places (B, K) of the tokens that compute, in their order; in shorter rows padding follows, to as many as needed.

    Args:
        hash_BL: An evenly spread number of each token, which decides.
        lengths_B: Tokens of each row; at least one has L.
    """
    device, length = hash_BL.device, hash_BL.shape[1]
    kept_B = [max(1, math.ceil(share * int(each) - 1e-9)) for each in lengths_B]
    count_B1 = torch.tensor(kept_B, device=device)[:, None]
    length_B1 = torch.as_tensor(lengths_B, device=device)[:, None]
    place_L = torch.arange(length, device=device)
    order_BL = (hash_BL.long() << 20) + place_L  # ties go to the earlier token
    order_BL = torch.where(place_L < length_B1, order_BL, 1 << 60).index_fill(1, place_L[:1], -(1 << 60))
    rank_BL = order_BL.argsort(1).argsort(1)
    # In shorter rows there is padding enough: ceil(s L) - ceil(s n) <= L - n.
    later_BL = torch.where(place_L < length_B1, 2 * length, length)
    return torch.where(rank_BL < count_B1, place_L, place_L + later_BL).argsort(1)[:, : max(kept_B)]


def _bound(block: nn.Module, arguments: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a block by name, without those that are None."""
    names = list(inspect.signature(type(block).forward).parameters)[1:]
    bound = {**dict(zip(names, arguments, strict=False)), **named}
    return {name: each for name, each in bound.items() if each is not None}


def _unknown(bound: Mapping[str, Any]) -> list[str]:
    known = (rerouting.HIDDEN, _MASK, _POSITIONS, _ROTATIONS, *_SETTINGS)
    return [name for name in bound if name not in known]


def _thinned(name: str, value: Any, index_BK: Tensor) -> Any:
    """An argument of a block, for the tokens that compute."""
    rows, count = index_BK.shape
    if name == rerouting.HIDDEN:
        return value.gather(1, index_BK[..., None].expand(-1, -1, value.shape[-1]))
    if name == _POSITIONS:
        return value.expand(rows, -1).gather(1, index_BK)
    if name == _ROTATIONS:
        return tuple(
            each.expand(rows, -1, -1).gather(1, index_BK[..., None].expand(-1, -1, each.shape[-1])) for each in value
        )
    if name == _MASK:
        mask_BHQL = value.expand(rows, -1, -1, -1)
        heads, queries = mask_BHQL.shape[1:3]
        if queries > 1:
            picked = index_BK[:, None, :, None].expand(-1, heads, -1, mask_BHQL.shape[-1])
            mask_BHQL = mask_BHQL.gather(2, picked)
        return mask_BHQL.gather(3, index_BK[:, None, None].expand(-1, heads, mask_BHQL.shape[2], count))
    assert name in _SETTINGS, f"a block reads `{name}`"
    assert name not in _CACHES or not value.get_seq_length(), "a training step keeps no cache"
    return value
