"""What a truncated teacher cache loses of the divergence that a live teacher gives, for a student at its start.

Of a position the cache keeps k tokens and the mass of all others as one event, so the divergence of these events is at
most that of the whole vocabulary. The difference is measured at some positions of a few rows.

Legend: N positions, n of them, V vocabulary, k tokens kept of each position.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from workbench.config.sections.distill_config import DistillConfig
from workbench.data.batching import MicroBatch, evenly_spaced, micro_batches
from workbench.data.text.tokenized_set import TokenizedSet
from workbench.distillation import teacher_cache
from workbench.distillation.student_loss import Teacher, TeacherLogits, divergence
from workbench.distillation.teacher_cache import TopTokens
from workbench.errors import ConfigError
from workbench.losses.chunked_loss import chunks
from workbench.losses.divergences import log_probs
from workbench.models.output_heads import Head

ROWS, POSITIONS = 8, 256
"""Training rows by which the gap is measured, and their supervised positions, both evenly spaced."""
TOKENS = 8192
"""Tokens in one forward pass, padding included."""


@dataclass(frozen=True)
class CacheGap:
    """The divergence of a token with a live teacher, and with a cache of k tokens."""

    k: int
    live: float
    cached: float

    @property
    def share(self) -> float:
        """Part of the live divergence that the cache loses."""
        return (self.live - self.cached) / self.live if self.live else 0.0

    @property
    def sentence(self) -> str:
        """What it is, for a person."""
        return (
            f"A cache of {self.k:,} tokens a position loses {self.share:.2%} of the divergence from a live teacher, of "
            f"the student at its start ({self.live - self.cached:.2g} of {self.live:.3g} a token, by {ROWS} rows)."
        )

    @property
    def facts(self) -> dict[str, Any]:
        """As cache.json holds it."""
        values = {"live_divergence": self.live, "gap": self.live - self.cached, "gap_share": self.share}
        return {name: round(value, 6) for name, value in values.items()}


@dataclass(frozen=True, eq=False)
class GapProbe:
    """Logits of a student (N, V) and log-probabilities of its teacher (N, V of it) at the same positions."""

    student_NV: Tensor
    teacher_NV: Tensor
    config: DistillConfig

    @cached_property
    def live(self) -> float:
        """The divergence of a token over the whole vocabulary, with the factor of the temperature."""
        compare, vocabulary = divergence(self.config, self._temperature), self.teacher_NV.shape[1]
        return self._mean(
            compare(log_probs(student_nV[:, :vocabulary], self._temperature), teacher_nV)
            for student_nV, teacher_nV in self._chunks()
        )

    def at(self, k: int) -> CacheGap:
        """What a cache of `k` tokens loses, as it would be written and read."""

        def cached(student_nV: Tensor, teacher_nV: Tensor) -> Tensor:
            packed = teacher_cache.pack_likeliest(teacher_nV, k=k, dtype=self.config.cache.dtype)
            tensors = teacher_cache.unpack_likeliest(packed)
            return TopTokens(tensors, teacher_nV.shape[1], self.config, self._temperature).loss(student_nV, *tensors)

        return CacheGap(k, self.live, self._mean(cached(*pair) for pair in self._chunks()))

    def smallest(self, share: float) -> CacheGap:
        """The fewest tokens that lose at most this share; raises ConfigError where all tokens lose more by rounding."""
        vocabulary, high = self.teacher_NV.shape[1], 1
        while high < vocabulary and self.at(high).share > share:
            high = min(2 * high, vocabulary)
        k = bisect_left(range(high), True, lo=high // 2 + 1, key=lambda k: self.at(k).share <= share)
        found = self.at(k)
        if found.share > share:
            raise ConfigError(
                f"distill.cache.gap={share:g}: a cache of all {vocabulary:,} tokens in {self.config.cache.dtype} loses "
                f"{found.share:.2g} of the divergence. Write a higher gap, or distill.cache.dtype=float32."
            )
        return found

    @property
    def _temperature(self) -> float:
        assert isinstance(self.config.temperature, float), "refused otherwise"
        return self.config.temperature

    def _chunks(self) -> Iterator[tuple[Tensor, ...]]:
        for pair in chunks(4 * self.teacher_NV.shape[1], self.student_NV, self.teacher_NV):
            yield tuple(each.double() for each in pair)

    def _mean(self, sums: Iterator[Tensor]) -> float:
        return sum(map(float, sums)) / max(1, len(self.teacher_NV))


@torch.no_grad()
def student_logits(train: TokenizedSet, model: nn.Module, head: Head, *, vocabulary: int) -> Tensor:
    """Logits (N, V) of a student at the positions, on the host."""
    parts = []
    for batch, chosen_n in _positions(train, next(model.parameters()).device):
        hidden_ND = head.hidden(model, batch.inputs).flatten(0, 1)[batch.positions_N[chosen_n]]
        parts += [head.project(some)[:, :vocabulary].float().cpu() for (some,) in chunks(head.vocabulary, hidden_ND)]
    return torch.cat(parts)


@torch.no_grad()
def teacher_log_probs(
    train: TokenizedSet, teacher: Teacher, config: DistillConfig, *, vocabulary: int, device: torch.device
) -> Tensor:
    """Log-probabilities (N, V) of a teacher at the same positions, over the tokens that all of its models know."""
    assert isinstance(config.temperature, float), "refused otherwise"
    parts = []
    for batch, chosen_n in _positions(train, device):
        signal = teacher.signal(batch, config, temperature=config.temperature)
        assert isinstance(signal, TeacherLogits)
        hidden = [each[chosen_n] for each in signal.tensors]
        parts += [signal.log_probs(some, vocabulary=vocabulary).cpu() for some in chunks(signal.vocabulary, *hidden)]
    return torch.cat(parts)


def _positions(train: TokenizedSet, device: torch.device) -> Iterator[tuple[MicroBatch, Tensor]]:
    passes = list(micro_batches(evenly_spaced(len(train), ROWS), train.lengths, tokens=TOKENS))
    for rows in passes:
        batch = train.batch(rows).to(device)
        chosen = evenly_spaced(len(batch.labels_N), max(1, POSITIONS // len(passes)))
        yield batch, torch.from_numpy(np.asarray(chosen)).to(device)
