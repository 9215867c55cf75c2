"""The reward of a configuration: a weighted sum of verifiers, functions and reward models; errors name the part.

Legend: M reward models, S answers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from workbench import schema
from workbench.config import DataConfig
from workbench.config.sections.rewards_config import (
    FunctionReward,
    JsonReward,
    JudgeReward,
    LikelihoodReward,
    ModelReward,
    NumberReward,
    PatternReward,
    RewardConfig,
    RewardSource,
    UnitTestReward,
    VoteReward,
)
from workbench.data import starter
from workbench.data.batching import Indices, Row
from workbench.data.rows import RawRow, excerpt
from workbench.data.text import formats, prompts, stepwise, tokenized
from workbench.data.text.chat import ChatEncoder, Encoded, truncate
from workbench.data.text.formats import Example
from workbench.data.text.generated_answers import Answer, Episode, Floats, answer_to
from workbench.data.text.stepwise import StepEncoder
from workbench.data.text.tokenized_set import TokenizedSet
from workbench.errors import ConfigError
from workbench.evaluation import reward_scores
from workbench.evaluation.forward_passes import over_rows
from workbench.evaluation.judges import JudgedShares
from workbench.evaluation.rewards.verifiers import (
    JsonVerifier,
    NumberVerifier,
    PatternVerifier,
    UnitTestVerifier,
    UserFunction,
    Vote,
    WriterLikelihood,
    column,
    reference,
)
from workbench.models import reward_model
from workbench.models.reward_model import RewardModel
from workbench.runs import provenance, run_directory, trust
from workbench.runs.trust import Trust

SPREAD = "reward_spread"  # name under which the disagreement of reward models stands beside the rewards


class Rater(NamedTuple):
    """A loaded reward model."""

    model: RewardModel
    max_tokens: int  # most tokens that it reads
    config: RewardConfig

    @property
    def steps(self) -> bool:
        """Whether it rates the steps of an answer."""
        return self.config.kind == "process"


class RewardEnsemble:
    """The reward of a reward model, or the mean of several minus a penalty for their disagreement. Raises ConfigError:
    a run is not of recipe reward, is not finished, or rates no steps where `aggregate` asks for them."""

    def __init__(self, config: ModelReward) -> None:
        self._config = config
        runs = [member for run in config.runs for member in run_directory.fold_members(run.expanduser())]
        self._models = [_load_rater(run, config) for run in runs]

    def __call__(self, answers: Sequence[Answer]) -> list[float]:
        return self.rated(answers)[0]

    def rated(self, answers: Sequence[Answer]) -> tuple[list[float], list[float]]:
        """The reward of each answer, and the standard deviation of the models' rewards; 0 for one model."""
        reward_MS = self.read(answers)
        # Mean of the models minus `pessimism` times their standard deviation (M - 1 degrees of freedom).
        pessimistic_S = reward_MS.mean(0) - self._config.pessimism * spread(reward_MS)
        return [float(each) for each in pessimistic_S], [float(each) for each in spread(reward_MS)]

    @property
    def several(self) -> bool:
        """Whether there is more than one model."""
        return len(self._models) > 1

    def read(self, answers: Sequence[Answer]) -> Floats:
        """Reward (M, S) of each answer by each model."""
        return np.asarray([_read_rewards(model, answers) for model in self._models], dtype=np.float64)


def spread(reward_MS: Floats) -> Floats:
    """Standard deviation (S,) over the models; 0 for one model."""
    return np.zeros(reward_MS.shape[1]) if len(reward_MS) < 2 else np.asarray(reward_MS.std(0, ddof=1))


def _load_rater(run: Path, wanted: ModelReward) -> Rater:
    config = run_directory.shipped_config(run, Trust(wanted.trust, "trust: true beside the run in rewards"))
    if not config.task.margins or config.task.output is None:
        raise ConfigError(
            f"rewards, model: {run} is a run of recipe {config.recipe}, which tells no reward. Name a run of recipe "
            "reward: workbench run reward/quickstart data.train=pairs.jsonl"
        )
    run_directory.require_read_once(run, config)
    own = config.reward
    if wanted.aggregate is not None:
        if own.kind != "process":
            raise ConfigError(
                f"rewards, model: aggregate={wanted.aggregate} is for models that rate steps, and {run} rates whole "
                "answers. Leave aggregate out, or name a run with reward.kind=process."
            )
        own = own.model_copy(update={"aggregate": wanted.aggregate})
    return Rater(reward_model.load(run, config, ChatEncoder), config.data.max_tokens, own)


