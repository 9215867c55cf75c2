"""Judges of pairs of answers: a model at an address with OpenAI's interface, or a program; how far to trust them.

A judge is asked in both orders, since most favour a position (Zheng et al. 2023, arXiv:2306.05685). What a model said
is kept on disk, so that the same question is paid for once.

Legend: S pairs of answers.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from workbench.config.sections.basic_sections import an_address
from workbench.config.sections.distill_config import RequestLimits
from workbench.config.sections.rewards_config import CRITERIA, JudgeReward
from workbench.data.text.generated_answers import Answer
from workbench.data.text.messages import Message
from workbench.errors import ConfigError
from workbench.evaluation import comparison, metrics
from workbench.evaluation.comparison import Floats
from workbench.runs import files
from workbench.runs.openai_client import OpenAIClient

Pairs = Sequence[tuple[Answer, Answer]]
Judge = Callable[[Pairs], list[int]]
"""Says of each pair which answer is better: 1 the first, 2 the second, 0 neither."""
RESAMPLES = 2000
_VERDICT = re.compile(r"\[\[([ABC])\]\]")
_CODES = {"A": 1, "B": 2, "C": 0}
_FORM = (
    "You compare two answers to the same request. {criteria} The order of the answers, their length and their layout "
    "do not count. Give your reasons in a few sentences. Then end with [[A]] where answer A is better, [[B]] where "
    "answer B is better, or [[C]] where neither is."
)


def named(
    judge: str, model: str | None, *, timeout: float, key: str = "--judge", option: str = "--judge-model"
) -> Judge:
    """A judge as a person names it: an address with a model, or a program; `timeout` in seconds, of an answer of the
    address or of all verdicts of the program. Raises ConfigError: an address without a model, or the other way round.
    """
    served = judge.startswith(("http://", "https://"))
    if served != (model is not None):
        raise ConfigError(
            f"{judge}: which model there? Write {option} NAME."
            if served
            else f"{option} {model}: is for an address, such as http://localhost:8000/v1. Leave it out."
        )
    if model is None:
        return lambda pairs: comparison.judge_verdicts(judge, pairs, timeout=timeout, key=key)
    try:
        url = an_address(judge)
    except ValueError as error:
        raise ConfigError(f"{key}: {error}") from None
    return AddressJudge(url, model, limits=RequestLimits(timeout=timeout), key=key)


@dataclass(frozen=True)
class AddressJudge:
    """A model at an address, which is asked about each pair at temperature 0. `key`: names it in errors."""

    url: str
    model: str
    criteria: str = CRITERIA
    limits: RequestLimits = field(default_factory=RequestLimits)
    max_tokens: int = 1024
    key: str = "--judge"

    def __call__(self, pairs: Pairs) -> list[int]:
        """Verdicts; one that names neither answer, as where it was cut, is 0. Raises WorkbenchError: the address does
        not answer, or none of its verdicts can be read."""
        bodies = [self._body(*pair) for pair in pairs]
        places = [self._place(body) for body in bodies]
        lacking = {place: body for place, body in zip(places, bodies, strict=True) if not place.exists()}
        if lacking:
            self._ask(lacking)
        said = [str(files.read_json(place).get("said")) for place in places]
        letters = [_VERDICT.findall(each) for each in said]
        if said and not any(letters):
            raise ConfigError(
                f"{self.key}={self.url}: none of {len(said):,} answers of {self.model} ends with [[A]], [[B]] or "
                f"[[C]]. The first: {said[0][-200:]!r}. Name a model that follows instructions."
            )
        return [_CODES[each[-1]] if each else 0 for each in letters]

    def _ask(self, lacking: dict[Path, dict[str, Any]]) -> None:
        kept = "verdicts that are there by then are kept"
        limits = self.limits
        client = OpenAIClient.of(self.url, key=self.key, kept=kept, seconds=limits.timeout, retries=limits.retries)

        def ask(place: Path, body: dict[str, Any]) -> None:
            said = client.said(client.sent("POST", "chat/completions", body))
            files.write_json(place, {"model": self.model, "said": said})

        with client, ThreadPoolExecutor(limits.at_once) as pool:
            asked = [pool.submit(ask, *each) for each in lacking.items()]
            try:
                for each in asked:
                    each.result()
            finally:
                pool.shutdown(cancel_futures=True)

    def _body(self, first: Answer, second: Answer) -> dict[str, Any]:
        request, texts = _said(first.messages) or first.prompt, [first.text, second.text]
        if first.messages != second.messages:  # each goes on from answers of its own
            request = (
                f"{first.prompt}\n\nBoth answers come last in a conversation of their own. Compare those last turns."
            )
            texts = [_said(each.example.messages) for each in (first, second)]
        shown = f"Request:\n{request}\n\n[Answer A]\n{texts[0]}\n[End of answer A]\n\n[Answer B]\n{texts[1]}\n"
        return {
            "model": self.model,
            "messages": [
                {"role": "system", "content": _FORM.format(criteria=self.criteria)},
                {"role": "user", "content": f"{shown}[End of answer B]"},
            ],
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "seed": 0,
        }

    def _place(self, body: dict[str, Any]) -> Path:
        digest = hashlib.sha256(json.dumps([self.url, body], sort_keys=True).encode()).hexdigest()
        folder = files.cache_folder() / "verdicts" / digest[:2]
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"{digest}.json"


def _said(messages: Sequence[Message]) -> str:
    return "\n\n".join(f"{each['role']}: {each.get('content') or ''}" for each in messages)


class BothOrders(NamedTuple):
    """Verdicts on pairs, each seen in both orders."""

    forward_S: list[int]
    """With the first answer in front."""
    backward_S: list[int]
    """With the second answer in front."""

    @property
    def win_S(self) -> Floats:
        """Share of the first answer: 1 where it is better in both orders, 0.5 where the order decides."""
        return comparison.wins_by_verdict(self.forward_S, self.backward_S)

    @property
    def bias(self) -> dict[str, float]:
        """`order_agreement`, how often both orders say the same, and `first_chosen`, how often a verdict that decides
        is for the answer in front, with its 95 % interval over pairs: one half without a bias."""
        told = {"order_agreement": comparison.order_agreement(self.forward_S, self.backward_S)}
        front_S = np.asarray([[each == 1 for each in side] for side in self], dtype=np.float64)
        decided_S = np.asarray([[each != 0 for each in side] for side in self], dtype=np.float64)
        some_S = decided_S.sum(0) > 0
        if some_S.any():
            share_S = front_S.sum(0)[some_S] / decided_S.sum(0)[some_S]
            low, high = comparison.win_rate_interval(share_S)
            told |= {"first_chosen": float(share_S.mean()), "first_chosen_low": low, "first_chosen_high": high}
        return told


def in_both_orders(judge: Judge, pairs: Pairs) -> BothOrders:
    """Verdicts on each pair and on the same pair the other way round."""
    verdicts = judge([*pairs, *((second, first) for first, second in pairs)])
    return BothOrders(verdicts[: len(pairs)], verdicts[len(pairs) :])


def agreement(people_S: Sequence[int], judge_S: Sequence[int], *, seed: int = 0) -> dict[str, float]:
    """How far a judge agrees with people on the same pairs, each 1, 2 or 0 (neither).

    `agreement` is the share of pairs with the same verdict, with Wilson's 95 % interval; `kappa` is Cohen's (1960),
    (p_o - p_e) / (1 - p_e), with the 95 % interval of the percentiles of a bootstrap over pairs. It is 0 where chance
    alone agrees as often.
    """
    people, said = np.asarray(people_S), np.asarray(judge_S)
    wilson = metrics.accuracy_interval(float((people == said).sum()), len(people))
    found = {"agreement": float((people == said).mean()), "agreement_low": wilson.low, "agreement_high": wilson.high}
    draws = np.random.default_rng([seed, 31]).integers(len(people), size=(RESAMPLES, len(people)))
    low, high = np.percentile([kappa(people[draw], said[draw]) for draw in draws], [2.5, 97.5])
    return found | {"kappa": kappa(people, said), "kappa_low": float(low), "kappa_high": float(high)}


def kappa(one_S: Any, other_S: Any) -> float:
    """Cohen's kappa of two raters; 1 where both always give the same single verdict."""
    one, other = np.asarray(one_S), np.asarray(other_S)
    expected = float(sum((one == code).mean() * (other == code).mean() for code in _CODES.values()))
    observed = float((one == other).mean())
    return 1.0 if expected == 1 else (observed - expected) / (1 - expected)


