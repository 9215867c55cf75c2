"""Foreign code that never ends is told so, and what was timed before goes on being timed."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable

import pytest
from transformers import AutoTokenizer

from workbench.data import time_limit
from workbench.data.text import chat
from workbench.data.text.chat import ChatEncoder
from workbench.data.text.formats import Example
from workbench.errors import BackboneError

ENDLESS = """\
{%- for message in messages %}{{ message.content }}{%- endfor %}
{%- for a in range(99999 if messages[0].content == 'a' else 0) %}{%- for b in range(99999) %}{%- endfor %}{%- endfor %}
"""
QUESTION = Example(
    "rows.jsonl, row 1", messages=({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"})
)


def test_a_template_that_never_ends_is_refused_with_its_row(stories: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "time_limit", lambda error: time_limit.time_limit(error, seconds=0.1))
    template = ChatEncoder(AutoTokenizer.from_pretrained(stories), ENDLESS)
    calls: list[Callable[[], object]] = [
        lambda: template.encode(QUESTION, loss_on="assistant"),
        lambda: template.prompt([{"role": "user", "content": "a"}]),
    ]
    for call in calls:
        with pytest.raises(BackboneError, match=r"was not done with it after .*\n  Correct it, or give another one"):
            call()


def _spin() -> None:
    while True:
        try:
            sum(range(1000))
        except Exception:
            continue


def test_code_cannot_catch_its_limit_and_an_earlier_alarm_stays_set() -> None:
    def handler(number: int, frame: object) -> None: ...

    before = signal.signal(signal.SIGVTALRM, handler)
    signal.setitimer(signal.ITIMER_VIRTUAL, 1000)
    try:
        with pytest.raises(KeyError), time_limit.time_limit(lambda: KeyError("late"), seconds=0.05):
            _spin()
        assert signal.getsignal(signal.SIGVTALRM) is handler
        assert 0 < signal.getitimer(signal.ITIMER_VIRTUAL)[0] < 1001
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def test_waiting_takes_no_processor_time() -> None:
    with time_limit.time_limit(AssertionError, seconds=0.05):
        time.sleep(0.1)


def test_other_threads_work_without_a_limit() -> None:
    done: list[int] = []

    def work() -> None:
        with time_limit.time_limit(AssertionError):
            done.append(1)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done
