"""Rows of Arrow tables, from parquet files or the hub, in the form that a jsonl file would give them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow


def rows_of(table: pyarrow.Table | pyarrow.RecordBatch) -> Iterator[dict[str, Any]]:
    """Yield the rows of a table, without the nulls that columnar storage adds for keys that only other rows have.

    Columns that `datasets` keeps as JSON text, because their rows differ in shape (such as tool arguments), are parsed.
    Its numbers of classes become their names.
    """
    kinds = {field.name: field.type for field in table.schema}
    classes = _class_names(table.schema.metadata or {})
    for values in table.to_pylist():
        row = {name: _plain(value, kinds[name]) for name, value in values.items() if value is not None}
        for name in classes.keys() & row.keys():
            # -1 marks a withheld class; it stays a number, which the format then refuses.
            row[name] = classes[name].get(row[name], row[name])
        yield row


def _class_names(metadata: Mapping[bytes, bytes]) -> dict[str, dict[int, str]]:
    """Names of classes by their numbers, for each column that `datasets` wrote as a ClassLabel."""
    try:
        features = json.loads(metadata[b"huggingface"])["info"]["features"]
        return {
            name: dict(enumerate(kind["names"]))
            for name, kind in features.items()
            if isinstance(kind, dict) and kind.get("_type") == "ClassLabel"
        }
    except (KeyError, TypeError, AttributeError, ValueError):  # no or other metadata
        return {}


def _plain(value: Any, kind: pyarrow.DataType) -> Any:
    import pyarrow

    if value is None:
        return None
    if isinstance(kind, pyarrow.BaseExtensionType):
        return json.loads(value) if kind.extension_name == "arrow.json" else value
    if pyarrow.types.is_struct(kind):
        return {field.name: _plain(value[field.name], field.type) for field in kind if value[field.name] is not None}
    if pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind):
        return [_plain(item, kind.value_type) for item in value]
    return value
