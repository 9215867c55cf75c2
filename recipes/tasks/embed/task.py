"""The task `embed` as verbs and recipes over tasks ask for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from workbench.adapters import stock
from workbench.config import RunConfig
from workbench.config.model_heads import HIDDEN, ModelHead
from workbench.data import leaks, mixture
from workbench.data.batching import Examples, evenly_spaced, global_batch, micro_batches, steps_per_epoch
from workbench.data.embedding import pair_data, pair_records, pair_set
from workbench.data.embedding.pair_set import PairSet
from workbench.data.held_out_split import Splits
from workbench.data.text.quality import rules
from workbench.data.text.quality.survey import SourceRows
from workbench.errors import DataError
from workbench.evaluation import retrieval_scores
from workbench.evaluation.serving.served_models import Embedded, EmbeddingModel, Turns
from workbench.losses.ranking_losses import leading
from workbench.models import backbones, embedder
from workbench.models.backbones import Loader
from workbench.models.embedder import Embedder
from workbench.recipes.inspection import left_out
from workbench.recipes.task import ROWS, DryTask, PredictionTable, RowFile, ScoringOptions, Task
from workbench.recipes.tasks.embed import embed_run
from workbench.recipes.tasks.embed.embed_run import EmbedRun, prepare
from workbench.runs import provenance, units
from workbench.runs.run_directory import Run
from workbench.training import capacity
from workbench.training.callbacks import Callback, Silent
from workbench.training.optim.schedules import total_steps

if TYPE_CHECKING:
    from workbench.evaluation.serving.served_models import ServedModel


SHOWN = 3
"""Rows that are rendered in full."""
LOOKED = 16
"""Global batches whose known pairs are counted."""


@dataclass(frozen=True)
class EmbedInspection:
    """Findings of `check`, for a run that is not refused."""

    config: RunConfig
    data: Splits[PairSet]
    examples: list[tuple[str, list[tuple[str, str]]]]
    """Place of some rows, and what each of their texts is to the others, with the text as the model reads it."""
    targets: list[str]
    """Modules that get an adapter; empty for full fine-tuning."""
    steps: int | None
    """None where a budget alone ends the run."""
    notes: list[str]
    blocks: int | None = None
    """Transformer blocks of the backbone, where layers freeze."""
    probe: str = ""


@dataclass(frozen=True)
class Angle:
    """How far two embedders are apart on the same texts."""

    texts: int
    cosine: float
    """The least cosine of a text's two embeddings."""
    difference: float
    """The largest difference of two of their numbers."""

    @property
    def sentence(self) -> str:
        """For a person."""
        return (
            f"On {self.texts:,} held-out texts: least cosine {self.cosine:.6f}, largest difference of a number "
            f"{self.difference:.1e}."
        )


def _rendered(rows: PairSet, row: int, decode: object) -> list[tuple[str, str]]:
    assert callable(decode)
    second = f"score {rows.score_N[row]:g}" if rows.form == "scored" else "positive"
    named = [("anchor", rows.anchor_N[row]), (second, rows.positive_N[row])]
    named += [("negative", unit) for unit in rows.negatives[row]]
    return [(name, str(decode(rows.units.tokens[unit]))) for name, unit in named]


def known_share(rows: PairSet, drawn: Examples, config: RunConfig) -> list[str]:
    """Sentence on the passages of a batch that are known to belong to an anchor, and so are no negatives of it.

    Args:
        drawn: The same rows as an epoch draws them.
    """
    size, loss = config.batch.size, config.embed.loss_of(rows.form)
    if loss != "contrastive":
        return []
    known = others = 0
    for step in range(min(LOOKED, steps_per_epoch(len(drawn), size))):
        draws = global_batch(step, rows=len(drawn), size=size, seed=config.seed)
        texts = rows.texts(drawn.sample(draws, epoch=0))
        known_BN = rows.known(texts.anchor_B, texts.passages)
        known += int(known_BN.sum()) - len(texts.anchor_B)
        others += known_BN.size - len(texts.anchor_B)
    share = known / max(1, others)
    sentence = (
        f"In batches of {size} rows, {units.percent(share)} of the other passages are known to belong to an anchor "
        "(same class, same text, or another row says so): they are no negatives."
    )
    many = share > 0.5
    return [sentence + (" A smaller batch.size loses little: most of a batch is not used." if many else "")]


