"""Judges of pairs: what a model at an address says, once for each question, and how far it agrees with people."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.metrics import cohen_kappa_score

from tests.fake_teacher import FakeServer
from workbench.config.sections.rewards_config import JudgeReward
from workbench.data.text.generated_answers import Answer
from workbench.errors import ConfigError
from workbench.evaluation import judges
from workbench.evaluation.judges import AddressJudge, BothOrders, JudgedShares
from workbench.runs import openai_client


class JudgeServer(FakeServer):
    """Prefers the longer answer, unless `verdict` decides by the two texts."""

    def __init__(self) -> None:
        super().__init__()
        self.verdict: Any = lambda a, b: "[[A]]" if len(a) > len(b) else "[[B]]" if len(b) > len(a) else "[[C]]"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[JudgeServer]:
    monkeypatch.setattr(openai_client, "WAITS", (0.0,) * 7)
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path / "cache"))
    server = JudgeServer()
    server.answer = lambda body: answer(server, body)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def answer(server: JudgeServer, body: dict[str, Any]) -> dict[str, Any]:
    shown = body["messages"][-1]["content"]
    first = shown.split("[Answer A]\n")[1].split("\n[End of answer A]")[0]
    second = shown.split("[Answer B]\n")[1].split("\n[End of answer B]")[0]
    said = f"I look at both, [[C]] at first. {server.verdict(first, second)}"
    return {"choices": [{"index": 0, "message": {"role": "assistant", "content": said}, "finish_reason": "stop"}]}


def pair(first: str, second: str, prompt: str = "Why?") -> tuple[Answer, Answer]:
    return Answer(prompt, first), Answer(prompt, second)


def test_each_question_is_asked_once(server: JudgeServer) -> None:
    asks, pairs = AddressJudge(server.url, "teacher"), [pair("long one", "short"), pair("a", "bb"), pair("x", "y")]
    judged = judges.in_both_orders(asks, pairs)
    assert judged == BothOrders([1, 2, 0], [2, 1, 0]) and judged.win_S.tolist() == [1, 0, 0.5]
    assert judged.bias["order_agreement"] == 1 and judged.bias["first_chosen"] == 0.5
    assert len(server.asked) == 6 and {each["temperature"] for each in server.asked} == {0}
    assert judges.in_both_orders(asks, pairs) == judged and len(server.asked) == 6, "kept on disk"
    AddressJudge(server.url, "teacher", criteria="Judge by style.")(pairs[:1])
    assert len(server.asked) == 7, "another question"


def test_a_judge_that_follows_the_order_is_told(server: JudgeServer) -> None:
    server.verdict = lambda a, b: "[[A]]"
    judged = judges.in_both_orders(AddressJudge(server.url, "teacher"), [pair(f"a{n}", f"b{n}") for n in range(9)])
    assert judged.win_S.tolist() == [0.5] * 9, "the order cancels out"
    assert judged.bias["order_agreement"] == 0 and judged.bias["first_chosen"] == 1
    assert judged.bias["first_chosen_low"] > 0.5


def test_what_is_no_verdict_decides_nothing(server: JudgeServer) -> None:
    server.verdict = lambda a, b: "[[A]]" if a == "good" else "no idea"
    server.answer = lambda body: {
        "choices": [{"message": {"content": "[[A]]" if "good" in body["messages"][-1]["content"] else "no idea"}}]
    }
    assert AddressJudge(server.url, "teacher")([pair("good", "b"), pair("c", "d")]) == [1, 0]
    with pytest.raises(ConfigError, match=r"none of 1 answers of teacher ends with \[\[A\]\]"):
        AddressJudge(server.url, "teacher")([pair("c", "d")])


def test_an_answer_has_the_share_that_it_beats(server: JudgeServer) -> None:
    """Of the other answers to its prompt, equal ones half, whatever stands between them."""
    texts = ["a", "bbb", "cc", "bbb"]
    answers = [Answer("Why?", text, place="row 1") for text in texts]
    answers.insert(2, Answer("How?", "alone", place="row 2"))
    shares = JudgedShares(JudgeReward(url=server.url, model="teacher"))(answers)
    assert shares == pytest.approx([0, (1 + 1 + 0.5) / 3, 0.0, 1 / 3, (1 + 1 + 0.5) / 3])
    assert len(server.asked) == 3 * 2, "three different texts, two orders"


@pytest.mark.parametrize("seed", range(3))
def test_kappa_is_cohens(seed: int) -> None:
    people, said = np.random.default_rng(seed).integers(0, 3, size=(2, 80))
    said = np.where(np.arange(80) % 3 > 0, people, said)
    found = judges.agreement(people.tolist(), said.tolist())
    assert found["kappa"] == pytest.approx(cohen_kappa_score(people, said))
    assert found["agreement"] == pytest.approx((people == said).mean())
    assert found["kappa_low"] < found["kappa"] < found["kappa_high"]
    assert found == judges.agreement(people.tolist(), said.tolist()), "the same resamples"


def test_kappa_of_chance_and_of_one_verdict() -> None:
    people = [1, 2] * 200
    said = np.random.default_rng(0).integers(1, 3, size=400).tolist()
    found = judges.agreement(people, said)
    assert found["kappa_low"] < 0 < found["kappa_high"]
    assert judges.kappa([1, 1], [1, 1]) == 1 and judges.kappa([1, 1], [2, 2]) == 0


@pytest.mark.parametrize(
    ("judge", "model", "message"),
    [
        ("http://localhost:1/v1", None, "Write --judge-model NAME"),
        ("sed s/.*/1/", "teacher", "is for an address"),
        ("http://", "teacher", "write an address such as"),
    ],
)
def test_an_address_goes_with_a_model(judge: str, model: str | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        judges.named(judge, model, timeout=1)
