"""Rerankers: queries and passages that belong together in, a scored cross-encoder and a report out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from workbench.adapters import anatomy
from workbench.config import RunConfig, model_heads
from workbench.config.model_heads import HIDDEN
from workbench.config.sections.embed_config import EmbedConfig
from workbench.data import mixture, named_sets
from workbench.data.embedding import pair_set, rerank_candidates
from workbench.data.embedding.rerank_candidates import CandidateSet
from workbench.data.held_out_split import Splits
from workbench.evaluation import retrieval_scores, run_embedder
from workbench.evaluation.forward_passes import ModelResults
from workbench.evaluation.run_embedder import RunEmbedder
from workbench.losses.ranking_losses import leading
from workbench.models import backbones, reranker
from workbench.models.backbones import Backbone
from workbench.models.embedder import Embedder
from workbench.models.reranker import Reranker
from workbench.recipes.single.single_run import Scored, SingleRun
from workbench.recipes.tasks.embed import negative_mining
from workbench.recipes.tasks.embed.negative_mining import Mined
from workbench.runs import files
from workbench.training import preflight
from workbench.training.optim.schedules import total_steps
from workbench.training.signal import TrainingSignal

Scores = dict[str, Any]


def prepare(config: RunConfig) -> tuple[PreTrainedTokenizerBase, Splits[CandidateSet], list[str]]:
    """Tokenizer, data and the names of the modules that get an adapter; refuses what would fail or teach nothing."""
    reranker.require_known_form(config)
    tokenizer = reranker.tokenizer_of(config)
    run_embedder.of(config, "rerank")
    data = rerank_candidates.load(config, tokenizer)
    train = mixture.mixed(data.train, config)
    mixture.require_passes(train, config, total_steps(config, len(train)))
    splits = list(data.named().values())
    return tokenizer, data, preflight.require_backbone(config, splits, model_heads.of(config))


def mined(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase, train: CandidateSet, near: RunEmbedder | None
) -> Mined:
    """Passages that are near by the embeddings of a run, or by means of what the backbone makes of texts."""
    pairs, section = train.pairs, config.rerank
    if near is None:
        backbone = backbones.load(config.model, tokenizer, task=HIDDEN).model
        bare = Embedder(backbone, backbone, tokenizer, EmbedConfig())
        units = pair_set.units(pairs.units.texts, tokenizer, max_tokens=config.data.max_tokens)
        embedded_UD = leading(retrieval_scores.embed_texts(bare, units), bare.width, normalise=True)
    else:
        queries, texts = set(pairs.anchor_N.tolist()), pairs.units.texts
        prefixes = [section.query_prefix if unit in queries else section.passage_prefix for unit in range(len(texts))]
        own = [text[len(prefix) :] for text, prefix in zip(texts, prefixes, strict=True)]
        sides_2UD = np.stack([near.embed(own, passages=passages) for passages in (False, True)])
        side_U = np.asarray([int(unit not in queries) for unit in range(len(texts))])
        embedded_UD = nn.functional.normalize(torch.from_numpy(sides_2UD[side_U, np.arange(len(texts))]), dim=1)
    return negative_mining.mined(pairs, embedded_UD, count=section.mine, below=section.mine_below)


@dataclass(frozen=True)
class RerankRun(SingleRun[Reranker, CandidateSet]):
    """A run that learns which passages belong to a query."""

    tokenizer: PreTrainedTokenizerBase
    data: Splits[CandidateSet]

    @property
    def rows(self) -> Mapping[str, CandidateSet]:
        return self.data.named()

    @property
    def splits(self) -> Any:
        return self.data

    @property
    def vocabulary(self) -> PreTrainedTokenizerBase:
        return self.tokenizer

    def untrained(self, backbone: Backbone) -> Reranker:
        return self.assemble(backbone.model, backbone)

    def assemble(self, model: nn.Module, backbone: Backbone) -> Reranker:
        return reranker.make(model, backbone.model, self.tokenizer, self.config)

    def supervise(self, live: Reranker, backbone: Backbone, progress: Callable[[], float]) -> TrainingSignal:
        return TrainingSignal(mixture.mixed(self.data.train, self.config), live.loss(self.data.train))

    def width(self, live: Reranker) -> int:
        return anatomy.hidden_size(live.classifier.backbone.config)

    def held_out_loss(self, live: Reranker) -> tuple[float, Mapping[str, float]]:
        loss_values = retrieval_scores.rerank_losses(live, self.data.held_out)
        return loss_values["loss"], named_sets.held_out_losses(loss_values)

    def save(self, live: Reranker, folder: Path, *, adapter: Callable[[Path], None] | None = None) -> None:
        assert adapter is None, "passages of other rows are sampled for one adapter"
        reranker.save(live, folder)

    def load(self) -> Reranker:
        return reranker.load(self.run.home, self.config, waiting=self.placement.waiting)

    def score(self, model: Reranker, rows: CandidateSet, scoring: ModelResults | None = None) -> Scored:
        with self.scoring_time(rows):
            ranked = retrieval_scores.score_reranker(
                model, rows, candidates=self.config.rerank.candidates, scoring=scoring
            )
        return Scored(ranked.scores, ranked.table)

    def write_predictions(self, model: Reranker, outputs: pd.DataFrame, before: Mapping[str, Any]) -> None:
        files.write_bytes(self.run.path / "predictions.parquet", outputs.to_parquet())
