"""The tasks of tokens, `sft` and `mlm`, as verbs and recipes over tasks ask for them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from torch import nn

from workbench import evaluation
from workbench.config import RunConfig
from workbench.data.text.row_encoder import row_encoder
from workbench.data.text.tokenized_set import TokenizedSet
from workbench.losses.chunked_loss import chunk_positions
from workbench.models import backbones, output_heads
from workbench.models.backbones import Backbone, Loader
from workbench.models.exported import ExportedModel
from workbench.recipes.task import DryTask, PredictionTable, RowFile, ScoringOptions, Task
from workbench.recipes.tasks.sft import text_run
from workbench.recipes.tasks.sft.text_run import TextRun
from workbench.runs.run_directory import Run
from workbench.training import preflight
from workbench.training.callbacks import Callback, Silent
from workbench.training.capacity import FORWARD_TOKENS

if TYPE_CHECKING:
    from workbench.data.text.quality.survey import SourceRows
    from workbench.recipes.inspection import Inspection
    from workbench.recipes.tasks.sft.text_verbs import TextReference


class TokenTask(Task):
    """A model of tokens."""

    scores_later = True
    kind: ClassVar[type[TextRun]] = TextRun

    def begin(self, config: RunConfig, run: Run, callback: Callback, *, loader: Loader = backbones.load) -> TextRun:
        return text_run.begin(config, run, callback, kind=self.kind, loader=loader)

    def inspect(self, config: RunConfig) -> Inspection:
        from workbench.recipes.tasks.sft import text_verbs

        return text_verbs.inspect(config)

    def require(self, config: RunConfig, data: object) -> None:
        preflight.require_runnable(config, data)  # type: ignore[arg-type]

    def evaluate(self, run: Path, config: RunConfig, turn: ScoringOptions) -> dict[str, float]:
        from workbench.recipes.tasks.sft import text_verbs

        return text_verbs.evaluate(run, config, turn)

    def predict(self, run: Path, source: str, config: RunConfig, turn: ScoringOptions) -> PredictionTable:
        from workbench.recipes.tasks.sft import text_verbs

        if not config.task.writes_text:
            return super().predict(run, source, config, turn)
        return text_verbs.predict(run, source, config, turn)

    def outputs(self, run: Path, config: RunConfig) -> TextReference:
        from workbench.recipes.tasks.sft import text_verbs

        return text_verbs.outputs(run, config)

    def dry(self, config: RunConfig, run: Run) -> DryTask:
        tokenizer, template, data = text_run.prepare(config, run)
        return dry_text(self.kind(config, run, Silent(), tokenizer, template, data))

    def survey(self, config: RunConfig, files: Sequence[RowFile]) -> list[SourceRows]:
        from workbench.recipes.tasks.sft import text_verbs

        tokenizer = backbones.tokenizer(config.model)
        template = text_run.read_template(config)
        encoder = row_encoder(config, backbones.hub_config(config.model), tokenizer, template=template)
        return text_verbs.survey(files, encoder)


def dry_text(single: TextRun, *, looked: float = 0.0, once: int = 0) -> DryTask:
    """A run of a language model as a plan carries it out; arguments as of `DryTask`."""

    held_out = single.splits.held_out

    def assemble(own: TextRun, model: nn.Module, backbone: Backbone) -> ExportedModel:
        return ExportedModel(model, output_heads.known(backbone.model), own.tokenizer, own.template, [])

    def worst(live: ExportedModel) -> list[TokenizedSet]:
        from workbench.planning.dry_run import largest_rows

        positions = chunk_positions(live.head.vocabulary, backbones.device())
        return [held_out.subset(rows) for rows in largest_rows(held_out, tokens=FORWARD_TOKENS, positions=positions)]

    def largest(live: ExportedModel) -> object:
        return [evaluation.likelihood(live.model, live.head, rows) for rows in worst(live)]

    def read(live: ExportedModel) -> int:
        rows = worst(live)[0]
        evaluation.likelihood(live.model, live.head, rows)
        return int(rows.lengths.sum())

    return DryTask(single, largest, assemble, looked=looked, once=once, read=read)


TASK = TokenTask()
