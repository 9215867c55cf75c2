"""Raw rows to examples: ten row formats, recognised by their columns, of one type."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from workbench.config import DataConfig
from workbench.data.rows import RawRow, fingerprint, read_rows, shown
from workbench.data.text.messages import Message, last_answer_only, message_of, messages_of, tools_of, without_loss
from workbench.errors import DataError
from workbench.schema import did_you_mean

__all__ = ["Example", "convert", "fingerprint", "read", "renamed"]

Columns = Mapping[str, Any]

_MISTAKES_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Example:
    """One training example, before any template or tokenizer."""

    place: str
    """Where it stands, such as `train.jsonl, row 17`."""
    messages: tuple[Message, ...] = ()
    """Chat messages in Hugging Face's form: role, content (a string), and where they apply tool_calls and loss.

    `loss` is False where an assistant turn is context, not to be learnt. Empty for raw text.
    """
    tools: tuple[dict[str, Any], ...] = ()
    """Tools the conversation may call, each as {type: function, function: {name, description, parameters}}."""
    text: tuple[tuple[str, bool], ...] = ()
    """Raw text pieces, each with whether it carries loss. Empty for chat."""


def read(source: str, config: DataConfig, *, skipped: list[str], limit: int | None = None) -> Iterator[Example]:
    """The examples of a file, a folder or a hub data set, one by one, in their order.

    Args:
        source: What `read_rows` reads.
        config: Its format, columns and on_bad_row are used.
        skipped: Takes place and reason of every row that is left out.
        limit: Rows to look at; None for all.

    Raises:
        DataError: The source or its columns cannot be read, no row is left, or `on_bad_row` is refuse and rows
            are malformed: the message holds up to five of them.
    """
    refuse = config.on_bad_row == "refuse"
    chosen: _Format | None = None
    mistakes: list[str] = []
    seen = used = 0
    for row in itertools.islice(read_rows(source), limit):
        seen += 1
        if chosen is None and not row.mistake:
            chosen = _choose(source, row.columns, config)
        try:
            example = _example(row, chosen, config.columns)
        except DataError as error:
            (mistakes if refuse else skipped).append(f"{row.place}: {error}")
            if len(mistakes) == _MISTAKES_SHOWN:
                break
            continue
        if example is None:
            skipped.append(f"{row.place}: its label is false, an answer that is not to be learnt.")
        elif not mistakes:
            used += 1
            yield example
    if mistakes:
        raise DataError(_refusal(source, mistakes, seen))
    if not seen:
        raise DataError(f"{source}: holds no rows. Write it again, or name another one.")
    if not used:
        raise DataError(f"{source}: none of its {seen} rows can be used. The last one: {skipped[-1]}")


def convert(row: RawRow, config: DataConfig) -> Example | None:
    """One row as an example, whatever `on_bad_row` says; None for an answer that is not to be learnt."""
    chosen = None if row.mistake else _choose(row.place, row.columns, config)
    try:
        return _example(row, chosen, config.columns)
    except DataError as error:
        raise DataError(f"{row.place}: {error}") from None


def _refusal(source: str, mistakes: Sequence[str], seen: int) -> str:
    count = "1 malformed row" if len(mistakes) == 1 else f"{len(mistakes)} malformed rows"
    more = ", where reading stopped" if len(mistakes) == _MISTAKES_SHOWN else ""
    lines = [f"{source} has {count} among the first {seen}{more}:", *(f"  {mistake}" for mistake in mistakes)]
    return "\n".join([*lines, "Mend them, or write data.on_bad_row=skip to leave them out and count them."])


def _example(row: RawRow, chosen: _Format | None, renames: Mapping[str, str]) -> Example | None:
    if row.mistake or chosen is None:
        raise DataError(row.mistake)
    columns = renamed(row.columns, renames)
    if not any(need <= columns.keys() for need in chosen.needs):
        raise DataError(
            f"data.format {chosen.name} needs {_needs(chosen)}; the row has {', '.join(columns) or 'no column'}. "
            "Name the row's format, or rename its columns with data.columns."
        )
    return chosen.convert(row.place, columns)


def _choose(source: str, found: Columns, config: DataConfig) -> _Format:
    """The format that the configuration names, or the one that the columns of the first row fit."""
    for wanted, name in config.columns.items():
        if wanted not in _COLUMNS:
            raise DataError(f"data.columns: `{wanted}` is no column of any format.{did_you_mean(wanted, _COLUMNS)}")
        if name not in found:
            raise DataError(f"data.columns: {source} has no column `{name}`.{did_you_mean(name, list(found))}")
    named = [known for known in _FORMATS if known.name == config.format]
    if named:
        return named[0]
    names = renamed(found, config.columns).keys()
    fits = [(known, need) for known in _FORMATS for need in known.needs if need <= names]
    # {messages, chosen, rejected} also fits plain messages: the format that explains more columns wins.
    best = {known.name: known for known, need in fits if not any(need < other for _, other in fits)}
    if len(best) == 1:
        return next(iter(best.values()))
    raise DataError(_unclear(source, list(names), list(best)))


def _unclear(source: str, names: list[str], fits: list[str]) -> str:
    example = dict(zip(("question", "answer") if len(names) > 1 else ("text",), names, strict=False))
    renames = ", ".join(f"{wanted}: {name[:30]}" for wanted, name in example.items())
    columns = ", ".join(f"`{name[:60]}`" for name in names) or "none"
    problem = f"fit several formats ({', '.join(fits)})" if fits else "fit no known format"
    return "\n".join(
        [
            f"{source}: its columns, {columns}, {problem}.",
            f"Write data.format={(fits or ['alpaca'])[0]}, or rename columns as {{wanted: found}}, "
            f"such as data.columns='{{{renames}}}'.",
            "Formats and the columns that each needs:",
            *(f"  {known.name}: {_needs(known)}" for known in _FORMATS),
        ]
    )


def _needs(known: _Format) -> str:
    return ", or ".join(" + ".join(name for name in _COLUMNS if name in need) for need in known.needs)


def renamed(columns: Columns, renames: Mapping[str, str]) -> dict[str, Any]:
    """`columns` with {wanted: found} applied."""
    kept = {name: value for name, value in columns.items() if name not in renames.values()}
    return kept | {wanted: columns[name] for wanted, name in renames.items() if name in columns}


def _string(columns: Columns, name: str, cure: str = "write it in quotes") -> str:
    value = columns.get(name)
    if value is None:
        raise DataError(f"`{name}` is missing or null.")
    if not isinstance(value, str):
        raise DataError(f"`{name}` must be a string, found {shown(value)}: {cure}.")
    if not value.strip():
        raise DataError(f"`{name}` is empty.")
    return value


def _optional(columns: Columns, name: str) -> str:
    value = columns.get(name)
    return _string(columns, name) if value not in (None, "") else ""


def _chat(place: str, columns: Columns, messages: Sequence[Message]) -> Example:
    """`messages` as an example, with the row's system prompt and tools."""
    if system := _optional(columns, "system"):
        if messages[0]["role"] == "system":
            raise DataError("has a `system` column and a system message. Remove one of them.")
        messages = [{"role": "system", "content": system}, *messages]
    if not any(message["role"] == "assistant" for message in messages):
        raise DataError(f"has no assistant message to learn, only {', '.join(m['role'] for m in messages)}.")
    return Example(place, messages=tuple(messages), tools=tools_of(columns.get("tools")))


