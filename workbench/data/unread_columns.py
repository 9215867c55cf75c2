"""What rows carry and nothing reads: `check` names it, and what other tools give a meaning is refused by its name."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from workbench.config import DataConfig
from workbench.config.sections.basic_sections import ID, MARGIN, WEIGHT
from workbench.errors import DataError

ROW_FLAGS = ("train", "training", "trainable", "loss", "loss_mask", "masked")
"""Columns by which other tools say whether a row, or each of its turns, carries loss."""
LOSS_FLAGS = (*ROW_FLAGS, "loss_weight", "weight", "train_detail")
"""The same as keys of a turn."""
MEDIA = ("image", "images", "video", "videos", "audio", "audios", "pixel_values")
"""Columns, and keys of a turn, with what is no text."""

_TOOLS = ("tools", "functions", "function_call", "tool_calls", "tool_choice")
_PROMPTS = ("system", "system_prompt", "history", "input", "context", "query", "prefix", "chat_template_kwargs")
_COLUMN_OF_WEIGHTS = "it says how often a row counts: write data.columns='{weight: NAME}', where the recipe weighs rows"
_MEANINGS = {
    **dict.fromkeys(MEDIA, "pictures, videos and sounds are not read with text"),
    **dict.fromkeys(
        _TOOLS,
        "tools are read beside a conversation: `messages`, `conversations`, or a question and an answer",
    ),
    **dict.fromkeys(
        (*LOSS_FLAGS, "assistant_masks", "completion_mask", "prompt_mask", "target_mask"),
        "it says what carries loss, which is read as true or false of a row, or one of each of its `messages`",
    ),
    **dict.fromkeys(("weight", "weights", "sample_weight", "sample_weights", "row_weight"), _COLUMN_OF_WEIGHTS),
    **dict.fromkeys(
        ("chosen_weight", "chosen_weights", "rejected_weight", "rejected_weights"), "answers of a pair count once each"
    ),
    **dict.fromkeys(
        _PROMPTS,
        "it belongs to a prompt, which is read without it. Columns that are read together are system, history, "
        "instruction and input, or system, context and question: name them with data.columns",
    ),
    **dict.fromkeys(
        ("chosen", "rejected", "kto_tag"), "it judges answers, which data.format=preference reads, and recipe prefer"
    ),
}

_noted: ContextVar[dict[str, dict[str, None]] | None] = ContextVar("_noted", default=None)


@contextmanager
def noting() -> Iterator[dict[str, dict[str, None]]]:
    """Inside the block, what nothing reads is kept: names of columns by source, in their order."""
    found: dict[str, dict[str, None]] = {}
    token = _noted.set(found)
    try:
        yield found
    finally:
        _noted.reset(token)


def note(source: str, names: Iterable[str]) -> None:
    """Keep the names of columns, or of keys of messages, of a source that nothing reads."""
    if (found := _noted.get()) is not None:
        found.setdefault(source, {}).update(dict.fromkeys(names))


def in_words(found: Mapping[str, Iterable[str]], reads: Collection[str] | None) -> list[str]:
    """A sentence for each source. `reads`: columns that are read elsewhere; None: all are."""
    if reads is None:
        return []
    unread = {
        source: ", ".join(_quoted(name) for name in names if name not in reads) for source, names in found.items()
    }
    return [
        f"not read: {names} ({Path(source).name}). Where that is meant, data.ignore='[{names}]' says so."
        for source, names in unread.items()
        if names
    ]


def columns_in_file(config: DataConfig, names: Iterable[str]) -> set[str]:
    """Columns of a file that stand for `names`, and those that sections of `data` name."""
    optional = (WEIGHT, MARGIN, ID)  # read where they are named
    own = {config.columns.get(name, name) for name in names if name not in optional or name in config.columns}
    beside = (config.fold.group, config.fold.column, config.fold.time, config.curriculum.column)
    return (
        own | {config.columns[name] for name in optional if name in config.columns} | {each for each in beside if each}
    )


def left(columns: Mapping[str, Any], reads: Collection[str]) -> list[str]:
    """Columns of a row with a value that are not read. Raises DataError: other tools give one of them a
    meaning."""
    names = [name for name in columns if name not in reads and carries(columns[name])]
    for name in names:
        if (meaning := _MEANINGS.get(name)) is not None:
            raise DataError(f"`{name}` is not read here: {meaning}. Or leave it out: data.ignore='[{_quoted(name)}]'.")
    return names


def require_prompt(columns: Mapping[str, Any], reads: Collection[str]) -> None:
    """Raise DataError where a row that is to be answered has a part of its prompt in a column that is not read."""
    for name in columns:
        if name in (*MEDIA, *_TOOLS, *_PROMPTS) and name not in reads and carries(columns[name]):
            raise DataError(f"`{name}` is not read here: {_MEANINGS[name]}. Or take it out of the file.")


def carries(value: Any) -> bool:
    """Whether a value says anything."""
    if isinstance(value, str):
        return value.strip() not in ("", "[]", "{}")
    return bool(value) if isinstance(value, list | tuple | dict) else value is not None and value == value


def _quoted(name: str) -> str:
    """A name as YAML writes it in a list."""
    plain = re.fullmatch(r"[A-Za-z_][\w-]*", name) and name.lower() not in ("null", "true", "false", "yes", "no", "on")
    return name if plain else json.dumps(name)


def without(columns: dict[str, Any], ignore: Collection[str]) -> dict[str, Any]:
    """A row, and its messages, without what is ignored."""
    return {
        name: [_bare(item, ignore) for item in value] if isinstance(value, list) else _bare(value, ignore)
        for name, value in columns.items()
        if name not in ignore
    }


def _bare(item: Any, ignore: Collection[str]) -> Any:
    return {key: each for key, each in item.items() if key not in ignore} if isinstance(item, dict) else item
