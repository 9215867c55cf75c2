"""Text of an answer comes in pieces that add up to what its tokens decode to, and ends before a stop word."""

from __future__ import annotations

import queue
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from tests.workbench.evaluation.serving.conftest import Serve
from workbench.config import ModelConfig
from workbench.evaluation.serving.openai_format import CompletionRequest
from workbench.evaluation.serving.scheduler import (
    AnswerInProgress,
    AnswerPiece,
    AnswerText,
    Interrupted,
    QueueFull,
    Sampling,
    Scheduler,
    ShuttingDown,
    TimedOut,
)
from workbench.evaluation.serving.served_models import TextModel
from workbench.models import backbones


@pytest.fixture(scope="module", params=["starter", "stories"])
def tokenizer(request: pytest.FixtureRequest, stories: str) -> PreTrainedTokenizerBase:
    return backbones.tokenizer(ModelConfig(id="starter" if request.param == "starter" else stories))


TEXTS = st.text(st.sampled_from("ab .\n<é漢🙂"), min_size=1, max_size=24)


@given(st.data())
def test_pieces_add_up(tokenizer: PreTrainedTokenizerBase, data: st.DataObject) -> None:
    prompt, ids = (tokenizer.encode(data.draw(TEXTS), add_special_tokens=False) for _ in range(2))
    prompt = prompt[-6:]
    cut = data.draw(st.integers(0, len(ids)))
    text = AnswerText(tokenizer, prompt, ())
    pieces = [text.push(token) for token in ids]
    whole, before = (tokenizer.decode(each, skip_special_tokens=True) for each in (prompt + ids, prompt))
    assert "".join(pieces) + text.finish() == whole[len(before) :]
    assert not text.stopped
    half = AnswerText(tokenizer, prompt, ())
    begun = "".join(map(half.push, ids[:cut])) + half.finish()  # it may end within a character
    assert whole[len(before) :].startswith(begun.rstrip("\ufffd"))


@given(st.data())
def test_it_ends_before_the_first_stop_word(tokenizer: PreTrainedTokenizerBase, data: st.DataObject) -> None:
    ids = tokenizer.encode(data.draw(TEXTS), add_special_tokens=False)
    stops = data.draw(st.lists(st.text("ab .", min_size=1, max_size=3), min_size=1, max_size=3))
    plain, text, written = AnswerText(tokenizer, [], ()), AnswerText(tokenizer, [], stops), ""
    for token in ids:
        written += text.push(token)
        assert not any(stop in written for stop in stops)
    written += text.finish()
    whole = "".join(map(plain.push, ids)) + plain.finish()
    found = [(place + len(stop), place) for stop in stops if (place := whole.find(stop)) >= 0]
    assert text.stopped == bool(found)
    assert written == (whole[: min(found)[1]] if found else whole)  # the one that is complete first


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

    def written() -> bool:
        seen.add(model.scheduler.running)
        return all(len(each.answer.answer) == 20 for each in many)

    _until(written)
    assert max(seen) == 2 and all(each.whole() for each in many)
    model.scheduler.close()


def test_an_answer_that_takes_too_long_is_interrupted(model: TextModel) -> None:
    late = Heard(model, tokens=400, seconds=0.05)
    model.scheduler.submit([late.answer])
    with pytest.raises(TimedOut):
        late.whole()
    _until(lambda: model.scheduler.running == 0)


def test_who_listens_and_fails_is_nobody_elses_matter(model: TextModel, caplog: pytest.LogCaptureFixture) -> None:
    def gone(event: AnswerPiece | Interrupted) -> None:
        if isinstance(event, Interrupted):
            raise RuntimeError("its loop has ended")

    late, after = Heard(model, tokens=400, seconds=0.05), Heard(model, tokens=3)
    late.answer.listener = gone
    model.scheduler.submit([late.answer])
    _until(lambda: (model.scheduler.running, model.scheduler.waiting) == (0, 0))
    model.scheduler.submit([after.answer])
    assert after.whole() and model.scheduler.between(lambda: 3) == 3
    assert "its loop has ended" in caplog.text


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
