"""Reference of every setting, read from the sections: its key, values, default and meaning."""

from __future__ import annotations

import difflib
import inspect
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from workbench.config import glossary
from workbench.config.run_config import RunConfig
from workbench.errors import ConfigError
from workbench.schema import families

Node = Mapping[str, Any]
"""A part of a JSON schema."""

_NAME, _ARXIV = r"[A-Z][\w'-]+", r"arXiv:\d{4}\.\d{4,5}"
_AUTHORS = rf"(?:{_NAME}, {_NAME} and {_NAME}|{_NAME}(?: {_NAME})?(?: et al\.| (?:&|and) {_NAME})?)"
_PAPER = re.compile(rf"{_AUTHORS},? (?:{_NAME} )?\(?(?:19|20)\d\d\)?(?:, {_ARXIV})?|{_ARXIV}")
"""Citations in docstrings, such as `Hu et al. 2021, arXiv:2106.09685`."""
_BOUNDS = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}
_OPEN = re.compile(r"^(a whole number|a number|text|a list of|a path|keys of its own|any value|null$|keys and values)")
"""Values of a setting that are no words to choose among."""
_TYPES = {"integer": "a whole number", "number": "a number", "string": "text", "object": "keys and values"}


@dataclass(frozen=True)
class SettingReference:
    """One key of a recipe."""

    key: str
    """Its place, such as `batch.size`; NAME stands for a name that the user chooses, `[]` for items of a list."""
    values: str
    """Values that may be written there."""
    default: str
    """Its value where the recipe does not name it; empty where it must."""
    meaning: str
    why: str = ""
    """The reason for its default, which its docstring ends with after `Why:`; empty where it gives none."""
    of: tuple[str, ...] = ()
    """Values of the section's choosing key, such as `adapter.method`, that have it; empty: all."""
    is_section: bool = False
    unit: str = ""
    """Unit of its number; empty where it has none."""
    papers: tuple[str, ...] = ()
    """Papers that its docstring cites, or else that of its section."""

    @property
    def words(self) -> list[str]:
        """Those of its values that are words to choose among."""
        return [word for word in self.values.split(" | ") if not _OPEN.match(word)]

    @property
    def is_closed(self) -> bool:
        """Whether nothing but its words, or null, may be written there."""
        return not any(_OPEN.match(word) and word != "null" for word in self.values.split(" | "))


@dataclass(frozen=True)
class NamedChoice:
    """A section of a family, such as the method dora, by the name that chooses it."""

    key: str
    """The key that chooses, such as `adapter.method`."""
    name: str
    meaning: str
    settings: tuple[SettingReference, ...]
    """Keys that it has, those of all sections of the family too."""
    papers: tuple[str, ...] = ()
    """Papers that its docstring cites."""


def json_schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of a recipe, for editors: keys, types, bounds, defaults, descriptions.

    Settings that do not go together, and files that are not there, are found by `workbench check` alone.
    """
    title = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Recipe of peft-workbench"}
    return {**RunConfig.model_json_schema(), **title}


def json_schema_text() -> str:
    """`json_schema` as it stands in a file, a key a line."""
    return json.dumps(json_schema(), indent=1) + "\n"


def settings() -> list[SettingReference]:
    """Every setting, sections before their keys. What sections of a family share with one meaning is one setting."""
    return list(_settings_of(tuple((key, *family.choices.items()) for key, family in families(RunConfig).items())))


@lru_cache(maxsize=2)  # reading every section takes most of a second
def _settings_of(registered: tuple[Any, ...]) -> tuple[SettingReference, ...]:
    """Settings while these sections are those of the families, to which plugins add."""
    schema, choosing = RunConfig.model_json_schema(), families(RunConfig)
    references: dict[tuple[str, str], SettingReference] = {}
    for setting in _settings(schema, "", (), schema["$defs"]):
        family = choosing.get(_section(setting.key))
        if family and setting.key.endswith(f".{family.tag}"):
            meaning = "Which of these sections it is; each has keys of its own."
            setting = SettingReference(setting.key, " | ".join(family.names()), family.untagged, meaning)
        of = (
            (*references[place].of, *setting.of)
            if (place := (setting.key, setting.meaning)) in references
            else setting.of
        )
        of = tuple(dict.fromkeys(of))
        cited = setting.papers
        if family is not None:  # what several sections share is from no paper of one of them
            cited = papers(setting.meaning) or (_papers_of(setting.key, of[0]) if len(of) == 1 else ())
        everywhere = family is not None and len(of) == len(family.names())
        references[place] = replace(setting, of=() if everywhere else of, papers=cited)
    return tuple(references.values())


def choosing_keys() -> list[str]:
    """Keys that choose among sections, such as `adapter.method`."""
    return [f"{section}.{family.tag}" for section, family in families(RunConfig).items()]


def choices(key: str) -> dict[str, str]:
    """Meanings of the values of a key that chooses among sections, such as `adapter.method`; empty for other keys."""
    family = families(RunConfig).get(_section(key))
    if family is None or key != f"{_section(key)}.{family.tag}":
        return {}
    return {name: family.described(name) for name in family.names()}


def named_choices(name: str) -> list[NamedChoice]:
    """Methods, policies and other sections that are chosen by this name; none where it is a key itself."""
    known = settings()
    if any(each.key == name for each in known):
        return []
    choosing = [key for key in choosing_keys() if name in choices(key)]
    return [
        NamedChoice(key, name, choices(key)[name], tuple(_keys_of(known, key, name)), _papers_of(key, name))
        for key in choosing
    ]


def is_key(word: str) -> bool:
    """Whether a word is a whole key or section, such as `batch.size` or `folds`."""
    return any(_means(word, each.key) for each in settings())


def papers(text: str) -> tuple[str, ...]:
    """Papers that a text cites, each once."""
    return tuple(dict.fromkeys(each.group().replace("(", "").replace(")", "") for each in _PAPER.finditer(text)))


def _papers_of(key: str, name: str) -> tuple[str, ...]:
    """Papers of the section that `name` chooses among those of a key's section, such as a method."""
    family = families(RunConfig)[_section(key)]
    text = " ".join((inspect.getdoc(family.section_for({family.tag: name})) or "").split())
    return papers(family.described(name)) or papers(text)


