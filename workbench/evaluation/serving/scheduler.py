"""Answers in progress, and the thread that generates many at once: one joins at any token, and leaves when it ends.

Legend: W tokens of a prompt that are read at once, V vocabulary.
"""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from workbench.errors import out_of_memory
from workbench.evaluation.comparison import Floats
from workbench.evaluation.generation import picked
from workbench.evaluation.serving.engine import CHUNK, SIZES, Chunk, Engine
from workbench.models.attention_backend import RowCache, room
from workbench.models.picture_processor import PictureProcessor

_BEFORE = 6  # tokens of the prompt that are decoded before an answer, since a tokenizer drops the first space of a text
_HALF = "\ufffd"  # what the first bytes of an incomplete character decode to
Reason = Literal["stop", "length"]
_log = logging.getLogger(__name__)
ResultT = TypeVar("ResultT")


class AnswerText:
    """Decodes tokens as they come; holds back half characters and what may be the beginning of a stop word."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], stops: Sequence[str]) -> None:
        self._backend = tokenizer.backend_tokenizer
        self._ids = list(prompt[-_BEFORE:])
        self._before, self._written = 0, len(self._ids)
        self._stops = stops
        self._held = ""
        self.stopped = False  # whether a stop word came; the text ends before it

    def push(self, token: int) -> str:
        """The text that is certain after this token."""
        self._ids.append(token)
        more = self._new()
        if not more or more.endswith(_HALF):
            return ""
        self._before, self._written = self._written, len(self._ids)
        return self._certain(more)

    def finish(self) -> str:
        """The rest of the text; half a character stays as the tokenizer writes it."""
        rest = self._certain(self._new())
        if not self.stopped:
            rest, self._held = rest + self._held, ""
        return rest

    def _new(self) -> str:
        """Text of the tokens that are not written yet, decoded after some that are, since their text may depend on
        them."""
        known, whole = (
            str(self._backend.decode(self._ids[self._before : end], skip_special_tokens=True))
            for end in (self._written, len(self._ids))
        )
        return whole[len(known) :]

    def _certain(self, more: str) -> str:
        if self.stopped:
            return ""
        text = self._held + more
        stop_spans = [(place + len(stop), place) for stop in self._stops if (place := text.find(stop)) >= 0]
        if stop_spans:  # the one that is complete first
            self.stopped, self._held = True, ""
            return text[: min(stop_spans)[1]]
        kept = max(
            (
                size
                for stop in self._stops
                for size in range(min(len(text), len(stop) - 1) + 1)
                if stop.startswith(text[len(text) - size :])
            ),
            default=0,
        )
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]


@dataclass(frozen=True)
class Sampling:
    """How the tokens of an answer are chosen."""

    max_tokens: int
    """Most tokens of the answer."""
    temperature: float = 0.0
    """Logits are divided by it; 0: greedy."""
    top_p: float = 1.0
    """Sample from the likeliest tokens that together have this probability."""
    seed: tuple[int, ...] | None = None
    """Decides the random numbers; None: different ones each time."""
    logprobs: int | None = None
    """Number of likeliest tokens whose log-probabilities are recorded with each token; None: record nothing."""
    echo: bool = False
    """Whether the prompt's tokens are scored too, where `logprobs` is set."""
    top_k: int = 0
    """Sample from so many likeliest tokens; 0: from all."""


