"""JSON Schemas that answers are held to, by the library jsonschema."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.data.rows import excerpt
from workbench.errors import ConfigError
from workbench.schema import did_you_mean

if TYPE_CHECKING:
    from jsonschema.protocols import Validator

_NOTES = ("$schema", "$id", "$comment", "$defs", "definitions", "title", "description", "default", "examples")
"""Keywords that say nothing of values."""


def validator(source: Path | Mapping[str, Any]) -> Validator:
    """The check of values against a schema; of the draft that the schema names, else 2020-12.

    Args:
        source: The schema, or a JSON file that holds it.

    Raises:
        ConfigError: It cannot be read, is no schema, or refers to another file; the message names the place.
    """
    from jsonschema import Draft202012Validator, SchemaError, validators
    from referencing import Registry, Resource
    from referencing.exceptions import Unresolvable
    from referencing.jsonschema import DRAFT202012

    name = str(source) if isinstance(source, Path) else "json_schema"
    schema = _read(source) if isinstance(source, Path) else dict(source)
    if not isinstance(schema, Mapping):
        raise _error(name, f"is {excerpt(schema)}, and a schema is an object")
    kind = validators.validator_for(schema, default=Draft202012Validator)
    try:
        kind.check_schema(schema, format_checker=kind.FORMAT_CHECKER)
    except SchemaError as error:
        raise _error(name, f"{error.json_path}: {error.message}") from None
    known = {*kind.VALIDATORS, *_NOTES}
    if unknown := [key for key in schema if key not in known]:  # the library would not look at them
        raise _error(name, f"{unknown[0]} is no keyword.{did_you_mean(unknown[0], sorted(known))}")
    resource = Resource.from_contents(schema, default_specification=DRAFT202012)
    whole = resource.id() or ""
    registry: Registry[Any] = Registry().with_resource(whole, resource)  # where nothing else is: nothing is fetched
    resolver = registry.resolver(whole)
    for reference in _references(schema):
        try:
            resolver.lookup(reference)
        except Unresolvable:
            raise _error(name, f"$ref {reference!r} leads nowhere; only places in the schema are read") from None
    return kind(schema, registry=registry)


def _references(schema: Any) -> Iterator[str]:
    if isinstance(schema, Mapping):
        if isinstance(reference := schema.get("$ref"), str):
            yield reference
        schema = list(schema.values())
    if isinstance(schema, list):
        for part in schema:
            yield from _references(part)


def _error(name: str, problem: str) -> ConfigError:
    return ConfigError(f"rewards, json: {name}: {problem}. Correct the schema.")


def _read(path: Path) -> Any:
    try:
        return json.loads(path.expanduser().read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"rewards, json: {path}: cannot be read as JSON ({error}). Name a file with a JSON schema, or write the "
            "schema itself as json_schema."
        ) from None
