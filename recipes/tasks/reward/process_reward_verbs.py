"""`check`, `evaluate` and `predict` of process reward models; recipe reward's verbs hand over to them."""

from __future__ import annotations

from pathlib import Path

from workbench.config import RunConfig
from workbench.data import mixture
from workbench.data.batching import evenly_spaced
from workbench.data.text import tokenized
from workbench.data.text.stepwise import RIGHT, StepSet
from workbench.evaluation import reward_scores
from workbench.evaluation.forward_passes import ModelResults
from workbench.models.reward_model import RewardModel
from workbench.recipes.inspection import SHOWN, Inspection, left_out, pieces
from workbench.recipes.task import PredictionTable
from workbench.recipes.tasks.reward import process_reward
from workbench.recipes.tasks.reward.reward_run import load
from workbench.runs import units
from workbench.training.optim.schedules import total_steps


def inspect(config: RunConfig) -> Inspection:
    """Findings of `check`, for a run that is not refused."""
    tokenizer, _, answers, targets = process_reward.prepare(config)
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
            *left_out(train.answers),
        ],
    )


def _cut(*splits: StepSet, most: int) -> list[str]:
    """Sentence on steps that cutting leaves out."""
    cut = sum(rows.cut_steps for rows in splits)
    return [f"Cutting to data.max_tokens={most} leaves out {cut:,} steps, which nothing is learnt from."] if cut else []


def evaluate(run: Path, config: RunConfig, scoring: ModelResults | None = None) -> dict[str, float]:
    """Scores of the saved model on data.test where `config` names it, else on the held-out answers."""
    model = load(run, config)
    read_as = process_reward.encoder(model.template, config)
    rows = tokenized.read_files(config.data.test_files, config.data, model.tokenizer, read_as)
    return process_reward.score(model, held_out(model, config) if rows is None else StepSet(rows), scoring)[0]


def held_out(model: RewardModel, config: RunConfig) -> StepSet:
    """The held-out answers."""
    read_as = process_reward.encoder(model.template, config)
    return StepSet(tokenized.load(config.data, model.tokenizer, read_as, seed=config.seed).held_out)


def predict(run: Path, source: str, config: RunConfig, scoring: ModelResults | None = None) -> PredictionTable:
    """How sure every step of a file is right, with its answer's `reward.aggregate`; labels are ignored."""
    model = load(run, config)
    read_as = process_reward.encoder(model.template, config, labelled=False)
    rows = StepSet(tokenized.read(source, config.data, model.tokenizer, read_as))
    outputs = process_reward.table(model, rows, reward_scores.read_step_logits(model, rows, scoring=scoring))
    reward_R = reward_scores.aggregated(rows, outputs["probability"].to_numpy(), config.reward.aggregate)
    return PredictionTable(outputs.assign(reward=reward_R[rows.row_of_step]), rows.answers.skipped)
