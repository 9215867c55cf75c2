"""Layers of a bank: each row of a batch belongs to a member, and goes through the member's own adapter.

A member's rows stand together, so that its low-rank product is one matrix product over a slice, beside one product with
the frozen weight for all rows. Members may differ in their number of rows, ranks and scales; neighbours that agree in
all three are one batched product. On accelerators neighbours that differ are grouped products (`grouped_products.py`),
so that launches do not grow with the members. Measured on two cores with bfloat16 units (5 members of rank 16 with 480
tokens each, 384 wide), forward and backward, by slices and as one batched product: 2.2 and 1.4 ms in bfloat16 beside
4.1 ms for the frozen weight, 3.2 and 3.1 ms beside 9.5 ms in float32; on one core 3.1 and 2.2, 5.3 and 4.4 ms.

Legend: K members, B rows, L tokens of a row, N of all rows, T of each member, I inputs, O outputs, R rank.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from peft.tuners.lora.layer import LoraLayer
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from workbench.adapters.precision.grouped_products import WORD, RowGroups, fastest
from workbench.adapters.precision.peft_layers import ShapedLoraConv2d
from workbench.adapters.precision.quantised_weights import LatestWeight, SharingLayer, dequantised, is_quantised
from workbench.adapters.row_dropout import RowDropout, member_starts, of_rows, row_keys, sent
from workbench.errors import BackboneError


class MemberRows(NamedTuple):
    """Rows of one member."""

    member: str
    many: int
    tokens: int = 0
    """Number of their tokens, where rows are packed."""


class RowRun(NamedTuple):
    """Neighbouring rows that take the same way through a layer."""

    member: str | None
    """Member with layers of its own; None: members that share the layer."""
    rows: slice
    """Places in the routing."""
    where: slice
    """Places in a dimension of the layer's input."""


class _SentGroups(NamedTuple):
    """What grouped products read on the device."""

    groups: RowGroups
    ratio_K11: Tensor | None
    """Each member's scale by that of the first; None: all are the same."""
    starts_1N: Tensor
    """What their tokens' keys are too large by, where rows are packed."""
    zero_11: Tensor
    """What pads smaller ranks."""


