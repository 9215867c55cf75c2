"""The members of a sweep: the run that each combination of values is."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import ValidationError

from workbench.config import curriculum_checks, distill_expansion, length_checks
from workbench.config.run_sections import RunSections
from workbench.config.sweep_config import shown
from workbench.schema import Mistakes, Section, did_you_mean, explain

Run = TypeVar("Run", bound=RunSections)

MOST = 1000
"""Members of a sweep."""
LONGEST_NAME = 100
"""Characters of a folder's name."""

_ANY = "*"
_ABLE: dict[str, tuple[str, ...]] = {
    "seed": (),
    "adapter": (_ANY,),
    "batch": ("size",),
    "train": ("epochs", "steps", "learning_rate", "weight_decay", "max_grad_norm"),
    "schedule": (_ANY,),
    "classes": ("weights", "beta", "gamma", "smoothing", "logit_adjustment", "sampling"),
    "evaluate": ("patience",),
}
"""Sections, and those of their keys that members may differ in."""

_APART = "Run a sweep for each value, and put them side by side with `workbench compare`."
_WHY = {
    "model": f"the members share one loaded backbone. {_APART}",
    "data": f"the members learn from the same rows and are measured on the same held-out rows. {_APART}",
    "masking": f"the members are measured on the same hidden tokens. {_APART}",
    "image": f"the members read the same pictures. {_APART}",
    "classes": f"the members read the same rows with the same labels. {_APART}",
    "adapter.method": f"the members share one method. {_APART}",
    "batch.tokens_per_device": "it never changes the result. Leave it out of the sweep.",
    "batch.packing": "it never changes the result. Leave it out of the sweep.",
}
"""Why members cannot differ in a key, or in the keys of a section."""
_SHARED = "it is the same for all members. Write it beside the sweep, not in it."


@dataclass(frozen=True)
class Trial(Generic[Run]):
    """One combination of values, and the run that it is."""

    name: str
    """Name of its folder: learning_rate=0.001,seed=0."""
    settings: Mapping[str, Any]
    """The value of each key of the sweep."""
    config: Run


def trials(config: Run) -> list[Trial[Run]]:
    """Every member of a sweep, in order.

    Raises:
        Mistakes: all that is wrong with any of them.
    """
    over = config.sweep.over
    _require(_misfits(config))
    combinations = [dict(zip(over, values, strict=True)) for values in itertools.product(*over.values())]
    names = [_name(settings) for settings in combinations]
    if len(set(names)) < len(names):
        names = [f"{number:03}-{name}" for number, name in enumerate(names)]
    base = {**config.model_dump(mode="json"), "recipe": config.sweep.of, "sweep": {}}
    found, mistakes = [], dict[tuple[str, str], list[str]]()
    for name, settings in zip(names, combinations, strict=True):
        values = _written(base, settings)
        try:
            run = type(config).model_validate(values)
        except ValidationError as error:
            for mistake in explain(type(config), values, error):
                mistakes.setdefault(mistake, []).append(name)
        else:
            found.append(Trial(name, {key: _resolved(run, key) for key in over}, run))
    _require([_mistake(*mistake, names, len(combinations), over) for mistake, names in mistakes.items()])
    _require([(f"sweep.over.{key}", _TWICE) for key in over if _repeats(key, over[key], found)])
    return found


def shared(config: Run) -> Run:
    """The first member with the sweep's own seed: model, data and held-out rows are those of all members."""
    return trials(config)[0].config.model_copy(update={"seed": config.seed})


def shipped_values(values: Mapping[str, Any], folder: Path, members: Mapping[str, Any]) -> dict[str, Any]:
    """The values of config.yaml in the run directory `folder`, as those of the run whose adapter it ships.

    Of a sweep that is its best member with the sweep's seed, which decides the held-out rows.

    Args:
        members: Of a sweep, its table `sweep.json`.
    """
    if values.get("recipe") != "sweep":
        return distill_expansion.shipped_values(values, folder)
    best = [each["settings"] for each in members.get("members", ()) if each["member"] == members["best"]]
    settings = {key: value for each in best for key, value in each.items() if key != "seed"}
    return _written({**values, "recipe": values.get("sweep", {}).get("of", "sft"), "sweep": {}}, settings)


