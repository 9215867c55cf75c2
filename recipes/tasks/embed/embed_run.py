"""A run of task embed: texts that belong together in, a scored bi-encoder out.

The loss compares all rows of a global batch, however small the micro-batches are: see `training.cached_gradients`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from workbench.config import RunConfig
from workbench.config.model_heads import HIDDEN, ModelHead
from workbench.data import mixture, named_sets
from workbench.data.batching import MicroBatch
from workbench.data.embedding import pair_data
from workbench.data.embedding.pair_set import PairSet
from workbench.data.held_out_split import Splits
from workbench.evaluation import retrieval_scores
from workbench.evaluation.forward_passes import ModelResults
from workbench.models import backbones, embedder
from workbench.models.backbones import Backbone
from workbench.models.embedder import Embedder, EmbeddingLoss
from workbench.recipes.single.single_run import Scored, SingleRun
from workbench.runs import files
from workbench.training import preflight
from workbench.training.optim.schedules import total_steps
from workbench.training.signal import TrainingSignal


def prepare(config: RunConfig) -> tuple[PreTrainedTokenizerBase, Splits[PairSet], list[str]]:
    """Tokenizer, data and the names of the modules that get an adapter; refuses what would fail or teach nothing."""
    embedder.require_known_form(config)
    tokenizer = backbones.tokenizer(config.model)
    data = pair_data.load(config, tokenizer)
    train = mixture.mixed(data.train, config)
    mixture.require_passes(train, config, total_steps(config, len(train)))
    splits = list(data.named().values())
    return tokenizer, data, preflight.require_backbone(config, splits, HIDDEN)


@dataclass(frozen=True)
class EmbedRun(SingleRun[Embedder, PairSet]):
    """A run that learns which texts belong together."""

    tokenizer: PreTrainedTokenizerBase
    data: Splits[PairSet]

    @property
    def rows(self) -> Mapping[str, PairSet]:
        return self.data.named()

    @property
    def splits(self) -> Any:
        return self.data

    @property
    def vocabulary(self) -> PreTrainedTokenizerBase:
        return self.tokenizer

    @property
    def task(self) -> ModelHead:
        return HIDDEN

    def untrained(self, backbone: Backbone) -> Embedder:
        return self.assemble(backbone.model, backbone)

    def assemble(self, model: nn.Module, backbone: Backbone) -> Embedder:
        return embedder.make(model, backbone.model, self.tokenizer, self.config)

    def supervise(self, live: Embedder, backbone: Backbone, progress: Callable[[], float]) -> TrainingSignal:
        def passes(batch: MicroBatch, scale: float) -> Tensor:
            return live.pooled(batch).sum() * scale

        train = mixture.mixed(self.data.train, self.config)
        return TrainingSignal(train, passes, whole=EmbeddingLoss(live), reads_packed=True)

    def width(self, live: Embedder) -> int:
        return live.width

    def held_out_loss(self, live: Embedder) -> tuple[float, Mapping[str, float]]:
        loss_values = retrieval_scores.embedding_losses(live, self.data.held_out, batch=self.config.batch.size)
        return loss_values["loss"], named_sets.held_out_losses(loss_values)

    def save(self, live: Embedder, folder: Path, *, adapter: Callable[[Path], None] | None = None) -> None:
        assert adapter is None, "a loss that compares the rows of a batch trains in no bank"
        embedder.save(live, folder, self.config)

    def load(self) -> Embedder:
        return embedder.load(self.run.home, self.config, waiting=self.placement.waiting)

    def load_over(self, backbone: Backbone) -> Embedder:
        return embedder.load(self.run.home, self.config, backbone=backbone)

    def score(self, model: Embedder, rows: PairSet, scoring: ModelResults | None = None) -> Scored:
        with self.scoring_time(rows):
            scored = retrieval_scores.score_embeddings(
                model, rows, self.data.train, batch=self.config.batch.size, scoring=scoring
            )
        return Scored(scored.scores, scored.table)

    def write_predictions(self, model: Embedder, outputs: pd.DataFrame, before: Mapping[str, Any]) -> None:
        files.write_bytes(self.run.path / "predictions.parquet", outputs.to_parquet())
