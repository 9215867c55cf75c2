"""Answers share an engine: they wait, are turned away, cancelled, and end in time."""

from __future__ import annotations

import queue
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.workbench.evaluation.serving.conftest import Serve
from workbench.evaluation.serving.answer_progress import (
    AnswerInProgress,
    AnswerPiece,
    Interrupted,
    Sampling,
    ShuttingDown,
    TimedOut,
)
from workbench.evaluation.serving.requests import CompletionRequest
from workbench.evaluation.serving.scheduler import QueueFull, Scheduler
from workbench.evaluation.serving.served_models import TextModel


class Heard:
    """What is told of one answer."""

    def __init__(self, model: TextModel, *, tokens: int, seconds: float = 60.0, **settings: Any) -> None:
        self.events: queue.Queue[AnswerPiece | Interrupted] = queue.Queue()
        asked = CompletionRequest(model=model.name, prompt="Once upon", max_tokens=tokens)
        (prompt,) = model.prompts(asked)
        sampling = Sampling(tokens, **settings)
        self.answer: AnswerInProgress = model.answer(prompt, asked, sampling, self.events.put, seconds=seconds)

    def whole(self) -> str:
        text = ""
        while True:
            event = self.events.get(timeout=60)
            if isinstance(event, Interrupted):
                raise event
            text += event.text
            if event.reason is not None:
                return text


@pytest.fixture
def model(serve: Serve, lora_runs: list[Path]) -> TextModel:
    return serve(lora_runs[:1], rows=2, queue=2)[0]


def _until(condition: Any) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_who_waits_too_long_in_line_is_turned_away_and_a_cancelled_one_makes_room(model: TextModel) -> None:
    long = [Heard(model, tokens=400) for _ in range(4)]
    for each in long:
        model.scheduler.submit([each.answer])
    with pytest.raises(QueueFull):
        model.scheduler.submit([Heard(model, tokens=1).answer])
    _until(lambda: (model.scheduler.running, model.scheduler.waiting) == (2, 2))
    model.scheduler.cancel([each.answer for each in long])
    _until(lambda: (model.scheduler.running, model.scheduler.waiting) == (0, 0))
    last = Heard(model, tokens=3)
    model.scheduler.submit([last.answer])
    assert last.whole()


def test_answers_wait_for_memory(serve: Serve, lora_runs: list[Path]) -> None:
    loaded = serve(lora_runs[:1], rows=8)[0]
    model = replace(loaded, scheduler=Scheduler(loaded.scheduler._engine, rows=8, tokens=130, queue=8))
    many = [Heard(model, tokens=20) for _ in range(5)]  # each has room for 64 tokens
    model.scheduler.submit([each.answer for each in many])
    seen = set()
    while any(len(each.answer.answer) < 20 for each in many):
        seen.add(model.scheduler.running)
        time.sleep(0.001)
    assert max(seen) == 2 and all(each.whole() for each in many)
    model.scheduler.close()


def test_an_answer_that_takes_too_long_is_interrupted(model: TextModel) -> None:
    late = Heard(model, tokens=400, seconds=0.05)
    model.scheduler.submit([late.answer])
    with pytest.raises(TimedOut):
        late.whole()
    _until(lambda: model.scheduler.running == 0)


def test_closing_interrupts_what_runs_and_takes_nothing_more(model: TextModel) -> None:
    long = Heard(model, tokens=400)
    model.scheduler.submit([long.answer])
    model.scheduler.close()
    with pytest.raises(ShuttingDown):
        long.whole()
    with pytest.raises(ShuttingDown):
        model.scheduler.submit([Heard(model, tokens=1).answer])


def test_a_seed_decides_a_drawn_answer_whatever_runs_beside_it(model: TextModel) -> None:
    def drawn(seed: int, beside: int) -> str:
        heard = Heard(model, tokens=16, temperature=1.0, top_p=0.9, seed=(seed, 0))
        others = [Heard(model, tokens=5, temperature=1.5) for _ in range(beside)]
        model.scheduler.submit([*(each.answer for each in others), heard.answer])
        return heard.whole()

    assert drawn(1, 0) == drawn(1, 2) != drawn(2, 0)


def test_the_nucleus_of_a_tiny_share_is_the_greedy_answer(model: TextModel) -> None:
    greedy, nucleus = Heard(model, tokens=12), Heard(model, tokens=12, temperature=1.3, top_p=1e-9)
    model.scheduler.submit([greedy.answer, nucleus.answer])
    assert greedy.whole() == nucleus.whole()


def test_a_failure_of_the_engine_interrupts_and_the_next_answer_is_written(
    model: TextModel, caplog: pytest.LogCaptureFixture
) -> None:
    broken = Heard(model, tokens=4)
    broken.answer.prompt = [10**9]  # no such token
    model.scheduler.submit([broken.answer])
    with pytest.raises(Interrupted):
        broken.whole()
    assert "index out of range" in caplog.text
    after = Heard(model, tokens=2)
    model.scheduler.submit([after.answer])
    assert after.whole()
    assert threading.active_count() < 20
