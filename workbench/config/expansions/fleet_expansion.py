"""The members of a fleet: the run that each user's settings make of those of the recipe."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from workbench.adapters import Method
from workbench.config.expansions import member_runs
from workbench.config.expansions.member_runs import LONGEST_NAME, Run, Trial
from workbench.config.sections.fleet_config import merged, nested, of_folder
from workbench.config.sections.run_sections import RunSections
from workbench.schema import ROOT, explain

_NAME = re.compile(rf"[A-Za-z0-9_+=-][\w.+=-]{{0,{LONGEST_NAME - 1}}}", re.ASCII)
_OWN = {
    "seed": (),
    "adapter": (),
    "data": (),
    "masking": (),
    "classes": (),
    "batch": ("size",),
    "train": ("epochs", "steps", "learning_rate", "weight_decay", "max_grad_norm"),
    "schedule": (),
    "optimizer": (),
    "average": (),
    "evaluate": (),
    "save": (),
}
"""Sections that each member has for itself, and which of their keys; none: all."""
_SIZE = "batch.size"


def with_rows(values: dict[str, Any]) -> dict[str, Any]:
    """The values of a fleet with training rows of its own, which a run must have: those of its first member.

    Where no member has any, a place of theirs stands for it: the mistake is a member's, and its own check tells it.
    """
    fleet, data = values.get("fleet"), values.get("data", {})
    if not isinstance(data, Mapping) or data.get("train") or data.get("sources"):
        return values
    members = of_folder(fleet.get("members")) if isinstance(fleet, Mapping) else None
    each = map(nested, members.values()) if isinstance(members, Mapping) else ()
    first: Mapping[str, Any] = next((own["data"] for own in each if isinstance(own.get("data"), Mapping)), {})
    rows = {key: first[key] for key in ("train", "sources") if key in first}
    return {**values, "data": {**data, **(rows or {"train": "fleet.members.NAME.data.train"})}}


def trials(config: Run) -> list[Trial[Run]]:
    """Every member of a fleet, in order.

    Raises:
        Mistakes: all that is wrong with any of them, by member.
    """
    member_runs.require([*_misfits(config), *_foreign(config)])
    base = {**config.model_dump(mode="json"), **config.as_task(), "fleet": {}}
    members, mistakes = list[Trial[Run]](), list[tuple[str, str]]()
    for number, (name, settings) in enumerate(config.fleet.members.items()):
        values = _over(base, nested(settings))
        try:
            run = type(config).model_validate(values)
        except ValidationError as error:
            mistakes += [
                (f"fleet.members.{name}" + ("" if place == ROOT else f".{place}"), why)
                for place, why in explain(type(config), values, error)
            ]
        else:
            mistakes += [(f"fleet.members.{name}.{place}", why) for place, why in _apart(run)]
            members.append(Trial(name, _flat(settings), run, number))
    member_runs.require(mistakes)
    return members


def plain(name: str) -> str:
    """A name with what no member's name has replaced."""
    return re.sub(r"[^\w.=+-]", "_", name, flags=re.ASCII)[-LONGEST_NAME:]


