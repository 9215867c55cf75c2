"""JSON schemas (draft 2020-12) as far as they look at values; a keyword that is not known is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

from workbench.data.rows import excerpt
from workbench.errors import ConfigError
from workbench.schema import did_you_mean

_TYPES: dict[str, Callable[[Any], bool]] = {
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
    "number": lambda value: _is_number(value),
    "integer": lambda value: _is_number(value) and value == int(value),
}
_NOTES = {"$schema", "$id", "$comment", "$defs", "definitions", "title", "description", "default", "examples", "format"}
_NUMBERS: dict[str, Callable[[Any, Any], bool]] = {
    "minimum": lambda value, limit: value >= limit,
    "maximum": lambda value, limit: value <= limit,
    "exclusiveMinimum": lambda value, limit: value > limit,
    "exclusiveMaximum": lambda value, limit: value < limit,
    "multipleOf": lambda value, step: Decimal(str(value)) % Decimal(str(step)) == 0,
}
_SIZES = {
    "minLength": (str, 1),
    "maxLength": (str, -1),
    "minItems": (list, 1),
    "maxItems": (list, -1),
    "minProperties": (dict, 1),
    "maxProperties": (dict, -1),
}
"""The type that a limit is for, and whether it is the least (1) or the most (-1)."""
_SCHEMAS = ("not", "items", "additionalProperties", "propertyNames")
_LISTS = ("anyOf", "allOf", "oneOf", "prefixItems")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_PLAIN = ("type", "enum", "const", "required", "pattern", "uniqueItems", "$ref")
_SHAPES: dict[str, Any] = {
    **dict.fromkeys(_NUMBERS, (int, float)),
    **dict.fromkeys(_SIZES, int),
    **dict.fromkeys((*_LISTS, "required", "enum"), list),
    **dict.fromkeys(_MAPS, dict),
    "type": (str, list),
    "pattern": str,
}
"""Types that values of keywords have."""
_KNOWN = {*_NOTES, *_NUMBERS, *_SIZES, *_SCHEMAS, *_LISTS, *_MAPS, *_PLAIN}


class JsonSchema:
    """A schema that values are held to.

    Args:
        source: The schema, or a JSON file that holds it.

    Raises:
        ConfigError: It cannot be read, or says what is not known here; the message names the place.
    """

    def __init__(self, source: Path | Mapping[str, Any]) -> None:
        self._name = str(source) if isinstance(source, Path) else "json_schema"
        self._root = _read(source) if isinstance(source, Path) else source
        self._require(self._root, "")

    def fits(self, value: Any) -> bool:
        """Whether a value that json.loads gave is as the schema says."""
        return self._fits(value, self._root)

    def _fits(self, value: Any, schema: Any) -> bool:
        if isinstance(schema, bool):
            return schema
        if "$ref" in schema and not self._fits(value, self._referred(schema["$ref"])):
            return False
        return all(check(self, value, schema) for check in (_plain, _number, _size, _array, _object, _combined))

    def _referred(self, reference: str) -> Any:
        found: Any = self._root
        for part in reference.removeprefix("#").split("/")[1:]:
            found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
        return found

    def _require(self, schema: Any, place: str) -> None:
        """Refuse what is no schema, or none that is known here."""
        if isinstance(schema, bool):
            return
        if not isinstance(schema, Mapping):
            raise self._error(place, f"expected an object, found {type(schema).__name__}")
        for key, value in schema.items():
            if key not in _KNOWN:
                raise self._error(place, f"{key} is not known here.{did_you_mean(key, sorted(_KNOWN))}")
            if key in _SHAPES and not isinstance(value, _SHAPES[key]):
                raise self._error(place, f"{key} is {excerpt(value)}")
        self._require_values(schema, place)
        for name, part in _parts(schema):
            self._require(part, f"{place}/{name}")

    def _require_values(self, schema: Mapping[str, Any], place: str) -> None:
        types = schema.get("type", [])
        for name in [types] if isinstance(types, str) else types:
            if name not in _TYPES:
                raise self._error(place, f"type {name!r} is unknown.{did_you_mean(str(name), list(_TYPES))}")
        for pattern in [*([schema["pattern"]] if "pattern" in schema else []), *schema.get("patternProperties", {})]:
            try:
                re.compile(pattern)
            except (re.error, TypeError) as error:
                raise self._error(place, f"{pattern!r} is no regular expression ({error})") from None
        if "$ref" in schema and not isinstance(self._referred(str(schema["$ref"])), (bool, Mapping)):
            raise self._error(place, f"$ref {schema['$ref']!r} leads nowhere; only places in the schema are read")

    def _error(self, place: str, problem: str) -> ConfigError:
        return ConfigError(f"rewards, json: {self._name}{'#' + place if place else ''}: {problem}. Correct the schema.")


def _read(path: Path) -> Any:
    try:
        return json.loads(path.expanduser().read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"rewards, json: {path}: cannot be read as JSON ({error}). Name a file with a JSON schema, or write the "
            "schema itself as json_schema."
        ) from None


def _parts(schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the schemas inside of one, with their places."""
    yield from ((key, schema[key]) for key in _SCHEMAS if key in schema)
    for key in _LISTS:
        yield from ((f"{key}/{number}", part) for number, part in enumerate(schema.get(key, ())))
    for key in _MAPS:
        yield from ((f"{key}/{name}", part) for name, part in schema.get(key, {}).items())


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _same(first: Any, second: Any) -> bool:
    """Whether two values are equal as JSON, where true is not 1."""
    return json.dumps(_plain_numbers(first), sort_keys=True) == json.dumps(_plain_numbers(second), sort_keys=True)


