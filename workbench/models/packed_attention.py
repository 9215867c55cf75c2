"""Attention over rows that lie one after another in a single sequence: no row sees another, but what all begin with.

Legend: T tokens of all rows, H heads of queries, K of keys and values, D width of a head.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PretrainedConfig

from workbench.models import cached_rows as cached_rows_attention
from workbench.models import cudnn_attention, short_row_attention
from workbench.models.cached_rows import RowPart
from workbench.models.sequence_attention import SequenceGroup
from workbench.models.weight_storage import HALVES

_Attend = Callable[..., tuple[Tensor, None]]

ALIKE = 16
"""Rows whose lengths end in the same stretch of as many tokens are padded to its end and computed at once in half
precision, for which oneDNN compiles a product for every length and number."""
BLOCK = 48
"""Shorter rows share a block of so many tokens, in which a mask hides them from each other. Forward and backward of 96
rows of 5 to 35 tokens, 12 heads of 32, on one core with bfloat16 units, in ms: rows that are padded to about their own
length 21.0, blocks of 48 tokens 11.6, of 64 12.6, of 96 17.9."""
SHORT = 128
"""Tokens of the longest rows that are computed so."""
WIDEST = 192
"""Width of a head that flash attention trains on every GPU that it knows; wider ones, some."""
OLDEST = (8, 0)
"""Compute capability that it needs: Ampere's."""

FAMILIES = ("bert", "gemma", "gpt2", "granite", "llama", "mistral", "qwen2", "qwen3")
"""Architectures by transformers' `model_type` of which tests show that packed rows compute what each computes alone."""


def register() -> None:
    """Let every model of this process whose attention is sdpa read packed rows, and short rows and new shapes fast."""
    cudnn_attention.forbid()
    AttentionInterface.register("sdpa", attend)


def refusal(config: PretrainedConfig, *, longest: int, rows: str = "packed rows") -> str | None:
    """Why rows cannot be packed for a backbone, and what it is; None where they can.

    Args:
        longest: Tokens of the longest row.
        rows: Kind of rows that the reason is about.
    """
    if config.model_type not in FAMILIES:
        return f"{config.model_type} is none of the architectures that are known to read {rows}"
    attention = getattr(config, "_attn_implementation", None)
    if attention not in (None, "sdpa"):
        return f"the attention is {attention}, and {rows} need sdpa"
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    if window is not None and window < longest:
        return f"its attention reaches back {window} tokens, and the longest row has {longest}"
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
    """Attention as sdpa computes it; of packed rows (B = 1) within each row alone, in its squared length's time.

    Args:
        row_lengths: Tokens of each packed row (B,) int64, on the host; None: rows are padded.
        row_starts: Place of each packed row's first token, and that of the end (B + 1,) int32, where the queries are.
        row_owners: The member of a bank that each packed row is of (B,) int64, on the host; None: all are one's. An
            infinity of one never meets what another computes.
        prefix_tokens: Tokens at the beginning of the sequence that every row sees before its own, which alone
            `row_lengths` counts (1,) int64, on the host; None: rows share none.
        sequence: The processes that hold parts of the tokens; rows are causal then. None: all tokens are here.
        cached_rows: Rows of one token each that belong to rows with keys and values of their own; None: they do not.
    """
    if cached_rows is not None:
        return cached_rows_attention.attend(module, query_BHTD, key_BKTD, value_BKTD, parts=cached_rows, **settings)
    if sequence is not None:
        query, key, value = (sequence.to_heads(each) for each in (query_BHTD, key_BKTD, value_BKTD))
        settings |= {"row_lengths": row_lengths, "row_starts": row_starts, "prefix_tokens": prefix_tokens}
        settings |= {"is_causal": is_causal}
        attended_BTHD, _ = attend(module, query, key, value, None, **settings)
        return sequence.to_tokens(attended_BTHD), None
    if row_lengths is None:
        inputs = (query_BHTD, key_BKTD, value_BKTD, attention_mask)
        return short_row_attention.attend(module, *inputs, is_causal=is_causal, **settings)
    lengths: list[int] = row_lengths.tolist()
    shared = 0 if prefix_tokens is None else sum(prefix_tokens.tolist())
    assert query_BHTD.shape[0] == 1 and query_BHTD.shape[2] == shared + sum(lengths), "packed rows are one sequence"
    causal: bool = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if not shared and _has_kernel(query_BHTD, settings.get("dropout", 0.0)):
        assert row_starts is not None, "they travel with the batch"
        inputs = (query_BHTD, key_BKTD, value_BKTD, row_starts)
        return of_any_lengths(*inputs, longest=max(lengths), causal=causal, scale=settings.get("scaling")), None
    alone: _Attend = partial(short_row_attention.attend, module, is_causal=causal, **settings)
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


def at_once(config: PretrainedConfig, device: torch.device, compute: torch.dtype) -> bool:
    """Whether one kernel computes the attention of all packed rows of a backbone without dropout."""
    text: Any = config.get_text_config(decoder=True)
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return _computes(device, compute, width)


