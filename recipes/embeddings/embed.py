"""Sentence embeddings: texts that belong together in, a scored bi-encoder and a report out.

The loss compares all rows of a global batch, however small the micro-batches are: see `training.cached_gradients`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from workbench.config import RunConfig
from workbench.config.model_heads import HIDDEN
from workbench.data import mixture
from workbench.data.embedding import pair_data
from workbench.data.embedding.pair_set import PairSet
from workbench.data.held_out_split import Splits
from workbench.models import backbones, embedder
from workbench.recipes.embeddings import negative_mining
from workbench.recipes.embeddings.embed_run import EmbedRun
from workbench.runs import provenance
from workbench.runs.run_directory import Run
from workbench.training import preflight
from workbench.training.callbacks import Callback
from workbench.training.optim.schedules import total_steps

Scores = dict[str, Any]


def main(config: RunConfig, run: Run, callback: Callback) -> Scores:
    """Train as `config` says; returns scores before and after, as they stand in scores.json."""
    # Data first: it is the cheapest thing to get wrong, and needs no weights.
    tokenizer, data, _ = prepare(config)
    provenance.note_data(run, data.facts())
    pairs = EmbedRun(config, run, callback, tokenizer, data)
    if config.embed.mine:
        pairs = replace(pairs, data=data._replace(train=negative_mining.with_negatives(pairs)))
    pairs.train(score_later=True)
    return pairs.finish()


def prepare(config: RunConfig) -> tuple[PreTrainedTokenizerBase, Splits[PairSet], list[str]]:
    """Tokenizer, data and the names of the modules that get an adapter; refuses what would fail or teach nothing."""
    embedder.require_known_form(config)
    tokenizer = backbones.tokenizer(config.model)
    data = pair_data.load(config, tokenizer)
    train = mixture.mixed(data.train, config)
    mixture.require_passes(train, config, total_steps(config, len(train)))
    splits = list(data.named().values())
    return tokenizer, data, preflight.require_backbone(config, splits, HIDDEN)
