"""Typed sections from YAML and `key=value` words; every mistake of a file is reported at once."""

from __future__ import annotations

import ast
import difflib
import functools
import inspect
import io
import itertools
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler, ValidationError, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, InitErrorDetails, PydanticCustomError
from ruamel.yaml import YAML
from ruamel.yaml.composer import MaxDepthExceededError
from ruamel.yaml.constructor import SafeConstructor
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import ScalarNode
from ruamel.yaml.representer import SafeRepresenter
from ruamel.yaml.scanner import Scanner, ScannerError

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


class Section(BaseModel):
    """Base of every section: unknown keys are errors, values never change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

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
    def documented(cls, found: JsonSchemaValue, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """The JSON schema of this class with the docstrings of its fields.

        Read here and not at the import (`use_attribute_docstrings`): no run needs them, and they take 0.3 s.
        """
        properties = handler.resolve_ref_schema(found).get("properties", {})
        for base in cls.__mro__:
            for name, text in _field_docstrings(base).items() if issubclass(base, Section) else ():
                if name in properties:
                    properties[name].setdefault("description", text)
        return found


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


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping that a YAML file holds; raises ConfigError with the line where it is not one."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file. `workbench ls recipes` lists the shipped recipes.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path}: cannot be read as UTF-8 text ({error}). Name a YAML file, saved as UTF-8."
        ) from None
    try:
        values = load_yaml(text)
    except YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML.\n  {str(error).replace(chr(10), chr(10) + '  ')}") from None
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ConfigError(f"{path}: expected a mapping such as `recipe: sft`, found {_shown(values)}.")
    return values


def load_yaml(text: str) -> Any:
    """The value that YAML 1.2 holds; raises ruamel's YAMLError for whatever is none."""
    yaml = YAML(typ="safe", pure=True)
    yaml.Scanner, yaml.Constructor, yaml.max_depth = _Scanner, _Constructor, 50
    try:
        value = yaml.load(text)
    except MarkedYAMLError as error:
        error.note = None  # how a program could do without the check
        if isinstance(error, MaxDepthExceededError):
            error.problem = "values are nested too deeply"
        raise
    except ValueError as error:  # a number of more digits than Python reads
        raise YAMLError(str(error)) from None
    if not _is_unicode(value):
        raise YAMLError("it holds half of a character, such as \\ud800, that UTF-8 cannot hold")
    return value


def dump_yaml(values: Mapping[str, Any]) -> str:
    """`values` as YAML that `load_yaml` reads back equal."""
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    yaml.Representer = _Representer
    text = io.StringIO()
    yaml.dump(dict(values), text)
    return text.getvalue()


def override(values: Mapping[str, Any], words: Sequence[str]) -> dict[str, Any]:
    """`values` with every `section.key=value` word applied; the value is read as YAML."""
    result = _copy(values)
    for word in words:
        key, equals, text = word.partition("=")
        parts = key.split(".")
        if not equals or not all(parts):
            raise ConfigError(f"{word!r}: expected key=value, such as train.epochs=3.")
        try:
            value = load_yaml(text)
        except YAMLError:
            value = text
        if not _is_unicode(value):
            raise ConfigError(f"{key}: {_shown(value)} is no text that UTF-8 can hold. Write it anew.")
        section = result
        for part in parts[:-1]:
            child = section.setdefault(part, {})
            if not isinstance(child, dict):
                raise ConfigError(f"{word!r}: `{part}` is {_shown(child)}, not a section with keys.")
            section = child
        section[parts[-1]] = value
    return result


def parse(section: type[SectionT], values: Mapping[str, Any], *, source: str) -> SectionT:
    """`values` as a section; raises one ConfigError that lists every mistake with its cure."""
    try:
        return section.model_validate(values)
    except ValidationError as error:
        mistakes = explain(section, values, error)
    count = "1 mistake" if len(mistakes) == 1 else f"{len(mistakes)} mistakes"
    found = ConfigError("\n".join([f"{source} has {count}:", *(f"  {place}: {text}" for place, text in mistakes)]))
    found.mistakes = tuple(mistakes)
    raise found


def did_you_mean(word: str, known: Sequence[str]) -> str:
    """' Did you mean `x`?' for the nearest known word, otherwise the known words."""
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f" Did you mean `{near[0]}`?" if near else f" Known: {', '.join(sorted(known))}."