def _has_kernel(query_BHTD: Tensor, dropout: float) -> bool:
    return not dropout and _computes(query_BHTD.device, query_BHTD.dtype, query_BHTD.shape[-1])


def _computes(device: torch.device, dtype: torch.dtype, width: int) -> bool:
    """Whether flash attention computes rows of any lengths at once: on NVIDIA GPUs, in half precision."""
    if device.type != "cuda" or torch.version.hip is not None or _kernel() is None:
        return False
    return dtype in HALVES and width <= WIDEST and width % 8 == 0


@cache
def _kernel() -> Callable[..., Tensor] | None:
    """torch's flash attention over rows of any lengths; None where the GPU, or an older torch, has none such."""
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < OLDEST:
        return None
    try:
        from torch.nn.attention.varlen import varlen_attn  # nothing for a CPU
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
        kernel: As `torch.nn.attention.varlen.varlen_attn`, which it is where None.
    """
    kernel = kernel or _kernel()
    assert kernel is not None, "`_has_kernel` says whether there is one"
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
    """Rows of one owner that are computed as one, in which a mask hides them from each other."""

    start: int
    """Place of its first token."""
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
    """Neighbours of one owner that share a block; a longer row has its own."""
    start, row = 0, 0
    for _, same in itertools.groupby(owners):
        many = len(list(same))
        for block in _up_to(lengths[row : row + many], BLOCK):
            yield _Block(start, block)
            start += sum(block)
        row += many


def _up_to(lengths: Sequence[int], tokens: int) -> Iterator[list[int]]:
    """Neighbours that have so many tokens together at most; a longer row is alone."""
    group: list[int] = []
    for length in lengths:
        if group and sum(group) + length > tokens:
            yield group
            group = []
        group.append(length)
    yield group


def _in_blocks(blocks: Iterator[_Block], attend: _Attend, heads: Sequence[Tensor], *, causal: bool) -> Tensor:
    """Attention (1, T, H, D) of all blocks: short ones padded to the same end at once, each other by itself."""
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
        attended.append(_of_group(place_BL, row_BL, attend, heads, causal=causal))
        places.append(place_BL[row_BL >= 0])
    order = torch.tensor(np.argsort(np.concatenate(places)), device=heads[0].device)
    return torch.cat(attended).index_select(0, order)[None]


def _of_group(
    place_BL: npt.NDArray[np.int64],
    row_BL: npt.NDArray[np.int64],
    attend: _Attend,
    heads: Sequence[Tensor],
    *,
    causal: bool,
) -> Tensor:
    """Attention (N, H, D) of the N tokens of blocks that are padded to the same end; the arrays are of `_places`."""
    same_BLL = row_BL[:, :, None] == row_BL[:, None]
    mask = np.tril(same_BLL) if causal else same_BLL
    device, real = heads[0].device, np.flatnonzero(row_BL >= 0)
    place = torch.tensor(place_BL.ravel(), device=device)
    padded = [each[0].transpose(0, 1).index_select(0, place).unflatten(0, place_BL.shape) for each in heads]
    attended_BLHD, _ = attend(*(each.transpose(1, 2) for each in padded), torch.tensor(mask, device=device)[:, None])
    return attended_BLHD.flatten(0, 1).index_select(0, torch.tensor(real, device=device))


def _after(first: Sequence[Tensor], lengths: list[int], attend: _Attend, rows: Sequence[Tensor]) -> Tensor:
    """Attention (1, T, H, D) of neighbours that see what is `first`, then themselves.

    All of them are queries of one product, so that there is one copy of what they share; a mask hides neighbours.

    Args:
        first: Query, key and value of what they share.
        rows: The same of the neighbours.
    """
    query, *own = rows
    seen = [torch.cat(pair, dim=2) for pair in zip(first[1:], own, strict=True)]
    shared, row_T = first[0].shape[2], np.repeat(np.arange(len(lengths)), lengths)
    itself_TT = (row_T[:, None] == row_T) & np.tri(len(row_T), dtype=bool)
    mask = np.concatenate([np.ones((len(row_T), shared), dtype=bool), itself_TT], axis=1)
    return attend(query, *seen, torch.tensor(mask, device=query.device)[None, None])[0]


def _places(blocks: Sequence[_Block], end: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Places (B, L) of the tokens of blocks in the sequence, and of which row of its block each is; -1: padding.

    Padding repeats a token. B is a multiple of four, as products of every number of blocks are compiled. numpy counts:
    a plan's tensors have no values, and so no number of true ones.
    """
    place_BL = np.zeros((-(-len(blocks) // 4) * 4, end), dtype=np.int64)
    row_BL = np.full(place_BL.shape, -1)
    for number, block in enumerate(blocks):
        place_BL[number] = block.start + np.minimum(np.arange(end), block.many - 1)
        row_BL[number, : block.many] = np.repeat(np.arange(len(block.lengths)), block.lengths)
    return place_BL, row_BL
