"""The task `rerank` as verbs and recipes over tasks ask for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from workbench.config import RunConfig
from workbench.evaluation import run_embedder
from workbench.models import backbones
from workbench.models.backbones import Loader
from workbench.recipes.task import DryTask, PredictionTable, RowFile, ScoringOptions, Task, largest_numbers
from workbench.recipes.tasks.rerank import rerank_run
from workbench.recipes.tasks.rerank.rerank_run import RerankRun
from workbench.runs.run_directory import Run
from workbench.training.callbacks import Callback, Silent

if TYPE_CHECKING:
    from workbench.data.text.quality.survey import SourceRows
    from workbench.recipes.tasks.embed.embed_verbs import EmbedInspection
    from workbench.recipes.tasks.rerank.rerank_verbs import RankReference


class RerankTask(Task):
    """Scores of queries and passages."""

    def begin(self, config: RunConfig, run: Run, callback: Callback, *, loader: Loader = backbones.load) -> RerankRun:
        return rerank_run.begin(config, run, callback, loader=loader)

    def inspect(self, config: RunConfig) -> EmbedInspection:
        from workbench.recipes.tasks.rerank import rerank_verbs

        return rerank_verbs.inspect(config)

    def evaluate(self, run: Path, config: RunConfig, turn: ScoringOptions) -> dict[str, float]:
        from workbench.recipes.tasks.rerank import rerank_verbs

        return rerank_verbs.evaluate(run, config, turn.scoring)

    def predict(self, run: Path, source: str, config: RunConfig, turn: ScoringOptions) -> PredictionTable:
        from workbench.recipes.tasks.rerank import rerank_verbs

        return PredictionTable(*rerank_verbs.predict(run, source, config, turn.scoring))

    def outputs(self, run: Path, config: RunConfig) -> RankReference:
        from workbench.recipes.tasks.rerank import rerank_verbs

        return rerank_verbs.outputs(run, config)

    def dry(self, config: RunConfig, run: Run) -> DryTask:
        tokenizer, data, _ = rerank_run.prepare(config)
        single = RerankRun(config, run, Silent(), tokenizer, data)
        return DryTask(single, largest_numbers(data.held_out.all_pairs, lambda live, batch: live.scores(batch)))

    def survey(self, config: RunConfig, files: Sequence[RowFile]) -> list[SourceRows]:
        from workbench.recipes.tasks.embed import embed_verbs

        return embed_verbs.survey(config, files)

    def files(self, config: RunConfig) -> Mapping[str, Mapping[str, str]]:
        embedders = run_embedder.files(config)
        return {"embedder": embedders} if embedders else {}


TASK = RerankTask()
