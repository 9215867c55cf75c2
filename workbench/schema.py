"""Typed sections from plain values; every mistake of a file is reported at once."""

from __future__ import annotations

import ast
import difflib
import functools
import inspect
import itertools
import operator
import re
import textwrap
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self, TypeVar, get_args, get_origin

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, InitErrorDetails, PydanticCustomError

from workbench.errors import ConfigError


@functools.cache
def _field_docstrings(cls: type) -> dict[str, str]:
    """Docstrings of the fields that stand in the body of a class; none where it has no source file."""
    try:
        [tree] = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    except (OSError, TypeError):
        return {}
    assert isinstance(tree, ast.ClassDef)
    return {
        field.target.id: inspect.cleandoc(text.value.value)
        for field, text in itertools.pairwise(tree.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
    }


@dataclass(frozen=True)
class Unit:
    """Unit of a setting: `steps: Annotated[PositiveInt | None, Unit("steps")]`. It stands in the JSON schema."""

    name: str

    def __get_pydantic_json_schema__(self, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {**handler(core_schema), "unit": self.name}


_SHARE = re.compile(r"([\w ,=]+: )?(?P<what>Shares?|Probability|Chances?) (of|that) ")
"""Beginnings of docstrings that say that a number is a fraction of 1."""


def _share(field: JsonSchemaValue, text: str) -> str | None:
    """The unit of a number that is a fraction, by its docstring; None for anything else."""
    beginning, numbers = _SHARE.match(text), [field, *field.get("anyOf", ())]
    if beginning is None or not any(each.get("type") == "number" for each in numbers):
        return None
    return "share, as a fraction of 1" if beginning["what"].startswith("Share") else "probability"


@dataclass(frozen=True)
class NamesCode:
    """Marks a setting by which Python code is executed, for `code` to find: `hook: Annotated[Path, NamesCode()]`."""

    when: Callable[[Any], bool] = bool
    """Whether a value names code; by default each that is set."""
    beside: tuple[str, ...] = ()
    """Keys of the section that mean nothing without it."""
    stays: bool = False
    """Whether a run that is read without trust keeps it, as one that is required: who executes it asks for trust."""


CodeFile = Annotated[Path, NamesCode()]
"""A Python file that is executed."""
MayExecute = Annotated[bool, NamesCode()]
"""Permission to execute the Python code that another setting's folder or run names."""


@dataclass(frozen=True)
class HoldsSettings:
    """Marks a setting that holds settings of other runs."""

    read: Callable[[Any], Mapping[str, Mapping[str, Any]]]
    """The sections of each run by its name, from the value of the setting."""


class Section(BaseModel):
    """Base of every section: unknown keys are errors, values never change after loading."""

    # Validators are built where they are first used: at the import each would be built twice, once in what holds it.
    model_config = ConfigDict(defer_build=True, extra="forbid", frozen=True, allow_inf_nan=False)

    def differs(self, key: str) -> bool:
        """Whether the value of a key is not its default."""
        return bool(getattr(self, key) != type(self).model_fields[key].get_default(call_default_factory=True))

    @classmethod
    def section_for(cls, values: Any) -> type[Section]:
        """The class that `values` are an instance of: a subclass where one of their keys chooses it."""
        return cls

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return cls.documented(handler(core_schema), handler)

    @classmethod
    def documented(cls, schema: JsonSchemaValue, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """The JSON schema of this class with the docstrings of its fields.

        Read here and not at the import (`use_attribute_docstrings`): no run needs them, and they take 0.3 s.
        """
        properties = handler.resolve_ref_schema(schema).get("properties", {})
        for base in cls.__mro__:
            for name, text in _field_docstrings(base).items() if issubclass(base, Section) else ():
                if name in properties:
                    properties[name].setdefault("description", text)
                    if (unit := _share(properties[name], text)) is not None:
                        properties[name].setdefault("unit", unit)
        return schema


class ConsistentSection(Section):
    """A section whose values may contradict each other."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if mistakes := list(self._contradictions()):
            raise ValueError(" ".join(mistakes))
        return self

    @abstractmethod
    def _contradictions(self) -> Iterator[str]:
        """Sentences on values that do not go together."""


class Tagged(Section):
    """Base of a family of sections, of which one of their keys chooses the class.

    The base of a family sets the three class variables; its subclasses stand in `choices` by their value of the key.
    """

    tag: ClassVar[str]
    """The key that chooses."""
    untagged: ClassVar[str]
    """Its value where it is left out."""
    choices: ClassVar[Mapping[str, type[Section]]]
    refused: ClassVar[Mapping[str, str]] = {}
    """Values that a user may look for and that there are not: the reason, and what to write instead."""

    @classmethod
    def section_for(cls, values: Any) -> type[Section]:
        if "choices" not in cls.__dict__:
            return cls
        name = values.get(cls.tag, cls.untagged) if isinstance(values, dict) else None
        return cls.choices.get(name, cls) if isinstance(name, str) else cls

    @classmethod
    def misplaced(cls, values: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
        """Place and cure of settings that other sections of the family have."""
        return ()

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """That of any section of the family."""
        if "choices" not in cls.__dict__:
            return cls.documented(handler(core_schema), handler)
        sections = [
            section.documented(handler(section.__pydantic_core_schema__), handler)
            for section in dict.fromkeys(cls.choices.values())
        ]
        if cls.untagged not in cls.choices:
            own = cls.documented(handler(core_schema), handler)
            handler.resolve_ref_schema(own)["properties"][cls.tag] = {"const": cls.untagged, "default": cls.untagged}
            sections.insert(0, own)
        return {"anyOf": sections}

    @classmethod
    def names(cls) -> list[str]:
        """Values of the key that chooses."""
        return list(dict.fromkeys([cls.untagged, *cls.choices]))

    @classmethod
    def described(cls, name: str) -> str:
        """The section of that value of the key, in a line."""
        return (inspect.getdoc(cls.section_for({cls.tag: name})) or "").split("\n")[0]

    @model_validator(mode="wrap")
    @classmethod
    def _of_its_own_class(cls, values: Any, validate: Callable[[Any], Tagged]) -> Tagged:
        """`{tag: name}` becomes the section that `choices` has for that name."""
        if "choices" not in cls.__dict__ or not isinstance(values, dict):
            return validate(values)
        section = cls.section_for(values)
        if section is cls and (cls.untagged in cls.choices or values.get(cls.tag, cls.untagged) != cls.untagged):
            own = () if cls.untagged in cls.choices else (cls.untagged,)
            raise unknown(cls.tag, values[cls.tag], known=[*own, *cls.choices], refused=cls.refused)
        if mistakes := list(cls.misplaced(values)):
            raise Mistakes(mistakes)
        return validate(values) if section is cls else section.model_validate({cls.tag: cls.untagged, **values})  # type: ignore[return-value]


def unknown(key: str, value: Any, *, known: Iterable[str], refused: Mapping[str, str] | None = None) -> ValidationError:
    """The mistake of a section whose `key` chooses its class, where there is none of that name."""
    text = f"unknown {key} {value!r}." + did_you_mean(str(value), list(known))
    if isinstance(value, str) and (reason := (refused or {}).get(value)):
        text = f"{value} is not offered: {reason}"
    error = PydanticCustomError("unknown", "{text}", {"text": text})
    return ValidationError.from_exception_data(key, [InitErrorDetails(type=error, loc=(key,), input=value)])


class Mistakes(ValueError):
    """Several mistakes at places of their own, for a validator that looks at more than one place."""

    def __init__(self, mistakes: Sequence[tuple[str, str]]) -> None:
        super().__init__("; ".join(f"{place}: {text}" for place, text in mistakes))
        self.mistakes = tuple(mistakes)


ROOT = "the recipe"
"""Place of a mistake that is none of a single key."""
SectionT = TypeVar("SectionT", bound=Section)


def parse(section: type[SectionT], values: Mapping[str, Any], *, source: str) -> SectionT:
    """`values` as a section; raises one ConfigError that lists every mistake with its cure."""
    try:
        return section.model_validate(values)
    except ValidationError as error:
        mistakes = explain(section, values, error)
    count = "1 mistake" if len(mistakes) == 1 else f"{len(mistakes)} mistakes"
    config_error = ConfigError(
        "\n".join([f"{source} has {count}:", *(f"  {place}: {text}" for place, text in mistakes)])
    )
    config_error.mistakes = tuple(mistakes)
    raise config_error


def did_you_mean(word: str, known: Sequence[str], *, within: str = "", shown_by: str = "") -> str:
    """' Did you mean `x`?' for the nearest known word, otherwise the known words.

    Args:
        within: The beginning of all of them, which makes none nearer.
        shown_by: A command that shows them, to be named where they are too many for a sentence.
    """
    names = {each.removeprefix(within): each for each in known}
    near = difflib.get_close_matches(word.removeprefix(within), names, n=1, cutoff=0.6)
    if near:
        return f" Did you mean `{names[near[0]]}`?"
    return f" `{shown_by}` shows what there is." if shown_by else f" Known: {', '.join(sorted(known))}."


def explain(section: type[Section], values: Mapping[str, Any], error: ValidationError) -> list[tuple[str, str]]:
    """Place and cure of every mistake that pydantic found in `values`."""
    messages: dict[str, list[str]] = {}
    for item in error.errors(include_url=False):
        mistakes = item.get("ctx", {}).get("error")
        if isinstance(mistakes, Mistakes):
            for place, text in mistakes.mistakes:
                messages.setdefault(place, []).append(text)
            continue
        path = _locate(item["loc"], values)
        place = ".".join(map(str, path)) or ROOT
        if item["type"] == "extra_forbidden":
            text = "unknown key." + _key_meant(section, path, values)
        elif item["type"] == "missing" and isinstance(item["loc"][-1], int):
            text = f"expected a list such as [a, b], found {shown(item['input'])}."
        elif item["type"] == "too_long":
            text = f"expected at most {item['ctx']['max_length']} items, found {shown(item['input'])}."
        elif item["type"] == "missing":
            text = "is required."
        elif item["type"] == "unknown":
            text = item["msg"]
        elif item["type"] == "value_error":
            text = str(item["ctx"]["error"])
        elif item["type"] in ("too_short", "string_too_short"):
            unit = "item" if item["type"] == "too_short" else "character"
            text = f"expected at least {item['ctx']['min_length']} {unit}, found {shown(item['input'])}."
        elif item["type"] in ("model_type", "model_attributes_type"):
            fields = _at(section, path, values).model_fields
            text = f"expected keys of its own, such as {place}.{next(iter(fields))}, found {shown(item['input'])}."
            if item["input"] is None and not any(field.is_required() for field in fields.values()):
                text += f" Write {place}={{}} for the defaults."
        else:
            text = item["msg"].replace("Input should be", "expected").split(", unable to parse")[0]
            text = text.replace("a valid boolean, unable to interpret input", "true or false")
            text = f"{text.replace('a valid tuple', 'a list such as [a, b]')}, found {shown(item['input'])}."
        messages.setdefault(place, []).append(text)
    for section_place, text in _without_space(values):
        if below := [place for place in messages if f"{place}.".startswith(f"{section_place}.")]:
            messages = {place: texts for place, texts in messages.items() if place not in below} | {
                section_place: [text]
            }
    return [(place, _merged(texts)) for place, texts in messages.items()]


def _without_space(values: Any, place: str = "") -> Iterator[tuple[str, str]]:
    """Yield place and cure of mappings with `{name:value}`, which YAML reads as the name of nothing."""
    joined = {}
    for key, value in values.items() if isinstance(values, Mapping) else ():
        name, colon, rest = str(key).partition(":")
        if colon and rest and value is None:
            joined[name] = rest
        yield from _without_space(value, f"{place}.{key}" if place else str(key))
    if joined:
        pairs = ", ".join(f"{name}: {rest}" for name, rest in joined.items())
        yield place, f"a space belongs after each colon, else there is no value. Write {{{pairs}}}."


def _key_meant(section: type[Section], path: Sequence[int | str], values: Any) -> str:
    """' Did you mean `x`?': the keys of that name in sections below, the highest first, and the nearest beside it."""
    parent, own = _at(section, path[:-1], values), functools.reduce(operator.getitem, path[:-1], values)
    near = did_you_mean(str(path[-1]), list(parent.model_fields))
    within = sorted(_named_below(parent, str(path[-1]), own), key=len)[:2]
    if not within:
        return near
    named = [f"`{'.'.join(map(str, [*path[:-1], *below]))}`" for below in within]
    return f" Did you mean {' or '.join([*named, *re.findall('mean (.*)[?]', near)])}?"


def _named_below(section: type[Section], key: str, values: Any) -> Iterator[tuple[str, ...]]:
    """Yield the path of each key of that name in the sections below a section that has `values`."""
    for name, field in section.model_fields.items():
        own = values.get(name) if isinstance(values, dict) else None
        several = getattr(field.annotation, "__origin__", None) in (dict, list, tuple)
        for choice in () if several else _choices(field.annotation):
            if issubclass(choice, Section):
                below = choice.section_for(own)
                yield from [(name, key)] if key in below.model_fields else []
                yield from ((name, *path) for path in _named_below(below, key, own))


def _merged(texts: list[str]) -> str:
    """One sentence for the several that a union type gives about one value."""
    if len(texts) == 1 or not all(text.startswith("expected ") for text in texts):
        return " ".join(dict.fromkeys(texts))
    wanted = [text.removeprefix("expected ").rsplit(", found ", 1)[0] for text in texts]
    return f"expected {' or '.join(dict.fromkeys(wanted))}, found {texts[0].rsplit(', found ', 1)[1]}"


def _locate(loc: tuple[int | str, ...], values: Any) -> list[int | str]:
    """The part of pydantic's location that names keys of the file, without union tags."""
    path: list[int | str] = []
    for index, part in enumerate(loc):
        last = index == len(loc) - 1
        keys = range(len(values)) if isinstance(values, list) else values if isinstance(values, dict) else ()
        if part in keys:
            values = values[part]
        elif not isinstance(values, dict) or not last:
            continue
        path.append(part)
    return path


def _at(section: type[Section], path: Sequence[int | str], values: Any) -> type[Section]:
    """The section at `path` of the file."""
    of_mapping = False
    for part in path:
        values = values[part] if isinstance(part, int) else values.get(part) if isinstance(values, dict) else None
        if isinstance(part, int) or of_mapping:  # an item of a list, or of a mapping by its key
            section, of_mapping = section.section_for(values), False
            continue
        annotation = section.model_fields[part].annotation
        (section,) = [c for c in _choices(annotation) if issubclass(c, Section)]
        of_mapping = get_origin(annotation) is dict
        section = section if of_mapping else section.section_for(values)
    return section


@dataclass(frozen=True)
class CodeSetting:
    """A setting of a configuration by which Python code is executed."""

    place: tuple[Any, ...]
    value: Any
    section: type[Section]
    """That has the setting."""
    of_member: bool = False
    """Whether it stands in the settings of another run (`HoldsSettings`)."""

    @property
    def key(self) -> str:
        """Its place as it is written, such as `data.curriculum.function`."""
        return ".".join(map(str, self.place))


def code(
    section: type[Section], values: Any, place: tuple[Any, ...] = (), *, whole: type[Section] | None = None
) -> Iterator[CodeSetting]:
    """Yield the settings in `values` that have code executed, wherever the section has a field that `NamesCode` marks.

    Args:
        values: As they stand in a file: they need not be valid.
        whole: The section of a whole run, where `section` is a part of it.
    """
    whole, section = whole or section, section.section_for(values)
    for name, field in section.model_fields.items() if isinstance(values, Mapping) else ():
        value, at = values.get(name), (*place, name)
        if any(mark.when(value) for mark in code_marks(field)):
            yield CodeSetting(at, value, section)
        for mark in field.metadata:
            for member, own in mark.read(value).items() if value and isinstance(mark, HoldsSettings) else ():
                for found in code(whole, own):
                    yield CodeSetting((*at, member, *found.place), found.value, found.section, of_member=True)
        for inner, each, below in _sections_in(field.annotation, value, at):
            yield from code(inner, each, below, whole=whole)


def code_marks(field: FieldInfo) -> list[NamesCode]:
    """Marks of a field of a section by which Python code is executed."""
    return [mark for mark in [*field.metadata, *_marks(field.annotation)] if isinstance(mark, NamesCode)]


def _marks(annotation: Any) -> Iterator[Any]:
    """Yield what annotates a type and the types that it is made of, without the fields of sections."""
    yield from getattr(annotation, "__metadata__", ())
    for part in get_args(annotation):
        yield from _marks(part)


def _sections_in(
    annotation: Any, value: Any, place: tuple[Any, ...]
) -> Iterator[tuple[type[Section], Any, tuple[Any, ...]]]:
    """Yield the sections that a value of this type holds, each with its own value and place."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is None:
        if isinstance(annotation, type) and issubclass(annotation, Section):
            yield annotation, value, place
    elif isinstance(value, (list, tuple)) and origin in (list, tuple):
        for number, each in enumerate(value):
            for part in parts:
                yield from _sections_in(part, each, (*place, number))
    elif isinstance(value, Mapping) and origin is dict:
        for key, each in value.items():
            yield from _sections_in(parts[1], each, (*place, key))
    elif origin not in (list, tuple, dict):  # a union, or what is annotated
        for part in parts:
            yield from _sections_in(part, value, place)


def families(section: type[Section], place: str = "") -> dict[str, type[Tagged]]:
    """The families of sections below a section, by their place, such as `adapter`; `[]` stands for items of a list."""
    by_place: dict[str, type[Tagged]] = {}
    for name, field in section.model_fields.items():
        for choice in _choices(field.annotation):
            if not issubclass(choice, Section):
                continue
            at = f"{place}{name}" + "[]" * (getattr(field.annotation, "__origin__", None) is tuple)
            if issubclass(choice, Tagged) and "choices" in choice.__dict__:
                by_place[at] = choice
            by_place |= families(choice, f"{at}.")
    return by_place


def _choices(annotation: Any) -> list[type]:
    parts = getattr(annotation, "__args__", ())
    if isinstance(annotation, type) and not parts:
        return [annotation]
    return [choice for part in parts for choice in _choices(part)]


def shown(value: Any) -> str:
    """The beginning of a value, for messages."""
    text = "null" if value is None else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