def some_embeddings(model: Embedder, rows: PairSet, *, texts: int) -> Tensor:
    """Embeddings of the first texts of a set."""
    first = pair_set.first_units(rows, texts)
    return leading(retrieval_scores.embed_texts(model, first), model.width, normalise=model.config.normalise)


def save_merged(model: PreTrainedModel, unmerged: Embedder, folder: Path, config: RunConfig) -> None:
    """A stock model, its tokenizer, and what sentence-transformers reads."""
    stock.save(model, folder)
    embedder.save_around(unmerged, folder, config)


def angle(wanted_UD: Tensor, found_UD: Tensor) -> Angle:
    """The distance of the second embeddings from the first."""
    cosine_U = torch.nn.functional.cosine_similarity(wanted_UD.double(), found_UD.double(), dim=1)
    return Angle(len(wanted_UD), float(cosine_U.min()), float((wanted_UD - found_UD).abs().max()))


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
        save_merged(model, self.unmerged, folder, self.config)

    def error(self, model: nn.Module, backbone: PreTrainedModel) -> Angle:
        again = embedder.make(model, backbone, self.tokenizer, self.config)
        return angle(self.wanted_UD, some_embeddings(again, self.rows, texts=ROWS))


def survey(config: RunConfig, files: Sequence[RowFile]) -> list[SourceRows]:
    """Rows of texts that are compared, with the tokens of the longest."""
    tokenizer, source_rows = backbones.tokenizer(config.model), []
    for title, own, trains in files:
        source = pair_records.read(own.train, own, limit=own.limit)
        records = source.records
        ids = iter(tokenizer([text for record in records for text in record.texts], verbose=False)["input_ids"])
        tokens_N = [max(len(next(ids)) for _ in record.texts) for record in records]
        source_rows.append(
            SourceRows(
                title,
                source.name,
                [rules.row_text_of_texts(record.place, record.texts) for record in records],
                np.asarray(tokens_N, dtype=np.int64),
                trains,
                labels=[(record.label,) for record in records] if source.form == "labelled" else None,
                numbers=[record.score for record in records] if source.form == "scored" else None,
                unreadable=source.skipped,
            )
        )
    return source_rows


