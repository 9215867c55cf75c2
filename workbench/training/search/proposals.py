"""Proposals of settings by Optuna's samplers: a function of the space, the seed and what earlier trials gave."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
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
"""Digits of a proposed number, which a person reads and writes."""
ATTEMPTS = 20
"""Proposals for each that is wanted, of which some were tried before."""

Settings = dict[str, Any]


def propose(
    search: SearchConfig, tried: Sequence[Settings], standings: Sequence[Standing], *, count: int, seed: int
) -> list[Settings]:
    """So many settings that were not tried.

    Args:
        tried: Settings so far.
        standings: What each of them gave.
        seed: Of the run. What is proposed depends on it, on the space and on the other arguments, on nothing else.
    """
    study = studied(search, tried, standings, seed=seed, top=search.rungs)
    known = {_key(each) for each in tried}
    proposals: list[Settings] = []
    asked = distributions(search)
    for _ in range(ATTEMPTS * count):
        if len(proposals) == count:
            return proposals
        settings = _settings(study.ask(asked).params, search)
        if _key(settings) not in known:
            known.add(_key(settings))
            proposals.append(settings)
    rest = (each for each in _enumerated(search) if _key(each) not in known)
    return [*proposals, *itertools.islice(rest, count - len(proposals))]


def studied(
    search: SearchConfig, tried: Sequence[Settings], standings: Sequence[Standing], *, seed: int, top: int
) -> Study:
    """Optuna's study of what was tried, in memory. A trial that did not come to `top` counts as pruned."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(sampler=_sampler(search, seed=seed, number=len(tried)))
    study.add_trials(
        [
            _frozen(search, settings, standing, top=top)
            for settings, standing in zip(tried, standings, strict=True)
            if standing
        ]
    )
    return study


def distributions(search: SearchConfig) -> dict[str, BaseDistribution]:
    """The space in Optuna's words; choices are known by their places, since they may be lists."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    def of(each: Range | tuple[Any, ...]) -> BaseDistribution:
        if not isinstance(each, Range):
            return CategoricalDistribution(list(range(len(each))))
        if each.integer:
            return IntDistribution(int(each.low), int(each.high), log=each.log)
        return FloatDistribution(each.low, each.high, log=each.log)

    return {key: of(each) for key, each in search.space.items()}


def _sampler(search: SearchConfig, *, seed: int, number: int) -> BaseSampler:
    """A fresh one for the trials from `number` on, so that a restart proposes the same."""
    import optuna

    drawn = int(np.random.SeedSequence([seed, number]).generate_state(1)[0])
    if search.sampler == "random":
        return optuna.samplers.RandomSampler(seed=drawn)
    with warnings.catch_warnings():  # proposals of one wave keep away from each other, which Optuna may still change
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return optuna.samplers.TPESampler(seed=drawn, constant_liar=True)


def _frozen(search: SearchConfig, settings: Settings, standing: Standing, *, top: int) -> FrozenTrial:
    import optuna

    places = {key: each.index(settings[key]) for key, each in search.space.items() if not isinstance(each, Range)}
    ended = math.isfinite(standing.get(top, math.inf))
    return optuna.trial.create_trial(
        state=optuna.trial.TrialState.COMPLETE if ended else optuna.trial.TrialState.PRUNED,
        value=standing[top] if ended else None,
        params={**settings, **places},
        distributions=distributions(search),
        intermediate_values=dict(standing),
    )


def _settings(params: Mapping[str, Any], search: SearchConfig) -> Settings:
    """Proposed values, numbers in few digits and inside their range."""
    settings = dict[str, Any]()
    for key, each in search.space.items():
        value = params[key]
        if not isinstance(each, Range):
            settings[key] = each[value]
        elif each.integer:
            settings[key] = int(value)
        else:
            settings[key] = min(max(float(f"{value:.{DIGITS}g}"), each.low), each.high)
    return settings


def _enumerated(search: SearchConfig) -> Iterator[Settings]:
    """Every setting of a space; of a range of fractions as many numbers as there are trials, so that one is new."""
    for chosen in itertools.product(*(_values(each, search.trials) for each in search.space.values())):
        yield dict(zip(search.space, chosen, strict=True))


def _values(each: Range | tuple[Any, ...], trials: int) -> Sequence[Any]:
    if not isinstance(each, Range):
        return each
    if each.integer:
        return range(int(each.low), int(each.high) + 1)
    spaced = np.geomspace if each.log else np.linspace
    fractions: list[float] = spaced(each.low, each.high, trials).tolist()
    return fractions


def _key(settings: Settings) -> str:
    return repr(sorted(settings.items(), key=lambda item: item[0]))
