"""Outputs of a finished run for held-out rows, which whatever is made of it has to have, too."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import numpy as np
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from workbench.adapters import stock
from workbench.config import RunConfig, model_heads
from workbench.config.model_heads import HIDDEN, ModelHead
from workbench.data.embedding import pair_data
from workbench.data.embedding.pair_set import PairSet
from workbench.data.embedding.rerank_candidates import PairedTexts
from workbench.data.labelled.labelled_data import LabelledSet
from workbench.data.labelled.labels import Floats
from workbench.data.text import tokenized
from workbench.data.text.chat import ChatEncoder
from workbench.data.text.prompts import PromptEncoder
from workbench.data.text.row_encoder import RowEncoder
from workbench.data.text.tokenized_set import TokenizedSet
from workbench.evaluation import retrieval_scores, reward_scores
from workbench.evaluation.perplexity import Agreement, agreement, hidden_states
from workbench.models import classifier, embedder, exported, output_heads, reranker, reward_model
from workbench.models.classifier import Classifier
from workbench.models.embedder import Embedder
from workbench.models.exported import ExportedModel
from workbench.models.output_heads import Head
from workbench.models.reranker import Reranker
from workbench.models.reward_model import RewardModel
from workbench.recipes.embeddings import embed_verbs, rerank_verbs
from workbench.recipes.embeddings.embed_verbs import Angle
from workbench.recipes.labels import classify_verbs
from workbench.recipes.labels.classify_verbs import Gap
from workbench.recipes.preferences import reward_run, reward_verbs

ROWS = 64
"""Held-out rows that are compared."""
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")
"""Keys of a generation_config.json that only sampling reads; Llama 2's has them, and does not sample."""
OutputError = Agreement | Gap | Angle
S = TypeVar("S", RewardModel, Reranker)
R = TypeVar("R", TokenizedSet, PairedTexts)


class RunOutputs(Protocol):
    """Outputs of a run for held-out rows, and the means to compare others with them."""

    @property
    def task(self) -> ModelHead:
        """Head of its model."""

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """Tokenizer that the run saved; None where it reads pictures."""

    @property
    def note(self) -> str:
        """Sentence on outputs that a stock model leaves to who reads it; empty where there is none."""

    def settle(self, model: PreTrainedModel) -> PreTrainedModel:
        """Configure a whole model to stop and to pad as the run does."""

    def save(self, model: PreTrainedModel, folder: Path) -> None:
        """Write a whole model into `folder` with what belongs beside it, as a stock one."""

    def error(self, model: nn.Module, backbone: PreTrainedModel) -> OutputError:
        """Distance of a model's outputs from the run's.

        Args:
            model: The same as `backbone`, called like it, or with an adapter around it.
            backbone: Settled, where it is no whole model that was saved so.
        """


def of(run: Path, config: RunConfig) -> RunOutputs:
    """The outputs of what the run at `run` shipped."""
    if config.recipe in ("classify", "crossval"):
        unmerged = classifier.load(run, config)
        rows, wanted = classify_verbs.some_outputs(unmerged, config, rows=ROWS)
        return ClassReference(config, unmerged.reader.tokenizer, unmerged, rows, wanted)
    if config.recipe == "embed":
        embeds = embedder.load(run, config)
        pairs = pair_data.load(config, embeds.tokenizer).held_out
        return EmbedReference(config, embeds, pairs, embed_verbs.some_embeddings(embeds, pairs, texts=ROWS))
    if config.recipe == "rerank":
        return _of_pairs(run, config)
    if config.recipe == "reward":
        return _of_rewards(run, config)
    return _of_text(run, config)


def _of_text(run: Path, config: RunConfig) -> TextReference:
    unmerged = exported.load(run, config)
    template: RowEncoder = unmerged.template
    if config.recipe == "reinforce" and isinstance(template, ChatEncoder):
        template = PromptEncoder(template)
    held_out = tokenized.load(config.data, unmerged.tokenizer, template, seed=config.seed).held_out
    wanted = hidden_states(unmerged.model, unmerged.head, held_out, rows=ROWS)
    return TextReference(config, unmerged, held_out, wanted)


def _of_rewards(run: Path, config: RunConfig) -> RewardReference:
    unmerged = reward_run.load(run, config)
    rows = reward_verbs.held_out(unmerged, config)
    rows = rows.subset(np.arange(min(ROWS, len(rows))))
    return RewardReference(config, unmerged, rows, reward_scores.read_rewards(unmerged, rows)[:, None])


def _of_pairs(run: Path, config: RunConfig) -> RankReference:
    unmerged = reranker.load(run, config)
    pairs = rerank_verbs.some_pairs(unmerged, config, count=ROWS)
    return RankReference(config, unmerged, pairs, retrieval_scores.pair_scores(unmerged, pairs)[:, None])


