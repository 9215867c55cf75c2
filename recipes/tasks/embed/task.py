"""The task `embed` as verbs and recipes over tasks ask for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from workbench.config import RunConfig
from workbench.data.batching import micro_batches
from workbench.models import backbones
from workbench.models.backbones import Loader
from workbench.recipes.task import DryTask, PredictionTable, RowFile, ScoringOptions, Task
from workbench.recipes.tasks.embed import embed_run, negative_mining
from workbench.recipes.tasks.embed.embed_run import EmbedRun
from workbench.runs import provenance
from workbench.runs.run_directory import Run
from workbench.training import capacity
from workbench.training.callbacks import Callback, Silent

if TYPE_CHECKING:
    from workbench.data.text.quality.survey import SourceRows
    from workbench.evaluation.serving.served_models import ServedModel
    from workbench.recipes.tasks.embed.embed_verbs import EmbedInspection, EmbedReference


class EmbedTask(Task):
    """Embeddings of texts."""

    scores_later = True

    def begin(self, config: RunConfig, run: Run, callback: Callback, *, loader: Loader = backbones.load) -> EmbedRun:
        # Data first: it is the cheapest thing to get wrong, and needs no weights.
        tokenizer, data, _ = embed_run.prepare(config)
        provenance.note_data(run, data.facts())
        pairs = EmbedRun(config, run, callback, tokenizer, data, loader=loader)
        if config.embed.mine:
            pairs = replace(pairs, data=data._replace(train=negative_mining.with_negatives(pairs)))
        return pairs

    def inspect(self, config: RunConfig) -> EmbedInspection:
        from workbench.recipes.tasks.embed import embed_verbs

        return embed_verbs.inspect(config)

    def evaluate(self, run: Path, config: RunConfig, turn: ScoringOptions) -> dict[str, float]:
        from workbench.recipes.tasks.embed import embed_verbs

        return embed_verbs.evaluate(run, config, turn.scoring)

    def predict(self, run: Path, source: str, config: RunConfig, turn: ScoringOptions) -> PredictionTable:
        from workbench.recipes.tasks.embed import embed_verbs

        return PredictionTable(*embed_verbs.predict(run, source, config, turn.scoring))

    def outputs(self, run: Path, config: RunConfig) -> EmbedReference:
        from workbench.recipes.tasks.embed import embed_verbs

        return embed_verbs.outputs(run, config)

    def dry(self, config: RunConfig, run: Run) -> DryTask:
        tokenizer, data, _ = embed_run.prepare(config)
        mined = negative_mining.by_chance(data.train, config.embed.mine)
        data = data._replace(train=data.train.with_negatives(mined))
        texts = data.held_out.units
        longest = next(micro_batches(np.arange(len(texts.texts)), texts.lengths, tokens=capacity.FORWARD_TOKENS))
        worst = texts.batch(longest).to(backbones.device())
        single = EmbedRun(config, run, Silent(), tokenizer, data)
        return DryTask(single, lambda live: live.pooled(worst), units=True)

    def survey(self, config: RunConfig, files: Sequence[RowFile]) -> list[SourceRows]:
        from workbench.recipes.tasks.embed import embed_verbs

        return embed_verbs.survey(config, files)

    def serve(self, run: Path, config: RunConfig, name: str, created: int, *, queue: int) -> ServedModel:
        from workbench.recipes.tasks.embed import embed_verbs

        return embed_verbs.serve(run, config, name, created, queue=queue)


TASK = EmbedTask()
