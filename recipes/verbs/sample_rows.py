"""Rows from sampled answers: the best ones for SFT, all good ones, pairs for preferences, or all with their rewards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from workbench.data.text.formats import Example
from workbench.evaluation.rewards import SPREAD

Row = dict[str, Any]


class ScoredAnswer(NamedTuple):
    """An answer with its reward."""

    text: str
    finished: bool
    """Whether it ended by itself, and not because it was as long as answers may be."""
    reward: float
    parts: dict[str, float]
    """Its rewards by name, and how far reward models disagree on it, where there are several."""


class AnswerGroup(NamedTuple):
    """The answers to a prompt."""

    question: Example
    answers: Sequence[ScoredAnswer]


def rows(groups: Sequence[AnswerGroup], to: str, *, least: float | None, margin: float) -> list[Row]:
    """Rows as recipes sft and prefer read them, in the order of the prompts.

    Args:
        to: best, accepted, pairs or all. Answers that did not end by themselves are left out of all but `all`: a row
            would teach to end where they were cut.
        least: The lowest reward of an answer that is kept; None for every one. In pairs it is for the chosen one.
        margin: By how much the rewards of a pair differ at least; equal ones are never a pair.
    """
    lowest = float("-inf") if least is None else least
    make = _MAKERS[to]
    return [row for group in groups for row in make(group, lowest, margin)]


def best(answers: Sequence[ScoredAnswer]) -> ScoredAnswer | None:
    """The finished answer with the highest reward, of equal ones the first."""
    return max((each for each in answers if each.finished and each.text), key=lambda each: each.reward, default=None)


def _best(group: AnswerGroup, least: float, _: float) -> Iterator[Row]:
    top_answer = best(group.answers)
    if top_answer is not None and top_answer.reward >= least:
        yield _answered(group.question, top_answer)


def _accepted(group: AnswerGroup, least: float, _: float) -> Iterator[Row]:
    known: set[str] = set()
    for each in group.answers:
        if each.finished and each.text and each.reward >= least and each.text not in known:
            known.add(each.text)
            yield _answered(group.question, each)


def _pairs(group: AnswerGroup, least: float, margin: float) -> Iterator[Row]:
    better = best(group.answers)
    worse = min(
        (each for each in group.answers if each.finished and each.text), key=lambda each: each.reward, default=None
    )
    if better is None or worse is None or better.reward < least or not better.reward - worse.reward > 0:
        return
    if better.reward - worse.reward >= margin:
        row = {"chosen": better.text, "rejected": worse.text, "margin": better.reward - worse.reward}
        yield _prompt(group.question) | row


def _all(group: AnswerGroup, least: float, _: float) -> Iterator[Row]:
    for number, each in enumerate(group.answers):
        if each.reward >= least:
            named = {name: value for name, value in each.parts.items() if name != SPREAD}
            parts: Row = {"rewards": named} if len(named) > 1 else {}
            parts |= {SPREAD: each.parts[SPREAD]} if SPREAD in each.parts else {}
            facts = {"place": group.question.place, "answer_number": number, "finished": each.finished, **parts}
            yield _answered(group.question, each) | facts


_MAKERS: dict[str, Callable[[AnswerGroup, float, float], Iterator[Row]]] = {
    "best": _best,
    "accepted": _accepted,
    "pairs": _pairs,
    "all": _all,
}
TO = tuple(_MAKERS)
"""Kinds of rows."""


def _prompt(question: Example) -> Row:
    if not question.messages:
        return {"prompt": question.whole_text}
    return {"messages": list(question.messages), **({"tools": list(question.tools)} if question.tools else {})}


def _answered(question: Example, answer: ScoredAnswer) -> Row:
    if not question.messages:
        return _prompt(question) | {"completion": answer.text, "reward": answer.reward}
    turns = [*question.messages, {"role": "assistant", "content": answer.text}]
    return _prompt(question) | {"messages": turns, "reward": answer.reward}
