"""A search before it trains: its first members, what they will cost, and why it may not begin."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from workbench.config import RunConfig
from workbench.config.expansions import search_expansion
from workbench.config.expansions.member_runs import Trial
from workbench.errors import ConfigError
from workbench.training import bank_trainer
from workbench.training.optim.schedules import total_steps
from workbench.training.search import optuna_proposals
from workbench.training.search.halving import Halving

EARLY = 4
"""Steps before which a comparison says little."""


def first_wave(config: RunConfig) -> list[Trial[RunConfig]]:
    """The members that a search begins with."""
    search = config.search
    settings = optuna_proposals.propose(search, [], [], count=search.most_at_once, seed=config.seed)
    return search_expansion.trials(config, settings)


def apart(config: RunConfig, trial: Trial[RunConfig]) -> str | None:
    """Why a member trains alone; None where a bank holds it."""
    if not config.search.together:
        return "search.together=false asks for it"
    return bank_trainer.refusal(trial.config)


def require_bank(config: RunConfig, ends: Sequence[Trial[RunConfig]]) -> None:
    """Refuse members that no bank holds, where devices share the backbone: it is cut for all members at once.

    Args:
        ends: Members at the ends of the space.
    """
    reasons = [why for trial in ends if (why := apart(config, trial)) is not None]
    if config.distributed.sharded and reasons:
        raise ConfigError(
            f"A search over shares of its backbone trains its members in one bank, and {reasons[0]}. Change that, or "
            "leave section distributed out."
        )


def require_rungs(config: RunConfig, rows: int, ends: Sequence[Trial[RunConfig]]) -> None:
    """Refuse comparisons that come before a first step, or twice after the same one.

    Args:
        rows: Of the training data.
        ends: Members at the ends of the space.
    """
    search = config.search
    for trial in ends:
        steps = total_steps(trial.config, rows)
        if steps is not None and steps < search.eta**search.rungs:
            most = max(0, math.floor(math.log(steps) / math.log(search.eta) + 1e-9))
            cure = f"search.rungs={most}" if most else f"search.eta={max(2, steps)} search.rungs=1"
            raise ConfigError(
                f"search.rungs={search.rungs} with eta={search.eta}: members are first compared after 1 of "
                f"{search.eta**search.rungs} parts of their {steps} steps, which is less than a step. Write {cure}, or "
                "longer trainings."
            )


def outlook(config: RunConfig, steps: int | None) -> Iterator[str]:
    """Sentences on what a search will do.

    Args:
        steps: Of a whole training; None where a budget alone ends it.
    """
    search = config.search
    wave = first_wave(config)
    why = apart(config, wave[0])
    how = "together in one bank" if why is None else f"one after another: {why}"
    who = "by chance" if search.sampler == "random" else "where earlier ones did well"
    yield f"{search.trials} settings, proposed {who}; {len(wave)} members begin, {how}. The first: {wave[0].name}."
    halving = Halving(search.eta, search.rungs)
    counts = halving.everything(search.trials)
    ways = [
        f"{count} to {halving.in_words(rung)}{'' if steps is None else f' ({math.ceil(share * steps):,})'}"
        for rung, (count, share) in enumerate(zip(counts, halving.shares, strict=True))
    ]
    cost = f"{'' if len(wave) == search.trials else 'about '}{halving.cost_of(counts):.3g} trainings"
    yield f"Members come {', '.join(ways)} of their steps: {cost}, instead of {search.trials}."
    if steps is not None and (first := math.ceil(halving.shares[0] * steps)) < EARLY:
        yield (
            f"The first comparison comes after step {first} of {steps:,}, where the best settings may not lead yet. "
            "Fewer search.rungs, or longer trainings, compare later."
        )
