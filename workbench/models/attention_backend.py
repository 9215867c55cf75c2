"""Which kernel computes attention: packed rows, short rows on a CPU, rows of a server with their own caches, cuDNN.

`register` replaces transformers' sdpa with `attend`, which dispatches:

- Packed rows lie one after another in one sequence, and no row sees another, except for a prefix that all share. On a
  GPU flash attention over rows of any lengths computes them, else blocks of rows under a mask.
- Short rows in half precision on a CPU: torch's kernel multiplies their small matrices without the processor's bfloat16
  units, above all in the backward pass. Here the attention weights are kept for the backward pass, and the products use
  these units. Forward and backward on one core of an Intel Xeon with bfloat16 units, 12 heads of 64, in ms (torch in
  bfloat16 / torch in float32 / here): 5 rows of 120 tokens 24.7 / 11.6 / 6.2; 3 of 207 28.8 / 18.0 / 9.1; 1 of 512 20.6
  / 26.9 / 16.1.
- Rows of a server, each with a cache of its own: the tokens of all rows are one batch of T rows of one token, and
  attention computes each row by itself, without padding. So a row's result does not depend on the other rows, not even
  in the last bit.
- cuDNN, which prepares a plan for every new shape, is allowed only where all rows have one length: on an H100 a plan
  takes longer than the rest of a step of a 1 B model. Flash attention takes any shape.

Legend: B rows, T tokens of all rows, t of one row, L queries, S keys, H heads of queries, K of keys and values, D width
of a head.
"""

from __future__ import annotations

import inspect
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, PretrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from workbench.data.batching import Indices
from workbench.models.sequence_attention import SequenceGroup
from workbench.models.weight_formats import HALVES

LONGEST = 512  # tokens of a row from which torch's half-precision kernel is as fast
_PLANNED = ContextVar("planned", default=False)
_LEAST_SCORE = torch.finfo(torch.float32).min
LEAST_ROOM = 64  # tokens that a row's cache can hold at first; it doubles when it is full
_Attend = Callable[..., tuple[Tensor, None]]
ALIKE = 16
"""In half precision row lengths are padded to a multiple of this, and rows of one padded length are computed together,
since oneDNN compiles a product for every length and number of rows."""
BLOCK = 48
"""Shorter rows share a block of so many tokens, in which a mask hides them from each other. Forward and backward of 96
rows of 5 to 35 tokens, 12 heads of 32, on one core with bfloat16 units, in ms: rows padded to about their own length
21.0, blocks of 48 tokens 11.6, of 64 12.6, of 96 17.9."""
SHORT = 128  # longest block, in tokens, that is computed together with others
WIDEST = 192  # largest width of a head that flash attention trains on every GPU that it supports
OLDEST = (8, 0)  # compute capability that flash attention needs: Ampere's
FAMILIES = ("bert", "gemma", "gpt2", "granite", "llama", "mistral", "qwen2", "qwen3")
"""Architectures (`model_type`) for which tests show that packed rows, and rows and blocks dealt to several devices,
compute what each row computes alone."""
PACKED_FAMILIES = (
    *FAMILIES,
    *("cohere", "deepseek_v3", "gemma3_text", "gemma4_text", "glm4", "glm4_moe", "llama4_text", "minimax_m2"),
    *("ministral3", "mixtral", "olmo2", "olmo3", "phi3", "qwen2_5_vl_text", "qwen3_moe", "qwen3_vl_text", "seed_oss"),
    *("smollm3", "starcoder2"),
)
"""Architectures for which tests show this for packed rows on one device."""

CARRYING = {"conv", "hybrid", "hybrid_sliding", "linear_attention"}
"""Kinds of layers (transformers' `layer_types`) that read a sequence from its beginning on, whatever rows it has."""


def forbid_cudnn() -> None:
    """Keep torch from using cuDNN's attention in this process."""
    torch.backends.cuda.enable_cudnn_sdp(False)


