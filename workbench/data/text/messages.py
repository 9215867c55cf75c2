"""Chat messages in the forms of OpenAI and ShareGPT, converted to the one form that Hugging Face templates read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from workbench.data.rows import excerpt
from workbench.data.text import media
from workbench.data.unread_columns import LOSS_FLAGS, MEDIA, carries
from workbench.errors import DataError
from workbench.schema import did_you_mean

Message = dict[str, Any]
"""role, content (always a string), optionally tool_calls, loss (a bool), media, and other keys that a template may
read."""

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "tool": "tool",
    "system": "system",
}
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
READ = frozenset({"role", "content", "tool_calls", "loss", media.KEY, *_REASONING_KEYS})
"""Keys of a message that every template is given in a form that it knows; it may read others."""


def messages_of(value: Any, name: str) -> list[Message]:
    """The messages of the list `value`, found in the column `name`; raises DataError for a malformed one."""
    if not isinstance(value, list) or not value:
        raise DataError(f"`{name}` must be a list of messages, found {excerpt(value)}.")
    places = ((f"message {number} of `{name}`", item) for number, item in enumerate(value, start=1))
    messages = [message_of(item, where) for where, item in places if not _says_nothing(item)]
    if not messages:
        raise DataError(f"`{name}` holds no message but an empty system prompt.")
    return messages


def _says_nothing(item: Any) -> bool:
    """Whether a message is a system prompt without a word, which is as if it were absent."""
    if not isinstance(item, dict) or item.get("role", item.get("from")) not in ("system", "developer"):
        return False
    text = item.get("content", item.get("value"))
    return text is None or (isinstance(text, str) and not text.strip())


def message_of(item: Any, where: str) -> Message:
    """Convert one message, {role, content, ...} or {from, value, ...}, with its tool calls and loss weight."""
    if isinstance(item, dict) and "role" not in item and "from" in item:
        item = _from_sharegpt(item, where)
    if not isinstance(item, dict) or "role" not in item:
        raise DataError(f"{where} must be an object with role and content (or from and value), found {excerpt(item)}.")
    role = item["role"]
    if role not in _ROLES:
        raise DataError(f"{where}: unknown role {excerpt(role)}.{did_you_mean(str(role), _ROLES)}")
    if item.get("function_call"):  # OpenAI's older form of a call, and `function` that of the role of its result
        if item.get("tool_calls"):
            raise DataError(f"{where}: has `function_call` and `tool_calls`. Leave one of them out.")
        item = {**item, "tool_calls": [item["function_call"]]}
    role = "tool" if role == "function" else role
    for key in MEDIA:
        if key not in media.COLUMNS and carries(item.get(key)):
            raise DataError(
                f"{where}: `{key}` is not read: conversations are text, pictures and recordings. Leave the row out, or "
                f"write data.ignore='[{key}]' to learn from the rest alone."
            )
    handled = ("role", "content", "tool_calls", "function_call", *LOSS_FLAGS, *MEDIA)
    message = {key: value for key, value in item.items() if key not in handled and value is not None}
    message["role"] = role
    # A template prints null as the word None, and some fail where the key is missing.
    message["content"], parts = _content(item.get("content"), where)
    if parts:
        message[media.KEY] = parts
    if beside := {key: item[key] for key in media.COLUMNS if carries(item.get(key))}:
        (message,) = media.placed([{**message, "role": "user"}], beside, f"{where}: ")
        message["role"] = role
    if item.get("tool_calls"):
        value = item["tool_calls"]
        if role != "assistant":
            raise DataError(f"{where}: tool_calls belong to the assistant, not to the {role}.")
        if not isinstance(value, list):
            raise DataError(f"{where}: tool_calls must be a list, found {excerpt(value)}.")
        message["tool_calls"] = [_tool_call(call, where) for call in value]
    if (loss := _loss_of(item, where)) is not None:
        if loss and role != "assistant":
            raise DataError(
                f"{where}: the {role}'s turn is to carry loss, and only the assistant's are learnt. Write false there, "
                "or leave the flags of all turns out with data.ignore, such as data.ignore='[train]', and write "
                "data.loss_on=all to learn every token."
            )
        message["loss"] = loss
    # A tool may return nothing; every other turn must have content.
    if role != "tool" and "tool_calls" not in message and not message["content"].strip():
        problem = "has neither content nor tool_calls" if role == "assistant" else "has no content"
        raise DataError(f"{where} ({role}) {problem}. Remove the message, or write its content.")
    return message


def flag(value: Any) -> bool | None:
    """Whether a value means yes (1, true, "true") or no; None where it is neither."""
    known = {"1": True, "1.0": True, "true": True, "0": False, "0.0": False, "false": False}
    return known.get(str(value).lower()) if isinstance(value, bool | int | float | str) else None


def _loss_of(item: Mapping[str, Any], where: str) -> bool | None:
    """Whether a turn carries loss, by any tool's flag; None where none says it."""
    given = dict[str, bool]()
    for key in LOSS_FLAGS:
        if (value := item.get(key)) is None:
            continue
        parts = [part.get("train") for part in value if isinstance(part, dict)] if isinstance(value, list) else [value]
        verdicts = {None if isinstance(part, str) else flag(part) for part in parts}
        if len(verdicts) != 1 or None in verdicts:
            problem = (
                "learns a part of the turn, but a turn carries loss as a whole (train: true) or not at all"
                if key == "train_detail"
                else f"is {excerpt(value)}, but a turn carries loss (1) or none (0)"
            )
            raise DataError(f"{where}: {key} {problem}. Write 0 or 1.")
        given[key] = verdicts.pop() is not (key == "masked")
    if len({*given.values()}) > 1:
        raise DataError(f"{where}: {' and '.join(given)} contradict each other. Leave one of them out.")
    return next(iter(given.values()), None)


