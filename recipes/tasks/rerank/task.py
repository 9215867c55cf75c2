"""The task `rerank` as verbs and recipes over tasks ask for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from workbench.adapters import anatomy
from workbench.config import RunConfig, model_heads
from workbench.config.model_heads import HIDDEN
from workbench.config.sections.embed_config import EmbedConfig
from workbench.data import mixture, named_sets
from workbench.data.batching import evenly_spaced
from workbench.data.embedding import pair_records, pair_set, rerank_candidates
from workbench.data.embedding.rerank_candidates import CandidateSet, PairedTexts
from workbench.data.held_out_split import Splits
from workbench.evaluation import retrieval_scores, run_embedder
from workbench.evaluation.forward_passes import ModelResults
from workbench.evaluation.run_embedder import RunEmbedder
from workbench.losses.ranking_losses import leading
from workbench.models import backbones, reranker
from workbench.models.backbones import Backbone, Loader
from workbench.models.embedder import Embedder
from workbench.models.reranker import Reranker
from workbench.recipes.inspection import left_out
from workbench.recipes.single.single_run import Scored, SingleRun
from workbench.recipes.task import ROWS, DryTask, PredictionTable, RowFile, ScoringOptions, Task, largest_numbers
from workbench.recipes.tasks.classify.task import Gap, NumberReference, save_merged
from workbench.recipes.tasks.embed import embed_run
from workbench.recipes.tasks.embed.embed_run import Mined
from workbench.recipes.tasks.embed.task import SHOWN, EmbedInspection, survey
from workbench.runs import provenance, units
from workbench.runs.run_directory import Run
from workbench.training import preflight
from workbench.training.callbacks import Callback, Silent
from workbench.training.optim.schedules import total_steps
from workbench.training.signal import TrainingSignal

if TYPE_CHECKING:
    from workbench.data.text.quality.survey import SourceRows


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
        embedded_UD = nn.functional.normalize(torch.from_numpy(near.vectors(pairs, section)), dim=1)
    return embed_run.mined_negatives(pairs, embedded_UD, count=section.mine, below=section.mine_below)


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

    def predictions(
        self, model: Reranker, rows: CandidateSet, outputs: pd.DataFrame, before: Mapping[str, Any]
    ) -> pd.DataFrame:
        return outputs


IDENTITY = "torch.nn.modules.linear.Identity"
"""For the CrossEncoder of sentence-transformers: scores are logits as they are."""


def _rendered(rows: CandidateSet, row: int) -> list[tuple[str, str]]:
    """The pairs of a row as the model reads them."""
    places = np.arange(row * rows.each, (row + 1) * rows.each)
    ids = rows.all_pairs.batch(places)
    lengths, decode = rows.all_pairs.lengths[places], rows.joins.tokenizer.decode
    texts = [str(decode(own[:length])) for own, length in zip(ids.inputs["input_ids"], lengths, strict=True)]
    first = f"score {rows.pairs.score_N[row]:g}" if rows.pairs.form == "scored" else "positive"
    return [(first if number == 0 else "negative", text) for number, text in enumerate(texts)]


def _form(rows: CandidateSet, config: RunConfig) -> str:
    section, pairs = config.rerank, rows.pairs
    loss = section.loss_of(pairs.form)
    cut = rows.truncated / (len(rows) * rows.each)
    cuts = f" Passages of {units.percent(cut)} of the pairs are cut to data.max_tokens." if cut else ""
    if pairs.form == "scored":
        return f"Rows are scored: {len(rows):,} pairs; loss {loss}.{cuts}"
    given = sum(map(len, pairs.negatives))
    mined = f" {section.mine} negatives a row are mined before training." if section.mine else ""
    return (
        f"Each of {len(rows):,} rows is its positive among {section.negatives} negatives ({given:,} are given; others "
        f"are passages of other rows at random, anew in each pass); loss {loss}.{mined}{cuts}"
    )


class RankReference(NumberReference[Reranker, PairedTexts]):
    """Scores of queries and passages."""

    def save(self, model: PreTrainedModel, folder: Path) -> None:
        # So that the CrossEncoder of sentence-transformers loads it with the same scores.
        model.config.sentence_transformers = {"activation_fn": IDENTITY}
        self.tokenizer.model_max_length = self.unmerged.joins.max_tokens
        save_merged(model, self.unmerged.classifier, folder)

    def error(self, model: nn.Module, backbone: PreTrainedModel) -> Gap:
        again = reranker.make(model, backbone, self.tokenizer, self.config)
        return self._gap(retrieval_scores.pair_scores(again, self.rows))


class RerankTask(Task):
    """Scores of queries and passages."""

    def begin(self, config: RunConfig, run: Run, callback: Callback, *, loader: Loader = backbones.load) -> RerankRun:
        # Data first: it is the cheapest thing to get wrong, and needs no weights.
        tokenizer, data, _ = prepare(config)
        provenance.note_data(run, data.facts())
        if config.rerank.mine:
            near, pairs = run_embedder.of(config, "rerank"), data.train.pairs
            by = "the backbone" if near is None else str(near.run)
            more = embed_run.kept_negatives(
                run, callback, pairs, lambda: mined(config, tokenizer, data.train, near), by=by
            )
            data = data._replace(train=replace(data.train, pairs=more))
        return RerankRun(config, run, callback, tokenizer, data, loader=loader)

    def inspect(self, config: RunConfig) -> EmbedInspection:
        _, data, targets = prepare(config)
        train, drawn = data.train, mixture.mixed(data.train, config)
        steps = total_steps(config, len(drawn))
        shown, ranked = evenly_spaced(len(train), SHOWN).tolist(), list[str]()
        if data.held_out.pairs.form != "scored":
            order = rerank_candidates.ranking(data.held_out, candidates=config.rerank.candidates)
            counts = [len(each) for each in order.passages]
            many = f"{min(counts)}" if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"
            ranked = [f"{len(counts):,} held-out queries rank {many} passages each, {sum(counts):,} pairs in all."]
        return EmbedInspection(
            config=config,
            data=data.map(lambda split: split.pairs),
            examples=[(train.place(row), _rendered(train, row)) for row in shown],
            targets=targets,
            steps=steps,
            notes=[
                *mixture.in_words(drawn, config, steps),
                _form(train, config),
                *ranked,
                *run_embedder.in_words(config),
                *left_out(*data.map(lambda split: split.pairs)),
            ],
        )

    def evaluate(self, run: Path, config: RunConfig, turn: ScoringOptions) -> dict[str, float]:
        model = reranker.load(run, config)
        data = rerank_candidates.load(config, model.tokenizer)
        rows = data.held_out if data.test is None else data.test
        return retrieval_scores.score_reranker(
            model, rows, candidates=config.rerank.candidates, scoring=turn.scoring
        ).scores

    def predict(self, run: Path, source: str, config: RunConfig, turn: ScoringOptions) -> PredictionTable:
        skipped: list[str] = []
        asked = pair_records.read_asked(source, config.data, skipped)
        model, section = reranker.load(run, config), config.rerank
        lines = [(each, passage) for each in asked for passage in each.passages]
        queries = [section.query_prefix + each.query for each, _ in lines]
        passages = [section.passage_prefix + passage for _, passage in lines]
        numbers = pair_set.numbered([*queries, *passages])
        raw = pair_set.raw_units(list(numbers), model.tokenizer)
        sides = [np.asarray([numbers[text] for text in side], dtype=np.int64) for side in (queries, passages)]
        model.joins.require_room(raw, sides[0])
        table = pd.DataFrame(
            {
                "row": [each.place for each, _ in lines],
                "query": [each.query for each, _ in lines],
                "passage": [passage for _, passage in lines],
                "score": retrieval_scores.pair_scores(
                    model, PairedTexts(raw, model.joins, *sides), scoring=turn.scoring
                ),
            }
        )
        ranks = table.groupby("row", sort=False)["score"].rank(ascending=False, method="first")
        return PredictionTable(table.assign(rank=ranks.astype(int)), skipped)

    def outputs(self, run: Path, config: RunConfig) -> RankReference:
        unmerged = reranker.load(run, config)
        pairs = rerank_candidates.load(config, unmerged.tokenizer).held_out.all_pairs
        pairs = pairs.take(np.arange(min(ROWS, len(pairs))))
        return RankReference(config, unmerged, pairs, retrieval_scores.pair_scores(unmerged, pairs)[:, None])

    def dry(self, config: RunConfig, run: Run) -> DryTask:
        tokenizer, data, _ = prepare(config)
        single = RerankRun(config, run, Silent(), tokenizer, data)
        return DryTask(single, largest_numbers(data.held_out.all_pairs, lambda live, batch: live.scores(batch)))

    def survey(self, config: RunConfig, files: Sequence[RowFile]) -> list[SourceRows]:
        return survey(config, files)

    def files(self, config: RunConfig) -> Mapping[str, Mapping[str, str]]:
        embedders = run_embedder.files(config)
        return {"embedder": embedders} if embedders else {}


TASK = RerankTask()