def grown(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Whether two configurations, as dictionaries, are those of a fleet and of the same with further members."""
    if old.get("recipe") != new.get("recipe") or not (old.get("fleet") or {}).get("members"):
        return False
    before, after = old["fleet"], new["fleet"]
    known = len(before["members"])
    same = list(after["members"].items())[:known] == list(before["members"].items())
    return same and known < len(after["members"]) and before == {**after, "members": before["members"]}


def with_batches(config: Run, share: Callable[[int], int]) -> Run:
    """The same fleet, of whose members those with a batch size of their own have another one: `share` of it."""
    members = {name: _flat(settings) for name, settings in config.fleet.members.items()}
    own = {
        name: {**settings, _SIZE: share(settings[_SIZE])} if _SIZE in settings else settings
        for name, settings in members.items()
    }
    return config.model_copy(update={"fleet": config.fleet.model_copy(update={"members": own})})


def _misfits(config: RunSections) -> Iterator[tuple[str, str]]:
    members = config.fleet.members
    if not members:
        yield "fleet.members", "needs a member, such as {alice: {data.train: alice.jsonl, adapter.rank: 8}}."
    for name in members:
        if not _NAME.fullmatch(name):
            yield (
                f"fleet.members.{name}",
                f"names a folder: letters, digits and _ - + . = only, {LONGEST_NAME} at most.",
            )
    if config.budget.timed:
        yield "budget", "a fleet cannot end in time. Write train.steps or train.epochs, of each member."
    if config.freeze.policy != "none":
        yield "freeze", "members come and go, and a fleet freezes no layers for all of them. Leave it out."
    if config.data.streaming.on:
        yield "data.streaming", "each member streams rows of its own. Write fleet.members.NAME.data.streaming."
    if config.trackers:
        yield "trackers", "a fleet sends nothing anywhere. Leave it out."
    if (why := member_runs.sharing_refusal(config, "a fleet")) is not None:
        yield "distributed", why


def _apart(run: RunSections) -> Iterator[tuple[str, str]]:
    """Settings of a member for which a run of its own asks the backbone before it trains."""
    if run.data.select.by_backbone:
        yield (
            "data.select",
            f"by={run.data.select.by} asks the backbone before a run. Write {run.data.select.random_instead}.",
        )
    if run.data.curriculum.measured:
        yield "data.curriculum", f"by={run.data.curriculum.by} asks the backbone first. Train it in a run of its own."
    if run.evaluate.dynamics is True:
        yield "evaluate.dynamics", "a fleet records no losses of rows. Leave it out, or train it in a run of its own."
    if run.data.mix.by == "learned":
        yield "data.mix", "by=learned follows the losses of single rows. Write data.mix.by=size or weight."


def _foreign(config: RunSections) -> Iterator[tuple[str, str]]:
    """Settings that members cannot have for themselves, and members without rows."""
    for name, settings in config.fleet.members.items():
        place, known = f"fleet.members.{name}", type(config).model_fields
        for key in _flat(settings):
            section, _, rest = key.partition(".")
            wanted, inside = _OWN.get(section), getattr(type(getattr(config, section, None)), "model_fields", {})
            unknown = section not in known or (rest and inside and rest.partition(".")[0] not in inside)
            if unknown or wanted == () or (wanted and (rest in wanted)):
                continue  # what is unknown is told with its neighbours
            if key == f"{config.task.start}.start":
                yield f"{place}.{key}", f"members begin with fresh adapters. Leave it out, or train {name} alone."
                continue
            yield (
                f"{place}.{key}",
                f"the members of a fleet share {key}: one backbone, whose rows are computed together. "
                f"Write {section if not rest else key} beside fleet.members, or train {name} in a run of its own.",
            )
        data = nested(settings).get("data")
        if not isinstance(data, Mapping) or not (data.get("train") or data.get("sources")):
            yield f"{place}.data.train", f"the rows of {name} are missing. Write data.train=FILE."


def _over(base: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a member: its settings over those of all; those that it replaces as a whole are left out."""
    kept = {name: dict(value) if isinstance(value, Mapping) else value for name, value in base.items()}
    adapter, data = settings.get("adapter"), settings.get("data")
    if isinstance(adapter, Mapping) and "method" in adapter:
        known = Method.section_for(adapter).model_fields
        kept["adapter"] = {key: value for key, value in base["adapter"].items() if key in known}
    if isinstance(data, Mapping):
        kept["data"] |= {"train": "", "sources": {}}
        kept["data"] |= {key: dict[str, str]() for key in ("held_out", "test") if isinstance(data.get(key), Mapping)}
    return merged(kept, settings)


def _flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by section and key: {adapter.rank: 8}."""
    keys: dict[str, Any] = {}
    for section, value in nested(settings).items():
        keys |= (
            {f"{section}.{key}": each for key, each in value.items()}
            if isinstance(value, Mapping)
            else {section: value}
        )
    return keys
