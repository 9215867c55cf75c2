"""The task `classify` as verbs and recipes over tasks ask for it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.config import RunConfig
from workbench.config.model_heads import ModelHead
from workbench.data.labelled.labelled_data import ClassSplits
from workbench.models import backbones, classifier
from workbench.models.backbones import Loader
from workbench.recipes.task import DryTask, PredictionTable, RowFile, Scores, ScoringOptions, Task
from workbench.recipes.tasks.classify import class_run
from workbench.recipes.tasks.classify.class_run import ClassRun
from workbench.runs.run_directory import Run
from workbench.training import capacity, preflight
from workbench.training.callbacks import Callback, Silent

if TYPE_CHECKING:
    from workbench.data.text.quality.survey import SourceRows
    from workbench.evaluation.serving.served_models import ServedModel
    from workbench.recipes.tasks.classify.class_verbs import ClassInspection, ClassReference


class ClassTask(Task):
    """Labels of rows."""

    def begin(self, config: RunConfig, run: Run, callback: Callback, *, loader: Loader = backbones.load) -> ClassRun:
        return class_run.begin(config, run, callback, loader=loader)

    def main(self, config: RunConfig, run: Run, callback: Callback) -> Scores:
        return class_run.main(config, run, callback)

    def inspect(self, config: RunConfig) -> ClassInspection:
        from workbench.recipes.tasks.classify import class_verbs

        return class_verbs.inspect(config)

    def head(self, inspection: Any) -> ModelHead:
        return classifier.task(inspection.data.labels, seed=inspection.config.seed)

    def require(self, config: RunConfig, data: ClassSplits) -> None:
        task = classifier.task(data.labels, seed=config.seed)
        preflight.require_backbone(config, list(data.rows.named().values()), task)

    def evaluate(self, run: Path, config: RunConfig, turn: ScoringOptions) -> dict[str, float]:
        from workbench.recipes.tasks.classify import class_verbs

        return class_verbs.evaluate(run, config, turn.scoring)

    def predict(self, run: Path, source: str, config: RunConfig, turn: ScoringOptions) -> PredictionTable:
        from workbench.recipes.tasks.classify import class_verbs

        return PredictionTable(*class_verbs.predict(run, source, config, turn.scoring))

    def outputs(self, run: Path, config: RunConfig) -> ClassReference:
        from workbench.recipes.tasks.classify import class_verbs

        return class_verbs.outputs(run, config)

    def dry(self, config: RunConfig, run: Run) -> DryTask:
        from workbench.planning.dry_run import largest_rows

        reader, data, _ = class_run.prepare(config)
        worst = [
            data.held_out.batch(rows).to(backbones.device())
            for rows in largest_rows(data.held_out, tokens=capacity.FORWARD_TOKENS)
        ]
        single = ClassRun(config, run, Silent(), reader, data)
        return DryTask(single, lambda live: [live.outputs(batch) for batch in worst])

    def survey(self, config: RunConfig, files: Sequence[RowFile]) -> list[SourceRows]:
        from workbench.recipes.tasks.classify import class_verbs

        return class_verbs.survey(config, files)

    def serve(self, run: Path, config: RunConfig, name: str, created: int, *, queue: int) -> ServedModel:
        from workbench.recipes.tasks.classify import served_classes

        served_classes.require_texts(run, config)
        return served_classes.load(run, config, name, created, queue=queue)


TASK = ClassTask()
