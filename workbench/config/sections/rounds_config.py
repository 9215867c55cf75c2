"""The section `rounds`: how often a model answers, is judged, and learns from what it wrote."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, SerializeAsAny

from workbench.config.sections.rewards_config import RewardSource
from workbench.schema import Section, Unit


class RoundsConfig(Section):
    """Rounds of sampling, judging and training, each of which begins with the adapter of the one before."""

    count: Annotated[PositiveInt, Unit("rounds")] = 3
    """Most rounds."""
    score: tuple[SerializeAsAny[RewardSource], ...] = ()
    """Rewards that say which answers are good, summed; each has a kind: function, number, regex, json, unit_tests,
    vote, likelihood, judge or model."""
    to: Literal["auto", "best", "accepted", "pairs"] = "auto"
    """What is learnt of the answers to a prompt: the best one (best-of-n), all different ones with a reward of `least`
    (rejection sampling), or the best and the worst as a pair (iterative DPO). auto: pairs with of=prefer, best with
    of=sft."""
    n: Annotated[int, Field(ge=2), Unit("answers to a prompt")] = 8
    """How many are written to each prompt of a round."""
    temperature: PositiveFloat = 1.0
    """Logits are divided by it."""
    max_new_tokens: Annotated[PositiveInt, Unit("tokens")] = 256
    """Most tokens of an answer, the one that ends it included; answers that it cuts are not learnt."""
    least: float | None = None
    """Lowest reward of an answer that is learnt, of a pair the chosen one; null: any."""
    margin: NonNegativeFloat = 0.0
    """By how much the rewards of a pair differ at least."""
    on_worse: Literal["stop", "go_on"] = "stop"
    """After a round whose adapter answers held-out prompts worse than the best before it: end, or train the rounds that
    are left. The best round is shipped."""
    warm_up: str | None = Field(default=None, min_length=1)
    """Rows that recipe sft teaches before the first round, such as how an answer is written: a model none of whose
    answers is ever good learns nothing. null: rounds begin with the backbone, or with the run that `start` of the
    task's section names."""
    warm_up_steps: Annotated[PositiveInt, Unit("steps")] = 16
    """Steps of that training."""
    warm_up_rate: PositiveFloat | None = None
    """Its learning rate; null: train.learning_rate."""