def _read_rewards(rater: Rater, answers: Sequence[Answer]) -> list[float]:
    """The reward of each answer: the model's output, or the aggregate of the probabilities that its steps are right."""
    model, template = rater.model, rater.model.template
    wholes = [_encoded(rater, answer) for answer in answers]
    cut = [truncate(whole, max_tokens=rater.max_tokens, side="left") for whole in wholes]
    rows = [
        Row(
            np.asarray(each.input_ids), np.asarray(each.supervised), pictures=each.pictures.key if each.pictures else ""
        )
        for each in cut
    ]
    device, combine = next(model.model.parameters()).device, reward_scores.AGGREGATES[rater.config.aggregate]

    def compute(numbers: Indices) -> list[float]:
        batch = template.collate([rows[number] for number in numbers], epoch=0).to(device)
        if not rater.steps:
            batch_rewards: list[float] = model.rewards(batch).double().cpu().tolist()
            return batch_rewards
        logits = model.step_logits(replace(batch, positions_N=batch.positions_N + 1)).double().cpu()
        counts = [int(rows[number].supervised[1:].sum()) for number in numbers]
        return [combine(each.sigmoid().numpy()) for each in logits.split(counts)]

    return over_rows(model.model, np.asarray([len(row.input_ids) for row in rows]), compute)


def _encoded(rater: Rater, answer: Answer) -> Encoded:
    """Prompt and answer; an answer of nothing but white space becomes the end token after the prompt."""
    template, text = rater.model.template, answer.text
    if text.strip() or not answer.messages:
        (example,) = template.expanded(answer.example, loss_on="last")
        if not rater.steps:
            return template.encode(example, loss_on="last")
        steps = stepwise.parted(text, rater.config.separator) or (text,)
        return StepEncoder(template, labelled=False).encode(replace(example, steps=steps), loss_on="last")
    ids = [*template.prompt(answer.messages, answer.tools), *template.stops()[:1]]
    return Encoded(ids, [False] * (len(ids) - 1) + [rater.steps])


Reward = Callable[[Sequence[Answer]], list[float]]  # rates answers by a finite number for each; higher is better


class Part(NamedTuple):
    """One of several rewards."""

    name: str
    weight: float
    score: Reward


class RewardSum:
    """A weighted sum of rewards, which is a Reward itself."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = tuple(parts)

    def __call__(self, answers: Sequence[Answer]) -> list[float]:
        return self.total(self.named(answers), len(answers))

    def named(self, answers: Sequence[Answer]) -> dict[str, list[float]]:
        """The unweighted reward of each answer, by the name of the part. Raises WorkbenchError: a part fails, takes too
        long, or gives no finite number for an answer; it is named."""
        return {part.name: _checked(part, answers, part.score(answers)) for part in self.parts} if answers else {}

    def detailed(self, answers: Sequence[Answer]) -> dict[str, list[float]]:
        """As `named`, with SPREAD where a part is an ensemble of reward models.

        That is the standard deviation over the models of an ensemble times its weight; of several ensembles the root of
        the sum of squares, as if they were independent.
        """
        named, spread_S, several = dict[str, list[float]](), [0.0] * len(answers), False
        for part in self.parts if answers else ():
            if isinstance(part.score, RewardEnsemble) and part.score.several:
                part_rewards, spreads, several = *part.score.rated(answers), True
                spread_S = [math.hypot(all_, part.weight * own) for all_, own in zip(spread_S, spreads, strict=True)]
            else:
                part_rewards = part.score(answers)
            named[part.name] = _checked(part, answers, part_rewards)
        return named | {SPREAD: spread_S} if several else named

    def total(self, named: dict[str, list[float]], count: int) -> list[float]:
        """The weighted sum of the rewards that `named` gave for `count` answers."""
        return [sum(part.weight * named[part.name][number] for part in self.parts) for number in range(count)]


def build(sources: Sequence[RewardSource], *, read_from: tuple[Path, Trust] | None = None) -> RewardSum:
    """The sum of the rewards that a configuration names. Raises ConfigError: a file, function, schema or run is missing
    or wrong, or the machine has no sandbox. `read_from`: the run directory that the configuration was read from, and
    whether its code is trusted; None for the user's own configuration."""
    if read_from is not None and not read_from[1].given:
        named = [setting.value for source in sources for setting in schema.code(type(source), source.model_dump())]
        if named:
            raise trust.refused(read_from[0], f"its rewards need {named[0]}", read_from[1])
    names = [source.name for source in sources]
    numbered = [f"{name} {1 + names[:number].count(name)}" for number, name in enumerate(names)]
    return RewardSum(
        [
            Part(name if names.count(name) == 1 else long, source.weight, _MADE[type(source)](source))
            for name, long, source in zip(names, numbered, sources, strict=True)
        ]
    )


def require_columns(sources: Sequence[RewardSource], rows: Iterable[tuple[str, Mapping[str, Any]]]) -> None:
    """Raise DataError for a row without a column that a reward reads, or whose number is none, before anything is
    generated. `rows`: place and columns of each row, by their names in the file."""
    for place, columns in rows:
        for source in sources:
            for name in source.columns:
                answer = Answer("", "", row=columns, place=place)
                reference(answer, name) if type(source) is NumberReward else column(answer, name, kind=source.kind)


