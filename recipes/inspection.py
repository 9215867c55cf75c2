"""Findings of `check` on rows of text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np
from transformers import PreTrainedTokenizerBase

from workbench.config import RunConfig
from workbench.data.batching import Row
from workbench.data.held_out_split import Splits
from workbench.data.text.media import KINDS, MediaProcessor
from workbench.data.text.quality.cleaning import Cleaning
from workbench.data.text.tokenized_set import TokenizedSet
from workbench.models import backbones

SHOWN = 3
"""Examples that are rendered in full."""
MOST = 5
"""Rows that were left out of which the reason is told."""


@dataclass(frozen=True)
class Inspection:
    """Findings of `check`, for a run that is not refused."""

    config: RunConfig
    data: Splits[TokenizedSet]
    examples: list[tuple[str, list[tuple[str, bool]]]]
    """Place and pieces of some examples: decoded text, and whether it carries loss."""
    targets: list[str]
    """Modules that get an adapter; empty for full fine-tuning."""
    steps: int | None
    """None where a budget alone ends the run."""
    notes: list[str]
    blocks: int | None = None
    """Transformer blocks of the backbone, where layers freeze."""


class Skipping(Protocol):
    """Rows some of which may have been skipped."""

    @property
    def skipped(self) -> Sequence[str]:
        """Rows that were left out, and why."""


class Thinned(Skipping, Protocol):
    """Rows some of which were left out by rules of quality too."""

    @property
    def cleaning(self) -> Cleaning | None:
        """Rows that `data.clean` left out."""


def raw_text(rows: object, config: RunConfig) -> list[str]:
    """A sentence on rows of raw text, where they are for a model that has a chat template."""
    answers = getattr(rows, "answers", rows)
    if not isinstance(answers, TokenizedSet) or answers.chat or not config.task.writes_text:
        return []
    if not backbones.tokenizer(config.model).chat_template:
        return []
    return [
        f"The rows are raw text, and {config.model.id} is a chat model: its chat template is not used, and it "
        "learns to go on with a text, not to answer in a chat. Rows of messages are written with it, and so are "
        "columns of a question and an answer: data.columns='{question: ..., answer: ...}'."
    ]


def left_out(train: Thinned, *others: Skipping | None) -> list[str]:
    """Sentences on rows that were left out of the splits."""
    return [*unread(train, *others), *([train.cleaning.sentence] if train.cleaning else ())]


def unread(*splits: Skipping | None) -> list[str]:
    """Sentences on rows that were skipped, each once where splits of one file share them, and at most five."""
    reasons = list(dict.fromkeys(reason for rows in splits if rows is not None for reason in rows.skipped))
    more = [f"Left out: {len(reasons) - MOST:,} more."] if len(reasons) > MOST else []
    return [*(f"Left out: {reason}" for reason in reasons[:MOST]), *more]


def pieces(
    row: Row, tokenizer: PreTrainedTokenizerBase, processor: MediaProcessor | None = None
) -> list[tuple[str, bool]]:
    """The decoded runs of tokens with and without loss, in order, with the number of a picture's or recording's tokens
    in their place. `processor`: knows these."""
    is_picture = np.zeros(len(row.input_ids), dtype=bool)
    if row.pictures and processor is not None:
        is_picture = np.isin(row.input_ids, processor.token_ids)
        is_picture[: row.source] = True  # a recording's positions
    cuts = [0, *(np.flatnonzero(np.diff(row.supervised * 1 + is_picture * 2)) + 1).tolist(), len(row.input_ids)]
    return [
        (
            f"[recording: {stop} positions]"
            if stop == row.source
            else f"[{KINDS[processor.kind].noun}: {stop - start} tokens]"
            if is_picture[start] and processor is not None
            else str(tokenizer.decode(row.input_ids[start:stop])),
            bool(row.supervised[start]),
        )
        for start, stop in pairwise(cuts)
    ]
