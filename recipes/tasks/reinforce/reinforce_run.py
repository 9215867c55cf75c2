"""Reinforcement: prompts in, an adapter whose own answers earn higher rewards, its scores and a report out.

The loop is that of every recipe; what differs is that the model writes the rows of a step when the step begins.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
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
from workbench.data.batching import Indices, MicroBatch, Row, evenly_spaced
from workbench.data.held_out_split import Splits
from workbench.data.text import generated_answers, tokenized
from workbench.data.text.chat import ChatEncoder
from workbench.data.text.generated_answers import Episode, Floats, SampledAnswer, WriteTurns
from workbench.data.text.prompts import PromptEncoder, sampled_prompts
from workbench.data.text.tokenized_set import TokenizedSet, require_ends
from workbench.data.text.tool_calls import CallReader
from workbench.errors import ConfigError
from workbench.evaluation import GeneratedAnswer, generation, rewards
from workbench.evaluation.forward_passes import ModelResults, stored_results
from workbench.evaluation.generation import AnswerSampler
from workbench.evaluation.rewards.reward_sum import RowJudge
from workbench.evaluation.tools.episodes import EpisodePlayer, EpisodeStart
from workbench.evaluation.tools.toolbox import Toolbox, toolbox
from workbench.models import backbones
from workbench.models.backbones import Backbone
from workbench.models.exported import ExportedModel
from workbench.recipes.single import start_adapter
from workbench.recipes.single.single_run import Scored
from workbench.recipes.tasks.reinforce import rollout_server
from workbench.recipes.tasks.sft import text_run
from workbench.recipes.tasks.sft.text_run import StartedRun, conversations
from workbench.runs import files, units
from workbench.runs.openai_client import OpenAIClient
from workbench.runs.run_directory import Run
from workbench.training import preference_objective, preflight
from workbench.training.callbacks import Callback
from workbench.training.optim.schedules import total_steps
from workbench.training.reinforcement import objective
from workbench.training.reinforcement.objective import ReinforceObjective
from workbench.training.reinforcement.rollouts import RolloutRows, Rollouts, SamplesAnswers, TurnWriter
from workbench.training.signal import TrainingSignal

if TYPE_CHECKING:
    import pandas as pd

Scores = dict[str, Any]
KEPT = "rollout"
"""Name of the answers of the present step in a checkpoint."""


def prompt_encoder(template: ChatEncoder, tools: Toolbox | None) -> PromptEncoder:
    """Writes prompts that offer the tools of a run."""
    return PromptEncoder(template, () if tools is None else tools.schemas)


def prepare(config: RunConfig) -> tuple[PreTrainedTokenizerBase, ChatEncoder, Splits[TokenizedSet], list[str]]:
    """Tokenizer, form of the rows, prompts, and names of the modules that get an adapter; refuses what would fail."""
    hub = backbones.of_one_sequence(config.model, recipe="reinforce")
    tools = toolbox(config.reinforce.tools)
    if not config.rewards and not (tools is not None and tools.rewards):
        raise ConfigError(
            "rewards: recipe reinforce learns from rewards, and there are none. Write for example "
            "rewards='[{kind: number, answer: answer}]', or a function of your own: [{file: my_reward.py}]."
        )
    tokenizer = backbones.tokenizer(config.model)
    template = conversations(config, tokenizer)
    if tools is not None:
        CallReader(tokenizer, template)
        tools.start()
    data = tokenized.load(config.data, tokenizer, prompt_encoder(template, tools), seed=config.seed)
    require_ends(data)
    text_run.require_whole_pictures(config, data.train)
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


def judges(
    config: RunConfig, data: Splits[TokenizedSet], tokenizer: PreTrainedTokenizerBase, tools: Toolbox | None = None
) -> list[RowJudge]:
    """The rewards of the run, for the rows of each table."""
    reward_sum = rewards.build(config.rewards)
    held_out, test = config.data.files_of("held_out"), config.data.files_of("test")
    read_from = [(data.train, config.data.training_files), (data.held_out, held_out), (data.test, test)]
    tables = {id(split.table): (split, files) for split, files in read_from if split is not None}
    schemas = () if tools is None else tools.schemas
    judging = [RowJudge(reward_sum, split, files, tokenizer, schemas) for split, files in tables.values()]
    for judge in judging:
        judge.require(config.rewards)
    return judging


def scored_rows(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase, template: ChatEncoder, tools: Toolbox | None = None
) -> TokenizedSet:
    """The prompts of `data.test` where there are any, else the held-out ones."""
    encoder = prompt_encoder(template, tools)
    split = tokenized.read_files(config.data.test_files, config.data, tokenizer, encoder)
    return split or tokenized.load(config.data, tokenizer, encoder, seed=config.seed).held_out


def drawn(
    sampler: SamplesAnswers,
    player: RowPlayer | None,
    judge: RowJudge,
    asked: Sequence[Row],
    rows: Indices,
    draws: Sequence[Floats],
) -> tuple[dict[str, Floats], list[str]]:
    """Rewards by name, and texts, of answers that are drawn to prompts, those to each one after another.

    Args:
        asked: The prompts, each with one more token.
        rows: Their numbers in the table of the judge.
        draws: Random numbers (G, T) of the answers to each.
    """
    each = len(draws[0])
    numbers, writer = np.repeat(rows, each).tolist(), TurnWriter(sampler, draws, scored=False)
    if player is None:
        written = [one.ids for one in writer.answers(asked)]
        return judge.named(numbers, written), [judge.text(ids) for ids in written]
    contexts = [row.input_ids[:-1] for row in asked for _ in range(each)]
    episodes = player.play(numbers, contexts, writer.turns)
    return judge.of_episodes(numbers, episodes), [one.transcript for one in episodes]


@dataclass(frozen=True)
class RewardedAnswer:
    """An answer to a held-out prompt."""

    place: str
    prompt: str
    answer: str
    """Its text; of an episode all turns, with calls and what they gave."""
    reward: float
    tokens: int
    """Tokens that the model wrote."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """Turns, calls and tool errors of an episode."""


@dataclass(frozen=True)
class ReinforceRun(StartedRun):
    """A run that learns from rewards of its own answers."""

    judges: list[RowJudge] = field(kw_only=True)
    server: OpenAIClient | None = field(default=None, kw_only=True)
    """Writes the answers, where the model that trains does not."""
    tools: Toolbox | None = field(default=None, kw_only=True)
    turn: threading.Lock = field(default_factory=threading.Lock, kw_only=True)
    """Held by who asks the tools and the rewards, while a server writes answers ahead."""

    def write_before(self, start: ExportedModel) -> None:
        scoring = stored_results(self.config, self.run, self.callback.stop_requested, model="before")
        scores, answers = self.score_start(start, scoring)
        by_place = {each.place: [each.answer, each.reward] for each in answers}
        files.write_json(self.run.path / "before.json", {"scores": scores, "answers": by_place})
        scoring.store.clear()

    def supervise(self, live: ExportedModel, backbone: Backbone, progress: Callable[[], float]) -> TrainingSignal:
        section, device, known = self.config.reinforce, backbones.device(), len(self.tokenizer)
        temperature = section.temperature
        judge = self._judge(self.data.train)
        player = None if self.tools is None else self._player(live, self.data.train)
        stop = live.stop if player is None else player.player.stop
        sampler: SamplesAnswers
        if self.server is None:
            processor = self.data.train.processor
            sampler = AnswerSampler(live.model, known=known, stop=stop, temperature=temperature, processor=processor)
        else:
            longest = int(RolloutRows(self.data.train, section).longest_sequences.max())
            sampler = rollout_server.sampler(
                self.server, self.config, self.run, live, known=known, stop=stop, longest=longest
            )
        if section.start is None:
            reference = objective.backbone_reader(live.model, backbone.model, live.head, temperature, device=device)
        else:
            reference = objective.snapshot_reader(live.model, live.head, temperature, device=device)
        prompts = sampled_prompts(self.data.train, self.config)
        steps = total_steps(self.config, len(prompts))
        rows = Rollouts(
            prompts,
            section,
            sampler,
            judge,
            own=objective.own_reader(live.model, live.head, temperature, device=device),
            reference=reference,
            seed=self.config.seed,
            stop=stop,
            player=player,
            ranks=self.run.ranks,
            served=section.rollouts.url is not None,
            batch=self.config.batch.size,
            total=None if steps is None else math.ceil(steps / section.updates),
            turn=self.turn,
        )
        return self.signal(rows, live)._replace(keeps={KEPT: rows})

    def signal(self, rows: RolloutRows, live: ExportedModel) -> TrainingSignal:
        """The loss of answers that were written."""
        section, head = self.config.reinforce, live.head
        objective = ReinforceObjective(section, rows, device=backbones.device())

        def loss(batch: MicroBatch, scale: float) -> Tensor:
            hidden_ND = head.supervised(live.model, batch.inputs, batch.positions_N)
            log_p_N = preference_objective.of_hidden(hidden_ND, batch.labels_N, head, section.temperature)
            entropy_N = None
            if section.entropy_bonus:
                entropy_N = preference_objective.entropies(hidden_ND, head, section.temperature)
            return objective(log_p_N, batch.labels_N, rows=batch.rows, scale=scale, entropy_N=entropy_N)

        return TrainingSignal(rows, loss, known=False, reads_packed=self.packs(live), meter=objective.meter)

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
        rows = self.data.held_out
        order = np.random.default_rng(self.config.seed).permutation(len(rows))[: self.sample_count]
        with self.turn:
            prompts, episodes = self._episodes(live, rows, order, None)
        pairs = zip(order, prompts, episodes, strict=True)
        return [
            GeneratedAnswer(rows.place(int(row)), self._shown(prompt), "", each.transcript)
            for row, prompt, each in pairs
        ]

    @property
    def sample_count(self) -> int:
        return self.config.evaluate.samples  # no number of answers means all of them here

    def score(self, model: ExportedModel, rows: TokenizedSet, scoring: ModelResults | None = None) -> Scored:
        with self.scoring_time(rows):
            answers, named = self._answered(model, rows, scoring)
        figures = {f"reward[{name}]": np.asarray(values) for name, values in named.items()} if len(named) > 1 else {}
        figures |= {
            "answer_tokens": np.asarray([each.tokens for each in answers]),
            "repetition": np.asarray([generated_answers.repetition(each.answer) for each in answers]),
        }
        if self.tools is not None:
            figures["success"] = np.asarray([each.reward >= generated_answers.SUCCESS for each in answers])
            figures |= {name: np.asarray([each.counts[name] for each in answers]) for name in answers[0].counts}
        figures |= self._drawn(model, rows)
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
        judge, numbers = self._judge(rows), rows.rows[chosen].tolist()
        with self.turn:
            prompts, episodes = self._episodes(model, rows, chosen, scoring)
            if self.tools is None:
                named = judge.of_texts(numbers, [each.text for each in episodes])
                lengths = [len(self.tokenizer(each.text, add_special_tokens=False)["input_ids"]) for each in episodes]
            else:
                named, lengths = judge.of_episodes(numbers, episodes), [each.tokens for each in episodes]
        parts = zip(chosen, prompts, episodes, judge.total(named), lengths, strict=True)
        answers = [
            RewardedAnswer(
                rows.place(int(row)), self._shown(prompt), each.transcript, float(reward), length, each.counts
            )
            for row, prompt, each, reward, length in parts
        ]
        return answers, named

    def _drawn(self, model: ExportedModel, rows: TokenizedSet) -> dict[str, Floats]:
        """Mean reward of `reinforce.draws` answers to each of the same prompts, and pass@k."""
        section, chosen, judge = self.config.reinforce, self._chosen(rows), self._judge(rows)
        if not section.draws:
            return {}
        draws = [
            generated_answers.sampling_numbers(
                [self.config.seed, int(row)], answers=section.draws, tokens=section.max_new_tokens
            )
            for row in rows.rows[chosen]
        ]
        player = None if self.tools is None else self._player(model, rows)
        stop = model.stop or evaluation.stop_tokens(self.tokenizer, self.data.train)
        sampler = AnswerSampler(
            model.model,
            known=len(self.tokenizer),
            stop=stop if player is None else player.player.stop,
            temperature=section.temperature,
            processor=rows.processor,
        )
        with self.turn:
            named, _ = drawn(sampler, player, judge, [rows[int(row)] for row in chosen], rows.rows[chosen], draws)
        reward_PG = judge.total(named).reshape(-1, section.draws)
        right_P = (reward_PG >= generated_answers.SUCCESS).sum(1).tolist()
        passed = generated_answers.passes([(section.draws, right) for right in right_P])
        return {f"mean@{section.draws}": reward_PG.mean(1)} | {f"pass@{k}": value_P for k, value_P in passed.items()}

    def _shown(self, prompt: Indices) -> str:
        return generation.shown(self.tokenizer, prompt, self.data.train.processor).strip()

    def _chosen(self, rows: TokenizedSet) -> Indices:
        """Numbers of `evaluate.answers` prompts of each set, evenly spaced."""
        most, sets = self.config.evaluate.answers, named_sets.rows_by_set(rows) or {"": np.arange(len(rows))}
        return np.concatenate([own[evenly_spaced(len(own), most or len(own))] for own in sets.values()])

    def _by_set(self, rows: TokenizedSet, answers: Sequence[RewardedAnswer]) -> dict[str, float]:
        """Mean reward of the answers to the prompts of each of several sets, by its name in scores.json."""
        reward_N = np.asarray([each.reward for each in answers])
        return named_sets.scored(rows.subset(self._chosen(rows)), lambda own: {"reward": float(reward_N[own].mean())})

    def _player(self, model: ExportedModel, rows: TokenizedSet) -> RowPlayer:
        assert self.tools is not None and isinstance(self.template, ChatEncoder)
        stop = model.stop or evaluation.stop_tokens(self.tokenizer, self.data.train)
        limit = self.config.reinforce.max_new_tokens
        player = EpisodePlayer(self.tools, self.template, self.tokenizer, stop=stop, limit=limit)
        return RowPlayer(player, self._judge(rows))

    def _episodes(
        self, model: ExportedModel, rows: TokenizedSet, chosen: Indices, scoring: ModelResults | None
    ) -> tuple[list[Indices], list[Episode]]:
        """Chosen prompts, and greedy answers to them."""
        asked = [rows[int(row)] for row in chosen]
        prompts = [row.input_ids[:-1] for row in asked]
        stop = model.stop or evaluation.stop_tokens(self.tokenizer, self.data.train)
        most = self.config.reinforce.max_new_tokens
        if self.tools is not None:
            player = self._player(model, rows)

            def write(_: Any, contexts: Sequence[Indices], taken: Sequence[int]) -> list[SampledAnswer]:
                new = most - min(taken)
                ids = evaluation.complete_ids(
                    model.model, contexts, stop=player.player.stop, max_new_tokens=new, scoring=scoring
                )
                turns = [SampledAnswer(np.asarray(each, dtype=np.int64), None) for each in ids]
                return [turn.first(most - start) for turn, start in zip(turns, taken, strict=True)]

            return prompts, player.play(rows.rows[chosen].tolist(), prompts, write)
        written = evaluation.complete(
            model.model,
            prompts,
            self.tokenizer,
            stop=stop,
            max_new_tokens=most,
            scoring=scoring,
            pictures=[row.pictures for row in asked],
            processor=rows.processor,
        )
        return prompts, [Episode((), False, text) for text in written]

    def write_predictions(self, model: ExportedModel, outputs: Any, before: Mapping[str, Any]) -> None:
        super().write_predictions(model, outputs, before)
        self.write_pictures(each.place for each in outputs)

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


@dataclass(frozen=True)
class RowPlayer:
    """Plays episodes of the rows of a table."""

    player: EpisodePlayer
    judge: RowJudge

    def play(self, rows: Sequence[int], asked: Sequence[Indices], write: WriteTurns) -> list[Episode]:
        starts = [EpisodeStart(ids, *self.judge.question(row)) for row, ids in zip(rows, asked, strict=True)]
        return self.player.play(starts, write)


class PlannedRollouts(ReinforceRun):
    """A run as a plan sees it: nobody writes its answers, and each is as long as it may be."""

    def supervise(self, live: ExportedModel, backbone: Backbone, progress: Callable[[], float]) -> TrainingSignal:
        rows = RolloutRows(sampled_prompts(self.data.train, self.config), self.config.reinforce)
        return self.signal(rows, live)._replace(meter=None)


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
    own = run.child(WARM_UP_FOLDER)
    saved = own.home / "adapter"
    if not run.ranks.agreed(saved.exists()):
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