def thoughts(message: Message) -> str:
    """The reasoning of an assistant's message, a field of its own or the content before `</think>`; or empty."""
    own = next((message[key] for key in _REASONING_KEYS if isinstance(message.get(key), str)), "")
    return (own or split_thoughts(message).get("reasoning_content", "")).strip()


def split_thoughts(message: Message) -> Message:
    """The message with reasoning in front of its content, `<think>...</think>`, in a field of its own."""
    before, closing, after = message["content"].partition("</think>")
    opening, _, inside = before.rpartition("<think>")
    if message["role"] != "assistant" or not closing or opening.strip() or not inside.strip():
        return message
    return {**message, "reasoning_content": inside.strip(), "content": after.strip()}


def without_loss(messages: Sequence[Message]) -> list[Message]:
    """The same messages; no assistant turn carries loss."""
    return [{**message, "loss": False} if message["role"] == "assistant" else message for message in messages]


def last_answer_only(messages: Sequence[Message]) -> list[Message]:
    """The same messages; only the last assistant turn carries loss."""
    answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    last = answers[-1] if answers else 0
    return [*without_loss(messages[:last]), *messages[last:]]


def tools_of(value: Any) -> tuple[dict[str, Any], ...]:
    """The tools of a row, given as a list or its JSON text, each as {type: function, function: its schema}."""
    if isinstance(value, str):
        value = _parsed(value, "`tools`") if value.strip() else None
    if not value:
        return ()
    if not isinstance(value, list):
        raise DataError(f"`tools` must be a list of JSON schemas, found {excerpt(value)}.")
    tools = list[dict[str, Any]]()
    for number, item in enumerate(value, start=1):
        function = item.get("function", item) if isinstance(item, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise DataError(
                f"tool {number} must be an object with name, description and parameters, found {excerpt(item)}."
            )
        tools.append({"type": "function", "function": function})
    return tuple(tools)


def _from_sharegpt(item: Mapping[str, Any], where: str) -> dict[str, Any]:
    name, value = item["from"], item.get("value")
    if not isinstance(name, str) or name not in _SHAREGPT_ROLES:
        raise DataError(f"{where}: unknown speaker {excerpt(name)}.{did_you_mean(str(name), list(_SHAREGPT_ROLES))}")
    message = {key: other for key, other in item.items() if key not in ("from", "value")}
    message |= {"role": _SHAREGPT_ROLES[name], "content": value}
    if name == "function_call":
        calls = _parsed(value, where) if isinstance(value, str) else value
        message |= {"content": None, "tool_calls": calls if isinstance(calls, list) else [calls]}
    return message


def _content(value: Any, where: str) -> tuple[str, list[media.Media]]:
    """The text of a content, with a mark for each part that is no text, and these parts."""
    if value is None or isinstance(value, str):
        return value or "", []
    if not isinstance(value, list):
        raise DataError(f"{where}: content must be a string or a list of parts, found {excerpt(value)}.")
    texts, parts = list[str](), list[media.Media]()
    for part in value:
        if (medium := media.part_of(part, where)) is not None:
            parts.append(medium)
            texts.append(media.MARK)
            continue
        is_text = isinstance(part, dict) and part.get("type") in ("text", "input_text", "output_text")
        text = part.get("text", part.get("value")) if is_text else None
        if not isinstance(text, str):
            raise DataError(
                f"{where}: a content part must be {{type: text, text: ...}} or {{type: image, path: ...}} (or audio), "
                f"found {excerpt(part)}."
            )
        texts.append(media.unmarked(text, where))
    return "".join(texts), parts


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise DataError(f"{where}: a tool call must be an object with name and arguments, found {excerpt(call)}.")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        arguments = _parsed(arguments, f"{where}: the arguments of {function['name']}")
    if not isinstance(arguments, dict):
        raise DataError(f"{where}: the arguments of {function['name']} must be an object, found {excerpt(arguments)}.")
    kept = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    return {"type": "function", **kept, "function": {"name": function["name"], "arguments": arguments}}


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: {excerpt(text)} is not valid JSON ({error}).") from None
