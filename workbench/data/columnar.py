"""Rows of Arrow tables, from parquet files or the hub, in the form that a jsonl file would give them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow


def rows_of(table: pyarrow.Table | pyarrow.RecordBatch) -> Iterator[dict[str, Any]]:
    """Yield the rows of a table, without the nulls that columnar storage adds for keys that only other rows have.

    Columns that `datasets` keeps as JSON text, because their rows differ in shape (such as tool arguments), are parsed.
    """
    kinds = {field.name: field.type for field in table.schema}
    for values in table.to_pylist():
        yield {name: _plain(value, kinds[name]) for name, value in values.items() if value is not None}


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
