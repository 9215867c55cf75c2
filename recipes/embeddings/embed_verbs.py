"""`check`, `evaluate`, `predict` and `merge` of recipe embed; the verbs' own files hand over to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from transformers import PreTrainedModel

from workbench.adapters import stock
from workbench.config import RunConfig
from workbench.data import mixture
from workbench.data.batching import Examples, evenly_spaced, global_batch, steps_per_epoch
from workbench.data.embedding import pair_data, pair_records, pair_set
from workbench.data.embedding.pair_set import PairSet
from workbench.data.held_out_split import Splits
from workbench.evaluation import retrieval_scores
from workbench.evaluation.forward_passes import ModelResults
from workbench.losses.embedding_losses import leading
from workbench.models import embedder
from workbench.models.embedder import Embedder
from workbench.recipes.embeddings.embed import prepare
from workbench.recipes.inspection import left_out
from workbench.runs import units
from workbench.training.optim.schedules import total_steps

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


def inspect(config: RunConfig) -> EmbedInspection:
    """Everything that `run` does before it loads weights."""
    tokenizer, data, targets = prepare(config)
    train, drawn = data.train, mixture.mixed(data.train, config)
    steps = total_steps(config, len(drawn))
    chosen = evenly_spaced(len(train), SHOWN).tolist()
    return EmbedInspection(
        config=config,
        data=data,
        examples=[(train.place(row), _rendered(train, row, tokenizer.decode)) for row in chosen],
        targets=targets,
        steps=steps,
        notes=[
            *mixture.in_words(drawn, config, steps),
            _form(train, config),
            *known_share(train, drawn, config),
            *left_out(train),
        ],
    )


def _rendered(rows: PairSet, row: int, decode: object) -> list[tuple[str, str]]:
    assert callable(decode)
    second = f"score {rows.score_N[row]:g}" if rows.form == "scored" else "positive"
    named = [("anchor", rows.anchor_N[row]), (second, rows.positive_N[row])]
    named += [("negative", unit) for unit in rows.negatives[row]]
    return [(name, str(decode(rows.units.tokens[unit]))) for name, unit in named]


def _form(rows: PairSet, config: RunConfig) -> str:
    given = sum(map(len, rows.negatives))
    negatives = f", {given:,} given negatives" if given else ""
    classes = f", {len(np.unique(rows.class_N)):,} classes" if rows.form == "labelled" else ""
    mined = f" {config.embed.mine} negatives a row are mined before training." if config.embed.mine else ""
    loss = config.embed.loss_of(rows.form)
    return f"Rows are {rows.form}: {len(rows.units.texts):,} texts{classes}{negatives}; loss {loss}.{mined}"


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


def evaluate(run: Path, config: RunConfig, scoring: ModelResults | None = None) -> dict[str, float]:
    """Scores of the saved embedder on data.test where `config` names it, else on the held-out rows."""
    model = embedder.load(run, config)
    data = pair_data.load(config, model.tokenizer)
    rows = data.held_out if data.test is None else data.test
    return retrieval_scores.score_embeddings(model, rows, data.train, batch=config.batch.size, scoring=scoring).scores


def predict(
    run: Path, source: str, config: RunConfig, scoring: ModelResults | None = None
) -> tuple[pd.DataFrame, Sequence[str]]:
    """The saved embedder's embeddings for every text of a file, and rows left out.

    Columns `passage`, `positive` and `sentence2` get the instruction of passages, any other that of queries.
    """
    skipped: list[str] = []
    texts, are_passages = pair_records.read_texts(source, config.data, skipped)
    model = embedder.load(run, config)
    prefix = config.embed.passage_prefix if are_passages else config.embed.query_prefix
    numbers = pair_set.numbered(prefix + each.text for each in texts)
    read = pair_set.units(list(numbers), model.tokenizer, max_tokens=config.data.max_tokens)
    found_UD = leading(
        retrieval_scores.embed_texts(model, read, scoring=scoring), model.width, normalise=config.embed.normalise
    )
    columns = {
        "row": [each.place for each in texts],
        "text": [each.text for each in texts],
        "embedding": [found_UD[numbers[prefix + each.text]].tolist() for each in texts],
    }
    return pd.DataFrame(columns), skipped


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
