"""Keys of a run that the members of one training over one backbone may differ in, and why they may not in others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workbench.adapters import METHODS
from workbench.config.sections.run_sections import RunSections
from workbench.schema import Section, did_you_mean

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

_APART = "Run a {recipe} for each value, and put them side by side with `workbench compare`."
_WHY = {
    "model": f"the members share one loaded backbone. {_APART}",
    "data": f"the members learn from the same rows and are measured on the same held-out rows. {_APART}",
    "masking": f"the members are measured on the same hidden tokens. {_APART}",
    "prefer": f"the members are measured by one loss against one reference. {_APART}",
    "image": f"the members read the same pictures. {_APART}",
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
    if name == "image" and rest.partition(".")[0] in type(config.image).model_fields:
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
