"""Samplers over examples of which only the numbers of tokens are known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from workbench.config import RunConfig
from workbench.data.batching import Indices, MicroBatch
from workbench.runs.ranks import ALONE
from workbench.training.row_losses import RowLosses
from workbench.training.sampling.row_orders import row_order
from workbench.training.sampling.sampler import Draw, Sampler


@dataclass(frozen=True)
class Tokens:
    """Examples of so many tokens, all of which carry loss."""

    lengths: Indices

    @property
    def difficulty(self) -> None:
        return None

    @property
    def supervised(self) -> Indices:
        return self.lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def sample(self, draws: Indices, *, epoch: int) -> Indices:
        return draws

    def place(self, index: int) -> str:
        return f"row {index}"

    def batch(self, indices: Indices, *, epoch: int = 0) -> MicroBatch:
        raise NotImplementedError


class Two:
    """Two processes: the other one hears of the rows that this one does not compute."""

    def __init__(self) -> None:
        self.other: list[Any] = []

    def gathered(self, value: list[Any]) -> list[list[Any]]:
        found = [value, self.other]
        self.other = []
        return found


def config(size: int = 2, seed: int = 0, **sampling: Any) -> RunConfig:
    data = {"train": "rows.jsonl", "sampling": sampling}
    return RunConfig.model_validate({"recipe": "sft", "seed": seed, "data": data, "batch": {"size": size}})


def sampler(tokens: Any, steps: int, *, size: int = 2, seed: int = 0, ranks: Any = ALONE, **sampling: Any) -> Sampler:
    found = row_order(Tokens(np.asarray(tokens)), config(size, seed, **sampling), steps, ranks)
    assert isinstance(found, Sampler)
    return found


def of(rows: Indices, loss_N: Any) -> RowLosses:
    """Losses of rows as a model would give that finds these in every step."""
    loss_B = np.asarray(loss_N, dtype=np.float32)[rows]
    return RowLosses(rows, loss_B, np.exp(-loss_B), loss_B < 0.5)


def followed(sampler: Sampler, loss_N: Any, first: int, last: int) -> list[Draw]:
    """The draws of steps `first` to `last` (without it) of a model whose losses never change."""
    draws = []
    for step in range(first, last):
        rows = sampler.rows(step)
        draws.append(draw := sampler.drawn(rows, of(rows, loss_N) if sampler.looks else None))
        sampler.rows_done(step + 1, of(draw.rows, loss_N))
    return draws