def digests(sources: Sequence[RewardSource]) -> dict[str, str]:
    """Digests of the files that rewards are read from, by path; missing files are left out."""
    digest_by_name: dict[str, str] = {}
    for path in (path for source in sources for path in source.files):
        place = path.expanduser()
        digest_by_name |= {str(path): provenance.digest(place)} if place.is_file() else {}
        digest_by_name |= provenance.digests(place, title=str(path)) if place.is_dir() else {}
    return digest_by_name


_MADE: dict[type[RewardSource], Callable[..., Reward]] = {
    FunctionReward: UserFunction,
    NumberReward: NumberVerifier,
    PatternReward: PatternVerifier,
    JsonReward: JsonVerifier,
    UnitTestReward: UnitTestVerifier,
    ModelReward: RewardEnsemble,
    VoteReward: Vote,
    LikelihoodReward: WriterLikelihood,
    JudgeReward: JudgedShares,
}  # the class of each kind of reward, by the class of its section


def _checked(part: Part, answers: Sequence[Answer], part_rewards: list[float]) -> list[float]:
    for answer, value in zip(answers, part_rewards, strict=True):
        if not math.isfinite(value):
            raise ConfigError(
                f"rewards, {part.name}: the reward of an answer is {value}, which nothing can be learnt from: "
                f"{answer.place}, {excerpt(answer.text)}. Let it give a finite number for every answer."
            )
    return part_rewards


class RowJudge:
    """The rewards of a run for answers to the rows of a table, which are rated with all columns of their files.

    Args:
        rows: Some rows of the table.
        files: Each file of the table's rows by name (empty where there is one), and how it is read.
        tools: Schemas of the tools that episodes call.
    """

    def __init__(
        self,
        rewards: RewardSum,
        rows: TokenizedSet,
        files: Mapping[str, DataConfig],
        tokenizer: PreTrainedTokenizerBase,
        tools: tuple[dict[str, Any], ...] = (),
    ) -> None:
        whole = replace(rows, rows=np.arange(len(rows.table)))
        self.table = rows.table
        self._rewards, self._tokenizer, self.tools = rewards, tokenizer, tools
        prefixes = rows.prefixes or ("",) * max(1, len(rows.sources))
        self._raw: list[tuple[RawRow, DataConfig, str | None]] = [
            (replace(raw, place=prefix + raw.place), own, formats.folder_of(starter.resolve(part.source)))
            for prefix, (part, own) in zip(prefixes, tokenized.of_files(whole, files), strict=True)
            for raw in tokenized.raw_rows(part, own)
        ]  # each row of the table, how its file is read, and where the paths of its pictures begin

    def require(self, sources: Sequence[RewardSource]) -> None:
        """Raise DataError where a row lacks a column that a reward reads."""
        require_columns(sources, ((raw.place, raw.columns) for raw, *_ in self._raw))

    def named(self, rows: Sequence[int], answers: Sequence[Indices]) -> dict[str, Floats]:
        """Rewards of answers by name, from each answer's row number and tokens; raises as `RewardSum.named`."""
        return self.of_texts(rows, [self.text(ids) for ids in answers])

    def of_texts(self, rows: Sequence[int], texts: Sequence[str]) -> dict[str, Floats]:
        """The same for answers as text."""
        pairs = [(self.question(row), text) for row, text in zip(rows, texts, strict=True)]
        return self._named([answer_to(question, text, columns) for (question, columns), text in pairs])

    def of_episodes(self, rows: Sequence[int], episodes: Sequence[Episode]) -> dict[str, Floats]:
        """The same for episodes, whose last turns are the answers, with the rewards that their environments gave: 0 of
        one that failed."""
        answers = []
        for row, episode in zip(rows, episodes, strict=True):
            question, columns = self.question(row)
            first = answer_to(question, episode.text, columns)
            answers.append(replace(first, messages=episode.messages or first.messages, tools=self.tools))
        given = sorted({name for each in episodes for name in each.rewards})
        own = {name: np.asarray([float(each.rewards.get(name, 0.0)) for each in episodes]) for name in given}
        if not given and not self._rewards.parts:
            own = {"environment": np.zeros(len(episodes))}
        return self._named(answers) | own

    def question(self, row: int) -> tuple[Example, Mapping[str, Any]]:
        """The prompt of a row, and its columns."""
        raw, config, folder = self._raw[row]
        question = prompts.question(raw, config)
        assert question is not None, "every row of the table has a prompt"
        return formats.located(question, folder), raw.columns

    def _named(self, answers: Sequence[Answer]) -> dict[str, Floats]:
        return {name: np.asarray(values, dtype=np.float64) for name, values in self._rewards.named(answers).items()}

    def total(self, named: Mapping[str, Floats]) -> Floats:
        """The weighted sum of the rewards; those of an environment count once."""
        listed = {name: values.tolist() for name, values in named.items()}
        count = len(next(iter(listed.values())))
        parts = {part.name for part in self._rewards.parts}
        given = [values for name, values in named.items() if name not in parts]
        return np.asarray(self._rewards.total(listed, count), dtype=np.float64) + sum(given)

    def text(self, ids: Indices) -> str:
        """An answer as text, without special tokens."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=True)).strip()