class EmbedTask(Task):
    """Embeddings of texts."""

    scores_later = True

    def begin(self, config: RunConfig, run: Run, callback: Callback, *, loader: Loader = backbones.load) -> EmbedRun:
        # Data first: it is the cheapest thing to get wrong, and needs no weights.
        tokenizer, data, _ = embed_run.prepare(config)
        provenance.note_data(run, data.facts())
        for sentence in leaks.told(data.named()):
            callback.say(sentence)
        pairs = EmbedRun(config, run, callback, tokenizer, data, loader=loader)
        if config.embed.mine:
            pairs = replace(pairs, data=data._replace(train=embed_run.with_negatives(pairs)))
        return pairs

    def inspect(self, config: RunConfig) -> EmbedInspection:
        tokenizer, data, targets = prepare(config)
        train, drawn = data.train, mixture.mixed(data.train, config)
        steps = total_steps(config, len(drawn))
        chosen = evenly_spaced(len(train), SHOWN).tolist()
        given = sum(map(len, train.negatives))
        negatives = f", {given:,} given negatives" if given else ""
        classes = f", {len(np.unique(train.class_N)):,} classes" if train.form == "labelled" else ""
        mined = f" {config.embed.mine} negatives a row are mined before training." if config.embed.mine else ""
        loss = config.embed.loss_of(train.form)
        return EmbedInspection(
            config=config,
            data=data,
            examples=[(train.place(row), _rendered(train, row, tokenizer.decode)) for row in chosen],
            targets=targets,
            steps=steps,
            notes=[
                *mixture.in_words(drawn, config, steps),
                f"Rows are {train.form}: {len(train.units.texts):,} texts{classes}{negatives}; loss {loss}.{mined}",
                *known_share(train, drawn, config),
                *left_out(*data),
                *leaks.told(data.named()),
            ],
        )

    def evaluate(self, run: Path, config: RunConfig, turn: ScoringOptions) -> dict[str, float]:
        model = embedder.load(run, config)
        data = pair_data.load(config, model.tokenizer)
        rows = data.held_out if data.test is None else data.test
        return retrieval_scores.score_embeddings(
            model, rows, data.train, batch=config.batch.size, scoring=turn.scoring
        ).scores

    def predict(self, run: Path, source: str, config: RunConfig, turn: ScoringOptions) -> PredictionTable:
        skipped: list[str] = []
        texts, are_passages = pair_records.read_texts(source, config.data, skipped)
        model = embedder.load(run, config)
        prefix = config.embed.passage_prefix if are_passages else config.embed.query_prefix
        numbers = pair_set.numbered(prefix + each.text for each in texts)
        read = pair_set.units(list(numbers), model.tokenizer, max_tokens=config.data.max_tokens)
        found_UD = leading(
            retrieval_scores.embed_texts(model, read, scoring=turn.scoring),
            model.width,
            normalise=config.embed.normalise,
        )
        columns = {
            "row": [each.place for each in texts],
            "text": [each.text for each in texts],
            "embedding": [found_UD[numbers[prefix + each.text]].tolist() for each in texts],
        }
        return PredictionTable(pd.DataFrame(columns), skipped)

    def outputs(self, run: Path, config: RunConfig) -> EmbedReference:
        embeds = embedder.load(run, config)
        pairs = pair_data.load(config, embeds.tokenizer).held_out
        return EmbedReference(config, embeds, pairs, some_embeddings(embeds, pairs, texts=ROWS))

    def dry(self, config: RunConfig, run: Run) -> DryTask:
        tokenizer, data, _ = embed_run.prepare(config)
        mined = embed_run.negatives_by_chance(data.train, config.embed.mine)
        data = data._replace(train=data.train.with_negatives(mined))
        texts = data.held_out.units
        longest = next(micro_batches(np.arange(len(texts.texts)), texts.lengths, tokens=capacity.FORWARD_TOKENS))
        worst = texts.batch(longest).to(backbones.device())
        single = EmbedRun(config, run, Silent(), tokenizer, data)
        return DryTask(single, lambda live: live.pooled(worst), units=True)

    def survey(self, config: RunConfig, files: Sequence[RowFile]) -> list[SourceRows]:
        return survey(config, files)

    def serve(self, run: Path, config: RunConfig, name: str, created: int, *, queue: int) -> ServedModel:
        model = embedder.load(run, config)

        def embed(texts: Sequence[str], passages: bool, dimensions: int | None) -> Embedded:
            size = dimensions or model.width
            if size not in model.sizes:
                raise DataError(f"dimensions: {size} was not trained. There are: {', '.join(map(str, model.sizes))}.")
            prefix = config.embed.passage_prefix if passages else config.embed.query_prefix
            numbers = pair_set.numbered(prefix + text for text in texts)
            read = pair_set.units(list(numbers), model.tokenizer, max_tokens=config.data.max_tokens)
            found_UD = leading(retrieval_scores.embed_texts(model, read), size, normalise=config.embed.normalise)
            places = [numbers[prefix + text] for text in texts]
            return Embedded(found_UD[places], int(read.lengths[places].sum()))

        return EmbeddingModel(name, config.model.id, created, Turns(queue), embed)


TASK = EmbedTask()
