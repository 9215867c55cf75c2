"""A thread that writes many answers at once: one joins at the next token, and one that ends leaves."""

from __future__ import annotations

import logging
import threading
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from workbench.errors import out_of_memory
from workbench.evaluation.serving.answer_progress import (
    AnswerInProgress,
    Interrupted,
    Overfull,
    ShuttingDown,
    TimedOut,
    Unloaded,
)
from workbench.evaluation.serving.engine import CHUNK, SIZES, Engine

_log = logging.getLogger(__name__)
ResultT = TypeVar("ResultT")


class QueueFull(Exception):
    """So many answers wait that another one is not taken."""


class Scheduler:
    """Answers of one engine, computed in a thread of its own.

    Args:
        rows: Answers that are written at the same time.
        tokens: Tokens of their prompts and answers that memory may hold.
        queue: Answers that may wait for a place.
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
        """Answers that are being written."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Answers that wait."""
        return len(self._waiting)

    @property
    def alive(self) -> bool:
        """Whether answers are written at all."""
        return self._thread.is_alive()

    def submit(self, answers: Sequence[AnswerInProgress]) -> None:
        """Have answers written, all or none of them.

        Raises:
            QueueFull: There is no room for all of them.
            Unloaded: The adapter of one is not there any more.
            ShuttingDown: No answer is begun any more.
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
        """Result of an action that the engine's thread does between two tokens; raises what it raises."""
        future: Future[ResultT] = Future()
        with self._changed:
            if self._closing or not self.alive:
                raise ShuttingDown
            self._actions.append((action, future))
            self._changed.notify()
        return future.result()

    def writes(self, member: str) -> bool:
        """Whether an answer of this adapter is written or waits."""
        return any(answer.member == member for answer in (*self._running, *self._waiting))

    def cancel(self, answers: Sequence[AnswerInProgress]) -> None:
        """Stop answers for which nobody waits; their places are free at the next token."""
        with self._changed:
            for answer in answers:
                answer.cancelled = True
            self._changed.notify()

    def close(self) -> None:
        """Interrupt what is still being written, and end the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._waiting or self._running or self._actions)
                self._drop()
                if self._closing:
                    self._end([*self._running, *self._waiting], ShuttingDown())
                    for _, future in self._actions:
                        future.set_exception(ShuttingDown())
                    return
                self._act()
                while self._waiting and self._has_place(self._waiting[0]):
                    self._running.append(self._waiting.popleft())
            if self._running:
                self._guarded_step()

    def _act(self) -> None:
        """Do what waits to be done between two tokens."""
        while self._actions:
            action, future = self._actions.popleft()
            try:
                future.set_result(action())
            except Exception as error:
                future.set_exception(error)

    def _has_place(self, answer: AnswerInProgress) -> bool:
        taken = sum(each.room for each in self._running)
        return len(self._running) < self._rows and (not taken or taken + answer.room <= self._tokens)

    def _drop(self) -> None:
        """Let go of answers that nobody waits for, and of those that take too long."""
        every = [*self._running, *self._waiting]
        self._end([answer for answer in every if answer.cancelled], None)
        self._end([answer for answer in every if answer.late and not answer.cancelled], TimedOut())

    def _end(self, answers: Sequence[AnswerInProgress], error: Interrupted | None) -> None:
        for answer in answers:
            (self._running if answer in self._running else self._waiting).remove(answer)
            answer.cancelled = True
            if error is not None:
                answer.listener(error)

    def _guarded_step(self) -> None:
        """A step; where memory runs out the last answer goes, and whatever else fails takes all of them along."""
        try:
            self._step()
        except Exception as error:
            with self._changed:
                if out_of_memory(error):
                    self._end(self._running[-1:], Overfull())
                else:
                    _log.error(traceback.format_exc())
                    self._end(list(self._running), Interrupted())

    def _step(self) -> None:
        """One token of each answer; of prompts as much as a pass has room for."""
        asked, tokens = {}, 0
        for answer in self._running:
            reads = answer.cache.length < len(answer.prompt)
            if not reads or tokens < SIZES[-1]:
                chunk = answer.chunk(CHUNK)
                asked[id(chunk)] = answer, chunk
                tokens += reads * len(chunk.ids)
        ended = []
        for chunk, logits_WV in self._engine.step([chunk for _, chunk in asked.values()]):
            answer = asked[id(chunk)][0]
            if answer.cancelled:
                continue
            if chunk.scored:
                answer.score_prompt(logits_WV)
            if chunk.ends and answer.push(logits_WV[-1]) is not None:
                ended.append(answer)
        with self._changed:
            for answer in ended:
                self._running.remove(answer)
