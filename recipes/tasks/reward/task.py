"""The task `reward` as verbs and recipes over tasks ask for it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from workbench.config import RunConfig
from workbench.data.text.preference_pairs import PreferenceEncoder
from workbench.models import backbones
from workbench.models.backbones import Loader
from workbench.recipes.task import DryTask, PredictionTable, RowFile, Scores, ScoringOptions, Task, largest_numbers
from workbench.recipes.tasks.reward import outcome_reward, process_reward
from workbench.recipes.tasks.reward.outcome_reward import RewardRun
from workbench.recipes.tasks.reward.process_reward import ProcessRun
from workbench.recipes.tasks.reward.reward_run import chat_encoder
from workbench.runs.run_directory import Run
from workbench.training.callbacks import Callback, Silent

if TYPE_CHECKING:
    import pandas as pd

    from workbench.data.text.quality.survey import SourceRows
    from workbench.recipes.inspection import Inspection
    from workbench.recipes.tasks.reward.reward_verbs import RewardReference


class RewardTask(Task):
    """Rewards of answers, or of their steps."""

    def begin(
        self, config: RunConfig, run: Run, callback: Callback, *, loader: Loader = backbones.load
    ) -> RewardRun | ProcessRun:
        return outcome_reward.begin(config, run, callback, loader=loader)

    def main(self, config: RunConfig, run: Run, callback: Callback) -> Scores:
        rewards = self.begin(config, run, callback)
        rewards.note_rows()
        rewards.train()
        return rewards.finish()

    def inspect(self, config: RunConfig) -> Inspection:
        from workbench.recipes.tasks.reward import reward_verbs

        return reward_verbs.inspect(config)

    def evaluate(self, run: Path, config: RunConfig, turn: ScoringOptions) -> dict[str, float]:
        from workbench.recipes.tasks.reward import reward_verbs

        return reward_verbs.evaluate(run, config, turn.scoring)

    def predict(self, run: Path, source: str, config: RunConfig, turn: ScoringOptions) -> PredictionTable:
        from workbench.recipes.tasks.reward import reward_verbs

        return PredictionTable(*reward_verbs.predict(run, source, config, turn.scoring))

    def pooled(self, config: RunConfig, table: pd.DataFrame) -> dict[str, float]:
        from workbench.evaluation import reward_scores

        if config.reward.kind == "process":
            return {}
        judged = table[~table["tie"]]
        return reward_scores.of_gaps((judged["chosen_reward"] - judged["rejected_reward"]).to_numpy())

    def outputs(self, run: Path, config: RunConfig) -> RewardReference:
        from workbench.recipes.tasks.reward import reward_verbs

        return reward_verbs.outputs(run, config)

    def dry(self, config: RunConfig, run: Run) -> DryTask:
        single = self.begin(config, run, Silent())
        answers = single.rows["held_out"].answers
        return DryTask(single, largest_numbers(answers, lambda live, batch: live.rewards(batch)))

    def survey(self, config: RunConfig, files: Sequence[RowFile]) -> list[SourceRows]:
        from workbench.recipes.tasks.sft import text_verbs

        template = chat_encoder(config, backbones.tokenizer(config.model))
        steps = config.reward.kind == "process"
        encoder = process_reward.encoder(template, config) if steps else PreferenceEncoder(template)
        return text_verbs.survey(files, encoder)


TASK = RewardTask()