@contextmanager
def planned(accelerated: bool) -> Iterator[None]:
    """Inside, tensors without values choose kernels as on an accelerator (NVIDIA's from Ampere on) where `accelerated`,
    though they are on a CPU."""
    token = _PLANNED.set(accelerated)
    try:
        yield
    finally:
        _PLANNED.reset(token)


def on_cpu(device: torch.device) -> bool:
    """Whether a CPU's kernels compute, and not those of an accelerator that a plan is for."""
    return device.type == "cpu" and not _PLANNED.get()


@contextmanager
def cudnn_allowed(lengths: Sequence[Indices]) -> Iterator[None]:
    """Inside the block cuDNN may compute attention if all rows have one length, so that its plans are reused.
    `lengths`: tokens of each row, for each training."""
    torch.backends.cuda.enable_cudnn_sdp(len({length for each in lengths for length in (each.min(), each.max())}) == 1)
    try:
        yield
    finally:
        forbid_cudnn()


def attend_short_rows(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """Map query (B, H, L, D), key and value (B, K, S, D) to (B, L, H, D), as sdpa does; short rows on a CPU fast."""
    settings |= {"dropout": dropout, "scaling": scaling, "is_causal": is_causal}
    if not on_cpu(query.device) or query.dtype not in HALVES or key.shape[2] >= LONGEST:
        inputs = (query, key, value, attention_mask)
        output, nothing = sdpa_attention_forward(module, *inputs, position_bias=position_bias, **settings)
        return output, nothing
    learns = position_bias is not None or (attention_mask is not None and attention_mask.requires_grad)
    if dropout or learns or query.shape[2] == 1:
        is_half = attention_mask is not None and attention_mask.dtype in HALVES
        mask = attention_mask.float() if attention_mask is not None and is_half else attention_mask
        bias = position_bias.float() if position_bias is not None else None  # T5's, of positions
        wide = (query.float(), key.float(), value.float(), mask)
        output, nothing = sdpa_attention_forward(module, *wide, position_bias=bias, **settings)
        return output.to(query.dtype), nothing
    causal = attention_mask is None and (getattr(module, "is_causal", True) if is_causal is None else is_causal)
    if causal:
        added: Tensor | None = torch.full((query.shape[2], key.shape[2]), _LEAST_SCORE).triu_(1)
    elif attention_mask is None:
        added = None
    elif attention_mask.dtype == torch.bool:
        added = torch.zeros(attention_mask.shape).masked_fill_(~attention_mask, _LEAST_SCORE)
    else:  # a mask that hides everything hides nothing: nobody reads such a row
        added = attention_mask.float().clamp_min(_LEAST_SCORE)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    output = _ShortRows.apply(query, key, value, added, scale)  # type: ignore[no-untyped-call]
    return output.transpose(1, 2).contiguous(), None


class _ShortRows(torch.autograd.Function):
    """softmax(query key^T scale + added) value; scores and softmax in float32, the rest in the precision of value."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, added: Tensor | None, scale: float) -> Tensor:
        (B, H, L, D), (_, K, S, _) = query.shape, key.shape
        # The query heads that share keys are stacked: one product for all of them.
        query = query.reshape(B * K, H // K * L, D)
        key, value = key.reshape(B * K, S, D), value.reshape(B * K, S, value.shape[-1])
        scores = torch.bmm(query.float().mul_(scale), key.float().mT)
        if added is not None:
            scores.view(B, H, L, S).add_(added)
        weights = scores.softmax(-1).to(value.dtype)
        ctx.save_for_backward(query, key, value, weights)
        ctx.scale, ctx.shape = scale, (B, H, K, L, S)
        return torch.bmm(weights, value).view(B, H, L, -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, weights = ctx.saved_tensors
        B, H, K, L, S = ctx.shape
        grad = grad.reshape(B * K, H // K * L, -1)
        by_weight = torch.bmm(grad, value.mT)
        by_score = torch._softmax_backward_data(by_weight, weights, -1, weights.dtype).mul_(ctx.scale)
        return (
            torch.bmm(by_score, key).view(B, H, L, -1),
            torch.bmm(by_score.mT, query).view(B, K, S, -1),
            torch.bmm(weights.mT, grad).view(B, K, S, -1),
            None,
            None,
        )


def room(tokens: int) -> int:
    """Tokens that the cache of a row of so many tokens has room for."""
    return max(LEAST_ROOM, 1 << (tokens - 1).bit_length())


@dataclass(eq=False)
class RowCache:
    """Keys and values of one row, by layer."""

    length: int = 0  # tokens that all layers hold
    _layers: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """Bytes of all layers, free room included."""
        return sum(tensor.nbytes for pair in self._layers.values() for tensor in pair)

    def extended(self, layer: int, key_1KtD: Tensor, value_1KtD: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values (1, K, S, D) of a layer, after those of further tokens are appended."""
        end = self.length + key_1KtD.shape[2]
        buffers = []
        for held, more in zip(self._layers.get(layer, (None, None)), (key_1KtD, value_1KtD), strict=True):
            if held is None:
                stored = more.new_zeros(*more.shape[:2], room(end), more.shape[3])
            else:
                stored = held if held.shape[2] >= end else F.pad(held, (0, 0, 0, room(end) - held.shape[2]))
            stored[:, :, self.length : end] = more
            buffers.append(stored)
        self._layers[layer] = buffers[0], buffers[1]
        return buffers[0][:, :, :end], buffers[1][:, :, :end]


@dataclass(frozen=True)
class RowPart:
    """Tokens that continue a row, and their places in the batch."""

    cache: RowCache
    where: slice


def attend_cached_rows(
    module: nn.Module,
    query_TH1D: Tensor,
    key_TK1D: Tensor,
    value_TK1D: Tensor,
    *,
    parts: Sequence[RowPart],
    sliding_window: int | None = None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """Attention (T, 1, H, D) of each part to its own row, to whose cache it is appended.

    A token of no part is padding, and attends to itself alone. Half precision on a CPU is computed in float32, which is
    faster.
    """
    layer: int = module.layer_idx  # type: ignore[assignment]
    wide = query_TH1D.device.type == "cpu" and query_TH1D.dtype in HALVES
    rows = [each.float() if wide else each for each in (query_TH1D, key_TK1D, value_TK1D)]
    groups = query_TH1D.shape[1] // value_TK1D.shape[1]
    attended = value_TK1D.transpose(1, 2).repeat_interleave(groups, dim=2)
    for part in parts:
        query, key, value = (each[part.where, :, 0].transpose(0, 1)[None] for each in rows)
        key, value = part.cache.extended(layer, key, value)
        mask = None
        if (tokens := query.shape[2]) > 1:
            before = key.shape[2] - tokens
            seen = torch.ones(tokens, key.shape[2], dtype=torch.bool).tril(before)
            mask = seen if sliding_window is None else seen.triu(before - sliding_window + 1)
            mask = mask[None, None].to(query.device)
        elif sliding_window is not None:
            key, value = key[:, :, -sliding_window:], value[:, :, -sliding_window:]
        output_1tHD, _ = sdpa_attention_forward(module, query, key, value, mask, **settings)
        attended[part.where, 0] = output_1tHD[0].to(attended.dtype)
    return attended, None


def register() -> None:
    """Replace sdpa in this process by `attend`, and forbid cuDNN's attention."""
    forbid_cudnn()
    AttentionInterface.register("sdpa", attend)


def packing_refusal(
    config: PretrainedConfig,
    *,
    longest: int,
    rows: str = "packed rows",
    families: Sequence[str] | None = PACKED_FAMILIES,
) -> str | None:
    """Why rows cannot be packed for a backbone; None where they can.

    Args:
        longest: Tokens of the longest row.
        rows: What the reason calls the rows.
        families: Architectures that are known to read them; None where a trial is about to tell.
    """
    config = config.get_text_config()
    if carrying := sorted(CARRYING & {*(getattr(config, "layer_types", None) or ())}):
        return f"its layers of {carrying[0]} carry a state along, from one of the {rows} into the next"
    if families is not None and config.model_type not in families:
        return f"{config.model_type} is none of the architectures that are known to read {rows}"
    attention = getattr(config, "_attn_implementation", None)
    if attention not in (None, "sdpa"):
        return f"the attention is {attention}, and {rows} need sdpa"
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    reach = [each for each in (window, getattr(config, "attention_chunk_size", None)) if each is not None]
    if reach and min(reach) < longest:
        return f"its attention reaches back {min(reach)} tokens, and the longest row has {longest}"
    if getattr(config, "position_embedding_type", "absolute") not in ("absolute", None):
        return f"its attention adds {config.position_embedding_type} biases to scores"
    return None


def attend(
    module: nn.Module,
    query_BHTD: Tensor,
    key_BKTD: Tensor,
    value_BKTD: Tensor,
    attention_mask: Tensor | None,
    *,
    row_lengths: Tensor | None = None,
    row_starts: Tensor | None = None,
    row_owners: Tensor | None = None,
    prefix_tokens: Tensor | None = None,
    sequence: SequenceGroup | None = None,
    cached_rows: Sequence[RowPart] | None = None,
    is_causal: bool | None = None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """Attention as sdpa computes it; packed rows (B = 1) attend within each row alone, in time of its squared length.

    Args:
        row_lengths: Tokens of each packed row (B,) int64, on the host; None: rows are padded.
        row_starts: Place of each packed row's first token, and of the end (B + 1,) int32, on the queries' device.
        row_owners: The bank member of each packed row (B,) int64, on the host; None: all have the same one. Rows of
            different members are computed apart, so that infinities of one never reach another.
        prefix_tokens: Number of tokens at the beginning of the sequence that every row sees before its own tokens, not
            counted by `row_lengths` (1,) int64, on the host; None: no shared prefix.
        sequence: The processes that hold parts of the tokens; rows are causal then. None: all tokens are here.
        cached_rows: The parts of a server's batch, whose rows have caches of their own; None: there are no caches.
    """
    if cached_rows is not None:
        return attend_cached_rows(module, query_BHTD, key_BKTD, value_BKTD, parts=cached_rows, **settings)
    if sequence is not None:
        query, key, value = (sequence.to_heads(each) for each in (query_BHTD, key_BKTD, value_BKTD))
        settings |= {"row_lengths": row_lengths, "row_starts": row_starts, "prefix_tokens": prefix_tokens}
        settings |= {"is_causal": is_causal}
        attended_BTHD, _ = attend(module, query, key, value, None, **settings)
        return sequence.to_tokens(attended_BTHD), None
    if row_lengths is None:
        inputs = (query_BHTD, key_BKTD, value_BKTD, attention_mask)
        return attend_short_rows(module, *inputs, is_causal=is_causal, **settings)
    lengths: list[int] = row_lengths.tolist()
    shared = 0 if prefix_tokens is None else sum(prefix_tokens.tolist())
    assert query_BHTD.shape[0] == 1 and query_BHTD.shape[2] == shared + sum(lengths), "packed rows are one sequence"
    causal: bool = getattr(module, "is_causal", True) if is_causal is None else is_causal
    flash = not settings.get("dropout", 0.0) and _computes(query_BHTD.device, query_BHTD.dtype, query_BHTD.shape[-1])
    if not shared and flash:
        assert row_starts is not None, "they travel with the batch"
        inputs = (query_BHTD, key_BKTD, value_BKTD, row_starts)
        return of_any_lengths(*inputs, longest=max(lengths), causal=causal, scale=settings.get("scaling")), None
    alone: _Attend = partial(attend_short_rows, module, is_causal=causal, **settings)
    every = (query_BHTD, key_BKTD, value_BKTD)
    if shared:
        assert causal, "what rows share sees none of them"
        cuts = list(_up_to(lengths, shared // 2))
        first, *parts = _split(every, [shared, *map(sum, cuts)])
        attended = [_after(first, cut, alone, rows) for cut, rows in zip(cuts, parts, strict=True)]
        return torch.cat([alone(*first, None)[0], *attended], dim=1), None
    if query_BHTD.dtype in HALVES:
        owners = [0] * len(lengths) if row_owners is None else row_owners.tolist()
        return _in_blocks(_blocks(lengths, owners), alone, every, causal=causal), None
    return torch.cat([alone(*rows, None)[0] for rows in _split(every, lengths)], dim=1), None


def _split(heads: Sequence[Tensor], sizes: list[int]) -> list[tuple[Tensor, ...]]:
    """Query, key and value of each part of so many tokens."""
    return list(zip(*(each.split(sizes, dim=2) for each in heads), strict=True))


def packs_in_one_kernel(config: PretrainedConfig, device: torch.device, compute: torch.dtype) -> bool:
    """Whether one kernel computes the attention of all packed rows of a backbone without dropout."""
    text: Any = config.get_text_config(decoder=True)
    return _computes(device, compute, getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)


def _computes(device: torch.device, dtype: torch.dtype, width: int) -> bool:
    """Whether flash attention computes rows of any lengths at once: on NVIDIA GPUs, in half precision."""
    there = _PLANNED.get() or (device.type == "cuda" and torch.version.hip is None)
    if not there or _kernel() is None:
        return False
    return dtype in HALVES and width <= WIDEST and width % 8 == 0


@cache
def _kernel() -> Callable[..., Tensor] | None:
    """torch's flash attention over rows of any lengths; None where the GPU or torch is too old for it."""
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < OLDEST:
        return None
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return cast("Callable[..., Tensor]", varlen_attn) if "window_size" in _settings(varlen_attn) else None


@cache
def _settings(kernel: Callable[..., Tensor]) -> frozenset[str]:
    return frozenset(inspect.signature(kernel).parameters)


def of_any_lengths(
    query_BHTD: Tensor,
    key_BKTD: Tensor,
    value_BKTD: Tensor,
    row_starts: Tensor,
    *,
    longest: int,
    causal: bool,
    scale: float | None,
    kernel: Callable[..., Tensor] | None = None,
) -> Tensor:
    """Attention (1, T, H, D) within each packed row, by one call for all of them.

    Args:
        longest: Tokens of the longest row.
        scale: Factor of the scores; None: D ** -0.5.
        kernel: None: `torch.nn.attention.varlen.varlen_attn`.
    """
    kernel = kernel or _kernel()
    assert kernel is not None, "`_computes` says whether there is one"
    rows = [each[0].transpose(0, 1) for each in (query_BHTD, key_BKTD, value_BKTD)]
    settings: dict[str, Any] = {"scale": scale, "window_size": (-1, 0 if causal else -1)}
    shared = query_BHTD.shape[1] // key_BKTD.shape[1]
    if shared > 1 and "enable_gqa" in _settings(kernel):
        settings["enable_gqa"] = True
    elif shared > 1:  # torch 2.11
        query, *others = rows
        rows = [query, *(each.repeat_interleave(shared, dim=1) for each in others)]
    return kernel(*rows, row_starts, row_starts, longest, longest, **settings)[None]


class _Block(NamedTuple):
    """Rows of one owner that are computed as one row; a mask hides them from each other."""

    start: int  # place of its first token
    lengths: list[int]

    @property
    def many(self) -> int:
        """Tokens."""
        return sum(self.lengths)

    @property
    def end(self) -> int:
        """Tokens that it is padded to."""
        return max(BLOCK, -(-self.many // ALIKE) * ALIKE)


def _blocks(lengths: Sequence[int], owners: Sequence[int]) -> Iterator[_Block]:
    """Blocks of neighbouring rows of one owner; a longer row gets its own block."""
    start, row = 0, 0
    for _, same in itertools.groupby(owners):
        many = len(list(same))
        for block in _up_to(lengths[row : row + many], BLOCK):
            yield _Block(start, block)
            start += sum(block)
        row += many


def pairs_in_blocks(lengths: Sequence[int]) -> int:
    """Pairs of tokens that half precision computes on a CPU for packed rows of one owner, with the padding of blocks.

    Args:
        lengths: Tokens of each row.
    """
    blocks = list(_blocks(lengths, [0] * len(lengths)))
    together = Counter(block.end for block in blocks if block.end <= SHORT)
    alone = sum(block.many**2 for block in blocks if block.end > SHORT)
    return alone + sum(_padded(count) * end**2 for end, count in together.items())


def _up_to(lengths: Sequence[int], tokens: int) -> Iterator[list[int]]:
    """Groups of neighbours with at most `tokens` tokens together; a longer row is alone."""
    group: list[int] = []
    for length in lengths:
        if group and sum(group) + length > tokens:
            yield group
            group = []
        group.append(length)
    yield group


def _in_blocks(blocks: Iterator[_Block], attend: _Attend, heads: Sequence[Tensor], *, causal: bool) -> Tensor:
    """Attention (1, T, H, D) of all blocks: short ones padded to the same length together, each longer one alone."""
    groups: dict[int, list[_Block]] = {}
    attended, places = list[Tensor](), list[npt.NDArray[np.int64]]()
    for block in blocks:
        if block.end <= SHORT:
            groups.setdefault(block.end, []).append(block)
        else:
            attended.append(attend(*(each.narrow(2, block.start, block.many) for each in heads), None)[0][0])
            places.append(np.arange(block.start, block.start + block.many))
    for end, group in groups.items():
        place_BL, row_BL = _places(group, end)
        # Attention (N, H, D) of the N tokens of blocks that are padded to the same length; arrays as from `_places`.
        same_BLL = row_BL[:, :, None] == row_BL[:, None]
        mask = np.tril(same_BLL) if causal else same_BLL
        device, real = heads[0].device, np.flatnonzero(row_BL >= 0)
        place = torch.tensor(place_BL.ravel(), device=device)
        padded = [each[0].transpose(0, 1).index_select(0, place).unflatten(0, place_BL.shape) for each in heads]
        attended_BLHD, _ = attend(
            *(each.transpose(1, 2) for each in padded), torch.tensor(mask, device=device)[:, None]
        )
        attended.append(attended_BLHD.flatten(0, 1).index_select(0, torch.tensor(real, device=device)))
        places.append(place_BL[row_BL >= 0])
    order = torch.tensor(np.argsort(np.concatenate(places)), device=heads[0].device)
    return torch.cat(attended).index_select(0, order)[None]


def _after(first: Sequence[Tensor], lengths: list[int], attend: _Attend, rows: Sequence[Tensor]) -> Tensor:
    """Attention (1, T, H, D) of neighbouring rows to a shared prefix, and of each row to itself.

    All rows are queries of one product, so that the prefix is not copied; a mask hides the other rows.

    Args:
        first: Query, key and value of the prefix.
        rows: Query, key and value of the rows.
    """
    query, *own = rows
    seen = [torch.cat(pair, dim=2) for pair in zip(first[1:], own, strict=True)]
    shared, row_T = first[0].shape[2], np.repeat(np.arange(len(lengths)), lengths)
    itself_TT = (row_T[:, None] == row_T) & np.tri(len(row_T), dtype=bool)
    mask = np.concatenate([np.ones((len(row_T), shared), dtype=bool), itself_TT], axis=1)
    return attend(query, *seen, torch.tensor(mask, device=query.device)[None, None])[0]


def _padded(count: int) -> int:
    """The multiple of four that so many blocks are padded to: oneDNN compiles a product for every number of them."""
    return -(-count // 4) * 4


def _places(blocks: Sequence[_Block], end: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Places (B, L) of the tokens of blocks in the sequence, and the row of its block that each is of; -1: padding.

    Padding repeats a token. numpy counts, since tensors have no values in a plan.
    """
    place_BL = np.zeros((_padded(len(blocks)), end), dtype=np.int64)
    row_BL = np.full(place_BL.shape, -1)
    for number, block in enumerate(blocks):
        place_BL[number] = block.start + np.minimum(np.arange(end), block.many - 1)
        row_BL[number, : block.many] = np.repeat(np.arange(len(block.lengths)), block.lengths)
    return place_BL, row_BL
