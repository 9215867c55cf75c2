"""Strings and numbers of a row's columns; what they are not is told with the column's name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workbench.data.rows import excerpt, finite
from workbench.errors import DataError


def number_of(value: Any, name: str) -> float:
    """The finite number `value`, found in the column `name`; raises DataError for anything else."""
    if (parsed := finite(value)) is None:
        raise DataError(f"`{name}` must be a finite number, found {excerpt(value)}.")
    return parsed


def string_of(columns: Mapping[str, Any], name: str, remedy: str = "write it in quotes") -> str:
    """The text in the column `name`; raises DataError, with `remedy`, where there is none but white space."""
    value = columns.get(name)
    if value is None:
        raise DataError(f"`{name}` is missing or null.")
    if not isinstance(value, str):
        raise DataError(f"`{name}` must be a string, found {excerpt(value)}: {remedy}.")
    if not value.strip():
        raise DataError(f"`{name}` is empty.")
    return value


def optional_string(columns: Mapping[str, Any], name: str) -> str:
    """The text in the column `name`, empty where it is missing, null or empty."""
    value = columns.get(name)
    return string_of(columns, name) if value not in (None, "") else ""
