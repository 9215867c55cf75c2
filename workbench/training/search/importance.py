"""How much of the differences between trials each setting explains, by Optuna's functional analysis of variance."""

from __future__ import annotations

import math
from collections.abc import Sequence

from workbench.config.sections.search_config import SearchConfig
from workbench.training.search.halving import Standing
from workbench.training.search.proposals import Settings, studied

LEAST = 4
"""Trials that a statement needs."""


def importances(
    search: SearchConfig, tried: Sequence[Settings], standings: Sequence[Standing], *, seed: int
) -> dict[str, float]:
    """Share of the variance that each setting explains, largest first (Hutter et al. 2014); empty for few trials.

    What varies is the place of a trial among all by its loss at the first rung, which all have: places, so that one
    exploded trial does not explain everything. What matters early need not be what matters at the end.
    """
    import optuna

    first = {trial: each[0] for trial, each in enumerate(standings) if math.isfinite(each.get(0, math.inf))}
    if len(first) < LEAST:
        return {}
    order = sorted(first, key=lambda trial: (first[trial], trial))
    places = {trial: {0: float(place)} for place, trial in enumerate(order)}
    study = studied(search, [tried[trial] for trial in places], list(places.values()), seed=seed, top=0)
    evaluator = optuna.importance.FanovaImportanceEvaluator(seed=seed)
    shares = optuna.importance.get_param_importances(study, evaluator=evaluator)
    return {key: float(value) for key, value in shares.items()}
