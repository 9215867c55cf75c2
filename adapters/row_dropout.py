"""Dropout and noise whose values depend on the seed, the step, the row and the layer alone.

A value is a hash of these and of the token's place and the unit, not taken from a stream of random numbers. So it is
the same whichever rows share a micro-batch, on every device, in a recomputed forward pass, and after a resume.

Legend: B rows, T tokens of a row, I inputs, R ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from peft.tuners.boft.layer import MultiplicativeDropoutLayer
from peft.tuners.pvera.layer import PveraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_FIRST = 0xBF58476D1CE4E5B9 - 2**64
_SECOND = 0x94D049BB133111EB - 2**64
"""Constants of SplitMix64 (Steele et al. 2014), as signed numbers."""
_FIRST_32, _SECOND_32 = 0x85EBCA6B - 2**32, 0xC2B2AE35 - 2**32
"""Constants of MurmurHash3's finalizer, as signed numbers."""


class RowDraw(NamedTuple):
    """Rows of one training in a micro-batch."""

    seed: int
    step: int
    rows: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64] | None = None
    """Tokens of each row, for noise that depends on them."""
    packed: bool = False
    """Whether the rows are packed into one sequence, in which `lengths` say where each ends."""
    copy: int = 0
    """Number of the pass, where the same rows are passed several times with different values."""


class _Now:
    """The rows of the current pass, for all threads: backward passes recompute layers in threads of their own."""

    keys_B: Tensor | None = None
    whole_B: Tensor | None = None
    """Keys of packed rows, where `keys_B` has those of their tokens."""
    lengths_B: Tensor | None = None
    step_B: npt.NDArray[np.int64] = np.zeros(1, np.int64)
    """A key of the step of each row's training."""

    @property
    def state(self) -> tuple[Any, ...]:
        return self.keys_B, self.whole_B, self.lengths_B, self.step_B

    @state.setter
    def state(self, state: tuple[Any, ...]) -> None:
        self.keys_B, self.whole_B, self.lengths_B, self.step_B = state


_NOW = _Now()


@contextmanager
def drawing(draws: Sequence[RowDraw], device: torch.device) -> Iterator[None]:
    """Declare the rows of the batch, in their order, for the forward and the backward pass inside the block."""
    each = [_keys(draw) for draw in draws]
    keys_B = np.concatenate(each)
    known = [draw.lengths for draw in draws if draw.lengths is not None]
    before = _NOW.state
    _NOW.whole_B = None
    if draws[0].packed:
        _NOW.whole_B = sent(keys_B, device)
        # Keys of each training count from its own first token, as a member of a bank sees only its own tokens.
        keys_B = np.concatenate([_token_keys(*pair) for pair in zip(each, known, strict=True)], axis=1)
    _NOW.keys_B = sent(keys_B, device)
    _NOW.lengths_B = sent(np.concatenate(known), device) if known else None
    steps = [int(_keys(draw._replace(rows=np.array([-1])))[0]) for draw in draws]
    _NOW.step_B = np.repeat(np.array(steps), [len(draw.rows) for draw in draws])
    try:
        yield
    finally:
        _NOW.state = before


@contextmanager
def of_rows(rows: slice, tokens: slice, *, count: int, total: int) -> Iterator[None]:
    """Declare that inside the block only some of the rows pass a layer.

    Args:
        rows: Their places among `count` rows. All members of a bank may read the same rows, which `drawing` has once.
        tokens: Their places among `total` tokens, where rows are packed.
    """
    before, keys_B = _NOW.state, _NOW.keys_B
    if keys_B is None:
        yield
        return
    _NOW.keys_B = _part(keys_B, tokens, total) if keys_B.ndim == 2 else _part(keys_B, rows, count)
    _NOW.whole_B = None if _NOW.whole_B is None else _part(_NOW.whole_B, rows, count)
    _NOW.lengths_B = None if _NOW.lengths_B is None else _part(_NOW.lengths_B, rows, count)
    _NOW.step_B = _NOW.step_B[rows.start % len(_NOW.step_B) :]
    try:
        yield
    finally:
        _NOW.state = before


