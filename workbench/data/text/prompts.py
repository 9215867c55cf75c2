"""Rows to answer: the formats of training rows, where the answer may be missing and is never shown."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from workbench.config import DataConfig
from workbench.data import starter
from workbench.data.rows import RawRow, read_rows
from workbench.data.text import formats
from workbench.data.text.formats import Example
from workbench.errors import DataError

_ANSWERS = {"instruction": "output", "prompt": "completion", "question": "answer"}
_UNKNOWN = "?"
"""Stands for an answer that a row does not have, until the answer is cut off."""


def read_prompts(source: str, config: DataConfig) -> Iterator[Example]:
    """The rows of `source` without their last answer.

    Raises:
        DataError: a row has nothing to answer, file and row are named; or there is no row.
    """
    rows = list(read_rows(starter.resolve(source)))
    if not rows:
        raise DataError(f"{source}: holds no rows to answer. Write it again, or name another one.")
    for row in rows:
        columns = formats.renamed(row.columns, config.columns)
        bare = config.model_copy(update={"columns": {}})
        example = formats.convert(RawRow(row.place, _with_answer(columns), row.mistake), bare)
        if example is not None:
            yield _without_answer(example)


def _with_answer(columns: dict[str, Any]) -> dict[str, Any]:
    for asked, given in _ANSWERS.items():
        if asked in columns and not {given, "answers", "chosen"} & {name for name in columns if columns[name]}:
            columns = {**columns, given: _UNKNOWN}
    for name in ("messages", "conversations"):
        turns = columns.get(name)
        if isinstance(turns, list) and turns and isinstance(turns[-1], dict):
            role = turns[-1].get("role", turns[-1].get("from"))
            if role not in ("assistant", "gpt"):
                columns = {**columns, name: [*turns, {"role": "assistant", "content": _UNKNOWN}]}
    return columns


def _without_answer(example: Example) -> Example:
    if example.text:
        asked = [piece for piece in example.text if not piece[1]]
        return replace(example, text=tuple(asked or [(text, False) for text, _ in example.text]))
    roles = [message["role"] for message in example.messages]
    last = len(roles) - 1 - roles[::-1].index("assistant")
    if last == 0:
        raise DataError(
            f"{example.place}: the answer comes first; there is nothing to answer. Write the question before it."
        )
    return replace(example, messages=example.messages[:last])