class Routing:
    """Which member each row of the batch belongs to; every layer of a bank reads it."""

    def __init__(self, *, counted: bool) -> None:
        self._rows: tuple[MemberRows, ...] = ()
        self._length: int | None = 1
        self._counted = counted
        """Whether rows have a known number of tokens: that of pictures and sound differs between stages and windows."""
        self.latest = LatestWeight()
        """The quantised weight that several members multiply with, within a batch."""
        self.grouping = fastest
        """How the device multiplies rows of unequal members."""
        self._groups: dict[tuple[Any, ...], _SentGroups] = {}

    def set(self, rows: Sequence[MemberRows], *, length: int | None) -> None:
        """Set the rows of the next batches, in their order, of `length` tokens each; None: packed into one sequence."""
        self.latest.clear()
        self._groups.clear()
        self._rows, self._length = tuple(rows), length

    def set_all(self, member: str) -> None:
        """Give all rows of the next batches to one member, however many there are."""
        self._rows, self._length = (MemberRows(member, -1),), 1

    def groups(self, kind: type[RowGroups], sizes: Sequence[int], ratios: Sequence[float], x: Tensor) -> _SentGroups:
        """What grouped products of members with so many tokens read, sent to the device of `x` once for all layers.

        Args:
            ratios: Scales of the members by that of the first.
        """
        device = x.device
        key = kind, tuple(sizes), tuple(ratios), device, x.dtype
        if key not in self._groups:
            equal = all(ratio == 1 for ratio in ratios)
            ratio_K11 = None if equal else sent(np.array(ratios, np.float32).reshape(-1, 1, 1), device).to(x.dtype)
            starts_1N, zero_11 = sent(member_starts(sizes), device), x.new_zeros(1, 1)
            self._groups[key] = _SentGroups(kind(sizes, device), ratio_K11, starts_1N, zero_11)
        return self._groups[key]

    @property
    def is_packed(self) -> bool:
        """Whether the rows are packed into one sequence."""
        return self._length is None

    @property
    def count(self) -> int:
        """Number of rows in the next batches; negative where it may be any."""
        return sum(each.many for each in self._rows)

    def slices(self, x: Tensor) -> Iterator[tuple[str, slice]]:
        """Each member, and where its rows are in the first dimension of `x` (B, ...) or (B * L, ...).

        Raises:
            BackboneError: `x` has another shape, so that its rows cannot be assigned to members.
        """
        if not self._rows:
            raise RuntimeError("a bank computes inside `with bank.route(...)` or `with bank.only(...)`")
        if self._rows[0].many < 0:
            yield self._rows[0].member, slice(0, len(x))
            return
        rows = self.count
        tokens, rest = divmod(len(x), rows)
        if rest or (self._counted and tokens not in (1, self._length)):
            raise self._unknown(len(x))
        start = 0
        for each in self._rows:
            stop = start + each.many * tokens
            yield each.member, slice(start, stop)
            start = stop

    def token_slices(self, x: Tensor) -> Iterator[tuple[str, slice]]:
        """Each member, and where its tokens are among all tokens of `x` (..., I). Raises as `slices` does."""
        tokens = x[..., 0].numel()
        if not self.is_packed:
            per = tokens // len(x)  # in one element of the first dimension
            for member, where in self.slices(x):
                yield member, slice(where.start * per, where.stop * per)
            return
        of_rows = tokens == self.count  # layers that read only the first token of each row
        if not of_rows and tokens != sum(each.tokens for each in self._rows):
            raise self._unknown(tokens)
        start = 0
        for each in self._rows:
            stop = start + (each.many if of_rows else each.tokens)
            yield each.member, slice(start, stop)
            start = stop

    def runs(self, x: Tensor, own: Collection[str]) -> tuple[int, list[RowRun]]:
        """The dimension of `x` along which rows follow one another, and their runs. Raises as `slices` does.

        Args:
            own: Members with layers of their own.
        """
        in_sequence = self.is_packed and x.ndim > 2 and len(x) == 1
        places = self.token_slices(x) if self.is_packed else self.slices(x)
        runs: list[RowRun] = []
        for number, (name, where) in enumerate(places):
            member = name if name in own else None
            rows = slice(number, number + 1)
            if runs and member is None and runs[-1].member is None:
                last = runs.pop()
                rows, where = slice(last.rows.start, rows.stop), slice(last.where.start, where.stop)
            runs.append(RowRun(member, rows, where))
        return int(in_sequence), [run for run in runs if run.where.stop > run.where.start]

    @contextmanager
    def within(self, run: RowRun) -> Iterator[None]:
        """Declare that inside the block only these rows are computed."""
        rows = self._rows
        if rows[0].many < 0 or run.rows == slice(0, len(rows)):
            yield
            return
        row, token = (
            [0, *accumulate(sizes)] for sizes in zip(*((each.many, each.tokens) for each in rows), strict=True)
        )
        first, last = run.rows.start, run.rows.stop
        own_rows, own_tokens = slice(row[first], row[last]), slice(token[first], token[last])
        self._rows = rows[run.rows]
        try:
            with of_rows(own_rows, own_tokens, count=row[-1], total=token[-1]):
                yield
        finally:
            self._rows = rows

    def _unknown(self, tokens: int) -> BackboneError:
        known = f"with {self._length} tokens each" if self._length else f"of {sum(each.tokens for each in self._rows)}"
        return BackboneError(
            f"A layer sees {tokens} tokens of {self.count} rows {known}: it chooses among tokens, as experts do, and "
            "a bank cannot tell whose they are. Leave it out of adapter.targets, or write folds.together=false or "
            "sweep.together=false."
        )


