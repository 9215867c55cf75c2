"""Section `reward`: what a reward model rates, and its loss."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat

from workbench.schema import Section

Aggregate = Literal["min", "product", "mean", "last"]
"""How the probabilities of the steps of an answer, that each is right, become one number."""


class RewardConfig(Section):
    """The reward model that recipe reward trains."""

    kind: Literal["outcome", "process"] = "outcome"
    """outcome: one number for a whole answer, learnt from pairs of answers. process: for each step of an answer the
    probability that it is right, learnt from rows with `completions`, a list of steps, and `labels`, one for each
    (Lightman et al. 2023, arXiv:2305.20050)."""
    centre: NonNegativeFloat = 0.01
    """kind=outcome: factor of the squared sum of a pair's two rewards, which is added to its loss: comparisons leave
    open what all rewards have in common, and this keeps it near 0 (Eisenstein et al. 2023). 0: nothing is added."""
    separator: Annotated[str, Field(min_length=1)] = "\n"
    """kind=process: stands between the steps of a row, and parts an answer into steps where there is none but its
    text."""
    aggregate: Aggregate = "min"
    """kind=process: the reward of a whole answer from the probabilities of its steps, for `sample`, `reinforce` and
    scores of answers: the lowest (Wang et al. 2024, arXiv:2312.08935), their product (Lightman et al. 2023), mean, or
    the last."""