def _part(values: Tensor, where: slice, many: int) -> Tensor:
    """The values at `where` of the last dimension, after it was repeated to the length `many`."""
    size = values.shape[-1]
    if many == size or where.stop <= size:
        return values[..., where]
    return values.repeat(*[1] * (values.ndim - 1), many // size)[..., where]


def sent(values: npt.NDArray[Any], device: torch.device) -> Tensor:
    """The values on a device, sent from pinned memory, so that the host does not wait for the copy."""
    here = torch.from_numpy(values)
    return here if device.type == "cpu" else here.pin_memory().to(device, non_blocking=True)


def row_keys(tokens: int | None = None) -> Tensor | None:
    """A key (B,) for each row of the current pass; None outside of `drawing`.

    Packed rows are one sequence with a key for each token (1, T), by which `row_hash` gives the token the values that
    it has in an unpacked row.

    Args:
        tokens: Number of tokens that a layer sees. If it sees only the first token of each packed row, the keys are
            those of rows (B,).
    """
    return _NOW.whole_B if _NOW.whole_B is not None and tokens == len(_NOW.whole_B) else _NOW.keys_B


@contextmanager
def among(start: int, stop: int) -> Iterator[None]:
    """Declare that inside the block layers see only the tokens from `start` to `stop` of each row."""
    before = _NOW.keys_B, _NOW.whole_B
    if (keys_B := _NOW.keys_B) is not None:
        own = keys_B if keys_B.ndim == 1 else keys_B[:, start:stop]
        _NOW.keys_B, _NOW.whole_B = own + (start * _GOLDEN + 2**63) % 2**64 - 2**63, None
    try:
        yield
    finally:
        _NOW.keys_B, _NOW.whole_B = before


def row_lengths() -> Tensor | None:
    """Tokens (B,) of each row of the current pass, where `drawing` was told."""
    return _NOW.lengths_B


def row_hash(keys_B: Tensor, place: int | Tensor, *, tokens: int, units: int) -> Tensor:
    """Uniform int32 numbers (B, tokens, units) for each row at a place of the model.

    Args:
        keys_B: Keys of rows, or of the tokens of packed rows (1, tokens), from `row_keys`.
        place: A number, or scalar tensor, that differs from layer to layer.
    """
    tokens_T = torch.arange(tokens, device=keys_B.device)
    place = place.to(keys_B.device) if isinstance(place, Tensor) else place
    units_I = place + torch.arange(units, device=keys_B.device) * _GOLDEN
    keys_BT = keys_B if keys_B.ndim == 2 else keys_B[:, None]
    hash_BTI = _high(_mixed(keys_BT + tokens_T * _GOLDEN))[..., None] ^ _high(_mixed(units_I))
    for factor, shift in ((_FIRST_32, 16), (_SECOND_32, 13)):
        hash_BTI = (hash_BTI ^ (hash_BTI >> shift)) * factor
    return hash_BTI


class RowDropout(nn.Dropout):
    """Dropout by row; as nn.Dropout outside of `drawing`, and in layers that choose among tokens, as experts do."""

    layer_key: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not self.p:
            return x
        keys_B = row_keys(x.shape[0] if x.shape[1:-1] == (1,) else None)
        if keys_B is None or len(x) % len(keys_B):
            return super().forward(x)
        assert keys_B.ndim == 1 or x.numel() == keys_B.shape[1] * x.shape[-1], "tokens are not those of packed rows"
        return self.drop(x, keys_B)

    def drop(self, x: Tensor, keys_B: Tensor) -> Tensor:
        """Drop inputs of `x` (B, ..., I) or (B * T, I): linear in `x`, and the same at every call.

        In the input of convolutions (B, channels, height, width) it drops single values.

        Args:
            keys_B: Keys of the rows of `x`.
        """
        x_BTI = x.reshape(len(keys_B), -1, x.shape[-1])
        hash_BTI = row_hash(keys_B, self.layer_key, tokens=x_BTI.shape[1], units=x_BTI.shape[2])
        dropped_BTI = hash_BTI < int(self.p * 2**32) - 2**31
        return (x_BTI.masked_fill(dropped_BTI, 0) * (1 / (1 - self.p))).view(x.shape)


class StepDropout(MultiplicativeDropoutLayer):
    """BOFT's dropout: replaces the same blocks of a rotation for all rows of a step, since they share the rotation."""

    layer_seed: int

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or row_keys() is None:
            untouched: Tensor = super().forward(x)  # type: ignore[no-untyped-call]
            return untouched
        with torch.random.fork_rng(devices=[]):  # PEFT draws from the CPU's generator
            torch.default_generator.manual_seed((int(_NOW.step_B[0]) ^ self.layer_seed) & (2**63 - 1))
            replaced: Tensor = super().forward(x)  # type: ignore[no-untyped-call]
        return replaced


_KINDS: dict[type[nn.Module], type[nn.Module]] = {nn.Dropout: RowDropout, MultiplicativeDropoutLayer: StepDropout}


def drop_by_row(model: nn.Module) -> None:
    """Make all dropout of adapters in `model` a function of seed, step, row and layer."""
    layers: list[tuple[str, Any]] = [pair for pair in model.named_modules() if isinstance(pair[1], BaseTunerLayer)]
    for path, layer in layers:
        for inner, module in layer.named_modules():
            if type(module) in _KINDS and module.p:
                key = _layer_key(f"{path}.{inner.rpartition('.')[0]}")  # without the adapter's name, other in a bank
                module.__class__ = _KINDS[type(module)]
                module.layer_seed = key
                if isinstance(module, RowDropout):  # a tensor, so that one compiled layer serves all
                    at = next((each.device for each in layer.parameters() if each.device.type != "meta"), None)
                    module.register_buffer("layer_key", torch.tensor(key, device=at), persistent=False)


def member_starts(sizes: Sequence[int]) -> npt.NDArray[np.int64]:
    """What to take from the keys of packed tokens (1, N), so that those of each member count from its first token.

    Args:
        sizes: Tokens of each member; together they are dropped in one call.
    """
    starts = np.cumsum(sizes) - np.asarray(sizes)
    with np.errstate(over="ignore"):
        return np.repeat(starts * np.int64(_GOLDEN), sizes)[None]


def _token_keys(keys_B: npt.NDArray[np.int64], lengths_B: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """A key for each token of packed rows (1, T), less its row's start: `row_hash` adds its place in the sequence."""
    start_B = np.cumsum(lengths_B) - lengths_B
    with np.errstate(over="ignore"):
        return np.repeat(keys_B - start_B * np.int64(_GOLDEN), lengths_B)[None]


def _keys(draw: RowDraw) -> npt.NDArray[np.int64]:
    """A key for each row; every bit depends on seed, step and row."""
    entropy = [draw.seed, draw.step, draw.copy] if draw.copy else [draw.seed, draw.step]
    start = np.random.SeedSequence(entropy).generate_state(1, np.uint64).view(np.int64)
    mixed: npt.NDArray[np.int64] = _mixed(torch.from_numpy(start + draw.rows * np.int64(_GOLDEN))).numpy()
    return mixed


def _layer_key(path: str) -> int:
    return int.from_bytes(hashlib.blake2b(path.encode(), digest_size=8).digest(), "big", signed=True)


def _mixed(keys: Tensor) -> Tensor:
    """SplitMix64's finalizer."""
    keys = (keys ^ (keys >> 30)) * _FIRST
    keys = (keys ^ (keys >> 27)) * _SECOND
    return keys ^ (keys >> 31)


def _high(keys: Tensor) -> Tensor:
    """The upper half of each 64 bits."""
    return (keys >> 32).to(torch.int32)


class NoiseByRow:
    """Mixed into PEFT's layer: noise by row; as in PEFT outside of `drawing`."""

    noise_key: int

    def _reparametrize(self, mean: Tensor, log_variance: Tensor, name: str) -> Tensor:
        layer: Any = self
        keys_B = row_keys()
        if not layer.training or keys_B is None or mean[..., 0].numel() % len(keys_B):
            drawn: Tensor = super()._reparametrize(mean, log_variance, name)  # type: ignore[misc]
            return drawn
        tokens = keys_B.shape[1] if keys_B.ndim == 2 else mean[..., 0].numel() // len(keys_B)
        hash_BTR = row_hash(keys_B, self.noise_key, tokens=tokens, units=mean.shape[-1])
        # Uniform numbers between -1 and 1 become normal ones, of at most 5.4 standard deviations.
        even_BTR = (hash_BTR.float() + 0.5) * 2**-31
        normal = torch.erfinv(even_BTR.clamp(-1 + 2**-24, 1 - 2**-24)) * 2**0.5
        return mean + (normal.view(mean.shape) * (0.5 * log_variance).exp()).to(mean.dtype)


def draw_noise_by_row(model: nn.Module) -> None:
    """Make the noise of PVeRA's layers in `model` a function of seed, step, row and layer."""
    made: dict[type[Any], type[Any]] = {}
    layers: list[tuple[str, Any]] = [pair for pair in model.named_modules() if isinstance(pair[1], PveraLayer)]
    for path, layer in layers:
        kind = type(layer)
        made.setdefault(kind, type(f"RowNoise{kind.__name__}", (NoiseByRow, kind), {}))
        layer.noise_key = _layer_key(path)
        layer.__class__ = made[kind]
