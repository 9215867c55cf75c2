"""A backbone whose head gives a query and a passage, read in one row, one number: how well they belong together.

Legend: B rows, C candidates of a row, S pairs of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from workbench.adapters import anatomy
from workbench.config import RunConfig, model_heads
from workbench.config.sections.embed_config import RerankConfig
from workbench.data.batching import Indices, MicroBatch
from workbench.data.embedding.rerank_candidates import CandidateSet, PairTokenizer
from workbench.data.labelled.labels import Labels
from workbench.data.labelled.text_reader import TextReader
from workbench.errors import BackboneError
from workbench.losses import ranking_losses
from workbench.models import backbones, classifier
from workbench.models.classifier import Classifier
from workbench.models.reward_model import settle_padding

LABELS = Labels("number", ("score",))  # the one output is the score as it is: nothing is standardised


@dataclass(frozen=True)
class Reranker:
    """A classifier with one output, which reads a query and a passage as the tokenizer joins two texts."""

    classifier: Classifier
    tokenizer: PreTrainedTokenizerBase
    config: RerankConfig
    joins: PairTokenizer

    @property
    def model(self) -> nn.Module:
        """Backbone, adapter and head."""
        return self.classifier.model

    def scores(self, batch: MicroBatch) -> Tensor:
        """Score (S,) of each pair, float32: a logit, before any sigmoid."""
        return self.classifier.outputs(batch)[:, 0].float()

    def loss(self, rows: CandidateSet) -> Callable[[MicroBatch, float], Tensor]:
        """The summed loss of a micro-batch of rows with their candidates, as the trainer wants it."""

        def loss(batch: MicroBatch, scale: float) -> Tensor:
            numbers = batch.rows_B if batch.rows_B is not None else np.zeros(len(batch.positions_N), dtype=np.int64)
            return self.loss_of(self.scores(batch).unflatten(0, (-1, rows.each)), rows, numbers) * scale

        return loss

    def loss_of(self, score_BC: Tensor, rows: CandidateSet, numbers: Indices) -> Tensor:
        """The summed loss of rows from the scores of their candidates. `numbers`: of the rows (B,) in the set."""
        loss = self.config.loss_of(rows.pairs.form)
        if rows.pairs.form == "scored":
            wanted_B = torch.from_numpy(rows.pairs.score_N[numbers]).to(score_BC)
            own = ranking_losses.binary_of_scores if loss == "bce" else ranking_losses.squared_difference
            return own(score_BC[:, 0], wanted_B)
        if loss == "bce":
            return ranking_losses.binary_candidates(score_BC)
        return ranking_losses.listwise_softmax(score_BC, temperature=self.config.temperature)


def require_known_form(config: RunConfig) -> None:
    """Refuse, before a row is read, a backbone that does not read one text. Raises BackboneError: it reads pictures, is
    an encoder-decoder, or has no classification head."""
    hub = backbones.of_one_sequence(config.model, recipe="rerank", take="an encoder or a causal backbone")
    if not anatomy.reads_tokens(backbones.skeleton(config.model, task=model_heads.of(config))):
        name = f"model.id={config.model.id}: {type(hub).__name__}"
        raise BackboneError(f"{name} reads no tokens, and recipe rerank texts. Take another one.")


def make(
    model: nn.Module, backbone: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, config: RunConfig
) -> Reranker:
    """How `model` scores a query and a passage."""
    reader = TextReader(tokenizer, config.data, config.classes, config.duplicates)
    scorer = classifier.classification_model(model, backbone, reader, LABELS)
    return Reranker(scorer, tokenizer, config.rerank, PairTokenizer(tokenizer, config.data.max_tokens))


def tokenizer_of(config: RunConfig) -> PreTrainedTokenizerBase:
    """The backbone's tokenizer, which pads with a token that ends no text."""
    tokenizer = backbones.tokenizer(config.model)
    settle_padding(tokenizer)
    return tokenizer


def save(live: Reranker, folder: Path) -> None:
    """Write adapter, head and tokenizer into `folder`, atomically."""
    classifier.save(live.classifier, folder)


def load(run: Path, config: RunConfig, *, waiting: bool = False) -> Reranker:
    """The reranker that the run at `run` shipped, in evaluation mode. `waiting`: on the host, as `backbones.load`
    says."""
    scorer = classifier.load(run, config, waiting=waiting)
    tokenizer = scorer.reader.tokenizer
    assert tokenizer is not None, "it reads texts"
    return Reranker(scorer, tokenizer, config.rerank, PairTokenizer(tokenizer, config.data.max_tokens))