def _misfits(config: RunSections) -> list[tuple[str, str]]:
    """Mistakes that are known before any member is looked at."""
    over = config.sweep.over
    found = [(f"sweep.over.{key}", why) for key in over if (why := _refusal(config, key))]
    if math.prod(map(len, over.values())) < 2:
        found.append(("sweep.over", "needs two members or more, such as {train.learning_rate: [1.0e-4, 1.0e-3]}."))
    if (count := math.prod(map(len, over.values()))) > MOST:
        found.append(("sweep.over", f"{count:,} members; {MOST:,} at most. Write fewer values."))
    if config.evaluate.every is None:
        found.append(("evaluate.every", "a sweep compares held-out losses. Write evaluate.every=0.25."))
    if config.data.select.by_backbone:
        found.append(("data.select", f"by={config.data.select.by} is for recipe=sft. Write data.select.by=random."))
    if config.data.sampling.by != "all":
        found.append(("data.sampling", "members of a sweep train on the same rows. Leave it out."))
    if config.data.mix.by == "learned":
        found.append(("data.mix", "by=learned gives each member rows of its own. Write data.mix.by=weight."))
    if reason := curriculum_checks.refusal(config, "a sweep"):
        found.append(("data.curriculum", reason))
    if reason := length_checks.refusal(config, "a sweep"):
        found.append(("data.length_warm_up", reason))
    if config.budget.timed:
        found.append(("budget", "a sweep cannot end in time. Write train.steps or budget.tokens, of each member."))
    if config.trackers:
        found.append(("trackers", "a sweep sends nothing anywhere. Leave it out."))
    return found


def _refusal(config: RunSections, key: str) -> str | None:
    """Why members cannot differ in `key`."""
    name, _, rest = key.partition(".")
    fields = type(config).model_fields
    if name not in fields:
        return "unknown key." + did_you_mean(key, _known(config))
    section = getattr(config, name)
    if isinstance(section, Section) and not rest and name in _ABLE:
        first = next(known for known in _known(config) if known.startswith(f"{name}."))
        return f"is a section. Name one of its keys, such as {first}."
    if name == "image" and rest.partition(".")[0] in type(config.image).model_fields:
        return f"members cannot differ in {key}: {_WHY[name]}"
    if rest and (not isinstance(section, Section) or rest not in type(section).model_fields):
        return "unknown key." + did_you_mean(key, _known(config))
    if key in _WHY or not _is_able(name, rest):
        return f"members cannot differ in {key}: {_WHY.get(key) or _WHY.get(name) or _SHARED}"
    return None


def _known(config: RunSections) -> list[str]:
    """Keys that members may differ in."""
    sections = {name: type(getattr(config, name)).model_fields for name in _ABLE if name != "seed"}
    keys = ["seed", *(f"{name}.{key}" for name, fields in sections.items() for key in fields if _is_able(name, key))]
    return [key for key in keys if key not in _WHY]


def _is_able(name: str, key: str) -> bool:
    return name in _ABLE and (key in _ABLE[name] or _ANY in _ABLE[name] or not key)


_TWICE = "duplicate value. Write each once."


def _repeats(key: str, values: Sequence[Any], found: Sequence[Trial[Run]]) -> bool:
    return len({str(trial.settings[key]) for trial in found}) < len(values)


def _mistake(place: str, text: str, names: list[str], members: int, over: Mapping[str, Any]) -> tuple[str, str]:
    """A mistake of some members; a value of the sweep is named by its place there."""
    if place in over:
        return f"sweep.over.{place}", text
    if len(names) == members:
        return place, text
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return place, f"{text} (member {names[0]}{more})"


def _require(mistakes: list[tuple[str, str]]) -> None:
    if mistakes:
        raise Mistakes(mistakes)


def _written(values: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """`values` with each key of `settings` in its section."""
    result = deepcopy(dict(values))
    for key, value in settings.items():
        *sections, last = key.split(".")
        reduce(lambda inner, name: inner.setdefault(name, {}), sections, result)[last] = value
    return result


def _resolved(run: RunSections, key: str) -> Any:
    return reduce(lambda inner, name: inner[name], key.split("."), run.model_dump(mode="json"))


def _name(settings: Mapping[str, Any]) -> str:
    """A folder's name; keys by their last part where that is enough."""
    lasts = [key.rpartition(".")[2] for key in settings]
    keys = lasts if len(set(lasts)) == len(lasts) else list(settings)
    name = ",".join(f"{key}={shown(value)}" for key, value in zip(keys, settings.values(), strict=True))
    return re.sub(r"[^\w.,=+-]", "_", name)[:LONGEST_NAME]
