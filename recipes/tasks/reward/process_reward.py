"""Process reward models: answers whose steps are rated in, the probability that each step is right out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy import special
from transformers import PreTrainedTokenizerBase

from workbench.config import RunConfig, model_heads
from workbench.data import mixture, named_sets
from workbench.data.batching import Indices, evenly_spaced
from workbench.data.held_out_split import Splits
from workbench.data.text import tokenized
from workbench.data.text.chat import ChatEncoder
from workbench.data.text.stepwise import RIGHT, StepEncoder, StepSet
from workbench.evaluation import reward_scores
from workbench.evaluation.forward_passes import ModelResults
from workbench.evaluation.reward_scores import Floats
from workbench.models import backbones, reward_model
from workbench.models.backbones import Backbone
from workbench.models.reward_model import RewardModel
from workbench.recipes.inspection import SHOWN, Inspection, left_out, pieces
from workbench.recipes.single.single_run import Scored
from workbench.recipes.task import PredictionTable
from workbench.recipes.tasks.reward.reward_run import RatingRun, load
from workbench.recipes.tasks.sft.text_run import conversations
from workbench.runs import units
from workbench.training import preflight
from workbench.training.optim.schedules import total_steps
from workbench.training.signal import TrainingSignal

if TYPE_CHECKING:
    import pandas as pd


def prepare(config: RunConfig) -> tuple[PreTrainedTokenizerBase, ChatEncoder, Splits[StepSet], list[str]]:
    """Tokenizer, form of the rows, data, and the names of the modules that get an adapter; refuses what would fail."""
    backbones.of_one_sequence(config.model, recipe="reward")
    tokenizer = backbones.tokenizer(config.model)
    reward_model.settle_padding(tokenizer)
    template = conversations(config, tokenizer)
    read = tokenized.load(config.data, tokenizer, encoder(template, config), seed=config.seed)
    answers = read.map(StepSet)
    train = mixture.mixed(answers.train, config)
    mixture.require_passes(train, config, total_steps(config, len(train)))
    splits = list(answers.named().values())
    return tokenizer, template, answers, preflight.require_backbone(config, splits, model_heads.of(config))


def encoder(template: ChatEncoder, config: RunConfig, *, labelled: bool = True) -> StepEncoder:
    """How rows are written; without labels where steps are to be rated."""
    return StepEncoder(template, config.reward.separator, labelled)


@dataclass(frozen=True)
class ProcessRun(RatingRun[StepSet]):
    """A run that learns which steps of answers are right."""

    answers: Splits[StepSet]

    @property
    def rows(self) -> Mapping[str, StepSet]:
        return self.answers.named()

    def baseline(self) -> dict[str, float]:
        return reward_scores.step_baseline(self.answers.train, self.answers.held_out)

    def on_held_out(self, answers: Indices) -> ProcessRun:
        """The same run with these held-out answers alone."""
        return replace(self, answers=self.answers._replace(held_out=self.answers.held_out.subset(answers)))

    def supervise(self, live: RewardModel, backbone: Backbone, progress: Callable[[], float]) -> TrainingSignal:
        train = mixture.mixed(self.answers.train, self.config)
        return TrainingSignal(train, live.step_loss, reads_packed=self.packs(live))

    @property
    def pictured(self) -> bool:
        return self.answers.train.answers.pictured

    def held_out_loss(self, live: RewardModel) -> tuple[float, Mapping[str, float]]:
        scores, _ = score(live, self.answers.held_out)
        metrics = {f"held_out_steps[{name}]": scores[name] for name in ("accuracy", "f1") if name in scores}
        return scores["loss"], metrics | named_sets.held_out_losses(scores)

    def score(self, model: RewardModel, rows: StepSet, scoring: ModelResults | None = None) -> Scored:
        with self.scoring_time(rows):
            return Scored(*score(model, rows, scoring))

    def predictions(
        self, model: RewardModel, rows: StepSet, outputs: Floats, before: Mapping[str, Any]
    ) -> pd.DataFrame:
        return table(model, rows, outputs).assign(label=rows.labels)


def score(model: RewardModel, rows: StepSet, scoring: ModelResults | None = None) -> tuple[dict[str, float], Floats]:
    """Scores of a reward model on answers, and the logit of each of their steps (S,)."""
    logit_S = reward_scores.read_step_logits(model, rows, scoring=scoring)
    return reward_scores.step_scores_by_set(rows, logit_S), logit_S


def table(model: RewardModel, rows: StepSet, logit_S: Floats) -> pd.DataFrame:
    """One line a step: its number from 1, its text, the first one behind its prompt, and how sure it is right."""
    import pandas as pd  # 0.2 s, which a plan need not wait for

    texts: list[str] = []
    for row in range(len(rows)):
        each = rows.answers[row]
        stops = (np.flatnonzero(each.supervised) + 1).tolist()
        spans = zip([0, *stops[:-1]], stops, strict=True)
        texts += [str(model.tokenizer.decode(each.input_ids[start:stop])) for start, stop in spans]
    row_S = rows.row_of_step
    return pd.DataFrame(
        {
            "row": [rows.place(int(row)) for row in row_S],
            "step": np.concatenate([np.arange(1, 1 + count) for count in rows.steps]),
            "text": texts,
            "probability": special.expit(logit_S),
        }
    )


def inspect(config: RunConfig) -> Inspection:
    """Findings of `check`, for a run that is not refused."""
    tokenizer, _, answers, targets = prepare(config)
    train, mixed = answers.train, mixture.mixed(answers.train, config)
    steps = total_steps(config, len(mixed))
    shown = evenly_spaced(len(train), SHOWN).tolist()
    right_S = train.labels >= RIGHT
    flawless = float((reward_scores.first_wrong(train, ~right_S) < 0).mean())
    right = units.percent(float(right_S.mean()))
    return Inspection(
        config=config,
        data=answers.map(lambda split: split.answers),
        examples=[(train.place(row), pieces(train.answers[row], tokenizer)) for row in shown],
        targets=targets,
        steps=steps,
        notes=[
            *mixture.in_words(mixed, config, steps),
            f"{len(right_S):,} steps of {len(train):,} answers: {right} are right, and {units.percent(flawless)} of "
            "the answers have no wrong one.",
            *_cut(answers.train, answers.held_out, most=config.data.max_tokens),
            *left_out(*answers.map(lambda split: split.answers)),
        ],
    )


def _cut(*splits: StepSet, most: int) -> list[str]:
    cut = sum(rows.cut_steps for rows in splits)
    return [f"Cutting to data.max_tokens={most} leaves out {cut:,} steps, which nothing is learnt from."] if cut else []


def evaluate(run: Path, config: RunConfig, scoring: ModelResults | None = None) -> dict[str, float]:
    """Scores of the saved model on data.test where `config` names it, else on the held-out answers."""
    model = load(run, config)
    read_as = encoder(model.template, config)
    rows = tokenized.read_files(config.data.test_files, config.data, model.tokenizer, read_as)
    return score(model, held_out(model, config) if rows is None else StepSet(rows), scoring)[0]


def held_out(model: RewardModel, config: RunConfig) -> StepSet:
    """The held-out answers."""
    read_as = encoder(model.template, config)
    return StepSet(tokenized.load(config.data, model.tokenizer, read_as, seed=config.seed).held_out)


def predict(run: Path, source: str, config: RunConfig, scoring: ModelResults | None = None) -> PredictionTable:
    """How sure every step of a file is right, with its answer's `reward.aggregate`; labels are ignored."""
    model = load(run, config)
    read_as = encoder(model.template, config, labelled=False)
    rows = StepSet(tokenized.read(source, config.data, model.tokenizer, read_as))
    outputs = table(model, rows, reward_scores.read_step_logits(model, rows, scoring=scoring))
    reward_R = reward_scores.aggregated(rows, outputs["probability"].to_numpy(), config.reward.aggregate)
    return PredictionTable(outputs.assign(reward=reward_R[rows.row_of_step]), rows.answers.skipped)