@dataclass(frozen=True)
class TextReference:
    """Next-token distributions at supervised positions."""

    config: RunConfig
    unmerged: ExportedModel
    rows: TokenizedSet
    wanted_ND: Tensor
    """Hidden states in front of the run's own head."""
    note: str = ""

    @property
    def task(self) -> ModelHead:
        return model_heads.of(self.config)

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self.unmerged.tokenizer

    def settle(self, model: PreTrainedModel) -> PreTrainedModel:
        if model.can_generate():
            _settle_generation(model.generation_config, self.unmerged.stop)
        return model

    def save(self, model: PreTrainedModel, folder: Path) -> None:
        stock.save(model, folder)
        self.tokenizer.save_pretrained(folder)

    def error(self, model: nn.Module, backbone: PreTrainedModel) -> Agreement:
        return self.error_of_head(model, output_heads.find(model, backbone))

    def error_of_head(self, model: nn.Module, head: Head) -> Agreement:
        """Distance of the outputs of a model whose head is known."""
        found_ND = hidden_states(model, head, self.rows, rows=ROWS)
        return agreement(self.unmerged.head, self.wanted_ND, head, found_ND)


@dataclass(frozen=True)
class ClassReference:
    """Outputs for labelled rows."""

    config: RunConfig
    tokenizer: PreTrainedTokenizerBase | None
    unmerged: Classifier
    rows: LabelledSet
    wanted_NC: Floats

    @property
    def task(self) -> ModelHead:
        return classifier.task(self.unmerged.labels, seed=self.config.seed)

    @property
    def note(self) -> str:
        labels = self.unmerged.labels
        if labels.kind != "number":
            return ""
        return f" Its output times {labels.scale:g} plus {labels.mean:g} is the number."

    def settle(self, model: PreTrainedModel) -> PreTrainedModel:
        classifier.classification_model(model, model, self.unmerged.reader, self.unmerged.labels)
        return model

    def save(self, model: PreTrainedModel, folder: Path) -> None:
        classify_verbs.save_merged(model, self.unmerged, folder)

    def error(self, model: nn.Module, backbone: PreTrainedModel) -> Gap:
        found_NC = classify_verbs.stock_outputs(model, self.rows)
        return classify_verbs.gap(self.unmerged.labels, self.wanted_NC, found_NC)


@dataclass(frozen=True)
class NumberReference(Generic[S, R]):
    """One number for each row, of a model with a head of one output."""

    config: RunConfig
    unmerged: S
    rows: R
    wanted_N1: Floats
    note: str = ""

    @property
    def task(self) -> ModelHead:
        return model_heads.of(self.config)

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self.unmerged.tokenizer

    def settle(self, model: PreTrainedModel) -> PreTrainedModel:
        own = self.unmerged.classifier
        classifier.classification_model(model, model, own.reader, own.labels)
        return model

    def save(self, model: PreTrainedModel, folder: Path) -> None:
        classify_verbs.save_merged(model, self.unmerged.classifier, folder)

    def _gap(self, found_N: Floats) -> Gap:
        return classify_verbs.gap(self.unmerged.classifier.labels, self.wanted_N1, found_N[:, None])


class RewardReference(NumberReference[RewardModel, TokenizedSet]):
    """Rewards of answers."""

    def error(self, model: nn.Module, backbone: PreTrainedModel) -> Gap:
        again = reward_model.make(model, backbone, self.tokenizer, self.unmerged.template, self.config)
        return self._gap(reward_scores.read_rewards(again, self.rows))


class RankReference(NumberReference[Reranker, PairedTexts]):
    """Scores of queries and passages."""

    def save(self, model: PreTrainedModel, folder: Path) -> None:
        rerank_verbs.save_merged(model, self.unmerged, folder)

    def error(self, model: nn.Module, backbone: PreTrainedModel) -> Gap:
        again = reranker.make(model, backbone, self.tokenizer, self.config)
        return self._gap(retrieval_scores.pair_scores(again, self.rows))


@dataclass(frozen=True)
class EmbedReference:
    """Embeddings of texts."""

    config: RunConfig
    unmerged: Embedder
    rows: PairSet
    wanted_UD: Tensor
    note: str = ""
    task: ModelHead = HIDDEN

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self.unmerged.tokenizer

    def settle(self, model: PreTrainedModel) -> PreTrainedModel:
        return model

    def save(self, model: PreTrainedModel, folder: Path) -> None:
        embed_verbs.save_merged(model, self.unmerged, folder, self.config)

    def error(self, model: nn.Module, backbone: PreTrainedModel) -> Angle:
        again = embedder.make(model, backbone, self.tokenizer, self.config)
        return embed_verbs.angle(self.wanted_UD, embed_verbs.some_embeddings(again, self.rows, texts=ROWS))


def _settle_generation(generation: GenerationConfig, stop: list[int]) -> None:
    """Let text end where the run's does, and leave out what transformers refuses to write."""
    generation.eos_token_id = stop
    for name in () if generation.do_sample else SAMPLING:
        setattr(generation, name, None)
