"""Rows to answer, in the formats of training rows; an answer that a row has is dropped."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from workbench.config import DataConfig
from workbench.data.rows import RawRow, read_rows
from workbench.data.text import formats
from workbench.data.text.formats import Example
from workbench.errors import DataError

_ANSWERS = {"instruction": "output", "prompt": "completion", "question": "answer"}
_PLACEHOLDER = "?"
"""Answer of a row that has none, so that it fits its format; it is dropped again."""


def read_prompts(source: str, config: DataConfig, skipped: list[str] | None = None) -> Iterator[Example]:
    """Yield the rows of `source` without their last answer; see `read_questions`."""
    return (example for example, _ in read_questions(source, config, skipped))


def read_questions(
    source: str, config: DataConfig, skipped: list[str] | None = None
) -> Iterator[tuple[Example, Mapping[str, Any]]]:
    """Yield the rows of `source` without their last answer, each with all of its columns, by their names in the file.

    Args:
        skipped: Reasons of rows that `config.on_bad_row` leaves out are appended.

    Raises:
        DataError: A row has nothing to answer (the message names file and row), or no row is left.
    """
    skipped = [] if skipped is None else skipped
    question_count = 0
    rows = list(read_rows(source))
    if not rows:
        raise DataError(f"{source}: holds no rows to answer. Write it again, or name another one.")
    for row in rows:
        try:
            example = question(row, config)
        except DataError as error:
            if config.on_bad_row == "refuse":
                raise
            skipped.append(str(error))
        else:
            if example is not None:
                question_count += 1
                yield example, row.columns
    if not question_count:
        reason = f"The last one: {skipped[-1]}" if skipped else "All are labelled as bad answers."
        raise DataError(f"{source}: none of its rows can be answered. {reason}")


def question(row: RawRow, config: DataConfig) -> Example | None:
    """A row without its last answer; None for an answer that is labelled as not preferred."""
    columns = formats.renamed(row.columns, config.columns)
    bare = config.model_copy(update={"columns": {}})
    example = formats.convert(RawRow(row.place, with_answer(columns), row.mistake), bare)
    return None if example is None else without_answer(example)


def with_answer(columns: dict[str, Any]) -> dict[str, Any]:
    """Columns with an answer, so that they fit their format: a placeholder where they have none."""
    for question, answer in _ANSWERS.items():
        if question in columns and not {answer, "answers", "chosen"} & {name for name in columns if columns[name]}:
            columns = {**columns, answer: _PLACEHOLDER}
    for name in ("messages", "conversations"):
        turns = columns.get(name)
        if isinstance(turns, list) and turns and isinstance(turns[-1], dict):
            role = turns[-1].get("role", turns[-1].get("from"))
            if role not in ("assistant", "gpt") and columns.get("chosen") is None:  # which stands behind them
                columns = {**columns, name: [*turns, {"role": "assistant", "content": _PLACEHOLDER}]}
    return columns


def without_answer(example: Example) -> Example:
    """The example without its last answer.

    Raises:
        DataError: Nothing comes before that.
    """
    if example.text:
        prompt = [piece for piece in example.text if not piece[1]]
        return replace(example, text=tuple(prompt or [(text, False) for text, _ in example.text]))
    roles = [message["role"] for message in example.messages]
    last = len(roles) - 1 - roles[::-1].index("assistant")
    if last == 0:
        raise DataError(
            f"{example.place}: the answer comes first; there is nothing to answer. Write the question before it."
        )
    return replace(example, messages=example.messages[:last])


def with_placeholder(example: Example) -> Example:
    """A prompt with an answer that only takes its place."""
    if example.text:
        return replace(example, text=(*((text, False) for text, _ in example.text), (_PLACEHOLDER, True)))
    return replace(example, messages=(*example.messages, {"role": "assistant", "content": _PLACEHOLDER}))
