"""`check`, `evaluate`, `predict` and `merge` of recipe rerank; the verbs' own files hand over to it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from torch import nn
from transformers import PreTrainedModel

from workbench.config import RunConfig
from workbench.data import mixture
from workbench.data.batching import evenly_spaced
from workbench.data.embedding import pair_records, pair_set, rerank_candidates
from workbench.data.embedding.rerank_candidates import CandidateSet, PairedTexts
from workbench.evaluation import retrieval_scores, run_embedder
from workbench.evaluation.forward_passes import ModelResults
from workbench.models import reranker
from workbench.models.reranker import Reranker
from workbench.recipes.inspection import left_out
from workbench.recipes.task import ROWS
from workbench.recipes.tasks.classify import class_verbs
from workbench.recipes.tasks.classify.class_verbs import Gap, NumberReference
from workbench.recipes.tasks.embed.embed_verbs import SHOWN, EmbedInspection
from workbench.recipes.tasks.rerank import rerank_run
from workbench.runs import units
from workbench.training.optim.schedules import total_steps

IDENTITY = "torch.nn.modules.linear.Identity"
"""For the CrossEncoder of sentence-transformers: scores are logits as they are."""


def inspect(config: RunConfig) -> EmbedInspection:
    """Everything that `run` does before it loads weights."""
    _, data, targets = rerank_run.prepare(config)
    train, drawn = data.train, mixture.mixed(data.train, config)
    steps = total_steps(config, len(drawn))
    shown = evenly_spaced(len(train), SHOWN).tolist()
    return EmbedInspection(
        config=config,
        data=data.map(lambda split: split.pairs),
        examples=[(train.place(row), _rendered(train, row)) for row in shown],
        targets=targets,
        steps=steps,
        notes=[
            *mixture.in_words(drawn, config, steps),
            _form(train, config),
            *_ranked(data.held_out, config),
            *run_embedder.in_words(config),
            *left_out(train),
        ],
    )


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


def _ranked(held_out: CandidateSet, config: RunConfig) -> list[str]:
    if held_out.pairs.form == "scored":
        return []
    order = rerank_candidates.ranking(held_out, candidates=config.rerank.candidates)
    counts = [len(each) for each in order.passages]
    many = f"{min(counts)}" if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"
    return [f"{len(counts):,} held-out queries rank {many} passages each, {sum(counts):,} pairs in all."]


def evaluate(run: Path, config: RunConfig, scoring: ModelResults | None = None) -> dict[str, float]:
    """Scores of the saved reranker on data.test where `config` names it, else on the held-out rows."""
    model = reranker.load(run, config)
    data = rerank_candidates.load(config, model.tokenizer)
    rows = data.held_out if data.test is None else data.test
    return retrieval_scores.score_reranker(model, rows, candidates=config.rerank.candidates, scoring=scoring).scores


def predict(
    run: Path, source: str, config: RunConfig, scoring: ModelResults | None = None
) -> tuple[pd.DataFrame, Sequence[str]]:
    """The score of every passage of a file for its query, its rank among those of its row, and rows left out."""
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
            "score": retrieval_scores.pair_scores(model, PairedTexts(raw, model.joins, *sides), scoring=scoring),
        }
    )
    ranks = table.groupby("row", sort=False)["score"].rank(ascending=False, method="first")
    return table.assign(rank=ranks.astype(int)), skipped


def save_merged(model: PreTrainedModel, unmerged: Reranker, folder: Path) -> None:
    """A stock model and its tokenizer, which the CrossEncoder of sentence-transformers loads with the same scores."""
    model.config.sentence_transformers = {"activation_fn": IDENTITY}
    unmerged.tokenizer.model_max_length = unmerged.joins.max_tokens
    class_verbs.save_merged(model, unmerged.classifier, folder)


def outputs(run: Path, config: RunConfig) -> RankReference:
    """Scores of a finished run for some of its held-out pairs."""
    unmerged = reranker.load(run, config)
    pairs = rerank_candidates.load(config, unmerged.tokenizer).held_out.all_pairs
    pairs = pairs.take(np.arange(min(ROWS, len(pairs))))
    return RankReference(config, unmerged, pairs, retrieval_scores.pair_scores(unmerged, pairs)[:, None])


class RankReference(NumberReference[Reranker, PairedTexts]):
    """Scores of queries and passages."""

    def save(self, model: PreTrainedModel, folder: Path) -> None:
        save_merged(model, self.unmerged, folder)

    def error(self, model: nn.Module, backbone: PreTrainedModel) -> Gap:
        again = reranker.make(model, backbone, self.tokenizer, self.config)
        return self._gap(retrieval_scores.pair_scores(again, self.rows))
