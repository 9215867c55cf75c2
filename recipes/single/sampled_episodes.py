"""Several episodes of a run with tools for each prompt, as `sample` writes answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from workbench.data.text import generated_answers, media
from workbench.data.text.chat import ChatEncoder
from workbench.data.text.formats import Example
from workbench.data.text.generated_answers import Episode
from workbench.errors import ConfigError, DataError
from workbench.evaluation.generation import AnswerSampler, question_of
from workbench.evaluation.tools.episodes import EpisodePlayer, EpisodeStart
from workbench.evaluation.tools.toolbox import Toolbox
from workbench.recipes.single.sampled_answers import LocalWriter, Questions, SampleSettings, Written, WrittenAnswer
from workbench.training.reinforcement.rollouts import TurnWriter


@dataclass(frozen=True)
class EpisodeWriter(LocalWriter):
    """A run that answers over several turns, with its tools and its environment."""

    tools: Toolbox = field(kw_only=True)
    columns: Sequence[Mapping[str, Any]] = ()
    """Those of the row of each prompt, which an environment is given."""

    def require(self, settings: SampleSettings, sources: Sequence[Any]) -> None:
        """Raise ConfigError where rows or rewards are for answers of one turn."""
        if settings.to == "pairs":
            raise ConfigError(
                f"--to pairs compares two answers to one prompt, and {self.name} plays episodes of several turns. "
                "Write --to best, accepted or all."
            )
        if any(source.reads_likelihood for source in sources):
            raise ConfigError(
                f"--score likelihood reads an answer of one turn, and {self.name} plays episodes. Leave it out."
            )

    def offered(self, questions: Questions) -> Questions:
        """The prompts, which offer the tools."""
        for question, _ in questions:
            if media.of_messages(question.messages):
                raise DataError(
                    f"{question.place}: has a picture, and {self.name} plays episodes over text alone. Leave it out."
                )
            if question.text or question.tools:
                why = "is raw text, which has no turns" if question.text else "has tools of its own"
                raise DataError(
                    f"{question.place}: {why}, and {self.name} calls the tools of {self.tools.config.file}. "
                    "Name its column `question`, and leave `tools` out with data.ignore='[tools]'."
                )
        return [(replace(question, tools=self.tools.schemas), columns) for question, columns in questions]

    def write(
        self, questions: Sequence[Example], settings: SampleSettings, known: Written, keep: Callable[[Written], None]
    ) -> None:
        if len(known) == len(questions):
            return
        model = self.load()
        assert isinstance(model.template, ChatEncoder), "a run with tools writes conversations"
        limit, each = settings.max_new_tokens, len(settings.wordings)
        player = EpisodePlayer(self.tools, model.template, model.tokenizer, stop=model.stop, limit=limit)
        sampler = AnswerSampler(
            model.model, known=len(model.tokenizer), stop=player.stop, temperature=settings.temperature
        )
        prompts = [question_of(model, question).ids for question in questions]
        for whole in sampler.batches(prompts, answers=settings.n, tokens=limit):
            batch = [int(row) for row in whole if int(row) not in known]
            if not batch:
                continue
            draws = [
                generated_answers.sampling_numbers([settings.seed, row], answers=settings.n, tokens=limit)
                for row in batch
            ]
            starts = [
                EpisodeStart(prompts[row], questions[row], self.columns[row // each])
                for row in batch
                for _ in range(settings.n)
            ]
            episodes = iter(player.play(starts, TurnWriter(sampler, draws, scored=False).turns))
            keep({row: {number: _written(next(episodes)) for number in range(settings.n)} for row in batch})


def _written(episode: Episode) -> WrittenAnswer:
    return WrittenAnswer(
        episode.text,
        not (episode.cut or episode.failure),
        problem=episode.failure if episode.dropped else "",
        messages=episode.turns,
        before=len(episode.messages),
        rewards=episode.rewards,
        counts=episode.counts,
    )
