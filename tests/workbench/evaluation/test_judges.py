"""Judges of pairs: what a model at an address says, once for each question, and how far it agrees with people."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sklearn.metrics import cohen_kappa_score

from tests.fake_judge import JudgeServer, judge
from workbench.config.sections.distill_config import RequestLimits
from workbench.config.sections.rewards_config import JudgeReward
from workbench.data.text.generated_answers import Answer
from workbench.errors import BackboneError, ConfigError
from workbench.evaluation import judges
from workbench.evaluation.judges import AddressJudge, BothOrders, JudgedShares

__all__ = ["judge"]


def pair(first: str, second: str, prompt: str = "Why?") -> tuple[Answer, Answer]:
    return Answer(prompt, first), Answer(prompt, second)


def test_each_question_is_asked_once(judge: JudgeServer) -> None:
    asks, pairs = AddressJudge(judge.url, "teacher"), [pair("long one", "short"), pair("a", "bb"), pair("x", "y")]
    judged = judges.in_both_orders(asks, pairs)
    assert judged == BothOrders([1, 2, 0], [2, 1, 0]) and judged.win_S.tolist() == [1, 0, 0.5]
    assert judged.bias["order_agreement"] == 1 and judged.bias["first_chosen"] == 0.5
    assert len(judge.asked) == 6 and {each["temperature"] for each in judge.asked} == {0}
    assert judges.in_both_orders(asks, pairs) == judged and len(judge.asked) == 6, "kept on disk"
    AddressJudge(judge.url, "teacher", criteria="Judge by style.")(pairs[:1])
    assert len(judge.asked) == 7, "another question"


def test_a_judge_that_follows_the_order_is_told(judge: JudgeServer) -> None:
    judge.verdict = lambda a, b: "[[A]]"
    judged = judges.in_both_orders(AddressJudge(judge.url, "teacher"), [pair(f"a{n}", f"b{n}") for n in range(9)])
    assert judged.win_S.tolist() == [0.5] * 9, "the order cancels out"
    assert judged.bias["order_agreement"] == 0 and judged.bias["first_chosen"] == 1
    assert judged.bias["first_chosen_low"] > 0.5


def test_what_is_no_verdict_decides_nothing(judge: JudgeServer) -> None:
    judge.verdict = lambda a, b: "[[A]]" if a == "good" else "no idea"
    judge.answer = lambda body: {
        "choices": [{"message": {"content": "[[A]]" if "good" in body["messages"][-1]["content"] else "no idea"}}]
    }
    assert AddressJudge(judge.url, "teacher")([pair("good", "b"), pair("c", "d")]) == [1, 0]
    with pytest.raises(ConfigError, match=r"none of 1 answers of teacher ends with \[\[A\]\]"):
        AddressJudge(judge.url, "teacher")([pair("c", "d")])


@pytest.mark.parametrize("wrong", [{"error": "no more"}, {"choices": []}, {"choices": [{"text": "[[A]]"}]}, [1], 3])
def test_an_answer_without_a_message_is_told(judge: JudgeServer, wrong: Any) -> None:
    well, many = judge.answer, [pair("good", "b"), pair("c", "dd")]
    assert well is not None
    judge.answer = lambda body: wrong if "good" not in body["messages"][-1]["content"] else well(body)
    with pytest.raises(BackboneError, match=r"--judge=http.*/chat/completions"):
        AddressJudge(judge.url, "teacher", limits=RequestLimits(at_once=1))(many)
    judge.answer = well
    assert AddressJudge(judge.url, "teacher")(many) == [1, 2] and len(judge.asked) == 3, "the first is kept"


def test_an_answer_has_the_share_that_it_beats(judge: JudgeServer) -> None:
    """Of the other answers to its prompt, equal ones half, whatever stands between them."""
    texts = ["a", "bbb", "cc", "bbb"]
    answers = [Answer("Why?", text, place="row 1") for text in texts]
    answers.insert(2, Answer("How?", "alone", place="row 2"))
    shares = JudgedShares(JudgeReward(url=judge.url, model="teacher"))(answers)
    assert shares == pytest.approx([0, (1 + 1 + 0.5) / 3, 0.0, 1 / 3, (1 + 1 + 0.5) / 3])
    assert len(judge.asked) == 3 * 2, "three different texts, two orders"
    alike = [Answer("Why?", "a", place="row 1"), Answer("Why?", "a", place="row 1")]
    assert JudgedShares(JudgeReward(url=judge.url, model="teacher"))(alike) == [0.5, 0.5]


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
