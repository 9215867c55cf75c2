"""Teachers of rerankers: a run of recipe rerank, or a cross-encoder that no run trained, and its scores of pairs.

Legend: U texts, P pairs, N rows, C candidates of a row, S pairs of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from workbench.config import RunConfig, model_heads
from workbench.config.sections.embed_config import RerankConfig
from workbench.data.batching import Floats, Indices, MicroBatch
from workbench.data.embedding import pair_set
from workbench.data.embedding.rerank_candidates import CandidateSet, PairedTexts
from workbench.distillation.teacher_sources import TeacherSource
from workbench.errors import ConfigError
from workbench.evaluation import retrieval_scores
from workbench.models import backbones, exported, reranker
from workbench.models.reranker import Reranker
from workbench.training import preflight


class RankingTeacher(NamedTuple):
    """A cross-encoder, not loaded."""

    config: RunConfig
    """Its instructions, and the longest row that it reads."""
    load: Callable[[], Reranker]


def find(source: TeacherSource, config: RunConfig) -> RankingTeacher:
    """Who teaches. Raises ConfigError: nobody who gives pairs of texts one score. `config`: the distillation's."""
    name = f"distill.teacher.id={source.name}"
    if source.models > 1:
        raise ConfigError(f"{name}: one teacher scores pairs, and these are {source.models}. Name one of them.")
    if source.run is not None:
        own = source.config_of(source.run)
        if own.task.name != config.task.name or own.over is not None:
            raise ConfigError(
                f"{name}: a run of recipe {own.recipe} scores no pairs of a query and a passage. Write one of recipe "
                f"{config.task.name}, or a cross-encoder."
            )
        exported.require_saved(source.run, own, "tokenizer.json", "classes.json")
        return RankingTeacher(own, partial(reranker.load, source.run, own))
    hub: Any = source.hub_config()
    if not any(each.endswith("ForSequenceClassification") for each in hub.architectures or ()) or hub.num_labels != 1:
        raise ConfigError(
            f"{name} has no head that gives a pair of texts one score. Write a run of recipe {config.task.name}, or a "
            "cross-encoder, whose config.json says ...ForSequenceClassification and has one label."
        )
    longest = min(config.data.max_tokens, preflight.longest_sequence(hub) or config.data.max_tokens)
    data = config.data.model_copy(update={"max_tokens": longest})
    own = config.model_copy(update={"model": source.model, "rerank": RerankConfig(), "data": data})
    return RankingTeacher(own, partial(_stock, source, own))


def _stock(source: TeacherSource, config: RunConfig) -> Reranker:
    tokenizer = reranker.tokenizer_of(config)
    with source.named_in_errors():
        backbone = backbones.load(config.model, tokenizer, task=model_heads.of(config)).model.eval()
    return reranker.make(backbone, backbone, tokenizer, config)


def as_read(rows: CandidateSet, teacher: RankingTeacher, model: Reranker, student: RerankConfig) -> CandidateSet:
    """Rows with the same candidates, as a teacher reads them.

    Args:
        student: The section whose instructions stand before the texts of the rows.
    """
    own, pairs = teacher.config.rerank, rows.pairs
    queries = set(pairs.anchor_N.tolist())
    texts = [
        own.query_prefix + text[len(student.query_prefix) :]
        if unit in queries
        else own.passage_prefix + text[len(student.passage_prefix) :]
        for unit, text in enumerate(pairs.units.texts)
    ]
    units = pair_set.raw_units(texts, model.tokenizer)
    model.joins.require_room(units, pairs.anchor_N)
    return replace(rows, pairs=replace(pairs, units=units), joins=model.joins, drawn_NC=rows.passage_NC)


class PairScores(NamedTuple):
    """What a teacher says of pairs of texts."""

    key_P: Indices
    """query * U + passage, ascending."""
    score_P: Floats

    def of(self, key_S: Indices) -> Floats:
        """Scores of these; nan of one that was not asked about, which no step learns."""
        place_S = np.searchsorted(self.key_P, key_S).clip(max=len(self.key_P) - 1)
        return np.where(self.key_P[place_S] == key_S, self.score_P[place_S], np.nan)


def keys(pairs: PairedTexts) -> Indices:
    """A number for each pair (P,)."""
    key_P: Indices = pairs.query_P * len(pairs.units.texts) + pairs.passage_P
    return key_P


def asked(model: Reranker, rows: CandidateSet, read: CandidateSet, passes: int) -> PairScores:
    """Scores of all candidates of rows in so many passes over them. `read`: the same rows as the teacher reads them."""
    each = [keys(rows.seen(epoch=epoch, step=0).all_pairs) for epoch in range(passes)]
    key_P, texts = np.unique(np.concatenate(each)), read.pairs.units
    pairs = PairedTexts(texts, read.joins, key_P // len(texts.texts), key_P % len(texts.texts))
    return PairScores(key_P, retrieval_scores.pair_scores(model, pairs))


@dataclass(frozen=True, eq=False)
class TaughtCandidates(CandidateSet):
    """Rows whose micro-batches have the teacher's score of each pair as its label."""

    said: PairScores | None = None

    def batch(self, indices: Indices, *, epoch: int = 0) -> MicroBatch:
        assert self.said is not None
        batch = super().batch(indices, epoch=epoch)
        places = (indices[:, None] * self.each + np.arange(self.each)).ravel()
        return replace(batch, labels_N=torch.from_numpy(self.said.of(keys(self.all_pairs.take(places)))).float())