PADDED = 128
"""Tokens of each member up to which products of unequal ranks in half precision on a CPU are one batched product of the
largest rank, where scales are the same or differ by a power of two. The layer's time, forward and backward, against
products apart (one core with bfloat16 units): five members of ranks 4 to 32 with 16 and 80 tokens 160 wide, and 80 and
240 tokens 384 wide, 0.67, 0.74, 0.89, 0.96; eight of ranks 8 and 16 with 32 tokens 384 wide 0.65; float32 1.00 to
1.33."""

STRETCH = 32
"""Low-rank products in half precision read a multiple of so many tokens. oneDNN compiles a product for every number, in
1.6 to 2.6 ms where one of 240 tokens at width 384 with rank 16 takes 0.05. Gradients of a step of five members, 160
short rows: 1.30 s with windows, 1.90 s without, in padded passes half as large (one core with bfloat16 units)."""


def joined(parts: Sequence[Tensor], *, dim: int) -> Tensor:
    """Outputs (..., C) for the rows of members, concatenated; heads with fewer classes are padded with zeros."""
    widest = max(part.shape[-1] for part in parts)
    wide = [part if part.shape[-1] == widest else F.pad(part, (0, widest - part.shape[-1])) for part in parts]
    return torch.cat(wide, dim=dim)


class Routed:
    """Mixed into a layer of a bank: rows of some members go through layers of their own, others through `shared`."""

    routing: Routing
    own: dict[str, nn.Module]
    """Own layers, by member. No children of this module: only their trainable parts are."""

    def forward(self, x: Tensor, *more: Any, **named: Any) -> Tensor:
        if not self.own:
            return self.shared(x, *more, **named)
        dimension, runs = self.routing.runs(x, self.own)
        if all(run.member is None for run in runs):
            return self.shared(x, *more, **named)
        outputs = []
        for run in runs:
            compute = self.shared if run.member is None else self.own[run.member]
            cut = partial(_cut, where=run.where, dimension=dimension, size=x.shape[dimension])
            with self.routing.within(run):
                outputs.append(compute(cut(x), *map(cut, more), **{key: cut(each) for key, each in named.items()}))
        return outputs[0] if len(outputs) == 1 else joined(outputs, dim=dimension)

    def train(self, mode: bool = True) -> Any:
        """Switch the members' own layers, too."""
        for layer in self.own.values():
            layer.train(mode)
        whole: Any = super()
        return whole.train(mode)

    @abstractmethod
    def shared(self, x: Tensor, *more: Any, **named: Any) -> Tensor:
        """The outputs for rows of members without a layer of their own."""


