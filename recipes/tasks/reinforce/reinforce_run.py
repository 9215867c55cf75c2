"""Reinforcement: prompts in, an adapter whose own answers earn higher rewards, its scores and a report out.

The loop is that of every recipe; what differs is that the model writes the rows of a step when the step begins.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from workbench import evaluation
from workbench.adapters import Full
from workbench.config import DataConfig, RunConfig, model_heads
from workbench.config.sections.basic_sections import EvaluateConfig, SaveConfig, TrainConfig
from workbench.config.sections.reinforce_config import ReinforceConfig
from workbench.data import mixture, named_sets
from workbench.data.batching import Indices, MicroBatch, evenly_spaced
from workbench.data.held_out_split import Splits
from workbench.data.text import generated_answers, tokenized
from workbench.data.text.chat import ChatEncoder
from workbench.data.text.prompts import PromptEncoder, sampled_prompts
from workbench.data.text.row_encoder import conversation_encoder
from workbench.data.text.tokenized_set import TokenizedSet, require_ends
from workbench.errors import ConfigError
from workbench.evaluation import GeneratedAnswer, rewards
from workbench.evaluation.forward_passes import ModelResults, stored_results
from workbench.evaluation.generation import AnswerSampler
from workbench.evaluation.rewards.reward_sum import RowJudge
from workbench.models import backbones
from workbench.models.backbones import Backbone
from workbench.models.exported import ExportedModel
from workbench.recipes.single import start_adapter
from workbench.recipes.single.single_run import Scored
from workbench.recipes.tasks.reinforce import rollout_server
from workbench.recipes.tasks.sft import text_run
from workbench.recipes.tasks.sft.text_run import StartedRun, read_template
from workbench.runs import files, units
from workbench.runs.openai_client import OpenAIClient
from workbench.runs.run_directory import Run
from workbench.training import preference_objective, preflight
from workbench.training.callbacks import Callback
from workbench.training.optim.schedules import total_steps
from workbench.training.reinforcement import objective
from workbench.training.reinforcement.objective import ReinforceObjective
from workbench.training.reinforcement.rollouts import RolloutRows, Rollouts, SamplesAnswers
from workbench.training.signal import TrainingSignal

if TYPE_CHECKING:
    import pandas as pd

Scores = dict[str, Any]
KEPT = "rollout"
"""Name of the answers of the present step in a checkpoint."""


def prepare(config: RunConfig) -> tuple[PreTrainedTokenizerBase, ChatEncoder, Splits[TokenizedSet], list[str]]:
    """Tokenizer, form of the rows, prompts, and names of the modules that get an adapter; refuses what would fail."""
    hub = backbones.of_one_sequence(config.model, recipe="reinforce")
    if not config.rewards:
        raise ConfigError(
            "rewards: recipe reinforce learns from rewards, and there are none. Write for example "
            "rewards='[{kind: number, answer: answer}]', or a function of your own: [{file: my_reward.py}]."
        )
    tokenizer = backbones.tokenizer(config.model)
    template = conversation_encoder(hub, tokenizer, template=read_template(config))
    data = tokenized.load(config.data, tokenizer, PromptEncoder(template), seed=config.seed)
    require_ends(data)
    train = sampled_prompts(data.train, config)
    mixture.require_passes(train, config, total_steps(config, len(train)))
    splits = [RolloutRows(split, config.reinforce) for split in data if split is not None]
    for split in splits:
        _require_room(config, split, preflight.longest_sequence(hub))
    modules = preflight.require_backbone(config, splits, model_heads.of(config))
    start_adapter.require(config)
    require_warm_up(config)
    return tokenizer, template, data, modules


def _require_room(config: RunConfig, rows: RolloutRows, limit: int | None) -> None:
    """Refuse answers for which a backbone of at most `limit` tokens has no room beside the longest prompt."""
    row = int(rows.longest_sequences.argmax())
    most, new = int(rows.longest_sequences[row]), config.reinforce.max_new_tokens
    if limit is not None and most > limit:
        half = f"reinforce.max_new_tokens={limit // 2} and data.max_tokens={limit // 2}"
        fits = f"reinforce.max_new_tokens={limit - most + new} or less"
        raise ConfigError(
            f"reinforce.max_new_tokens={new}: with such an answer {rows.place(row)} has {most} tokens, but "
            f"{config.model.id} was made for at most {limit}. Write {fits if most - new < limit else half}."
        )


def judges(config: RunConfig, data: Splits[TokenizedSet], tokenizer: PreTrainedTokenizerBase) -> list[RowJudge]:
    """The rewards of the run, for the rows of each table."""
    reward_sum = rewards.build(config.rewards)
    held_out, test = config.data.files_of("held_out"), config.data.files_of("test")
    read_from = [(data.train, config.data.training_files), (data.held_out, held_out), (data.test, test)]
    tables = {id(split.table): (split, files) for split, files in read_from if split is not None}
    judging = [RowJudge(reward_sum, split, files, tokenizer) for split, files in tables.values()]
    for judge in judging:
        judge.require(config.rewards)
    return judging


def scored_rows(config: RunConfig, tokenizer: PreTrainedTokenizerBase, template: ChatEncoder) -> TokenizedSet:
    """The prompts of `data.test` where there are any, else the held-out ones."""
    encoder = PromptEncoder(template)
    split = tokenized.read_files(config.data.test_files, config.data, tokenizer, encoder)
    return split or tokenized.load(config.data, tokenizer, encoder, seed=config.seed).held_out


@dataclass(frozen=True)
class RewardedAnswer:
    """An answer to a held-out prompt."""

    place: str
    prompt: str
    answer: str
    reward: float


@dataclass(frozen=True)
class ReinforceRun(StartedRun):
    """A run that learns from rewards of its own answers."""

    judges: list[RowJudge] = field(kw_only=True)
    server: OpenAIClient | None = field(default=None, kw_only=True)
    """Writes the answers, where the model that trains does not."""

    def write_before(self, start: ExportedModel) -> None:
        scoring = stored_results(self.config, self.run, self.callback.stop_requested, model="before")
        scores, answers = self.score_start(start, scoring)
        by_place = {each.place: [each.answer, each.reward] for each in answers}
        files.write_json(self.run.path / "before.json", {"scores": scores, "answers": by_place})
        scoring.store.clear()

    def supervise(self, live: ExportedModel, backbone: Backbone, progress: Callable[[], float]) -> TrainingSignal:
        section, device, known = self.config.reinforce, backbones.device(), len(self.tokenizer)
        temperature = section.temperature
        read = partial(preference_objective.log_probs, live.model, live.head, temperature=temperature)
        sampler: SamplesAnswers
        if self.server is None:
            sampler = AnswerSampler(live.model, known=known, stop=live.stop, temperature=temperature)
        else:
            sampler = rollout_server.sampler(self.server, self.config, self.run, live, known=known)
        if section.start is None:
            reference = objective.backbone_reader(live.model, backbone.model, live.head, temperature, device=device)
        else:
            reference = objective.snapshot_reader(live.model, live.head, temperature, device=device)
        rows = Rollouts(
            sampled_prompts(self.data.train, self.config),
            section,
            sampler,
            self._judge(self.data.train),
            own=objective.own_reader(live.model, live.head, temperature, device=device),
            reference=reference,
            seed=self.config.seed,
            stop=live.stop,
        )
        return self.signal(rows, read)._replace(keeps={KEPT: rows})

    def signal(self, rows: RolloutRows, read: Callable[[MicroBatch], Tensor]) -> TrainingSignal:
        """The loss of answers that were written."""
        objective = ReinforceObjective(self.config.reinforce, rows, device=backbones.device())

        def loss(batch: MicroBatch, scale: float) -> Tensor:
            return objective(read(batch), batch.labels_N, rows=batch.rows, scale=scale)

        return TrainingSignal(rows, loss, known=False, reads_packed=True, meter=objective.meter)

    def _judge(self, rows: TokenizedSet) -> RowJudge:
        return next(each for each in self.judges if each.table is rows.table)

    def held_out_loss(self, live: ExportedModel) -> tuple[float, Mapping[str, float]]:
        answers, _ = self._answered(live, self.data.held_out, None)
        mean = float(np.mean([each.reward for each in answers]))
        by_set = {f"held_out_{name}": each for name, each in self._by_set(self.data.held_out, answers).items()}
        return -mean, {"held_out_reward[mean]": mean, **by_set}

    def sampled(self, live: ExportedModel) -> Sequence[GeneratedAnswer]:
        if not self.answers_samples:
            return ()
        rows, judge = self.data.held_out, self._judge(self.data.held_out)
        order = np.random.default_rng(self.config.seed).permutation(len(rows))[: self.sample_count]
        prompts, written = self._written(live, rows, order, None)
        pairs = zip(order, prompts, written, strict=True)
        return [GeneratedAnswer(rows.place(int(row)), judge.text(prompt), "", text) for row, prompt, text in pairs]

    @property
    def sample_count(self) -> int:
        return self.config.evaluate.samples  # no number of answers means all of them here

    def score(self, model: ExportedModel, rows: TokenizedSet, scoring: ModelResults | None = None) -> Scored:
        with self.scoring_time(rows):
            answers, named = self._answered(model, rows, scoring)
        figures = {f"reward[{name}]": np.asarray(values) for name, values in named.items()} if len(named) > 1 else {}
        figures |= {
            "answer_tokens": np.asarray(
                [len(self.tokenizer(each.answer, add_special_tokens=False)["input_ids"]) for each in answers]
            ),
            "repetition": np.asarray([generated_answers.repetition(each.answer) for each in answers]),
        }
        reward_N = np.asarray([each.reward for each in answers])

        def of_some(own: Indices) -> dict[str, float]:
            scores = _with_interval(reward_N[own])
            means = {name: float(values[own].mean()) for name, values in figures.items()}
            return scores | {"loss": -scores["reward"]} | means

        answered = rows.subset(self._chosen(rows))
        scores = of_some(np.arange(len(answers))) | named_sets.scored(answered, of_some)
        return Scored(units.rounded(scores), answers)

    def _answered(
        self, model: ExportedModel, rows: TokenizedSet, scoring: ModelResults | None
    ) -> tuple[list[RewardedAnswer], dict[str, Any]]:
        """Greedy answers to `evaluate.answers` prompts, evenly spaced, and their rewards by name."""
        chosen = self._chosen(rows)
        prompts, written = self._written(model, rows, chosen, scoring)
        judge = self._judge(rows)
        named = judge.of_texts(rows.rows[chosen].tolist(), written)
        answers = [
            RewardedAnswer(rows.place(int(row)), judge.text(prompt), text, float(reward))
            for row, prompt, text, reward in zip(chosen, prompts, written, judge.total(named), strict=True)
        ]
        return answers, named

    def _chosen(self, rows: TokenizedSet) -> Indices:
        """Numbers of `evaluate.answers` prompts of each set, evenly spaced."""
        most, sets = self.config.evaluate.answers, named_sets.rows_by_set(rows) or {"": np.arange(len(rows))}
        return np.concatenate([own[evenly_spaced(len(own), most or len(own))] for own in sets.values()])

    def _by_set(self, rows: TokenizedSet, answers: Sequence[RewardedAnswer]) -> dict[str, float]:
        """Mean reward of the answers to the prompts of each of several sets, by its name in scores.json."""
        reward_N = np.asarray([each.reward for each in answers])
        return named_sets.scored(rows.subset(self._chosen(rows)), lambda own: {"reward": float(reward_N[own].mean())})

    def _written(
        self, model: ExportedModel, rows: TokenizedSet, chosen: Indices, scoring: ModelResults | None
    ) -> tuple[list[Indices], list[str]]:
        """Chosen prompts, and greedy answers to them."""
        prompts = [rows[int(row)].input_ids[:-1] for row in chosen]
        stop = model.stop or evaluation.stop_tokens(self.tokenizer, self.data.train)
        most = self.config.reinforce.max_new_tokens
        written = evaluation.complete(
            model.model, prompts, self.tokenizer, stop=stop, max_new_tokens=most, scoring=scoring
        )
        return prompts, written

    def predictions(
        self, model: ExportedModel, rows: TokenizedSet, outputs: Any, before: Mapping[str, Any]
    ) -> pd.DataFrame:
        import pandas as pd  # 0.2 s, which a plan need not wait for

        columns: dict[str, list[Any]] = {
            "row": [each.place for each in outputs],
            "prompt": [each.prompt for each in outputs],
        }
        if before:
            columns["before"] = [before[each.place][0] for each in outputs]
            columns["reward_before"] = [before[each.place][1] for each in outputs]
        columns |= {"after": [each.answer for each in outputs], "reward_after": [each.reward for each in outputs]}
        return pd.DataFrame(columns)


class PlannedRollouts(ReinforceRun):
    """A run as a plan sees it: nobody writes its answers, and each is as long as it may be."""

    def supervise(self, live: ExportedModel, backbone: Backbone, progress: Callable[[], float]) -> TrainingSignal:
        section = self.config.reinforce
        rows = RolloutRows(sampled_prompts(self.data.train, self.config), section)
        read = partial(preference_objective.log_probs, live.model, live.head, temperature=section.temperature)
        return self.signal(rows, read)._replace(meter=None)


def _with_interval(reward_N: Any) -> dict[str, float]:
    """Mean reward with its 95 % interval over prompts."""
    mean = float(reward_N.mean())
    half = 1.96 * float(reward_N.std(ddof=1)) / math.sqrt(len(reward_N)) if len(reward_N) > 1 else 0.0
    return {"reward": mean, "reward_low": mean - half, "reward_high": mean + half}


WARM_UP_FOLDER = "start"
"""Folder of the warm-up in a run directory."""
WARM_UP_HELD_OUT = 0.1
"""Share of its rows that are held out, at the least one."""


def require_warm_up(config: RunConfig) -> None:
    """Raise ConfigError where training cannot go on from what the warm-up teaches."""
    method = config.adapter.method
    if config.reinforce.warm_up is None or isinstance(config.adapter, Full) or method in start_adapter.METHODS:
        return
    raise ConfigError(
        f"reinforce.warm_up: adapter.method={method} changes the backbone itself when it starts, so that training "
        f"cannot go on from it. Write adapter.method={'|'.join((*start_adapter.METHODS, 'full'))}; or run recipe=sft, "
        "`workbench merge` it, and write its folder as model.id."
    )


def warmed_up(config: RunConfig, run: Run, callback: Callback) -> RunConfig:
    """The same run, which starts from what the rows of `reinforce.warm_up` taught; that happens once in a run."""
    section = config.reinforce
    if section.warm_up is None:
        return config
    own = run.own(WARM_UP_FOLDER)
    saved = own.path / "adapter"
    if not saved.exists():
        assert section.warm_up is not None
        rows = {"train": section.warm_up, "held_out": WARM_UP_HELD_OUT, "max_tokens": config.data.max_tokens}
        rate = section.warm_up_rate or config.train.learning_rate
        train = {**config.train.model_dump(), "steps": section.warm_up_steps, "epochs": None, "learning_rate": rate}
        taught = config.model_copy(
            update={
                "recipe": "sft",
                "reinforce": ReinforceConfig(),
                "rewards": (),
                "data": DataConfig.model_validate(rows),
                "train": TrainConfig.model_validate(train),
                "evaluate": EvaluateConfig(every=None, answers=0),
                "save": SaveConfig(every=None),
            }
        )
        callback.say(f"Warm-up: {section.warm_up_steps} steps of recipe sft on {section.warm_up} ...")
        tokenizer, template, data = text_run.prepare(taught, own)
        text_run.TextRun(taught, own, callback, tokenizer, template, data).train()
    if isinstance(config.adapter, Full):
        model = config.model.model_copy(update={"id": str(saved.resolve()), "revision": None})
        return config.model_copy(update={"model": model})
    section = config.reinforce.model_copy(update={"start": str(saved.parent)})
    return config.model_copy(update={"reinforce": section})