def _dialogue(columns: Columns) -> list[Message]:
    name = "messages" if "messages" in columns else "conversations"
    return messages_of(columns[name], name)


def _exchange(question: str, answer: str) -> list[Message]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _messages(place: str, columns: Columns) -> Example:
    return _chat(place, columns, _dialogue(columns))


def _alpaca(place: str, columns: Columns) -> Example:
    history = columns.get("history") or []
    if not isinstance(history, list) or not all(_is_exchange(pair) for pair in history):
        raise DataError(f"`history` must be a list of [question, answer] pairs, found {shown(history)}.")
    question = "\n\n".join(part for part in (_optional(columns, "instruction"), _optional(columns, "input")) if part)
    if not question:
        raise DataError("`instruction` is empty, and so is `input`.")
    turns = [message for pair in history for message in _exchange(*pair)]
    return _chat(place, columns, [*turns, *_exchange(question, _string(columns, "output"))])


def _is_exchange(pair: Any) -> bool:
    return isinstance(pair, list) and len(pair) == 2 and all(isinstance(side, str) and side.strip() for side in pair)


def _question_answer(place: str, columns: Columns) -> Example:
    context, question = _optional(columns, "context"), _string(columns, "question")
    if "answer" in columns:
        answer = _string(columns, "answer")
    else:
        answers = columns["answers"]
        listed = answers.get("text") if isinstance(answers, dict) else answers  # SQuAD: {text, answer_start}
        if not isinstance(listed, list) or not listed:
            raise DataError(f"`answers` must be a list with at least one answer, found {shown(answers)}.")
        answer = _string({"answers": listed[0]}, "answers")
    return _chat(place, columns, _exchange(f"{context}\n\n{question}" if context else question, answer))


def _text_label(place: str, columns: Columns) -> Example:
    label = _string(columns, "label", cure="map your classes to names")
    return _chat(place, columns, _exchange(_string(columns, "text"), label))


def _text(place: str, columns: Columns) -> Example:
    return Example(place, text=((_string(columns, "text"), True),))


def _prompt_completion(place: str, columns: Columns) -> Example:
    return _answered(place, columns, prompt="prompt", answer="completion")