def explain(section: type[Section], values: Mapping[str, Any], error: ValidationError) -> list[tuple[str, str]]:
    """Place and cure of every mistake that pydantic found in `values`."""
    found: dict[str, list[str]] = {}
    for item in error.errors(include_url=False):
        mistakes = item.get("ctx", {}).get("error")
        if isinstance(mistakes, Mistakes):
            for place, text in mistakes.mistakes:
                found.setdefault(place, []).append(text)
            continue
        path = _locate(item["loc"], values)
        place = ".".join(map(str, path)) or ROOT
        if item["type"] == "extra_forbidden":
            text = "unknown key." + did_you_mean(str(path[-1]), _siblings(section, path[:-1], values))
        elif item["type"] == "missing" and isinstance(item["loc"][-1], int):
            text = f"expected a list such as [a, b], found {_shown(item['input'])}."
        elif item["type"] == "too_long":
            text = f"expected at most {item['ctx']['max_length']} items, found {_shown(item['input'])}."
        elif item["type"] == "missing":
            text = "is required."
        elif item["type"] == "unknown":
            text = item["msg"]
        elif item["type"] == "value_error":
            text = str(item["ctx"]["error"])
        elif item["type"] in ("too_short", "string_too_short"):
            unit = "item" if item["type"] == "too_short" else "character"
            text = f"expected at least {item['ctx']['min_length']} {unit}, found {_shown(item['input'])}."
        elif item["type"] in ("model_type", "model_attributes_type"):
            first = _siblings(section, path, values)[0]
            text = f"expected keys of its own, such as {place}.{first}, found {_shown(item['input'])}."
        else:
            text = item["msg"].replace("Input should be", "expected").split(", unable to parse")[0]
            text = f"{text.replace('a valid tuple', 'a list such as [a, b]')}, found {_shown(item['input'])}."
        found.setdefault(place, []).append(text)
    return [(place, _merged(texts)) for place, texts in found.items()]


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


def _siblings(section: type[Section], path: Sequence[int | str], values: Any) -> list[str]:
    """Keys that may stand in the section at `path` of the file."""
    for part in path:
        if isinstance(part, int):  # an item of a list
            values = values[part]
            section = section.section_for(values)
            continue
        values = values.get(part) if isinstance(values, dict) else None
        (section,) = [c for c in _choices(section.model_fields[part].annotation) if issubclass(c, Section)]
        section = section.section_for(values)
    return list(section.model_fields)


def families(section: type[Section], place: str = "") -> dict[str, type[Tagged]]:
    """The families of sections below a section, by their place, such as `adapter`; `[]` stands for items of a list."""
    found: dict[str, type[Tagged]] = {}
    for name, field in section.model_fields.items():
        for choice in _choices(field.annotation):
            if not issubclass(choice, Section):
                continue
            at = f"{place}{name}" + "[]" * (getattr(field.annotation, "__origin__", None) is tuple)
            if issubclass(choice, Tagged) and "choices" in choice.__dict__:
                found[at] = choice
            found |= families(choice, f"{at}.")
    return found


def _choices(annotation: Any) -> list[type]:
    parts = getattr(annotation, "__args__", ())
    if isinstance(annotation, type) and not parts:
        return [annotation]
    return [choice for part in parts for choice in _choices(part)]


def _copy(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _copy(value) if isinstance(value, Mapping) else value for key, value in values.items()}


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _is_unicode(value: Any) -> bool:
    """Whether all text in a value can be written as UTF-8."""
    if isinstance(value, str):
        return not any("\ud800" <= letter <= "\udfff" for letter in value)
    if isinstance(value, Mapping):
        return all(_is_unicode(key) and _is_unicode(each) for key, each in value.items())
    return not isinstance(value, (list, tuple)) or all(map(_is_unicode, value))


class _Scanner(Scanner):
    """Refuses what no setting needs: an alias may hold itself, a tag asks for Python's objects."""

    def _refuse(self) -> None:
        mark = self.reader.get_mark()
        text = f"{self.reader.peek()} begins an anchor, an alias, a tag or a directive: write the value, or quote it"
        raise ScannerError(None, None, text, mark)

    fetch_anchor = fetch_alias = fetch_tag = fetch_directive = _refuse


class _Constructor(SafeConstructor):
    """Reads dates as text: no setting is one."""


_Constructor.add_constructor("tag:yaml.org,2002:timestamp", SafeConstructor.construct_yaml_str)


class _Representer(SafeRepresenter):
    """Writes no aliases, and escapes what ruamel.yaml does not read back where it is quoted, such as U+0085."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_str(self, data: str) -> ScalarNode:
        style = None if data.isprintable() else '"'
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=style)


_Representer.add_representer(str, _Representer.represent_str)
