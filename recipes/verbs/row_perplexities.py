"""Perplexity of rows by the backbone as it comes, for `workbench data`: of a sample that is cheap, or of all rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from workbench.config import DataConfig, RunConfig, model_heads
from workbench.data.batching import Indices, evenly_spaced
from workbench.data.text import tokenized
from workbench.data.text.chat import ChatEncoder
from workbench.data.text.token_masking import MlmEncoder
from workbench.errors import ConfigError, WorkbenchError
from workbench.evaluation import perplexity
from workbench.evaluation.frozen_features import LARGEST
from workbench.models import backbones, output_heads

MOST = 1000
"""Rows of a file that `auto` reads at most."""
WORK = {"cpu": 1e12, "cuda": 1e15}
"""Floating-point operations of some seconds, by device, that `auto` spends."""


class Perplexities(NamedTuple):
    """Perplexity of the supervised tokens of some rows of each file: by its title, then by file and row."""

    by_row: dict[str, dict[str, float]]
    note: str = ""
    """Why there is none, where some were to be expected."""


class SampleSize(NamedTuple):
    """Rows of each file that are read."""

    rows: int | None = None
    """At most so many, evenly spaced; None: all."""
    cheap: bool = False
    """Fewer where the backbone is large, and none where it would have to be fetched."""


def sample_size(wanted: str, config: RunConfig) -> SampleSize | None:
    """The sample that `--perplexity` asks for; None where there is to be none.

    Raises:
        ConfigError: It is none of auto, all, off and a number, or the recipe learns no tokens.
    """
    known = {"auto": SampleSize(MOST, cheap=True), "all": SampleSize(), "off": None}
    if wanted not in known and not (wanted.isdecimal() and int(wanted)):
        raise ConfigError(f"--perplexity={wanted}: write auto, all, off, or a number of rows such as 500.")
    if config.task.tokens:
        return known[wanted] if wanted in known else SampleSize(int(wanted))
    if wanted not in ("auto", "off"):
        raise ConfigError(
            f"--perplexity is measured on the tokens that a recipe learns, and recipe={config.recipe} learns labels. "
            "Leave it out."
        )
    return None


def measure(
    config: RunConfig,
    sources: Sequence[tuple[str, DataConfig]],
    tokenizer: PreTrainedTokenizerBase,
    template: ChatEncoder | MlmEncoder,
    size: SampleSize,
) -> Perplexities:
    """Perplexities of a sample of each file, by the backbone.

    Args:
        sources: Title of each file, and the settings that read it as training rows.
    """
    try:
        work = None
        if size.cheap:
            parameters = sum(
                each.numel() for each in backbones.skeleton(config.model, task=model_heads.of(config)).parameters()
            )
            if parameters > LARGEST or not backbones.weights_are_local(config.model):
                why = "is not on this machine" if parameters <= LARGEST else f"has over {LARGEST // 10**6} M parameters"
                return Perplexities(
                    {}, f"Perplexities were not measured: {config.model.id} {why}. Write --perplexity 500."
                )
            work = WORK[backbones.device().type] / (2 * parameters) / len(sources)
        backbone = backbones.load(config.model, tokenizer, task=model_heads.of(config))
        head = output_heads.find(backbone.model, backbone.model)
        by_title = {}
        for title, own in sources:
            rows = tokenized.read(own.train, own, tokenizer, template, limit=own.limit)
            sample = rows.subset(_spread(rows.lengths, size.rows, work))
            losses = perplexity.row_likelihoods(backbone.model, head, sample)
            sums: dict[str, tuple[float, int]] = {}
            for row, (loss, _, count) in enumerate(losses):
                place = tokenized.example_of(sample.place(row))
                before = sums.get(place, (0.0, 0))
                sums[place] = before[0] + loss, before[1] + count
            by_title[title] = {place: float(np.exp(loss / count)) for place, (loss, count) in sums.items()}
        return Perplexities(by_title)
    except WorkbenchError as error:
        if not size.cheap:
            raise
        return Perplexities({}, f"Perplexities were not measured: {error}")


def _spread(length_N: Indices, most: int | None, work: float | None) -> Indices:
    """Numbers of at most `most` rows, evenly spaced, fewer where their tokens would be more than `work`."""
    count = len(length_N) if most is None else min(most, len(length_N))
    if work is not None:
        count = max(1, min(count, int(work / length_N.mean())))
    return evenly_spaced(len(length_N), count)
