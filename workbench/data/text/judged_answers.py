"""Rows of judged answers: a chosen and a rejected answer to one prompt, or one answer that is good or bad."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from workbench.data.rows import excerpt
from workbench.data.text.column_values import string_of
from workbench.data.text.formats import Example, answered, chat_example, dialogue
from workbench.data.text.messages import Message, last_answer_only
from workbench.errors import DataError

PROMPTS = ("messages", "conversations", "prompt")
"""Columns of a prompt, the first of which that is there counts."""
_SAME = "Remove the row, or write data.on_bad_row=skip to leave out such rows and count them."


def convert(name: str, place: str, columns: Mapping[str, Any]) -> Example:
    """A row of format `name` as an example with a judgement.

    Raises:
        DataError: The row judges nothing, answers two prompts, or has twice the same answer.
    """
    if name == "stepwise":
        raise DataError("data.format stepwise rates the steps of answers. Write recipe=reward reward.kind=process.")
    if name != "preference":
        raise DataError(
            f"data.format {name} judges no answers. Give rows with chosen and rejected, or with label (true or false); "
            "write data.columns='{chosen: ..., rejected: ...}' where they are called otherwise."
        )
    if "chosen" in columns:
        return replace(_pair(place, columns), tie=_flag(columns, "tie"))
    if _flag(columns, "tie"):
        raise DataError("it rates one answer, and is a tie (`tie`), which two are. Leave `tie` out.")
    return replace(_rated(place, columns), desired=_flag(columns, "label", missing=None))


def _flag(columns: Mapping[str, Any], name: str, *, missing: bool | None = False) -> bool:
    """A cell that is true or false.

    Args:
        missing: Its value where there is none; None: it is refused.
    """
    value = columns.get(name)
    if value is None and missing is not None:
        return missing
    if str(value).lower() not in ("true", "false", "1", "0"):
        raise DataError(f"`{name}` must be true or false, found {excerpt(value)}.")
    return str(value).lower() in ("true", "1")


def _rated(place: str, columns: Mapping[str, Any]) -> Example:
    """The one answer of a row; the turns before it are context."""
    if "completion" in columns:
        return answered(place, columns, prompt="prompt", answer="completion")
    messages = dialogue(columns)
    if messages[-1]["role"] != "assistant":
        raise DataError(f"the last message is rated, and it is the {messages[-1]['role']}'s, not the assistant's.")
    return chat_example(place, columns, last_answer_only(messages))


def _pair(place: str, columns: Mapping[str, Any]) -> Example:
    if columns.get("rejected") is None:
        raise DataError("`rejected` is missing or null. A row needs two answers, or one and a label.")
    prompt = next((each for each in PROMPTS if columns.get(each) is not None), None)
    sides = [columns["chosen"], columns["rejected"]]
    if prompt is None and all(isinstance(side, str) for side in sides):
        columns = {**columns, **_split(string_of(columns, "chosen"), string_of(columns, "rejected"))}
    chosen, rejected = (
        answered(place, columns, prompt=prompt or "prompt", answer=answer) for answer in ("chosen", "rejected")
    )
    if bool(chosen.text) != bool(rejected.text):
        raise DataError("`chosen` is text and `rejected` a list of messages, or the other way round. Write both alike.")
    if chosen.text:
        _require_text(chosen, rejected)
    else:
        _require_chat(chosen, rejected)
    return replace(chosen, desired=True, rejected=replace(rejected, desired=False))


def _require_text(chosen: Example, rejected: Example) -> None:
    if chosen.text[-1][0].strip() == rejected.text[-1][0].strip():
        raise DataError(f"`chosen` and `rejected` are the same answer: there is nothing to prefer. {_SAME}")


def _require_chat(chosen: Example, rejected: Example) -> None:
    """Refuse two prompts, or one answer twice."""
    (before, first), (other, second) = (_parted(each.messages) for each in (chosen, rejected))
    if before != other:
        turns = range(min(len(before), len(other)))
        turn = 1 + next((turn for turn in turns if before[turn] != other[turn]), len(turns))
        raise DataError(
            f"`chosen` and `rejected` answer different prompts, from message {turn} on, so that they cannot be "
            "compared. Give both the same turns before the last answer."
        )
    if not first or not second:
        raise DataError("`chosen` or `rejected` has no answer that carries loss. Leave `loss` out of its last message.")
    if first == second:
        raise DataError(f"`chosen` and `rejected` are the same answer: there is nothing to prefer. {_SAME}")


def _parted(messages: Sequence[Message]) -> tuple[list[Message], list[Message]]:
    """The turns before the first that is learnt, and the others, as far as they can be told apart."""
    learnt = [message["role"] == "assistant" and message.get("loss", True) for message in messages]
    start = learnt.index(True) if True in learnt else len(messages)
    bare = [
        {**{key: each for key, each in message.items() if key != "loss"}, "content": message["content"].strip()}
        for message in messages
    ]
    return bare[:start], bare[start:]


def _split(chosen: str, rejected: str) -> dict[str, str]:
    """Columns of two texts that begin with the same prompt, which ends after the last white space that they share."""
    alike = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False))
    shared = "".join(character for character, _ in alike)
    if chosen == rejected:
        raise DataError(f"`chosen` and `rejected` are the same text: there is nothing to prefer. {_SAME}")
    # Not inside a word, of which one answer has another ending.
    end = next((place for place in range(len(shared), 0, -1) if shared[place - 1].isspace()), 0)
    prompt = shared[:end]
    if not prompt.strip():
        raise DataError(
            "`chosen` and `rejected` begin with no common prompt, and the row has no column `prompt`. "
            "Add one, or write data.columns='{prompt: ...}'."
        )
    return {"prompt": prompt, "chosen": chosen[end:], "rejected": rejected[end:]}