def _preference(place: str, columns: Columns) -> Example | None:
    """The preferred answer as an example; None for a row that is labelled as not preferred."""
    if "chosen" in columns:
        prompt = next((name for name in ("messages", "conversations", "prompt") if name in columns), "prompt")
        return _answered(place, columns, prompt=prompt, answer="chosen")
    label = columns["label"]
    if str(label).lower() not in ("true", "false"):
        raise DataError(f"`label` must be true or false, found {shown(label)}.")
    if str(label).lower() == "false":
        return None
    if "completion" in columns:
        return _prompt_completion(place, columns)
    # The label judges the last answer; the turns before it are context.
    return _chat(place, columns, last_answer_only(_dialogue(columns)))


def _answered(place: str, columns: Columns, *, prompt: str, answer: str) -> Example:
    """Raw text where both columns are strings, otherwise a chat; loss falls on the answer alone."""
    asked, given = columns.get(prompt), columns[answer]
    if isinstance(given, str) and not isinstance(asked, list):
        if _optional(columns, "system"):
            raise DataError(
                f"`system` has no place in raw text. For a chat, write data.format=question_answer "
                f"data.columns='{{question: {prompt}, answer: {answer}}}'."
            )
        return Example(place, text=((_string(columns, prompt), False), (_string(columns, answer), True)))
    if isinstance(given, str):
        answers = [{"role": "assistant", "content": _string(columns, answer)}]
    elif isinstance(given, dict):
        answers = [message_of(given, f"`{answer}`")]
    else:
        answers = messages_of(given, answer)
    if any(message["role"] == "user" for message in answers):  # it repeats the whole conversation
        return _chat(place, columns, last_answer_only(answers))
    if answers[-1]["role"] != "assistant":
        raise DataError(f"`{answer}` must end with the assistant, not with the {answers[-1]['role']}.")
    if isinstance(asked, list):
        before = messages_of(asked, prompt)
    else:
        before = [{"role": "user", "content": _string(columns, prompt)}]
    return _chat(place, columns, [*without_loss(before), *answers])


def _conversation_tree(place: str, columns: Columns) -> Example:
    """The path from the prompt along the best-ranked replies, up to the last answer (Köpf et al. 2023)."""
    roles = {"prompter": "user", "assistant": "assistant"}
    node: Any = columns["prompt"]
    path: list[Message] = []
    while node is not None:
        if not isinstance(node, dict) or node.get("role") not in tuple(roles):
            raise DataError(f"message {len(path) + 1} must have role prompter or assistant, found {shown(node)}.")
        path.append({"role": roles[node["role"]], "content": _string(node, "text")})
        replies = node.get("replies") or []
        if not isinstance(replies, list):
            raise DataError(f"message {len(path)}: `replies` must be a list, found {shown(replies)}.")
        # min keeps the first of equals; an unranked reply comes after the ranked ones.
        node = min((reply for reply in replies if not _is_deleted(reply)), key=_rank, default=None)
    while path and path[-1]["role"] != "assistant":
        path.pop()
    if not path:
        raise DataError("the tree holds no answer of the assistant.")
    return _chat(place, columns, path)


def _is_deleted(reply: Any) -> bool:
    return isinstance(reply, dict) and reply.get("deleted") is True


def _rank(reply: Any) -> float:
    rank = reply.get("rank") if isinstance(reply, dict) else None
    return rank if isinstance(rank, int | float) else float("inf")


@dataclass(frozen=True, slots=True)
class _Format:
    name: str
    needs: tuple[frozenset[str], ...]
    """Sets of columns, of which a row must have one."""
    convert: Callable[[str, Columns], Example | None]


def _format(convert: Callable[[str, Columns], Example | None], name: str, *needs: str) -> _Format:
    return _Format(name, tuple(frozenset(need.split()) for need in needs), convert)


_FORMATS = (
    _format(_messages, "messages", "messages"),
    _format(_messages, "sharegpt", "conversations"),
    _format(_alpaca, "alpaca", "instruction output"),
    _format(_prompt_completion, "prompt_completion", "prompt completion"),
    _format(_question_answer, "question_answer", "question answer", "question answers"),
    _format(_text_label, "text_label", "text label"),
    _format(_text, "text", "text"),
    _format(
        _preference,
        "preference",
        "chosen rejected",
        "messages chosen rejected",
        "conversations chosen rejected",
        "prompt chosen rejected",
        "messages label",
        "conversations label",
        "prompt completion label",
    ),
    _format(_conversation_tree, "conversation_tree", "prompt message_tree_id"),
)
_COLUMNS = (
    *("messages", "conversations", "instruction", "input", "output", "prompt", "completion", "question", "answer"),
    *("answers", "text", "label", "chosen", "rejected", "message_tree_id", "context", "system", "tools", "history"),
)
