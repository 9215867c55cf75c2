"""One answer that is being written: what is asked for, what has come, and who hears of it.

Legend: W tokens of a prompt that are read at once, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from workbench.evaluation.sampling import picked
from workbench.evaluation.serving.answer_text import AnswerText
from workbench.evaluation.serving.passes import Chunk
from workbench.models.cached_rows import RowCache, room

Reason = Literal["stop", "length"]


@dataclass(frozen=True)
class Sampling:
    """How the tokens of an answer are chosen."""

    max_tokens: int
    """Most tokens of the answer."""
    temperature: float = 0.0
    """Logits are divided by it; 0: the likeliest token."""
    top_p: float = 1.0
    """Only the likeliest tokens, with so much of the probability together."""
    seed: tuple[int, ...] | None = None
    """Decides the random numbers; None: different ones each time."""
    logprobs: int | None = None
    """Likeliest tokens whose log-probabilities are told beside that of the chosen one; None: none is told."""
    echo: bool = False
    """Tell those of the prompt's tokens too, where any are told."""


@dataclass(frozen=True)
class TokenScore:
    """A token and its natural log-probability, at temperature 1, among all tokens."""

    token: int
    logprob: float | None
    """None of a prompt's first token, before which nothing stands."""
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens in its place, best first."""


@dataclass(frozen=True)
class AnswerPiece:
    """Something new of an answer."""

    text: str
    tokens: int
    """Tokens of the answer so far."""
    scores: tuple[TokenScore, ...] = ()
    """Tokens that are new, where log-probabilities were asked for."""
    reason: Reason | None = None
    """Why the answer ends with it; None: more comes."""


class Interrupted(Exception):
    """An answer that will not come to its end."""


class TimedOut(Interrupted):
    """It would have taken longer than allowed."""


class Overfull(Interrupted):
    """Memory ran out."""


class Unloaded(Interrupted):
    """The adapter has left."""


class ShuttingDown(Interrupted):
    """The server ends."""


Listener = Callable[["AnswerPiece | Interrupted"], None]


@dataclass(eq=False)
class AnswerInProgress:
    """A prompt with its answer so far."""

    prompt: Sequence[int]
    member: str
    sampling: Sampling
    text: AnswerText
    stop: frozenset[int]
    """Tokens that end the answer."""
    known: int
    """Size of the tokenizer's vocabulary: only those tokens are drawn."""
    listener: Listener
    """Is told in the engine's thread."""
    deadline: float
    """Seconds of the monotonic clock."""
    cancelled: bool = False
    """Nobody waits for it any more."""
    cache: RowCache = field(default_factory=RowCache)
    answer: list[int] = field(default_factory=list)
    scores: list[TokenScore] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = np.random.default_rng(self.sampling.seed)
        if self._scores_prompt:
            self.scores.append(TokenScore(self.prompt[0], None))

    @property
    def room(self) -> int:
        """Tokens that it may come to take memory for."""
        return room(len(self.prompt) + self.sampling.max_tokens)

    @property
    def late(self) -> bool:
        """Whether its time is over."""
        return time.monotonic() > self.deadline

    def chunk(self, size: int) -> Chunk:
        """Tokens that are to be read next; of a prompt at most up to the next multiple of `size`."""
        read = self.cache.length
        if read >= len(self.prompt):
            return Chunk(self.cache, self.answer[-1:], self.member)
        ids = self.prompt[read : read + size]
        ends = read + len(ids) == len(self.prompt)
        return Chunk(self.cache, ids, self.member, ends=ends, scored=self._scores_prompt)

    @property
    def _scores_prompt(self) -> bool:
        return self.sampling.echo and self.sampling.logprobs is not None

    def score_prompt(self, logits_WV: Tensor) -> None:
        """Score what comes next in the prompt after each of the W tokens that were read last."""
        assert self.sampling.logprobs is not None
        next_tokens = self.prompt[self.cache.length - len(logits_WV) + 1 : self.cache.length + 1]
        for logits_V, token in zip(logits_WV, next_tokens, strict=False):  # the prompt's last token is followed by none
            self.scores.append(score(logits_V, token, self.sampling.logprobs))

    def push(self, logits_V: Tensor) -> Reason | None:
        """Choose the next token and tell the listener; returns why the answer ends, if it does."""
        token = self._chosen(logits_V)
        self.answer.append(token)
        if self.sampling.logprobs is not None:
            self.scores.append(score(logits_V, token, self.sampling.logprobs))
        ended = token in self.stop
        text = "" if ended else self.text.push(token)
        reason: Reason | None = None
        if ended or self.text.stopped:
            reason = "stop"
        elif len(self.answer) >= self.sampling.max_tokens:
            reason = "length"
        self._tell(text, reason)
        return reason

    def _tell(self, text: str, reason: Reason | None) -> None:
        if reason is not None:
            text += self.text.finish()
        if text or reason:
            self.listener(AnswerPiece(text, len(self.answer), tuple(self.scores), reason))
            self.scores = []

    def _chosen(self, logits_V: Tensor) -> int:
        if self.sampling.temperature == 0:
            return int(logits_V.argmax())
        drawn = torch.from_numpy(self._random.random(1)).to(logits_V.device)
        kept_V = nucleus(logits_V[: self.known], self.sampling.top_p, self.sampling.temperature)
        return int(picked(kept_V[None], drawn, self.sampling.temperature))


def nucleus(logits_V: Tensor, share: float, temperature: float) -> Tensor:
    """Logits of the likeliest tokens that have a share of the probability together; minus infinity elsewhere.

    Holtzman et al. 2020, "The Curious Case of Neural Text Degeneration".
    """
    if share >= 1:
        return logits_V
    sorted_V, order_V = (logits_V.double() / temperature).sort(descending=True, stable=True)
    before_V = sorted_V.softmax(-1).cumsum(-1) - sorted_V.softmax(-1)
    return logits_V.index_fill(0, order_V[before_V >= share], -torch.inf)


def score(logits_V: Tensor, token: int, top: int) -> TokenScore:
    """Log-probabilities of a token, and of the likeliest."""
    logprob_V = logits_V.float().log_softmax(-1)
    values, tokens = logprob_V.topk(min(top, len(logprob_V)))
    return TokenScore(token, float(logprob_V[token]), tuple(zip(tokens.tolist(), values.tolist(), strict=True)))