def _keys_of(known: Sequence[SettingReference], key: str, name: str) -> Iterator[SettingReference]:
    """Keys of the section of `key` that the section called `name` has."""
    for each in known:
        if _section(each.key) == _section(key) and each.key != key and (not each.of or name in each.of):
            yield each


def look_up(words: str) -> list[SettingReference]:
    """Settings that a person means: the key itself, a section with its keys, all whose last part it is, all that may
    have it as a value, or else all that speak of it.

    Raises:
        ConfigError: there is none.
    """
    known = settings()
    exact = [
        each
        for each in known
        if any(_means(words, key) for key in (each.key, _section(each.key), _section(each.key).removesuffix("[]")))
    ]
    word = words.lower()
    by_name = [each for each in known if each.key.rpartition(".")[2] == word]
    by_value = [each for each in known if word in map(str.lower, each.words) and word not in ("true", "false", "null")]
    if matches := exact or by_name or by_value or [each for each in known if word in each.meaning.lower()]:
        return matches
    keys = dict.fromkeys(part for each in known for part in (each.key, each.key.rpartition(".")[2]))
    terms = [each for term in glossary.terms() for each in term.words]
    names = [name for key in choosing_keys() for name in choices(key)]
    near = difflib.get_close_matches(words, [*dict.fromkeys([*terms, *names, *keys])], n=3, cutoff=0.6)
    hint = f" Did you mean {' or '.join(f'`{key}`' for key in near)}?" if near else ""
    raise ConfigError(
        f"explain {words}: no setting has that name or speaks of it.{hint} `workbench explain` lists all."
    )


def _means(words: str, key: str) -> bool:
    """Whether a key is meant, in which a person's own name may stand where the schema has NAME."""
    given_parts, parts = words.split("."), key.split(".")
    return len(given_parts) == len(parts) and all(
        part in (one, "NAME") for one, part in zip(given_parts, parts, strict=True)
    )


def _section(key: str) -> str:
    return key.rpartition(".")[0]


def _settings(node: Node, prefix: str, of: tuple[str, ...], known: Node) -> Iterator[SettingReference]:
    """Settings below a section of the schema, whose `$ref`s `known` resolves."""
    required, own_papers = node.get("required", ()), papers(" ".join(node.get("description", "").split()))
    for name, value in node["properties"].items():
        key = f"{prefix}{name}"
        inner = list(_sections(value, key, known))
        meaning = value.get("description") or (inner[0][1].get("description", "") if inner else "")
        default = "" if name in required else _shown(value.get("default"))
        is_section = bool(inner) and all(place == key for place, _ in inner)
        meaning, _, why = " ".join(meaning.split()).partition(" Why: ")
        cited = papers(meaning) or own_papers
        unit = value.get("unit", "")
        yield SettingReference(key, _values(value, known), default, meaning, why, of, is_section, unit, cited)
        for place, section in inner:
            yield from _settings(section, f"{place}.", _tags(section) if len(inner) > 1 else (), known)


def _sections(node: Node, key: str, known: Node) -> Iterator[tuple[str, Node]]:
    """Sections that may stand at a key, or below a name or in a list there, each with its place."""
    node = _resolved(node, known)
    if "properties" in node:
        yield key, node
    for each in node.get("anyOf", ()):
        yield from _sections(each, key, known)
    if isinstance(names := node.get("additionalProperties"), Mapping):
        yield from _sections(names, f"{key}.NAME", known)
    if isinstance(items := node.get("items"), Mapping):
        yield from _sections(items, f"{key}[]", known)


def _tags(section: Node) -> tuple[str, ...]:
    """Names that choose this section of its family."""
    first: Node = next(iter(section["properties"].values()))
    return tuple(first.get("enum", (first.get("const", first.get("default")),)))


def _resolved(node: Node, known: Node) -> Node:
    return known[node["$ref"].rpartition("/")[2]] if "$ref" in node else node


def _values(node: Node, known: Node) -> str:
    """The values that a node allows, in words."""
    node = _resolved(node, known)
    if "anyOf" in node:
        return " | ".join(dict.fromkeys(_values(each, known) for each in node["anyOf"]))
    if "enum" in node or "const" in node:
        return " | ".join(map(_shown, node.get("enum", [node.get("const")])))
    if "properties" in node:
        return "keys of its own"
    if (kind := node.get("type")) == "array":
        items = node.get("items") or (node.get("prefixItems") or [{}])[0]
        return f"a list of: {_values(items, known)}"
    if kind in ("boolean", "null"):
        return "true | false" if kind == "boolean" else "null"
    if kind == "string" and "path" in node.get("format", ""):
        return "a path"
    bounds = [f"{word} {_shown(node[bound])}" for bound, word in _BOUNDS.items() if bound in node]
    return ", ".join([_TYPES.get(str(kind), "any value"), *bounds])


def _shown(value: Any) -> str:
    """As it stands in YAML."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_shown(each)}" for key, each in value.items()) + "}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "[" + ", ".join(map(_shown, value)) + "]"
    return f"{value:g}" if isinstance(value, float) else str(value)
