"""Answers that a model gave: what a reward may look at, the random numbers of sampling, and signs of reward hacking.

Legend: G answers to a prompt, T most tokens of an answer, S answers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from workbench.data.text.formats import Example
from workbench.data.text.messages import Message


@dataclass(frozen=True)
class Answer:
    """An answer to a prompt."""

    prompt: str  # all that stood before the answer, as text: of a conversation the last message of the user
    text: str  # the answer, without the tokens that end it
    messages: tuple[Message, ...] = ()  # the turns before the answer; empty where the prompt is raw text
    tools: tuple[dict[str, Any], ...] = ()  # tools that the conversation may call
    row: Mapping[str, Any] = field(default_factory=dict)  # the columns of its row, by their names in the file
    place: str = "an answer"  # file and row, for messages
    likelihood: float | None = None  # mean log-probability of its tokens by its writer, in nats; None: not asked for

    @property
    def example(self) -> Example:
        """Prompt and answer as an example whose answer carries loss."""
        if not self.messages:
            return Example(self.place, text=((self.prompt, False), (self.text, True)))
        turns = (*self.messages, {"role": "assistant", "content": self.text})
        return Example(self.place, messages=turns, tools=self.tools)


def answer_to(question: Example, text: str, row: Mapping[str, Any], *, likelihood: float | None = None) -> Answer:
    """The answer `text` to the prompt `question`, which `prompts.read_prompts` gives."""
    asked = [message["content"] for message in question.messages if message["role"] == "user"]
    prompt = asked[-1] if asked else "".join(piece for piece, _ in question.text)
    return Answer(prompt, text, question.messages, question.tools, row, question.place, likelihood)


Floats = npt.NDArray[np.float64]


class SampledAnswer(NamedTuple):
    """An answer, and how likely each of its tokens was to whom drew it."""

    ids: npt.NDArray[np.int64]
    log_probs: Floats | None  # natural log-probability of each token, at the temperature of the draw; None: not told

    def first(self, tokens: int) -> SampledAnswer:
        """Its first tokens."""
        return SampledAnswer(self.ids[:tokens], None if self.log_probs is None else self.log_probs[:tokens])


class EpisodeRow(NamedTuple):
    """Tokens that a model read and drew one after another: an answer, or turns with what tools answered between."""

    ids: npt.NDArray[np.int64]  # behind the prompt, up to the last token that was drawn
    drawn: npt.NDArray[np.bool_]  # which of them the model drew; the others carry no loss
    log_probs: Floats | None = None  # natural log-probabilities of those, as the sampler reports them
    kept: int | None = None  # tokens of the prompt that they stand behind; None: all
    turns: npt.NDArray[np.int64] | None = (
        None  # number of the turn of each token that was drawn, where turns have rewards
    )


@dataclass(frozen=True)
class Episode:
    """An answer to a prompt, or several turns of a model, with the calls between."""

    rows: Sequence[EpisodeRow]  # one, and another from each turn on before which a template rewrites earlier ones
    cut: bool  # it reached a limit before it ended
    text: str = ""  # the last turn, without calls
    messages: tuple[Message, ...] = ()  # all of the conversation before that; empty where there are no tools
    counts: Mapping[str, int] = field(default_factory=dict)  # turns, calls, and tool errors
    rewards: Mapping[str, float] = field(default_factory=dict)  # of its environment, by their names
    so_far: Sequence[float] = ()  # the sum of those after each turn but the last one, where turns have rewards
    states: Sequence[str] = ()  # what each turn read since the one before, where turns are compared by it
    failure: str = ""  # what its environment did wrong
    closed: bool = False  # its environment ended it, and its last turn stands in `messages`
    dropped: bool = False  # nothing is learnt from it

    @property
    def tokens(self) -> int:
        """How many tokens the model drew."""
        return sum(int(row.drawn.sum()) for row in self.rows)

    @property
    def turns(self) -> list[Message]:
        """All of the conversation, with its last turn."""
        last: list[Message] = [] if self.closed else [{"role": "assistant", "content": self.text}]
        return [*self.messages, *last]

    @property
    def transcript(self) -> str:
        """The turns since the last message of the user, as people read them."""
        asked = max((n for n, each in enumerate(self.messages) if each["role"] == "user"), default=-1)
        lines = [line for message in self.messages[asked + 1 :] for line in _shown(message)]
        return "\n".join([*lines, self.text or "(nothing)"]) if lines else self.text


SUCCESS = 1.0
"""Reward from which on an episode counts as a success: that of a right answer."""


def _shown(message: Message) -> list[str]:
    if message["role"] != "assistant":
        return [f"[{message['role']}] {message['content']}"]
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    calls = [f"[call] {each['name']}({json.dumps(each['arguments'], ensure_ascii=False)})" for each in functions]
    return [*([message["content"]] if message["content"].strip() else []), *calls]


WriteTurns = Callable[[Sequence[int], Sequence[npt.NDArray[np.int64]], Sequence[int]], Sequence[SampledAnswer]]
"""Writes the next turns of some episodes, from their numbers, all tokens before, and how many of these stand behind the
prompt."""


def answered(ids: npt.NDArray[np.int64], log_probs: Floats | None, *, stop: Sequence[int]) -> Episode:
    """An answer without tools as an episode."""
    row = EpisodeRow(ids, np.ones(len(ids), dtype=np.bool_), log_probs)
    return Episode([row], not len(ids) or int(ids[-1]) not in stop)


def sampling_numbers(key: Sequence[int], *, answers: int, tokens: int) -> Floats:
    """Random numbers (G, T) in [0, 1) of the answers to a prompt; those of each answer depend on `key` and its number.
    `key`: numbers >= 0, such as seed, step and row."""
    return np.stack([np.random.default_rng([*key, answer]).random(tokens) for answer in range(answers)])


def pass_at(k: int, answers: int, right: int) -> float:
    """Chance that one or more of k answers to a prompt are right, where `right` of `answers` >= k were.

    It is unbiased: 1 - C(answers - right, k) / C(answers, k) (Chen et al. 2021, arXiv:2107.03374, eq. 1).
    """
    return 1 - math.comb(answers - right, k) / math.comb(answers, k)


def passes(counts: Sequence[tuple[int, int]]) -> dict[int, Floats]:
    """pass@k of each prompt by k, the powers of two up to the fewest answers, from its answers and right ones."""
    fewest = min(answers for answers, _ in counts)
    powers = (2**power for power in range(fewest.bit_length()))
    return {k: np.asarray([pass_at(k, *each) for each in counts]) for k in powers}


GRAM = 4  # words, or tokens, that are compared together


def repetition(text: str) -> float:
    """Share of an answer's runs of four words that it had before; 0 where it is shorter."""
    return repeated(text.split())


def repeated(parts: Sequence[Hashable]) -> float:
    """The same of its words, or its tokens."""
    grams = [tuple(parts[start : start + GRAM]) for start in range(len(parts) - GRAM + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def answer_lengths(texts: Sequence[str]) -> dict[str, float]:
    """Mean words and mean repetition of answers; empty where there are none."""
    if not texts:
        return {}
    words = float(np.mean([len(text.split()) for text in texts]))
    return {"words": round(words, 6), "repetition": round(float(np.mean(list(map(repetition, texts)))), 6)}


def length_correlation(texts: Sequence[str], reward_S: Sequence[float]) -> float | None:
    """Spearman's rank correlation of words and rewards; None where one of them is the same for all."""
    from scipy import stats  # takes 0.7 s to import

    words = [len(text.split()) for text in texts]
    if len(set(words)) < 2 or len(set(reward_S)) < 2:
        return None
    return float(stats.spearmanr(words, reward_S).statistic)
