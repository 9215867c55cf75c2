"""The longest row that a device could train on: steps on a row that nobody has, as long as it may be."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pyarrow

from workbench.config import RunConfig
from workbench.config.task_facts import names
from workbench.data.held_out_split import Splits
from workbench.data.text.tokenized_set import TokenizedSet, TokenTable
from workbench.errors import ConfigError
from workbench.models import backbones
from workbench.planning.plan import Plan
from workbench.recipes.tasks.sft.text_run import TextRun
from workbench.runs import units
from workbench.training import preflight

FIRST, LONGER, SHORTER = 16384, 65536, 2048
"""Tokens of the first row that is tried, from which on bytes grow evenly with tokens; of the second where it fits, and
where it does not."""
TRIALS, SECONDS, CLOSE = 6, 60.0, 0.005
"""Rows that are tried at most, seconds of the processor after which no other is once one fits, and the share of the
memory that may be left."""

PlanOfRow = Callable[[RunConfig, int], Plan]
"""From a configuration and the tokens of the only row to the plan."""


class LongestRow(NamedTuple):
    """The longest row of which a step was carried out, on tensors without values, that fits."""

    tokens: int
    """0: not even the first row that was tried fits."""
    needed: int
    """Bytes of the device."""
    host: int
    """Bytes of the host's memory."""
    limit: int | None
    """Tokens that the backbone was made for; None where it names no limit."""
    tried: int
    """Rows of which a step was carried out."""
    seconds: float
    """Seconds of the processor for all of these steps."""

    @property
    def sentence(self) -> str:
        """All of it for a person."""
        how = f"{self.tried} dry run{'s' * (self.tried != 1)}, {self.seconds:.0f} s of the processor"
        if not self.tokens:
            return f"Longest row: none; a row of {SHORTER:,} tokens takes {units.size(self.needed)} ({how})."
        host = f", {units.size(self.host)} in the host's memory" if self.host else ""
        beyond = self.limit is not None and self.limit < self.tokens
        made = f"; the backbone was made for at most {self.limit:,}" if beyond else ""
        return (
            f"Longest row: {self.tokens:,} tokens, all with loss ({units.size(self.needed)} on the device{host}{made}; "
            f"{how})."
        )


def find(
    config: RunConfig, plan: PlanOfRow, *, accelerated: bool, clock: Callable[[], float] = time.process_time
) -> LongestRow:
    """The longest row that fits, with every saving that is left to choose.

    Args:
        accelerated: Whether the device has a memory of its own, beside the host's.

    Raises:
        ConfigError: The recipe learns from more than rows of text as they are.
    """
    if not config.task.tokens or config.over is not None:
        able = names(lambda task: task.tokens)
        raise ConfigError(f"--longest-row: recipe={config.recipe} compares or writes rows. Ask of recipe={able}.")
    config = _saving(config, accelerated=accelerated)
    limit = preflight.longest_sequence(backbones.hub_config(config.model))

    def tried(tokens: int) -> Plan:
        batch = config.batch.model_copy(update={"size": 1, "growth": None, "tokens_per_device": tokens})
        data = config.data.model_copy(update={"max_tokens": min(tokens, config.data.max_tokens)})
        return plan(config.model_copy(update={"batch": batch, "data": data}), tokens)

    tokens, began = FIRST, clock()
    known: list[tuple[int, Plan]] = []
    for _ in range(TRIALS):
        each = tried(tokens)
        first = known[0][1] if known else each
        # What earlier dry runs left in this process is no part of a run.
        known.append((tokens, replace(each, process=first.process, memory=first.memory)))
        spent, fitting = clock() - began, [each for each in known if each[1].fits]
        tokens = _next(known)
        if tokens in (0, *(each for each, _ in known)) or (fitting and spent > SECONDS):
            break
    tokens, best = max(fitting, key=lambda each: each[0]) if fitting else (0, known[-1][1])
    return LongestRow(tokens, best.needed, best.host, limit, len(known), spent)


def _next(known: list[tuple[int, Plan]]) -> int:
    """Tokens to try after these, where the last two say that the memory ends; 0: none."""
    tokens, plan = known[-1]
    if len(known) == 1:
        return LONGER if plan.fits else SHORTER
    if tokens == SHORTER and not plan.fits:
        return 0
    (first, low), (second, high) = sorted(known, key=lambda each: abs(each[1].needed - each[1].memory))[:2]
    spare = plan.memory - plan.needed
    if 0 <= spare < CLOSE * plan.memory:
        return 0
    slope = (high.needed - low.needed) / (second - first)
    return max(1, tokens + int((spare - CLOSE / 4 * plan.memory) / slope)) if slope > 0 else 0


def _saving(config: RunConfig, *, accelerated: bool) -> RunConfig:
    """The run with every saving that was left to choose."""
    train = config.train
    again = True if train.checkpointing == "auto" else train.checkpointing
    away = accelerated and again is True if train.offload_activations == "auto" else train.offload_activations
    chosen = {"checkpointing": again, "offload_activations": away or "auto"}
    return config.model_copy(update={"train": train.model_copy(update=chosen)})


def with_row(single: TextRun, tokens: int) -> TextRun:
    """The same run with a row of so many tokens in place of all its rows, in training and held out."""
    rows = _row(single.data.train, tokens)
    return replace(single, data=Splits(rows, rows, None))


def _row(rows: TokenizedSet, tokens: int) -> TokenizedSet:
    """A row like the first of these, of so many tokens, each of which has loss."""
    like = rows.subset(np.arange(1))
    row = like.table[int(like.rows[0])]
    first = row["input_ids"][0]
    row |= {"input_ids": [first] * tokens, "supervised": [True] * tokens, "length": tokens, "source": 0}
    row |= {"targets": tokens - 1, "digest": 0}
    table = TokenTable(pyarrow.Table.from_pylist([row], schema=like.table.data.schema))
    return replace(like, table=table, rows=np.arange(1), sources={}, prefixes=())
