"""A run of task embed: texts that belong together in, a scored bi-encoder out.

The loss compares all rows of a global batch, however small the micro-batches are: see `training.cached_gradients`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from workbench.config import RunConfig
from workbench.config.model_heads import HIDDEN, ModelHead
from workbench.data import mixture, named_sets
from workbench.data.batching import Indices, MicroBatch
from workbench.data.embedding import pair_data
from workbench.data.embedding.pair_set import PairSet
from workbench.data.held_out_split import Splits
from workbench.errors import FileError
from workbench.evaluation import retrieval_scores
from workbench.evaluation.forward_passes import ModelResults
from workbench.losses.ranking_losses import leading
from workbench.models import backbones, embedder
from workbench.models.backbones import Backbone
from workbench.models.embedder import Embedder, EmbeddingLoss
from workbench.recipes.single.single_run import Scored, SingleRun
from workbench.runs import files
from workbench.runs.resume_command import resume_command
from workbench.runs.run_directory import Run
from workbench.training import preflight
from workbench.training.callbacks import Callback
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

    def predictions(
        self, model: Embedder, rows: PairSet, outputs: pd.DataFrame, before: Mapping[str, Any]
    ) -> pd.DataFrame:
        return outputs


FILE = "negatives.safetensors"
"""In a run directory: units (N, K) of each row's mined negatives, NO_NEGATIVE where it has fewer."""
NO_NEGATIVE = -1
MINED_AT_ONCE = 1024
"""Rows whose similarities are held at a time."""


class Mined(NamedTuple):
    """Negatives that were found."""

    unit_NK: Tensor
    similarity: float
    """Mean over them; nan where there are none."""


def with_negatives(pairs: EmbedRun) -> PairSet:
    """Training rows with `embed.mine` negatives each, which a resumed run finds in its directory."""
    return kept_negatives(pairs.run, pairs.callback, pairs.data.train, lambda: _mined(pairs), by="the backbone")


def kept_negatives(run: Run, callback: Callback, train: PairSet, mine: Callable[[], Mined], *, by: str) -> PairSet:
    """Training rows with the negatives that `mine` finds, which a resumed run finds in its directory.

    Args:
        by: Names what finds them.
    """
    path = run.home / FILE
    if not run.ranks.agreed(run.resumed and path.exists()):  # a run that failed here before had other rows
        if run.ranks.first:
            callback.say(f"Mining negatives with {by} before training ...")
            mined = mine()
            count = int((mined.unit_NK != NO_NEGATIVE).sum())
            callback.say(
                f"{count:,} negatives for {len(train):,} rows, mean similarity to their anchors {mined.similarity:.3f}."
            )
            files.write_bytes(path, save({"unit_NK": mined.unit_NK}))
        run.ranks.wait()
    try:
        unit_NK = load_file(path)["unit_NK"].numpy()
    except (SafetensorError, OSError, KeyError) as error:
        raise FileError(
            f"{path}: damaged ({error}). Delete it, and mine the same negatives: {resume_command(run.home)}"
        ) from None
    return train.with_negatives([units[units != NO_NEGATIVE] for units in unit_NK])


def _mined(pairs: EmbedRun) -> Mined:
    backbone = pairs.backbone()
    bare = pairs.assemble(backbone.model, backbone)
    embedded_UD = leading(retrieval_scores.embed_texts(bare, pairs.data.train.units), bare.width, normalise=True)
    return mined_negatives(
        pairs.data.train, embedded_UD, count=pairs.config.embed.mine, below=pairs.config.embed.mine_below
    )


def mined_negatives(rows: PairSet, embedded_UD: Tensor, *, count: int, below: float) -> Mined:
    """The passages most similar to each anchor that are not known to belong to it.

    Of rows without classes only those whose similarity is below that share of the positive's: what is nearer is often
    a positive that nobody labelled (Moreira et al. 2024, arXiv:2407.15831, TopK-PercPos).

    Args:
        embedded_UD: Embeddings of length 1 of all texts.
    """
    passage_P = np.unique(rows.positive_N)
    units, similarities = [], []
    for first in range(0, len(rows), MINED_AT_ONCE):
        some = np.arange(first, min(first + MINED_AT_ONCE, len(rows)))
        similarity_CP = (embedded_UD[rows.anchor_N[some]] @ embedded_UD[passage_P].T).numpy()
        excluded_CP = rows.known(rows.anchor_N[some], passage_P)
        if rows.form != "labelled":
            own_C = similarity_CP[np.arange(len(some)), np.searchsorted(passage_P, rows.positive_N[some])]
            excluded_CP |= similarity_CP >= (own_C - (1 - below) * np.abs(own_C))[:, None]
        similarity_CP[excluded_CP] = -np.inf
        place_CK = np.argsort(-similarity_CP, axis=1, kind="stable")[:, :count]
        similarity_CK = np.take_along_axis(similarity_CP, place_CK, axis=1)
        units.append(np.where(np.isfinite(similarity_CK), passage_P[place_CK], NO_NEGATIVE))
        similarities.append(similarity_CK[np.isfinite(similarity_CK)])
    known = np.concatenate(similarities)
    unit_NK = torch.from_numpy(np.concatenate(units).astype(np.int64))
    return Mined(unit_NK, float(known.mean()) if len(known) else float("nan"))


def negatives_by_chance(rows: PairSet, count: int) -> list[Indices]:
    """So many passages for each row, which stand in for mined ones where nothing trains."""
    generator = np.random.default_rng(0)
    return list(rows.positive_N[generator.integers(len(rows), size=(len(rows), count))])
