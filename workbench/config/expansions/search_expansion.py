"""The members of a search: the run that each proposed setting is, and the ends of the space, checked before any."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from workbench.config.expansions import member_runs, sweep_expansion
from workbench.config.expansions.member_runs import Run, Trial
from workbench.config.sections.run_sections import RunSections
from workbench.config.sections.search_config import Range
from workbench.schema import Mistakes

MOST = 256
"""Combinations of the ends of all ranges that are checked; of a larger space each key is checked by itself."""


def trials(config: Run, settings: Sequence[Mapping[str, Any]]) -> list[Trial[Run]]:
    """The runs of proposed settings, named by number and values.

    Raises:
        Mistakes: settings that each are right and do not go together.
    """
    names = [f"{number:03}-{member_runs.folder_name(each)}" for number, each in enumerate(settings)]
    values = config.model_dump(mode="json")
    return member_runs.trials(
        config,
        {**values, **config.as_task(), "search": {}, "budget": {"tokens": config.budget.tokens}},
        names,
        settings,
        section="search.space",
    )


def ends(config: Run) -> list[Trial[Run]]:
    """A member for each combination of choices and ends of ranges, or for each end by itself where they are many.

    Raises:
        Mistakes: all that is wrong with the search.
    """
    search = config.search
    mistakes = [(f"search.space.{key}", why) for key in search.space if (why := _refusal(config, key))]
    if not search.space:
        mistakes.append(
            ("search.space", "needs a key, such as {train.learning_rate: {low: 1.0e-4, high: 1.0e-2, log: true}}.")
        )
    elif search.settings < search.trials:
        mistakes.append(
            (
                "search.trials",
                f"{search.trials}, and search.space has {search.settings:g} settings. Write "
                f"search.trials={search.settings:g}, or recipe=sweep, which trains each to its end.",
            )
        )
    if config.train.steps is None and config.train.epochs is None and config.budget.timed and not config.budget.tokens:
        mistakes.append(
            ("budget", "ends the search, not its members. Write train.epochs=1 or train.steps too, of each member.")
        )
    if config.evaluate.patience is not None:
        mistakes.append(("evaluate.patience", "halving ends members that do worse. Leave it out."))
    if (why := member_runs.sharing_refusal(config, "a search")) is not None:
        mistakes.append(("distributed", why))
    member_runs.require([*mistakes, *sweep_expansion.misfits(config, "a search")])
    ends = {key: each.ends if isinstance(each, Range) else each for key, each in config.search.space.items()}
    first = {key: values[0] for key, values in ends.items()}
    if math.prod(map(len, ends.values())) <= MOST:
        wanted = [dict(zip(ends, values, strict=True)) for values in itertools.product(*ends.values())]
    else:
        wanted = [first, *({**first, key: value} for key, values in ends.items() for value in values[1:])]
    members = _whole(config, wanted)
    places = [
        (f"search.space.{key}", _TWICE)
        for key, each in config.search.space.items()
        if not isinstance(each, Range) and len({str(value) for value in each}) < len(each)
    ]
    member_runs.require(places)
    return members


def _whole(config: Run, wanted: Sequence[Mapping[str, Any]]) -> list[Trial[Run]]:
    """`trials`; a fraction where a whole number belongs is told what to write."""
    try:
        return trials(config, wanted)
    except Mistakes as error:
        cure = " Between low and high whole numbers need integer: true."
        fractions = {f"search.space.{key}" for key, each in config.search.space.items() if isinstance(each, Range)}
        raise Mistakes(
            [
                (place, text + cure if place in fractions and "integer" in text else text)
                for place, text in error.mistakes
            ]
        ) from None


def shared(config: Run) -> Run:
    """The first end of the space: model, data and held-out rows are those of all members."""
    return ends(config)[0].config


def _refusal(config: RunSections, key: str) -> str | None:
    if key == "seed":
        return "a search would choose the luckiest seed. Write recipe=sweep to see what seeds make."
    if key == "evaluate.patience":
        return "halving ends members that do worse. Leave it out."
    return member_runs.refusal(config, key, recipe="search", over=config.search.space)


_TWICE = "duplicate value. Write each once."
