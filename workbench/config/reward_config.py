"""Section `reward`: the loss of a reward model."""

from __future__ import annotations

from pydantic import NonNegativeFloat

from workbench.schema import Section


class RewardConfig(Section):
    """The reward model that recipe reward trains."""

    centre: NonNegativeFloat = 0.01
    """Factor of the squared sum of a pair's two rewards, which is added to its loss: comparisons leave open what all
    rewards have in common, and this keeps it near 0 (Eisenstein et al. 2023). 0: nothing is added."""