class JudgedShares:
    """The share of the other answers to its prompt that an answer beats by a judge, in both orders, ties half."""

    def __init__(self, config: JudgeReward) -> None:
        limits = RequestLimits(at_once=config.at_once, timeout=config.timeout)
        self._judge = AddressJudge(
            config.url, config.model, config.criteria, limits, config.max_tokens, key="rewards, judge: url"
        )

    def __call__(self, answers: Sequence[Answer]) -> list[float]:
        groups: dict[tuple[str, str], list[Answer]] = {}
        for each in answers:
            groups.setdefault((each.place, each.prompt), []).append(each)
        contests = [
            pair for group in groups.values() for pair in itertools.combinations({e.text: e for e in group}.values(), 2)
        ]  # equal answers are even
        shares = dict[tuple[str, str, str, str], float]()
        for (one, other), share in zip(contests, in_both_orders(self._judge, contests).win_S.tolist(), strict=True):
            shares[one.place, one.prompt, one.text, other.text] = share
            shares[one.place, one.prompt, other.text, one.text] = 1 - share

        def beaten(answer: Answer) -> float:
            group = groups[answer.place, answer.prompt]
            won = sum(shares.get((answer.place, answer.prompt, answer.text, each.text), 0.5) for each in group)
            return (won - 0.5) / max(1, len(group) - 1)  # without the half that it wins of itself

        return [beaten(each) for each in answers]
