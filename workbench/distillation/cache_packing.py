"""A teacher's distribution at a position in few bytes: its k likeliest tokens, or k draws from it.

Of a token's number its low 16 bits are kept, in rising order of the numbers; how many of a position's tokens lie below
each multiple of 65,536 gives the rest. With k = 64 and float16 that is 260 bytes, and 3 more for 262,144 tokens.

Legend: N positions, n of them, k tokens kept of each, V vocabulary, H multiples of 65,536 below V.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from workbench.config.sections.distill_config import DistillConfig
from workbench.data.batching import Indices
from workbench.distillation.teacher_signals import divergence
from workbench.losses.divergences import log_probs, sampled_forward_kl, top_k_and_rest

Packed = Mapping[str, npt.NDArray[Any]]
"""Arrays (N, ...) by name."""

DTYPES = {"float16": torch.float16, "float32": torch.float32}
_LOW = 2**16


@dataclass(frozen=True)
class TopTokens:
    """The likeliest tokens of each position, and all others as one event.

    Attributes:
        tensors: Tokens (N, k) int64, and log-probabilities (N, k + 1) float32, the last one of all other tokens.
        known: Tokens that the teacher knows, V.
    """

    tensors: Sequence[Tensor]
    known: int
    config: DistillConfig
    temperature: float

    @property
    def vocabulary(self) -> int:
        """Numbers that the loss makes of each position: the student's probabilities once more."""
        return self.known

    def loss(self, logits_nV: Tensor, *tensors: Tensor) -> Tensor:
        """The configured divergence over the k tokens and the rest."""
        ids_nk, teacher_nE = tensors
        student_nE = top_k_and_rest(log_probs(logits_nV[:, : self.known], self.temperature), ids_nk)
        return divergence(self.config, self.temperature)(student_nE, teacher_nE)


@dataclass(frozen=True)
class SampledTokens:
    """Draws from the teacher's distribution: an unbiased estimate of forward_kl (Anshumann et al. 2025).

    Attributes:
        tensors: Tokens (N, k) int64, the share of the draws that is each one's (N, k) float32 (0 where a token is
            repeated), and the teacher's sum p log p (N,) float32.
        known: Tokens that the teacher knows, V.
    """

    tensors: Sequence[Tensor]
    known: int
    temperature: float

    @property
    def vocabulary(self) -> int:
        """Numbers that the loss makes of each position: the student's probabilities once more."""
        return self.known

    def loss(self, logits_nV: Tensor, *tensors: Tensor) -> Tensor:
        """The estimate, times the square of the temperature."""
        student_nV = log_probs(logits_nV[:, : self.known], self.temperature)
        return sampled_forward_kl(student_nV, *tensors) * self.temperature**2


def pack_likeliest(log_probs_NV: Tensor, *, k: int, dtype: str) -> Packed:
    """The `k` likeliest tokens, or all where there are fewer; the mass of the others in float32."""
    vocabulary = log_probs_NV.shape[1]
    ids_Nk = log_probs_NV.topk(min(k, vocabulary)).indices.sort(-1).values
    said_NE = top_k_and_rest(log_probs_NV, ids_Nk)
    return {
        **pack_ids(ids_Nk.cpu().numpy(), vocabulary),
        "log_probs": said_NE[:, :-1].to(DTYPES[dtype]).cpu().numpy(),
        "rest": said_NE[:, -1].float().cpu().numpy(),
    }


def unpack_likeliest(packed: Packed) -> tuple[Tensor, Tensor]:
    """`tensors` of `TopTokens`."""
    said_NE = np.concatenate([packed["log_probs"].astype(np.float32), packed["rest"][:, None]], 1)
    # Rounded to float16 they do not quite add up to one.
    return torch.from_numpy(unpack_ids(packed)), torch.from_numpy(said_NE).log_softmax(-1)


def pack_draws(log_probs_NV: Tensor, uniform_Nk: Tensor) -> Packed:
    """The tokens at which the cumulative probability passes each of `uniform_Nk`, numbers in [0, 1) in float64."""
    probs_NV = log_probs_NV.double().exp()
    passed_NV = probs_NV.cumsum(-1)
    ids_Nk = torch.searchsorted(passed_NV, uniform_Nk * passed_NV[:, -1:], right=True)
    ids_Nk = ids_Nk.clamp(max=log_probs_NV.shape[1] - 1).sort(-1).values
    negative_entropy_N = torch.special.entr(probs_NV).sum(-1).neg().float()
    return {
        **pack_ids(ids_Nk.cpu().numpy(), log_probs_NV.shape[1]),
        "negative_entropy": negative_entropy_N.cpu().numpy(),
    }


def unpack_draws(packed: Packed) -> tuple[Tensor, Tensor, Tensor]:
    """`tensors` of `SampledTokens`."""
    ids_Nk = unpack_ids(packed)
    # The first of each run of equal tokens has the weight of all: gradients of one token that are added in any order
    # would differ in their last bits.
    first_Nk = np.diff(ids_Nk, axis=1, prepend=-1) != 0
    starts = np.flatnonzero(first_Nk)
    weights_Nk = np.zeros(ids_Nk.shape, dtype=np.float32)
    weights_Nk.flat[starts] = np.diff(starts, append=ids_Nk.size) / ids_Nk.shape[1]
    return torch.from_numpy(ids_Nk), torch.from_numpy(weights_Nk), torch.from_numpy(packed["negative_entropy"])


def pack_ids(ids_Nk: Indices, vocabulary: int) -> Packed:
    """Tokens below `vocabulary`, rising in each row, as their low 16 bits and how many lie below each multiple."""
    below_NH = (ids_Nk[:, None] < _starts(vocabulary)[:, None]).sum(-1)
    return {"ids": (ids_Nk % _LOW).astype(np.uint16), "below": below_NH.astype(np.min_scalar_type(ids_Nk.shape[1]))}


def unpack_ids(packed: Packed) -> Indices:
    """The tokens (N, k)."""
    ids_Nk: Indices = packed["ids"].astype(np.int64)
    for below_N in packed["below"].T:
        ids_Nk += _LOW * (np.arange(ids_Nk.shape[1]) >= below_N[:, None])
    return ids_Nk


def _starts(vocabulary: int) -> Indices:
    return np.arange(_LOW, vocabulary, _LOW)
