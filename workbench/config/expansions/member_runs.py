"""Members of a sweep or search: each is a run, whose settings are written over those that all have in common."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import reduce
from typing import Any, Generic, TypeVar

from pydantic import ValidationError

from workbench.adapters import METHODS
from workbench.config.sections.run_sections import RunSections
from workbench.config.sections.search_config import shown
from workbench.schema import Mistakes, Section, did_you_mean, explain

_ANY = "*"
_ABLE: dict[str, tuple[str, ...]] = {
    "seed": (),
    "adapter": (_ANY,),
    "batch": ("size",),
    "train": ("epochs", "steps", "learning_rate", "weight_decay", "max_grad_norm"),
    "schedule": (_ANY,),
    "optimizer": (
        "name",
        "betas",
        "eps",
        "momentum",
        "lookahead",
        "lookahead_alpha",
        "layer_decay",
        "head_rate",
        "l1",
        "l2",
        "l2_start",
        "scaling",
        "reference_batch",
    ),
    "average": (_ANY,),
    "prefer": ("beta", "alpha", "gamma", "label_smoothing", "desirable", "undesirable"),
    "classes": ("weights", "beta", "gamma", "smoothing", "logit_adjustment", "sampling"),
    "evaluate": ("patience",),
}
"""Sections, and those of their keys that members may differ in."""

_APART = "Run a {recipe} for each value: `workbench run` with --each puts them side by side."
_WHY = {
    "model": f"the members share one loaded backbone. {_APART}",
    "data": f"the members learn from the same rows and are measured on the same held-out rows. {_APART}",
    "masking": f"the members are measured on the same hidden tokens. {_APART}",
    "prefer": f"the members are measured by one loss against one reference. {_APART}",
    "image": f"the members read the same pictures. {_APART}",
    "audio": f"the members read the same recordings. {_APART}",
    "classes": f"the members read the same rows with the same labels. {_APART}",
    "batch.tokens_per_device": "it never changes the result. Leave it out of the {recipe}.",
    "batch.packing": "it never changes the result. Leave it out of the {recipe}.",
    "batch.shared_prefix": "it never changes the result. Leave it out of the {recipe}.",
}
"""Why members cannot differ in a key, or in the keys of a section."""
_SHARED = "it is the same for all members. Write it beside the {recipe}, not in it."


METHOD = "adapter.method"


def refusal(config: RunSections, key: str, *, recipe: str, over: Mapping[str, Any]) -> str | None:
    """Why members of a sweep or search cannot differ in `key`; None where they can.

    Args:
        over: The values that a key takes, of all keys that they differ in; anything else for a range of numbers.
    """
    name, _, rest = key.partition(".")
    if name not in type(config).model_fields:
        return "unknown key." + did_you_mean(key, _known(config))
    section = getattr(config, name)
    if name == "adapter" and METHOD in over and key != METHOD:
        methods = over[METHOD]
        known = [each for each in methods if each in METHODS] if isinstance(methods, (tuple, list)) else []
        having = [each for each in known if rest in METHODS[each].model_fields]
        if len(having) == len(known):
            return None
        if not having:
            names = sorted({name for each in known for name in METHODS[each].model_fields})
            return f"no method of {METHOD} has such a key." + did_you_mean(rest, names)
        lacking = ", ".join(each for each in known if each not in having)
        return (
            f"{lacking} has no {rest}. Members of all methods differ in the same keys: leave {lacking} out of "
            f"{METHOD}, or write `adapter.{rest}` beside, with one value, for those that have it."
        )
    if isinstance(section, Section) and not rest and name in _ABLE:
        first = next(known for known in _known(config) if known.startswith(f"{name}."))
        return f"is a section. Name one of its keys, such as {first}."
    if name in ("image", "audio") and rest.partition(".")[0] in type(section).model_fields:
        return f"members cannot differ in {key}: {_WHY[name].format(recipe=recipe)}"
    if rest and (not isinstance(section, Section) or rest not in type(section).model_fields):
        own = [known for known in _known(config) if known.startswith(f"{name}.")]
        return "unknown key." + (
            did_you_mean(key, own, within=f"{name}.") if own else did_you_mean(key, _known(config))
        )
    if key in _WHY or not _is_able(name, rest):
        why = _WHY.get(key) or _WHY.get(name) or _SHARED
        return f"members cannot differ in {key}: {why.format(recipe=recipe)}"
    return None


def of_method(section: Mapping[str, Any], method: Any) -> dict[str, Any]:
    """The section `adapter` of a member of another method.

    Settings that are not a default of the method that they were written for hold for every method that has them; any
    other has the default of its own method.
    """
    old, new = (METHODS.get(str(each)) for each in (section.get("method", "lora"), method))
    if old is new or old is None or new is None:
        return {**section, "method": method}
    kept = {key: value for key, value in section.items() if key in new.model_fields and value != _default(old, key)}
    return {**kept, "method": method}


def _default(method: type[Section], key: str) -> Any:
    default = method.model_fields[key].get_default(call_default_factory=True)
    return list(default) if isinstance(default, tuple) else default


def _known(config: RunSections) -> list[str]:
    """Keys that members may differ in."""
    sections = {name: type(getattr(config, name)).model_fields for name in _ABLE if name != "seed"}
    keys = ["seed", *(f"{name}.{key}" for name, fields in sections.items() for key in fields if _is_able(name, key))]
    return [key for key in keys if key not in _WHY]


def _is_able(name: str, key: str) -> bool:
    return name in _ABLE and (key in _ABLE[name] or _ANY in _ABLE[name] or not key)


Run = TypeVar("Run", bound=RunSections)

LONGEST_NAME = 100
"""Characters of a folder's name."""