@dataclass(frozen=True)
class TokenScore:
    """A token and its natural log-probability at temperature 1."""

    token: int
    logprob: float | None
    """None for the first token of a prompt, which nothing precedes."""
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens in its place with their log-probabilities, best first."""


@dataclass(frozen=True)
class AnswerPiece:
    """A new piece of an answer."""

    text: str
    tokens: int  # tokens of the answer so far
    scores: tuple[TokenScore, ...] = ()  # the new tokens, where log-probabilities were requested
    reason: Reason | None = None  # why the answer ends here; None: more follows


class Interrupted(Exception):
    """An answer that will not be finished."""


class TimedOut(Interrupted):
    """It took longer than allowed."""


class Overfull(Interrupted):
    """Memory ran out."""


class Unloaded(Interrupted):
    """The adapter was unloaded."""


class ShuttingDown(Interrupted):
    """The server shuts down."""


Listener = Callable[["AnswerPiece | Interrupted"], None]


@dataclass(eq=False)
class AnswerInProgress:
    """A prompt and its answer so far."""

    prompt: Sequence[int]
    member: str
    sampling: Sampling
    text: AnswerText
    stop: frozenset[int]  # tokens that end the answer
    known: int  # size of the tokenizer's vocabulary: only these tokens are sampled
    listener: Listener  # called in the engine's thread
    deadline: float  # seconds of the monotonic clock
    cancelled: bool = False  # whether the client has gone
    cache: RowCache = field(default_factory=RowCache)
    answer: list[int] = field(default_factory=list)
    scores: list[TokenScore] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = np.random.default_rng(self.sampling.seed)
        if self._scores_prompt:
            self.scores.append(TokenScore(self.prompt[0], None))

    @property
    def room(self) -> int:
        """Tokens for which it may need memory."""
        return room(len(self.prompt) + self.sampling.max_tokens)

    @property
    def late(self) -> bool:
        """Whether its time is over."""
        return time.monotonic() > self.deadline

    def chunk(self, size: int) -> Chunk:
        """The tokens to read next; at most `size` tokens of a prompt."""
        read = self.cache.length
        if read >= len(self.prompt):
            return Chunk(self.cache, self.answer[-1:], self.member)
        ids = self.prompt[read : read + size]
        return Chunk(self.cache, ids, self.member, ends=read + len(ids) == len(self.prompt), scored=self._scores_prompt)

    @property
    def _scores_prompt(self) -> bool:
        return self.sampling.echo and self.sampling.logprobs is not None

    def push(self, logits_V: Tensor) -> Reason | None:
        """Choose the next token and call the listener; returns why the answer ends, if it does."""
        sampling = self.sampling
        if not bool(logits_V.isfinite().any()):
            raise ValueError("no logit is finite")
        if sampling.temperature == 0:
            token = int(logits_V.argmax())
        else:
            drawn = torch.from_numpy(self._random.random(1)).to(logits_V.device)
            kept_V = likeliest(logits_V[: self.known], sampling.top_k)
            kept_V = nucleus(kept_V, sampling.top_p, sampling.temperature)
            token = int(picked(kept_V[None], drawn, sampling.temperature))
        self.answer.append(token)
        if sampling.logprobs is not None:
            self.scores.append(score(logits_V, token, sampling.logprobs))
        ended = token in self.stop
        text = "" if ended else self.text.push(token)
        reason: Reason | None = None
        if ended or self.text.stopped:
            reason = "stop"
        elif len(self.answer) >= sampling.max_tokens:
            reason = "length"
        if reason is not None:
            text += self.text.finish()
        if text or reason:
            self.listener(AnswerPiece(text, len(self.answer), tuple(self.scores), reason))
            self.scores = []
        return reason


def likeliest(logits_V: Tensor, many: int) -> Tensor:
    """Logits of the `many` likeliest tokens; minus infinity elsewhere. 0: all."""
    if not 0 < many < len(logits_V):
        return logits_V
    top = logits_V.topk(many).indices
    return torch.full_like(logits_V, -torch.inf).index_copy(0, top, logits_V[top])


def nucleus(logits_V: Tensor, share: float, temperature: float) -> Tensor:
    """Logits of the likeliest tokens that together have the probability `share`; minus infinity elsewhere.

    Holtzman et al. 2020, "The Curious Case of Neural Text Degeneration".
    """
    if share >= 1:
        return logits_V
    sorted_V, order_V = (logits_V.double() / temperature).sort(descending=True, stable=True)
    before_V = sorted_V.softmax(-1).cumsum(-1) - sorted_V.softmax(-1)
    return logits_V.index_fill(0, order_V[before_V >= share], -torch.inf)


def score(logits_V: Tensor, token: int, top: int) -> TokenScore:
    """Log-probabilities of a token and of the `top` likeliest tokens."""
    logprob_V = logits_V.float().log_softmax(-1)
    values, tokens = logprob_V.topk(min(top, len(logprob_V)))
    return TokenScore(token, float(logprob_V[token]), tuple(zip(tokens.tolist(), values.tolist(), strict=True)))


class QueueFull(Exception):
    """The queue has no room for another answer."""


class Scheduler:
    """Generates the answers of one engine in a thread.

    Args:
        rows: Most answers that are generated at the same time.
        tokens: Most tokens of their prompts and answers together.
        queue: Most answers that wait.
    """

    def __init__(self, engine: Engine, *, rows: int, tokens: int, queue: int) -> None:
        self._engine, self._rows, self._tokens, self._queue = engine, rows, tokens, queue
        self._running: list[AnswerInProgress] = []
        self._waiting: deque[AnswerInProgress] = deque()
        self._changed = threading.Condition()
        self._actions: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._closing = False
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self._thread.start()

    @property
    def running(self) -> int:
        """Number of answers that are being generated."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Number of answers that wait."""
        return len(self._waiting)

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def submit(self, answers: Sequence[AnswerInProgress]) -> None:
        """Queue answers, all or none of them.

        Raises:
            QueueFull: There is no room for all of them.
            Unloaded: The adapter of one was unloaded.
            ShuttingDown: The server takes no more answers.
        """
        with self._changed:
            if self._closing or not self.alive:
                raise ShuttingDown
            if any(answer.member not in self._engine.members for answer in answers):
                raise Unloaded
            free = self._rows - len(self._running) + self._queue - len(self._waiting)
            if len(answers) > free:
                raise QueueFull
            self._waiting.extend(answers)
            self._changed.notify()

    def between(self, action: Callable[[], ResultT]) -> ResultT:
        """Run an action in the engine's thread between two tokens; returns its result and raises what it raises."""
        future: Future[ResultT] = Future()
        with self._changed:
            if self._closing or not self.alive:
                raise ShuttingDown
            self._actions.append((action, future))
            self._changed.notify()
        return future.result()

    def feature(self, ids: Sequence[int]) -> Floats:
        """`Engine.feature` of a prompt, between two tokens."""
        return self.between(lambda: self._engine.feature(ids))

    def pictured(self, ids: Sequence[int], key: str, processor: PictureProcessor, member: str) -> list[int]:
        """`Engine.pictured` of a prompt, between two tokens."""
        return self.between(lambda: self._engine.pictured(ids, key, processor, member))

    def writes(self, member: str) -> bool:
        """Whether an answer of this adapter is being generated or waits."""
        return any(answer.member == member for answer in (*self._running, *self._waiting))

    def cancel(self, answers: Sequence[AnswerInProgress]) -> None:
        """Cancel answers; their places are free at the next token."""
        with self._changed:
            for answer in answers:
                answer.cancelled = True
            self._changed.notify()

    def close(self) -> None:
        """Interrupt unfinished answers, and end the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def _work(self) -> None:
        try:
            self._answer_all()
        finally:  # whatever ended it: nobody waits for what never comes
            with self._changed:
                self._closing = True
                self._end([*self._running, *self._waiting], ShuttingDown())
                for _, future in self._actions:
                    future.set_exception(ShuttingDown())

    def _answer_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._waiting or self._running or self._actions)
                every = [*self._running, *self._waiting]
                self._end([answer for answer in every if answer.cancelled], None)
                self._end([answer for answer in every if answer.late and not answer.cancelled], TimedOut())
                if self._closing:
                    return
                while self._actions:
                    action, future = self._actions.popleft()
                    try:
                        future.set_result(action())
                    except Exception as error:
                        future.set_exception(error)
                while self._waiting and self._has_place(self._waiting[0]):
                    self._running.append(self._waiting.popleft())
            if self._running:
                self._guarded_step()

    def _has_place(self, answer: AnswerInProgress) -> bool:
        taken = sum(each.room for each in self._running)
        return len(self._running) < self._rows and (not taken or taken + answer.room <= self._tokens)

    def _end(self, answers: Sequence[AnswerInProgress], error: Interrupted | None) -> None:
        for answer in answers:
            (self._running if answer in self._running else self._waiting).remove(answer)
            answer.cancelled = True
            if error is not None:
                try:
                    answer.listener(error)
                except Exception:  # who listens has ended: that is nobody else's matter
                    _log.error(traceback.format_exc())

    def _guarded_step(self) -> None:
        """A step; out of memory interrupts the newest answer, any other failure interrupts all."""
        try:
            # Generate one token of each answer; read as much of the prompts as a pass can hold.
            asked, tokens = {}, 0
            for answer in self._running:
                reads = answer.cache.length < len(answer.prompt)
                if not reads or tokens < SIZES[-1]:
                    chunk = answer.chunk(CHUNK)
                    asked[id(chunk)] = answer, chunk
                    tokens += reads * len(chunk.ids)
            ended, failed = [], []
            for chunk, logits_WV in self._engine.step([chunk for _, chunk in asked.values()]):
                answer = asked[id(chunk)][0]
                if answer.cancelled:
                    continue
                if chunk.scored:  # the prompt's tokens that follow each of the W tokens that were read last
                    assert answer.sampling.logprobs is not None
                    following = answer.prompt[answer.cache.length - len(logits_WV) + 1 : answer.cache.length + 1]
                    for logits_V, token in zip(logits_WV, following, strict=False):  # nothing follows the last one
                        answer.scores.append(score(logits_V, token, answer.sampling.logprobs))
                try:
                    if chunk.ends and answer.push(logits_WV[-1]) is not None:
                        ended.append(answer)
                except Exception:  # such as logits that are NaN: the others go on
                    _log.error(traceback.format_exc())
                    failed.append(answer)
            with self._changed:
                for answer in ended:
                    self._running.remove(answer)
                self._end(failed, Interrupted())
        except Exception as error:
            with self._changed:
                if out_of_memory(error):
                    self._end(self._running[-1:], Overfull())
                else:
                    _log.error(traceback.format_exc())
                    self._end(list(self._running), Interrupted())