def _plain_numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain_numbers(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_plain_numbers(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _plain(_: JsonSchema, value: Any, schema: Mapping[str, Any]) -> bool:
    types = schema.get("type", [])
    names = [types] if isinstance(types, str) else types
    if "type" in schema and not any(_TYPES[name](value) for name in names):
        return False
    if "enum" in schema and not any(_same(value, each) for each in schema["enum"]):
        return False
    if "const" in schema and not _same(value, schema["const"]):
        return False
    return not (isinstance(value, str) and "pattern" in schema) or re.search(schema["pattern"], value) is not None


def _number(_: JsonSchema, value: Any, schema: Mapping[str, Any]) -> bool:
    return not _is_number(value) or all(check(value, schema[key]) for key, check in _NUMBERS.items() if key in schema)


def _size(_: JsonSchema, value: Any, schema: Mapping[str, Any]) -> bool:
    limits = ((kind, sign, schema[key]) for key, (kind, sign) in _SIZES.items() if key in schema)
    return all(sign * (len(value) - limit) >= 0 for kind, sign, limit in limits if isinstance(value, kind))


def _array(own: JsonSchema, value: Any, schema: Mapping[str, Any]) -> bool:
    if not isinstance(value, list):
        return True
    first = schema.get("prefixItems", ())
    pairs = [*zip(value, first, strict=False), *((each, schema.get("items", True)) for each in value[len(first) :])]
    if not all(own._fits(each, part) for each, part in pairs):
        return False
    texts = [json.dumps(_plain_numbers(each), sort_keys=True) for each in value]
    return not schema.get("uniqueItems") or len(set(texts)) == len(texts)


def _object(own: JsonSchema, value: Any, schema: Mapping[str, Any]) -> bool:
    if not isinstance(value, dict):
        return True
    if not set(schema.get("required", ())) <= value.keys():
        return False
    for name, each in value.items():
        parts = [part for pattern, part in schema.get("patternProperties", {}).items() if re.search(pattern, name)]
        parts += [schema["properties"][name]] if name in schema.get("properties", {}) else []
        parts = parts or [schema.get("additionalProperties", True)]
        if not own._fits(name, schema.get("propertyNames", True)) or not all(own._fits(each, part) for part in parts):
            return False
    return True


def _combined(own: JsonSchema, value: Any, schema: Mapping[str, Any]) -> bool:
    fits = {
        key: [own._fits(value, part) for part in schema[key]] for key in ("anyOf", "allOf", "oneOf") if key in schema
    }
    return (
        any(fits.get("anyOf", (True,)))
        and all(fits.get("allOf", ()))
        and sum(fits.get("oneOf", (True,))) == 1
        and not ("not" in schema and own._fits(value, schema["not"]))
    )