class RoutedLora(Routed, nn.Module, LoraLayer):
    """PEFT's LoRA layer over any frozen linear layer, with each row through its member's A and B.

    torch.compile finds no gain between these layers: five members over MiniLM, padded rows of bfloat16, one core,
    1.82 s of processor time for a step's gradients against 1.68 s (medians of four, in turn), after 25 s in the first.
    """

    def shared(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
        tokens = x[..., 0].numel()
        parts = [
            _Part(where, self.scaling[member], self.r[member], (member,), _dropout(self, member, where, tokens))
            for member, where in self.routing.token_slices(x)
            if member in self.lora_A and where.stop > where.start
        ]
        if len(parts) == 1 and self._merges(x, parts[0]):
            return self._merged(x, parts[0])
        half = x.device.type == "cpu" and x.dtype in (torch.bfloat16, torch.float16)
        parts = [_in_stretches(part, tokens) if half else part for part in _together(parts, unequal=half)]
        products = list(self._grouped(x, parts))
        weights = [
            part.stacked([self._weight(each, member, x.dtype, part) for member in part.members], dim=dim)
            for part in products
            for dim, each in enumerate((self.lora_A, self.lora_B))
        ]
        output: Tensor = _RoutedProduct.apply(x, self.get_base_layer(), products, *weights)  # type: ignore[no-untyped-call]
        return output

    def _grouped(self, x: Tensor, parts: Sequence[_Part]) -> Iterator[_Part | _Group]:
        """Neighbouring parts with the same dropout in one grouped product each, where the device has these."""
        rest = list(parts)
        while rest:
            run = [rest.pop(0)]
            while rest and run[-1].tokens.stop == rest[0].tokens.start and self._rate(run[-1]) == self._rate(rest[0]):
                run.append(rest.pop(0))
            sizes = [part.many for part in run for _ in part.members]
            kind = self.routing.grouping(x, sizes, outputs=self.out_features or 0) if len(run) > 1 else None
            if kind is None:
                yield from run
                continue
            members = tuple(member for part in run for member in part.members)
            tokens = slice(run[0].tokens.start, run[-1].tokens.stop)
            rank = -(-max(part.rank for part in run) // WORD) * WORD
            scale = self.scaling[members[0]]
            here = self.routing.groups(kind, sizes, [self.scaling[member] / scale for member in members], x)
            drop = _dropout(self, members[0], tokens, x[..., 0].numel(), starts_1N=here.starts_1N)
            yield _Group(tokens, scale, rank, members, drop, here)

    def _rate(self, part: _Part) -> float:
        dropout: Any = self.lora_dropout[part.members[0]]
        return 0.0 if part.drop is None else float(dropout.p)

    def _merges(self, x: Tensor, part: _Part) -> bool:
        """Whether the product with the merged weight of the only member is as exact, and cheaper than its own two.

        Only inside `only`: elsewhere a row's last bits would depend on whether rows of other members stand beside it.
        In half precision it is not exact: an update below the last bit of a weight would be lost.
        """
        weight = getattr(self.get_base_layer(), "weight", None)
        if torch.is_grad_enabled() or self.routing.count >= 0 or part.drop is not None or x.dtype.itemsize < 4:
            return False
        if type(weight) is not nn.Parameter or weight.dtype != x.dtype:  # quantised, or cut over processes
            return False
        inputs, outputs = (self.in_features or 0), (self.out_features or 0)
        if weight.numel() != inputs * outputs:  # 4-bit values in the words of a wider type
            return False
        many = x[..., 0].numel()
        return part.many == many and many * (inputs + outputs) > weight.numel()

    def _merged(self, x: Tensor, part: _Part) -> Tensor:
        """The outputs by the frozen weight and its update in one, which is made anew for each pass: nothing to undo."""
        base: Any = self.get_base_layer()
        up_OR, down_RI = (self._weight(each, part.members[0], x.dtype, part) for each in (self.lora_B, self.lora_A))
        factors = (down_RI.T, up_OR.T) if isinstance(base, Conv1D) else (up_OR, down_RI)
        weight = torch.addmm(base.weight, *factors, alpha=part.scale)
        output: Tensor = torch.func.functional_call(base, {"weight": weight}, (x,))
        return output

    def _weight(self, matrices: Any, member: str, dtype: torch.dtype, part: _Part | _Group) -> Tensor:
        """A member's A or B; B times the ratio of its scale to the part's, a power of two."""
        weight: Tensor = matrices[member].weight.to(dtype)
        mixed = matrices is self.lora_B and isinstance(part, _Part)
        more = self.scaling[member] / part.scale if mixed else 1.0
        return weight if more == 1 else weight * more


def _dropout(
    layer: Any, member: str, where: slice, many: int, *, starts_1N: Tensor | int = 0
) -> Callable[[Tensor], Tensor] | None:
    """A member's dropout for its rows, which are at `where` of `many` tokens; None where nothing is dropped.

    Args:
        starts_1N: `member_starts`, where the rows are those of several members.
    """
    dropout = layer.lora_dropout[member]
    if not isinstance(dropout, RowDropout) or not dropout.training:
        return None
    keys_B = row_keys(many)
    assert keys_B is not None, "a bank with dropout trains inside `drawing`"
    # All members may read the same rows.
    if keys_B.ndim == 2:  # of packed rows, one for each token
        return partial(dropout.drop, keys_B=keys_B.repeat(1, max(1, many // keys_B.shape[1]))[:, where] - starts_1N)
    keys_B = keys_B.repeat(max(1, layer.routing.count // len(keys_B)))
    tokens = many // len(keys_B)  # of a row, in the first dimension
    return partial(dropout.drop, keys_B=keys_B[where.start // tokens : where.stop // tokens])


class RoutedConvolution(Routed, ShapedLoraConv2d):
    """PEFT's LoRA layer over a frozen convolution of pictures, with each row through its member's A and B."""

    def shared(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
        output: Tensor = self.get_base_layer()(x)
        parts = []
        for member, where in self.routing.slices(x):
            part = output[where]
            if member in self.lora_A and len(part):
                down: Any = self.lora_A[member]
                up: Any = self.lora_B[member]
                dropped = _dropped(x[where], _dropout(self, member, where, len(x)))
                part = part + (up(down(dropped.to(down.weight.dtype))) * self.scaling[member]).to(part.dtype)
            parts.append(part)
        return torch.cat(parts)


class _Part(NamedTuple):
    """Rows whose low-rank products are one batched product."""

    tokens: slice
    scale: float
    rank: int
    members: tuple[str, ...]
    """In the order of their tokens, of which each has as many."""
    drop: Callable[[Tensor], Tensor] | None
    """Dropout of the inputs: linear in them, and the same at every call."""
    window: slice | None = None
    """These tokens and some neighbours, in a multiple of STRETCH; only for a part of one member."""

    def around(self, x_NF: Tensor) -> Tensor:
        """A view (T, F) of the window; without one, see `of`."""
        return self.of(x_NF) if self.window is None else x_NF[self.window]

    def own(self, inner_KTR: Tensor) -> Tensor:
        """A view of this part's own rows in a product over `around`; rows of the others are set to 0."""
        if self.window is None:
            return inner_KTR
        first, last = self.tokens.start - self.window.start, self.tokens.stop - self.window.start
        inner_KTR[:first] = 0
        inner_KTR[last:] = 0
        return inner_KTR[first:last]

    def of(self, x_NF: Tensor) -> Tensor:
        """A view (K, T, F) of this part's tokens; (T, F) for one member."""
        found_TF = x_NF[self.tokens]
        return found_TF if len(self.members) == 1 else found_TF.view(len(self.members), -1, found_TF.shape[-1])

    @property
    def many(self) -> int:
        """Tokens of each member."""
        return int(self.tokens.stop - self.tokens.start) // len(self.members)

    def stacked(self, weights: Sequence[Tensor], *, dim: int) -> Tensor:
        """The members' A or B, whose ranks are in dimension `dim`."""
        return _stacked(weights)

    def update(self, x_NI: Tensor, output_NO: Tensor, down_KRI: Tensor, up_KOR: Tensor) -> Tensor:
        """Add the update of these rows to the output; returns what `gradients` needs: A x."""
        inner_KTR = _dropped(self.around(x_NI), self.drop) @ down_KRI.mT
        own_KTR = self.own(inner_KTR)
        _add_product(self.around(output_NO), inner_KTR, up_KOR.mT, self.scale)
        return own_KTR

    def gradients(
        self,
        x_NI: Tensor,
        grad_NO: Tensor,
        x_grad_NI: Tensor | None,
        inner_KTR: Tensor,
        down_KRI: Tensor,
        up_KOR: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Add the gradient of these rows to `x_grad_NI`; returns those of A and B."""
        inner_grad_KTR = self.around(grad_NO) @ up_KOR
        own_grad_KTR = self.own(inner_grad_KTR)
        if x_grad_NI is not None and self.drop is not None:
            self.of(x_grad_NI).add_(self.drop(inner_grad_KTR @ down_KRI), alpha=self.scale)
        elif x_grad_NI is not None:
            _add_product(self.around(x_grad_NI), inner_grad_KTR, down_KRI, self.scale)
        # Over the tokens of this part alone: a member that diverges has infinities, and 0 times these is none.
        down_grad_KRI = own_grad_KTR.mT @ _dropped(self.of(x_NI), self.drop)
        return down_grad_KRI.mul_(self.scale), (self.of(grad_NO).mT @ inner_KTR).mul_(self.scale)


class _Group(NamedTuple):
    """Neighbouring rows whose members may differ in tokens, rank and scale: grouped products, none per member."""

    tokens: slice
    scale: float
    rank: int
    """The largest, in whole words; smaller ones are padded with zeros."""
    members: tuple[str, ...]
    drop: Callable[[Tensor], Tensor] | None
    sent: _SentGroups

    def stacked(self, weights: Sequence[Tensor], *, dim: int) -> Tensor:
        """The members' A (K, R, I) or B (K, O, R), in one copy."""
        first, ratio = weights[0], self.sent.ratio_K11 if dim == 1 else None
        if all(each.shape[dim] == self.rank for each in weights):
            stacked = torch.stack(list(weights))  # whose gradients need no copy
            return stacked if ratio is None else stacked * ratio
        other, zero = first.shape[1 - dim], self.sent.zero_11
        filled: list[Tensor] = []
        for each in weights:
            short = self.rank - each.shape[dim]
            filled += [each, zero.expand((short, other) if dim == 0 else (other, short))] if short else [each]
        beside = torch.cat(filled, dim=dim)
        if dim == 0:
            return beside.view(len(weights), self.rank, other)
        stacked = beside.view(other, len(weights), self.rank).transpose(0, 1)
        return stacked if ratio is None else stacked * ratio

    def update(self, x_NI: Tensor, output_NO: Tensor, down_KRI: Tensor, up_KOR: Tensor) -> Tensor:
        """As of `_Part`."""
        groups, own_NI = self.sent.groups, _dropped(x_NI[self.tokens], self.drop)
        inner = groups.cleared(groups.product(groups.spread(own_NI), down_KRI.mT))
        output_NO[self.tokens].add_(groups.joined(groups.product(inner, up_KOR.mT)), alpha=self.scale)
        return inner

    def gradients(
        self,
        x_NI: Tensor,
        grad_NO: Tensor,
        x_grad_NI: Tensor | None,
        inner: Tensor,
        down_KRI: Tensor,
        up_KOR: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """As of `_Part`."""
        groups = self.sent.groups
        own = groups.spread(grad_NO[self.tokens])
        inner_grad = groups.cleared(groups.product(own, up_KOR))
        if x_grad_NI is not None:
            back_NI = _dropped(groups.joined(groups.product(inner_grad, down_KRI)), self.drop)
            x_grad_NI[self.tokens].add_(back_NI, alpha=self.scale)
        down_grad_KRI = groups.outer(inner_grad, groups.spread(_dropped(x_NI[self.tokens], self.drop)))
        return down_grad_KRI.mul_(self.scale), groups.outer(own, inner).mul_(self.scale)


def _together(parts: Sequence[_Part], *, unequal: bool = False) -> list[_Part]:
    """Joins neighbouring parts of equal tokens, scale and rank; parts with dropout stay alone.

    Args:
        unequal: Parts with few tokens may differ in rank, and in scale by a power of two.
    """
    merged: list[_Part] = []
    for part in parts:
        if merged and _agree(merged[-1], part, unequal=unequal):
            last = merged.pop()
            tokens = slice(last.tokens.start, part.tokens.stop)
            part = last._replace(tokens=tokens, rank=part.rank, members=last.members + part.members)
        merged.append(part)
    return merged


def _agree(first: _Part, second: _Part, *, unequal: bool) -> bool:
    joinable = first.tokens.stop == second.tokens.start and first.drop is None and second.drop is None
    if not joinable or first.many != second.many:
        return False
    if unequal and first.many <= PADDED:
        return math.frexp(second.scale / first.scale)[0] == 0.5
    return (first.scale, first.rank) == (second.scale, second.rank)


def _in_stretches(part: _Part, many: int) -> _Part:
    """A part of one member with a window of whole stretches among `many` tokens, if they fit.

    Tokens of neighbours enter its products with 0, which changes nothing.
    """
    length = -(-part.many // STRETCH) * STRETCH
    if len(part.members) > 1 or part.drop is not None or length > many:
        return part
    start = min(part.tokens.start, many - length)
    return part._replace(window=slice(start, start + length))


class _RoutedProduct(torch.autograd.Function):
    """Base product and low-rank updates in one operation: no output-sized temporaries, no weight saved twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, base: nn.Module, parts: list[_Part | _Group], *weights: Tensor) -> Tensor:
        # Of a view that cannot be flattened, torch multiplies each row with a copy of the weight.
        x = x.contiguous()
        # With a graph, though it is dropped: bitsandbytes has other kernels for training than for inference.
        with torch.enable_grad():
            output: Tensor = base(x.detach().requires_grad_()).detach()
        x_NI, output_NO = x.view(-1, x.shape[-1]), output.view(-1, output.shape[-1])
        inner = []
        for part, down_KRI, up_KOR in zip(parts, weights[::2], weights[1::2], strict=True):
            inner.append(part.update(x_NI, output_NO, down_KRI, up_KOR))
        ctx.save_for_backward(x_NI, *inner, *weights)
        ctx.base, ctx.parts = base, parts
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x_NI, *saved = ctx.saved_tensors
        inner, weights = saved[: len(ctx.parts)], saved[len(ctx.parts) :]
        grad_NO = grad.reshape(-1, grad.shape[-1])
        x_grad_NI = grad_NO @ _dense(ctx.base, grad.dtype) if ctx.needs_input_grad[0] else None
        grads: list[Tensor] = []
        for part, inner_KTR, down_KRI, up_KOR in zip(ctx.parts, inner, weights[::2], weights[1::2], strict=True):
            grads += part.gradients(x_NI, grad_NO, x_grad_NI, inner_KTR, down_KRI, up_KOR)
        x_grad = None if x_grad_NI is None else x_grad_NI.view(*grad.shape[:-1], -1)
        return x_grad, None, None, *grads


def _cut(value: Any, *, where: slice, dimension: int, size: int) -> Any:
    """Rows of a tensor whose `dimension` has `size` rows; any other value unchanged."""
    has_rows = isinstance(value, Tensor) and value.ndim > dimension and value.shape[dimension] == size
    return value.narrow(dimension, where.start, where.stop - where.start) if has_rows else value


def _stacked(weights: Sequence[Any]) -> Tensor:
    """Several matrices as (K, ...), smaller ones padded with zeros after their ranks.

    One matrix stays as it is: a batched product of one takes up to three times as long.
    """
    one: Tensor = weights[0]
    if len(weights) == 1:
        return one
    rows, columns = (max(each.shape[side] for each in weights) for side in (0, 1))
    alike = all(each.shape == (rows, columns) for each in weights)
    return torch.stack(
        [each if alike else F.pad(each, (0, columns - each.shape[1], 0, rows - each.shape[0])) for each in weights]
    )


def _add_product(to: Tensor, left: Tensor, right: Tensor, scale: float) -> None:
    add = to.addmm_ if to.ndim == 2 else to.baddbmm_
    add(left, right, alpha=scale)


def _dropped(x: Tensor, drop: Callable[[Tensor], Tensor] | None) -> Tensor:
    return x if drop is None else drop(x)


def _dense(base: Any, dtype: torch.dtype) -> Tensor:
    """The weight (O, I) of a linear layer as numbers, whatever it is stored in; that of members beside where kept."""
    if isinstance(base, SharingLayer):
        return base.latest.of(base, dtype)
    if is_quantised(base):
        return dequantised(base, dtype)
    weight: Tensor = base.weight.to(dtype)
    return weight.T if isinstance(base, Conv1D) else weight
