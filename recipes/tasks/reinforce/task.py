"""The task `reinforce` as verbs and recipes over tasks ask for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from torch import nn

from workbench import adapters, evaluation
from workbench.config import RunConfig, model_heads, plugins
from workbench.data import mixture, starter
from workbench.data.batching import evenly_spaced
from workbench.data.held_out_split import Splits
from workbench.data.rows import fingerprint
from workbench.data.text import decontamination, generated_answers
from workbench.data.text.chat import ChatEncoder
from workbench.data.text.prompts import PromptEncoder, sampled_prompts
from workbench.data.text.tokenized_set import TokenizedSet
from workbench.evaluation import rewards
from workbench.evaluation.generation import AnswerSampler
from workbench.evaluation.rewards.reward_sum import RowJudge
from workbench.evaluation.tools.episodes import EpisodePlayer
from workbench.evaluation.tools.toolbox import Toolbox, toolbox
from workbench.models import backbones, exported
from workbench.models.backbones import Loader
from workbench.recipes.inspection import SHOWN, Inspection, pieces, unread
from workbench.recipes.single import start_adapter
from workbench.recipes.task import DryTask, RowFile, Scores, ScoringOptions
from workbench.recipes.tasks.reinforce import reinforce_run, rollout_server
from workbench.recipes.tasks.reinforce.reinforce_run import PlannedRollouts, ReinforceRun, RowPlayer
from workbench.recipes.tasks.sft.task import TokenTask, dry_text, outputs, survey
from workbench.recipes.tasks.sft.text_run import conversations
from workbench.runs import provenance
from workbench.runs.run_directory import Run
from workbench.training.callbacks import Callback, Silent
from workbench.training.optim.schedules import total_steps

if TYPE_CHECKING:
    from workbench.data.text.quality.survey import SourceRows
    from workbench.recipes.tasks.sft.task import TextReference


ANSWERS = 2
"""Answers to each prompt that is shown."""
Shown = list[tuple[str, list[tuple[str, bool]]]]


def _answered(
    config: RunConfig, data: Splits[TokenizedSet], judge: RowJudge, template: ChatEncoder, tools: Toolbox | None
) -> Shown:
    """Some prompts, each with answers that the model draws before it is trained, and their rewards."""
    section, train = config.reinforce, data.train
    tokenizer = backbones.tokenizer(config.model)
    backbone = backbones.load(config.model, tokenizer, task=model_heads.of(config))
    model: nn.Module = backbone.model
    if section.start is not None:
        model = adapters.load(backbone.model, start_adapter.folder(section.start) / "adapter")
    chosen = evenly_spaced(len(train), SHOWN)
    prompts = [train[int(row)] for row in chosen]
    stop = evaluation.stop_tokens(tokenizer, train)
    player = None
    if tools is not None:
        player = EpisodePlayer(tools, template, tokenizer, stop=stop, limit=section.max_new_tokens)
        stop = player.stop
    sampler = AnswerSampler(
        model, known=len(tokenizer), stop=stop, temperature=section.temperature, processor=train.processor
    )
    numbers = [
        generated_answers.sampling_numbers([config.seed, int(row)], answers=ANSWERS, tokens=section.max_new_tokens)
        for row in chosen
    ]
    playing = None if player is None else RowPlayer(player, judge)
    named, texts = reinforce_run.drawn(sampler, playing, judge, prompts, train.rows[chosen], numbers)
    rows = np.repeat(chosen, ANSWERS)
    totals = judge.total(named)
    shown: Shown = []
    for number, (row, text) in enumerate(zip(rows, texts, strict=True)):
        each = ", ".join(f"{name} {values[number]:g}" for name, values in named.items())
        prompt = train[int(row)]
        bare = prompt._replace(input_ids=prompt.input_ids[:-1], supervised=prompt.supervised[:-1])
        title = f"{train.place(int(row))}, reward {totals[number]:g} ({each})"
        shown.append((title, [*pieces(bare, tokenizer, train.processor), (text or "(nothing)", True)]))
    return shown


def _sizes(config: RunConfig, data: Splits[TokenizedSet]) -> Iterator[str]:
    section, size = config.reinforce, config.batch.size
    count = f"{min(size, len(data.train)):,} prompts x {section.answers} answers of {section.max_new_tokens} tokens"
    yield f"Training: {len(data.train):,} prompts; held-out: {len(data.held_out):,}. A step writes {count} at most."
    if (served := section.rollouts).url is not None:
        yield (
            f"Answers are written by {served.id} at {served.url}, which loads the adapter before every "
            f"{'' if served.sync_every == 1 else f'{served.sync_every}th '}rollout (those shown are written here)."
        )
    if served.staleness:
        yield f"It writes up to {served.staleness} updates ahead of the training (reinforce.rollouts.staleness)."
    if section.updates > 1:
        yield f"Each answer is learnt from in {section.updates} steps one after another (reinforce.updates)."


class ReinforceTask(TokenTask):
    """Answers that the model writes itself earn higher rewards."""

    scores_later = False

    def begin(
        self, config: RunConfig, run: Run, callback: Callback, *, loader: Loader = backbones.load
    ) -> ReinforceRun:
        # Data first: it is the cheapest thing to get wrong, and needs no weights.
        tokenizer, template, data, _ = reinforce_run.prepare(config)
        tools = toolbox(config.reinforce.tools)
        judging = reinforce_run.judges(config, data, tokenizer, tools)
        return ReinforceRun(
            config, run, callback, tokenizer, template, data, judges=judging, tools=tools, loader=loader
        )

    def main(self, config: RunConfig, run: Run, callback: Callback) -> Scores:
        reinforce = self.begin(config, run, callback)
        with rollout_server.opened(config) if run.ranks.first else nullcontext() as server:
            if server is not None:
                rollout_server.require(server, config, reinforce.tokenizer, reinforce.data.train)
                callback.say(f"Answers are written by {config.reinforce.rollouts.id} at {server.url}.")
            provenance.note_data(run, reinforce.data.facts())
            decontamination.write_matches(reinforce.data.train.contamination, run)
            config = reinforce_run.warmed_up(config, run, callback)
            reinforce = replace(reinforce, config=config, server=server)
            reinforce.train()
            rollout_server.forget(server, run)
            return reinforce.finish()

    def inspect(self, config: RunConfig) -> Inspection:
        tokenizer, template, data, modules = reinforce_run.prepare(config)
        tools = toolbox(config.reinforce.tools)
        (judge, *_) = reinforce_run.judges(config, data, tokenizer, tools)
        with rollout_server.opened(config) as server:
            if server is not None:
                rollout_server.require(server, config, tokenizer, data.train)
        drawn = sampled_prompts(data.train, config)
        steps, section = total_steps(config, len(drawn)), config.reinforce
        what = "the backbone with the adapter switched off" if section.start is None else f"{section.start}, as it came"
        reference = f"Reference: {what}. It reads each answer once; there is no second model in memory."
        if not section.refers:
            reference = f"reinforce.method={section.method} compares with no reference (beta is 0)."
        return Inspection(
            config=config,
            data=data,
            examples=_answered(config, data, judge, template, tools),
            targets=modules,
            steps=steps,
            notes=[
                *mixture.in_words(drawn, config, steps),
                *_sizes(config, data),
                *unread(*data),
                *(data.train.contamination.sentences if data.train.contamination else ()),
                reference,
            ],
        )

    def evaluate(self, run: Path, config: RunConfig, turn: ScoringOptions) -> dict[str, float]:
        reward_sum = rewards.build(config.rewards, read_from=(run, turn.trust))
        model = exported.load(run, config)
        assert isinstance(model.template, ChatEncoder)
        tools = toolbox(config.reinforce.tools, read_from=(run, turn.trust))
        rows = reinforce_run.scored_rows(config, model.tokenizer, model.template, tools)
        files = config.data.files_of("held_out" if config.data.test is None else "test")
        judge = RowJudge(reward_sum, rows, files, model.tokenizer, () if tools is None else tools.schemas)
        finished = Run(run, None, resumed=True)
        splits = Splits(rows, rows, None)
        scoring = reinforce_run.ReinforceRun(
            config, finished, Silent(), model.tokenizer, model.template, splits, judges=[judge], tools=tools
        )
        return scoring.score(model, rows).scores

    def files(self, config: RunConfig) -> Mapping[str, Mapping[str, str]]:
        first, tools = config.reinforce.warm_up, config.reinforce.tools
        known: dict[str, Mapping[str, str]] = {} if first is None else {"warm-up rows": {first: fingerprint(first)}}
        if tools is not None and tools.file is not None:
            known["tools"] = plugins.fingerprints([Path(starter.resolve(str(tools.file)))])
        return known

    def outputs(self, run: Path, config: RunConfig) -> TextReference:
        return outputs(run, config, prompts_alone=True)

    def dry(self, config: RunConfig, run: Run) -> DryTask:
        tokenizer, template, data, _ = reinforce_run.prepare(config)
        return dry_text(PlannedRollouts(config, run, Silent(), tokenizer, template, data, judges=[]))

    def plan_notes(self, config: RunConfig) -> Sequence[str]:
        url = config.reinforce.rollouts.url
        notes = [] if url is None else [f"Answers are written at {url}, whose memory is its own."]
        return [
            *notes,
            "Writing and rewarding the answers of each step is not counted, in time and memory; each answer is taken "
            "to be as long as it may be.",
        ]

    def survey(self, config: RunConfig, files: Sequence[RowFile]) -> list[SourceRows]:
        return survey(files, PromptEncoder(conversations(config, backbones.tokenizer(config.model))))


TASK = ReinforceTask()
