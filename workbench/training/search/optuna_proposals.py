"""Proposals of settings by Optuna's samplers, and how much of the differences between trials each setting explains."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.config.sections.search_config import Range, SearchConfig
from workbench.training.search.halving import Standing

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.samplers import BaseSampler
    from optuna.study import Study
    from optuna.trial import FrozenTrial

DIGITS = 4
"""Significant digits of a proposed number, so that a person can read and write it."""
ATTEMPTS = 20
"""Proposals for each new setting: some of them were tried before."""

Settings = dict[str, Any]


def propose(
    search: SearchConfig, tried: Sequence[Settings], standings: Sequence[Standing], *, count: int, seed: int
) -> list[Settings]:
    """`count` settings that were not tried, fewer where the space has no more; a function of the arguments only.

    Args:
        tried: Settings so far.
        standings: Losses of each of them, by rung.
        seed: Of the run.
    """
    study = studied(search, tried, standings, seed=seed, top=search.rungs)
    known = {_key(each) for each in tried}
    proposals: list[Settings] = []
    asked = distributions(search)
    for _ in range(ATTEMPTS * count):
        if len(proposals) == count:
            return proposals
        params = study.ask(asked).params
        settings = dict[str, Any]()
        for key, each in search.space.items():
            value = params[key]
            if not isinstance(each, Range):
                settings[key] = each[value]
            elif each.integer:
                settings[key] = int(value)
            else:
                settings[key] = min(max(float(f"{value:.{DIGITS}g}"), each.low), each.high)
        if _key(settings) not in known:
            known.add(_key(settings))
            proposals.append(settings)
    rest = (each for each in _enumerated(search) if _key(each) not in known)
    return [*proposals, *itertools.islice(rest, count - len(proposals))]


def studied(
    search: SearchConfig, tried: Sequence[Settings], standings: Sequence[Standing], *, seed: int, top: int
) -> Study:
    """Optuna's study of what was tried, in memory. A trial that did not reach rung `top` counts as pruned."""
    import optuna

    def frozen(settings: Settings, standing: Standing) -> FrozenTrial:
        places = {key: each.index(settings[key]) for key, each in search.space.items() if not isinstance(each, Range)}
        ended = math.isfinite(standing.get(top, math.inf))
        return optuna.trial.create_trial(
            state=optuna.trial.TrialState.COMPLETE if ended else optuna.trial.TrialState.PRUNED,
            value=standing[top] if ended else None,
            params={**settings, **places},
            distributions=distributions(search),
            intermediate_values=dict(standing),
        )

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(sampler=_sampler(search, seed=seed, number=len(tried)))
    study.add_trials([frozen(*each) for each in zip(tried, standings, strict=True) if each[1]])
    return study


def distributions(search: SearchConfig) -> dict[str, BaseDistribution]:
    """The space as Optuna's distributions; a choice is known by its index, since it may be a list."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    def of(each: Range | tuple[Any, ...]) -> BaseDistribution:
        if not isinstance(each, Range):
            return CategoricalDistribution(list(range(len(each))))
        if each.integer:
            return IntDistribution(int(each.low), int(each.high), log=each.log)
        return FloatDistribution(each.low, each.high, log=each.log)

    return {key: of(each) for key, each in search.space.items()}


def _sampler(search: SearchConfig, *, seed: int, number: int) -> BaseSampler:
    """A fresh sampler for the trials from `number` on, so that a restart proposes the same."""
    import optuna

    drawn = int(np.random.SeedSequence([seed, number]).generate_state(1)[0])
    if search.sampler == "random":
        return optuna.samplers.RandomSampler(seed=drawn)
    with warnings.catch_warnings():  # `constant_liar` spreads the proposals of one round, and is experimental
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return optuna.samplers.TPESampler(seed=drawn, constant_liar=True)


def _enumerated(search: SearchConfig) -> Iterator[Settings]:
    """Every setting of a space; of a range of floats as many numbers as there are trials, so that one is new."""

    def values(each: Range | tuple[Any, ...]) -> Sequence[Any]:
        if not isinstance(each, Range):
            return each
        if each.integer:
            return range(int(each.low), int(each.high) + 1)
        spaced = np.geomspace if each.log else np.linspace
        numbers: list[float] = spaced(each.low, each.high, search.trials).tolist()
        return numbers

    for chosen in itertools.product(*map(values, search.space.values())):
        yield dict(zip(search.space, chosen, strict=True))


def _key(settings: Settings) -> str:
    return repr(sorted(settings.items(), key=lambda item: item[0]))  # values may not compare


LEAST_TRIALS = 4
"""Trials below which importances are not computed."""


def importances(
    search: SearchConfig, tried: Sequence[Settings], standings: Sequence[Standing], *, seed: int
) -> dict[str, float]:
    """Share of the variance that each setting explains, largest first (Hutter et al. 2014); empty for few trials.

    It is the variance of trials' ranks by loss at the first rung, which all trials have; ranks, so that one exploded
    trial does not explain everything. What matters early need not matter at the end.
    """
    import optuna

    first = {trial: each[0] for trial, each in enumerate(standings) if math.isfinite(each.get(0, math.inf))}
    if len(first) < LEAST_TRIALS:
        return {}
    order = sorted(first, key=lambda trial: (first[trial], trial))
    places = {trial: {0: float(place)} for place, trial in enumerate(order)}
    study = studied(search, [tried[trial] for trial in places], list(places.values()), seed=seed, top=0)
    evaluator = optuna.importance.FanovaImportanceEvaluator(seed=seed)
    shares = optuna.importance.get_param_importances(study, evaluator=evaluator)
    return {key: float(value) for key, value in shares.items()}