@dataclass(frozen=True)
class Trial(Generic[Run]):
    """One combination of values, and the run that it is."""

    name: str
    """Name of its folder: learning_rate=0.001,seed=0."""
    settings: Mapping[str, Any]
    """The value of each key that members differ in."""
    config: Run
    number: int
    """Its place among all members, from 0."""


def trials(
    config: Run, base: Mapping[str, Any], names: Sequence[str], wanted: Sequence[Mapping[str, Any]], *, section: str
) -> list[Trial[Run]]:
    """The run of each combination of settings.

    Args:
        base: Values of the run that all have in common.
        names: One for each.
        section: Place of the settings in the recipe, such as sweep.over.

    Raises:
        Mistakes: all that is wrong with any of them.
    """
    members, mistakes = [], dict[tuple[str, str], list[str]]()
    for number, (name, settings) in enumerate(zip(names, wanted, strict=True)):
        values = written(base, settings)
        try:
            run = type(config).model_validate(values)
        except ValidationError as error:
            for mistake in explain(type(config), values, error):
                mistakes.setdefault(mistake, []).append(name)
        else:
            members.append(Trial(name, {key: resolved(run, key) for key in settings}, run, number))
    keys = {key for settings in wanted for key in settings}
    require([_mistake(*mistake, names, len(wanted), keys, section) for mistake, names in mistakes.items()])
    return members


def _mistake(place: str, text: str, names: list[str], members: int, keys: set[str], section: str) -> tuple[str, str]:
    """A mistake of some members; a value of theirs is named by its place in the recipe."""
    if place in keys:
        return f"{section}.{place}", text
    if len(names) == members:
        return place, text
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return place, f"{text} (member {names[0]}{more})"


def require(mistakes: list[tuple[str, str]]) -> None:
    """Raise Mistakes where there are any."""
    if mistakes:
        raise Mistakes(mistakes)


def written(values: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """`values` with each key of `settings` in its section; a method's section has the keys of that method."""
    result = deepcopy(dict(values))
    if METHOD in settings:
        result["adapter"] = of_method(result.get("adapter") or {}, settings[METHOD])
    for key, value in settings.items():
        *sections, last = key.split(".")
        reduce(lambda inner, name: inner.setdefault(name, {}), sections, result)[last] = value
    return result


def resolved(run: RunSections, key: str) -> Any:
    """The value of a key in a run."""
    return reduce(lambda inner, name: inner[name], key.split("."), run.model_dump(mode="json"))


def folder_name(settings: Mapping[str, Any]) -> str:
    """A folder's name; keys by their last part where that is enough."""
    lasts = [key.rpartition(".")[2] for key in settings]
    keys = lasts if len(set(lasts)) == len(lasts) else list(settings)
    name = ",".join(f"{key}={shown(value)}" for key, value in zip(keys, settings.values(), strict=True))
    return re.sub(r"[^\w.,=+-]", "_", name)[:LONGEST_NAME]


def sharing_refusal(config: RunSections, recipe: str) -> str | None:
    """Why devices cannot share the backbone of all members; None where they can, or each holds all of it.

    Args:
        recipe: With its article.
    """
    if not config.distributed.sharded or config.distributed.engine == "fsdp2":
        return None
    return (
        f"{recipe} trains its members in one bank, each with an optimizer of its own, and DeepSpeed steps one. Write "
        "distributed={engine: fsdp2, zero: 3}, or leave it out."
    )
