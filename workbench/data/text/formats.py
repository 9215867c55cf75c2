"""Row formats: raw rows, recognised by their columns, become examples of one type."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from workbench.config import DataConfig
from workbench.config.sections.basic_sections import MARGIN, WEIGHT
from workbench.data import hub_datasets, resampling, unread_columns
from workbench.data.rows import (
    RawRow,
    convert_rows,
    excerpt,
    fingerprint,
    number_of,
    optional_string,
    string_of,
)
from workbench.data.source_files import local_path
from workbench.data.stored_files import StoredFile
from workbench.data.text import media
from workbench.data.text.messages import (
    Message,
    flag,
    last_answer_only,
    message_of,
    messages_of,
    tools_of,
    without_loss,
)
from workbench.data.unread_columns import ROW_FLAGS, carries
from workbench.errors import DataError
from workbench.schema import did_you_mean

__all__ = ["Conversion", "Example", "answered", "convert", "fingerprint", "read", "renamed"]

PROMPTS = ("messages", "conversations", "prompt")
"""Columns that may hold the prompt; the first that the row has is used."""
Columns = Mapping[str, Any]
Reader = Callable[[str, DataConfig], Iterator[RawRow]]  # from a source, and how it is read, to its raw rows


@dataclass(frozen=True, slots=True)
class Example:
    """One training example, before any template or tokenizer."""

    place: str
    """File and row, such as `train.jsonl, row 17`."""
    messages: tuple[Message, ...] = ()
    """Chat messages in Hugging Face's form: role, content (a string), and where they apply tool_calls and loss.

    An assistant turn whose `loss` is False is context and carries no loss. Empty for raw text.
    """
    tools: tuple[dict[str, Any], ...] = ()
    """Tools that the conversation may call, each as {type: function, function: {name, description, parameters}}."""
    text: tuple[tuple[str, bool], ...] = ()
    """Raw text pieces, each with whether it carries loss. Empty for chat."""
    weight: float = 1.0
    """How often it counts in the loss."""
    desired: bool | None = None
    """Whether its answer is the better one, or a good one; None for rows that are not preference rows."""
    rejected: Example | None = None
    """The worse answer to the same prompt, where a row has two."""
    margin: float = 0.0
    """By how much the reward of the better answer is to be higher."""
    tie: bool = False
    """Whether its two answers were judged equally good, so that neither is the better one."""
    steps: tuple[str, ...] = ()
    """Steps of its answer, one after another in its text, where they are rated one by one."""
    step_labels: tuple[float, ...] = ()
    """How right each is, from 0 (wrong) to 1 (right)."""

    @property
    def whole_text(self) -> str:
        """The pieces of raw text as one."""
        return "".join(text for text, _ in self.text)


def read(
    source: str,
    config: DataConfig,
    *,
    skipped: list[str],
    limit: int | None = None,
    weighted: bool = False,
    conversion: Conversion | None = None,
    reader: Reader | None = None,
) -> Iterator[Example]:
    """Iterate over the examples of a file, a folder or a hub data set, in their order. Raises DataError: as
    `convert_rows`; or no format fits the columns.

    Args:
        source: A path or a hub data set, as `read_rows` takes it.
        config: Its format, columns and on_bad_row are used.
        skipped: Place and reason of every skipped row are appended.
        limit: Rows to read; None for all.
        weighted: Whether to read how often each counts, where `config.columns` says in which column; else once each.
        conversion: Converts columns in place of the format's own conversion.
        reader: Yields the raw rows of `source` in place of `read_rows`.
    """
    config = config if weighted else config.unweighted
    reads, folder = set[str](), folder_of(source)

    def converter(first: RawRow) -> Callable[[RawRow], Example | None]:
        row_format = _detect(source, first.columns, config)
        reads.update(_reads(first.columns, row_format, config))
        reads.update(name for name, cell in first.columns.items() if isinstance(cell, StoredFile))  # of a reader
        if conversion is not None:
            row_format = replace(row_format, convert=partial(conversion, row_format.name))

        def convert(row: RawRow) -> Example | None:
            columns = renamed(row.columns, config.columns)
            if (denied := _not_trained(columns)) is not None:
                skipped.append(f"{row.place}: by its `{denied}` it is not trained on.")
                return None
            example = _example(row, row_format, config.columns)
            if example is None:
                skipped.append(f"{row.place}: its label is false: a bad answer, which is not trained on.")
            return example if example is None else located(example, folder)

        return convert

    raw = None if reader is None else lambda source: reader(source, config)
    return convert_rows(source, converter, config, skipped=skipped, limit=limit, reader=raw, reads=lambda _: reads)


def folder_of(source: str) -> str | None:
    """Where the paths of pictures in a source begin: the table's folder."""
    path = local_path(source)
    if not path.exists():
        return None if hub_datasets.is_id(source) else "."
    return str(path if path.is_dir() else path.parent)


def located(example: Example, folder: str | None) -> Example:
    """The example, the paths of whose pictures begin in `folder`."""
    if not any(media.KEY in message for message in example.messages):
        return example
    rejected = None if example.rejected is None else located(example.rejected, folder)
    return replace(example, messages=media.located(example.messages, folder), rejected=rejected)


def format_of(source: str, config: DataConfig) -> str:
    """Name of the format of the rows of `source`, by its first row."""
    found: list[str] = []

    def conversion(name: str, place: str, columns: Columns) -> Example:
        found.append(name)
        return Example(place)

    next(read(source, config, skipped=[], limit=1, conversion=conversion), None)
    return found[0] if found else ""


def convert(row: RawRow, config: DataConfig) -> Example | None:
    """One row as an example, whatever `on_bad_row` says; None for an answer that is labelled as not preferred."""
    config = config.unweighted
    if row.mistake:
        raise DataError(f"{row.place}: {row.mistake}")
    row = replace(row, columns=unread_columns.without(row.columns, config.ignore))
    row_format = _detect(row.place, row.columns, config)
    try:
        unread_columns.require_prompt(row.columns, _reads(row.columns, row_format, config))
        return _example(row, row_format, config.columns)
    except DataError as error:
        raise DataError(f"{row.place}: {error}") from None


def _example(row: RawRow, row_format: _Format, renames: Mapping[str, str]) -> Example | None:
    columns = with_turns(renamed(row.columns, renames), text=row_format.name != "text")
    if not any(required <= columns.keys() for required in row_format.required):
        raise DataError(
            f"data.format {row_format.name} needs {row_format.requirement}; the row has "
            f"{', '.join(columns) or 'no column'}. Name the row's format, or rename its columns with data.columns."
        )
    example = row_format.convert(row.place, columns)
    if example is not None:
        example = _with_media(example, columns)
    if example is not None and WEIGHT in renames:
        example = replace(example, weight=resampling.read_weight(columns.get(WEIGHT), renames[WEIGHT]))
    if example is not None and MARGIN in renames:
        example = replace(example, margin=number_of(columns.get(MARGIN), renames[MARGIN]))
        if example.tie and example.margin:
            raise DataError(
                f"is a tie, and `{renames[MARGIN]}` says by how much one answer is better, "
                f"{excerpt(columns.get(MARGIN))}. Write 0 there, or leave `tie` out."
            )
    return example


def _with_media(example: Example, columns: Columns) -> Example:
    """The example with the pictures that columns of its row hold, and those that its messages leave to them."""
    held = next((name for name in media.COLUMNS if carries(columns.get(name))), None)
    if example.text:
        if held is not None:
            cure = "data.columns='{question: prompt, answer: completion}' and data.format=question_answer"
            if example.desired is not None:
                cure = "data.columns='{question: prompt}'"
            raise DataError(f"raw text has no place for `{held}`. For a chat, write {cure}.")
        return example
    if not example.messages:
        return example
    if not any(media.KEY in message for message in example.messages) and not columns.keys() & set(media.COLUMNS):
        return example
    rejected = None if example.rejected is None else _with_media(example.rejected, columns)
    return replace(example, messages=tuple(media.placed(example.messages, columns)), rejected=rejected)


def _detect(source: str, columns: Columns, config: DataConfig) -> _Format:
    """The format that the configuration names, or the only one whose required columns the first row has."""
    for name, in_file in config.columns.items():
        if name not in _COLUMNS:
            raise DataError(f"data.columns: `{name}` is no column of any format.{did_you_mean(name, _COLUMNS)}")
        if in_file not in columns:
            raise DataError(f"data.columns: {source} has no column `{in_file}`.{did_you_mean(in_file, list(columns))}")
    for row_format in _FORMATS:
        if row_format.name == config.format:
            return row_format
    names = with_turns(renamed(columns, config.columns)).keys()
    fits = [(known, required) for known in _FORMATS for required in known.required if required <= names]
    # {messages, chosen, rejected} also fits plain messages: the format that requires more columns wins.
    best = {known.name: known for known, required in fits if not any(required < other for _, other in fits)}
    if len(best) == 1:
        return next(iter(best.values()))
    example = dict(zip(("question", "answer") if len(names) > 1 else ("text",), names, strict=False))
    renames = ", ".join(f"{name}: {in_file[:30]}" for name, in_file in example.items())
    listed = ", ".join(f"`{name[:60]}`" for name in names) or "none"
    problem = f"fit several formats ({', '.join(best)})" if best else "fit no known format"
    sentence = f"{source}: its columns, {listed}, {problem}."
    # Formats that need just one more column than these, and that column for each.
    lacking: dict[str, str] = {}
    for known in _FORMATS:
        for required in known.required:
            if not best and required & names and len(missing := required - names) == 1:
                lacking.setdefault(known.name, next(iter(missing)))
    if lacking:
        lacks = ", ".join(f"`{column}` for {name}" for name, column in lacking.items())
        stands = f"such as data.columns='{{{next(iter(lacking.values()))}: NAME}}'"
        raise DataError(
            f"{sentence}\nIt lacks {lacks}. Add that column, or say which one of the file stands for it, {stands}."
        )
    write = f"Write data.format={next(iter(best))}, or say" if best else "Say"
    message = [
        sentence,
        f"{write} which column is which as {{name: column in the file}}, such as data.columns='{{{renames}}}'.",
        "Formats and the columns that each needs:",
        *(f"  {known.name}: {known.requirement}" for known in _FORMATS),
    ]
    raise DataError("\n".join(message))


def renamed(columns: Columns, renames: Mapping[str, str]) -> dict[str, Any]:
    """`columns` under other names; `renames` maps each new name to the one in the file."""
    kept = {name: value for name, value in columns.items() if name not in renames.values()}
    return kept | {name: columns[in_file] for name, in_file in renames.items() if in_file in columns}


def _reads(columns: Columns, row_format: _Format, config: DataConfig) -> set[str]:
    """Columns of the file that rows of a format are read from, by those of its first row."""
    found = renamed(columns, config.columns)
    turned = with_turns(found, text=row_format.name != "text")
    names = {name for required in row_format.required if required <= turned.keys() for name in required}
    names |= {"text"} if turned.keys() - found.keys() else set()
    for name in ("instruction", "question"):
        names |= {"history", "context", *(("input",) if name == "instruction" else ())} if name in names else set()
    names |= {"system", "tools", "functions", "tie", MARGIN, *media.COLUMNS} if row_format.name != "text" else set()
    return unread_columns.columns_in_file(config, {*names, *ROW_FLAGS, WEIGHT})


def _not_trained(columns: Columns) -> str | None:
    """The column by which a whole row carries no loss; None where it does. Raises DataError: it says neither."""
    for name in ROW_FLAGS:
        value = columns.get(name)
        if value is None or (isinstance(value, list) and ("messages" in columns or "conversations" in columns)):
            continue
        if (loss := flag(value)) is None:
            raise DataError(
                f"`{name}` is {excerpt(value)}, but a row carries loss (true) or none (false), and a list is read "
                f"beside `messages`, a value for each. Or leave it out: data.ignore='[{name}]'."
            )
        if loss is (name == "masked"):
            return name
    return None


_SPEAKERS = {"human": "user", "user": "user", "assistant": "assistant", "system": "system"}
_TURNS = [
    re.compile(rf"(?:\A\s*|{between})({{}}):".format("|".join(map(str.capitalize, _SPEAKERS))))
    for between in (r"\n\n", r"\n", r"\s*### ?")
]  # a blank line between turns (hh_rlhf), a line end, or ### in front of each (Guanaco)


def transcript(text: Any) -> list[Message] | None:
    """The turns of a text that writes out a conversation, with "Human:" and "Assistant:" before them; None where it
    is none. A last turn of the assistant without a word asks for one, and is left out."""
    for turn in _TURNS if isinstance(text, str) else ():
        before, *pieces = turn.split(text)
        turns = [
            {"role": _SPEAKERS[speaker.lower()], "content": content.strip()}
            for speaker, content in zip(pieces[::2], pieces[1::2], strict=True)
        ]
        if (
            not before.strip()
            and turns
            and turns[0]["role"] != "assistant"
            and any(each["role"] == "assistant" for each in turns)
        ):
            return turns if turns[-1]["content"] else turns[:-1]
    return None


def with_turns(columns: Columns, *, text: bool = True) -> dict[str, Any]:
    """`columns` in which transcripts are lists of messages; one in `text` is `messages`, where `text` is true."""
    written = {name: transcript(columns.get(name)) for name in ("prompt", "chosen", "rejected")}
    turned: dict[str, Any] = {name: turns for name, turns in written.items() if turns is not None}
    if "prompt" in turned:  # what follows "Assistant:" is an answer, without the space between
        given = {name: columns.get(name) for name in ("chosen", "rejected", "completion") if name not in turned}
        turned |= {name: value.strip() for name, value in given.items() if isinstance(value, str)}
    beside = {"messages", "conversations", "label"} & columns.keys()
    if text and not beside and (turns := transcript(columns.get("text"))) is not None:
        return {**{name: value for name, value in columns.items() if name != "text"}, **turned, "messages": turns}
    return {**columns, **turned}


def chat_example(place: str, columns: Columns, messages: Sequence[Message]) -> Example:
    """An example of `messages`, with the row's system prompt and tools."""
    if system := optional_string(columns, "system"):
        if messages[0]["role"] == "system":
            raise DataError("has a `system` column and a system message. Remove one of them.")
        messages = [{"role": "system", "content": system}, *messages]
    if not any(message["role"] == "assistant" for message in messages):
        raise DataError(f"has no assistant message to learn, only {', '.join(m['role'] for m in messages)}.")
    tools = [columns[name] for name in ("tools", "functions") if carries(columns.get(name))]  # OpenAI's older name
    if len(tools) > 1:
        raise DataError("has `tools` and `functions`. Leave one of them out.")
    return Example(place, messages=tuple(messages), tools=tools_of(tools[0] if tools else None))


def dialogue(columns: Columns) -> list[Message]:
    """The messages of a row, each with the flag that a list beside them has for it."""
    name = "messages" if "messages" in columns else "conversations"
    messages = columns[name]
    for key in ROW_FLAGS:
        if isinstance(flags := columns.get(key), list) and isinstance(messages, list):
            if len(flags) != len(messages):
                raise DataError(f"`{key}` has {len(flags)} values for {len(messages)} messages. Write one for each.")
            messages = [
                {**message, key: message.get(key, own)} if isinstance(message, dict) else message
                for message, own in zip(messages, flags, strict=True)
            ]
    return messages_of(messages, name)


def _exchange(question: str, answer: str) -> list[Message]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def asked(columns: Columns) -> list[Message]:
    """The turns before an answer: `history`, and `instruction` with `input` or `context`, or `question` after its
    `context`."""
    history = columns.get("history") or []
    history = [] if isinstance(history, str) and not history.strip() else history
    pairs: list[Any] = history if isinstance(history, list) else [None]
    if not all(
        isinstance(pair, list) and len(pair) == 2 and all(isinstance(side, str) and side.strip() for side in pair)
        for pair in pairs
    ):
        raise DataError(f"`history` must be a list of [question, answer] pairs, found {excerpt(history)}.")
    names = ("instruction", "input", "context") if "instruction" in columns else ("context", "question")
    if "question" in names:
        string_of(columns, "question")
    question = "\n\n".join(part for name in names if (part := optional_string(columns, name)))
    if not question:
        raise DataError("`instruction` is empty, and so is `input`.")
    turns = [message for pair in pairs for message in _exchange(*pair)]
    return [*turns, {"role": "user", "content": question}]


def _alpaca(place: str, columns: Columns) -> Example:
    return _to_question(place, columns, string_of(columns, "output"))


def _to_question(place: str, columns: Columns, answer: str) -> Example:
    return chat_example(place, columns, [*asked(columns), {"role": "assistant", "content": answer}])


def _question_answer(place: str, columns: Columns) -> Example:
    if "answer" in columns:
        answer = string_of(columns, "answer")
    else:
        answers = columns["answers"]
        listed = answers.get("text") if isinstance(answers, dict) else answers  # SQuAD: {text, answer_start}
        if not isinstance(listed, list) or not listed:
            raise DataError(f"`answers` must be a list with at least one answer, found {excerpt(answers)}.")
        answer = string_of({"answers": listed[0]}, "answers")
    return _to_question(place, columns, answer)


def _text_label(place: str, columns: Columns) -> Example:
    label = string_of(columns, "label", remedy="map your classes to names")
    return chat_example(place, columns, _exchange(string_of(columns, "text"), label))


def _preference(place: str, columns: Columns) -> Example | None:
    """The preferred answer as an example; None for a row that is labelled as not preferred."""
    columns = judged(columns)
    if "chosen" in columns:
        prompt = next((name for name in PROMPTS if columns.get(name) is not None), "prompt")
        return answered(place, columns, prompt=prompt, answer="chosen")
    label = columns["label"]
    if str(label).lower() not in ("true", "false"):
        raise DataError(f"`label` must be true or false, found {excerpt(label)}.")
    if str(label).lower() == "false":
        return None
    if "completion" in columns:
        return answered(place, columns, prompt="prompt", answer="completion")
    # The label rates the last answer; the turns before it are context.
    return chat_example(place, columns, last_answer_only(dialogue(columns)))


def judged(columns: Columns) -> Columns:
    """The columns of judged answers under the names `prompt`, `completion` and `label`, where others stand for them."""
    if "label" not in columns and "kto_tag" in columns:
        columns = {**columns, "label": columns["kto_tag"]}
    if not {"instruction", "question"} & columns.keys() or any(columns.get(name) is not None for name in PROMPTS):
        return columns
    answer = next((name for name in ("completion", "output", "answer") if name in columns), None)
    return {**columns, "prompt": asked(columns), **({"completion": columns[answer]} if answer else {})}


def _stepwise(place: str, columns: Columns) -> Example | None:
    """The steps of an answer as one answer; None where one of them is labelled as wrong."""
    steps, labels = columns["completions"], columns.get("labels")
    if not isinstance(steps, list) or not all(isinstance(step, str) for step in steps):
        raise DataError(f"`completions` must be a list of steps, each a text, found {excerpt(steps)}.")
    if isinstance(labels, list) and not all(labels):
        return None
    return answered(place, {**columns, "completion": "\n".join(steps)}, prompt="prompt", answer="completion")


def answered(place: str, columns: Columns, *, prompt: str, answer: str) -> Example:
    """Raw text where both columns are strings, otherwise a chat; only the answer carries loss."""
    before, given = columns.get(prompt), columns[answer]
    if isinstance(given, str) and not isinstance(before, list):
        for name in ("system", "tools", "functions"):
            if carries(columns.get(name)):
                pair = answer in ("chosen", "rejected")
                wanted = "question: prompt" if pair else f"question: {prompt}, answer: {answer}"
                named = "" if pair else "data.format=question_answer "
                what = "`system` prompt" if name == "system" else f"`{name}`"
                raise DataError(f"raw text has no {what}. For a chat, write {named}data.columns='{{{wanted}}}'.")
        return Example(place, text=((string_of(columns, prompt), False), (string_of(columns, answer), True)))
    if isinstance(given, str):
        answers = [{"role": "assistant", "content": string_of(columns, answer)}]
    elif isinstance(given, dict):
        answers = [message_of(given, f"`{answer}`")]
    else:
        answers = messages_of(given, answer)
    if any(message["role"] == "user" for message in answers):  # the answer column holds the whole conversation
        return chat_example(place, columns, last_answer_only(answers))
    if answers[-1]["role"] != "assistant":
        raise DataError(f"`{answer}` must end with the assistant, not with the {answers[-1]['role']}.")
    turns = (
        dialogue(columns)
        if isinstance(before, list) and prompt != "prompt"
        else messages_of(before, prompt)
        if isinstance(before, list)
        else [{"role": "user", "content": string_of(columns, prompt)}]
    )
    return chat_example(place, columns, [*without_loss(turns), *answers])


def _conversation_tree(place: str, columns: Columns) -> Example:
    """The path from the prompt along the best-ranked replies, up to the last answer (Köpf et al. 2023)."""
    roles = {"prompter": "user", "assistant": "assistant"}
    node: Any = columns["prompt"]
    path: list[Message] = []
    while node is not None:
        if not isinstance(node, dict) or node.get("role") not in tuple(roles):
            raise DataError(f"message {len(path) + 1} must have role prompter or assistant, found {excerpt(node)}.")
        path.append({"role": roles[node["role"]], "content": string_of(node, "text")})
        replies = node.get("replies") or []
        if not isinstance(replies, list):
            raise DataError(f"message {len(path)}: `replies` must be a list, found {excerpt(replies)}.")
        # The first of equals; an unranked reply comes after the ranked ones.
        left = [reply for reply in replies if not (isinstance(reply, dict) and reply.get("deleted") is True)]
        ranks = [reply.get("rank") if isinstance(reply, dict) else None for reply in left]
        known = [rank if isinstance(rank, int | float) else float("inf") for rank in ranks]
        node = left[known.index(min(known))] if left else None
    while path and path[-1]["role"] != "assistant":
        path.pop()
    if not path:
        raise DataError("the tree holds no answer of the assistant.")
    return chat_example(place, columns, path)


Conversion = Callable[[str, str, Columns], Example | None]
"""From the name of the rows' format, a place and columns to an example; None for an answer that is not trained on."""


def of_format(name: str, place: str, columns: Columns) -> Example | None:
    """The example of a row of the format `name`, as that format reads it."""
    return next(each for each in _FORMATS if each.name == name).convert(place, columns)


@dataclass(frozen=True, slots=True)
class _Format:
    name: str
    required: tuple[frozenset[str], ...]  # sets of columns; a row must have all columns of one of them
    convert: Callable[[str, Columns], Example | None]

    @property
    def requirement(self) -> str:
        """The required columns, for messages."""
        return ", or ".join(" + ".join(name for name in _COLUMNS if name in required) for required in self.required)


def _format(convert: Callable[[str, Columns], Example | None], name: str, *required: str) -> _Format:
    return _Format(name, tuple(frozenset(columns.split()) for columns in required), convert)


_FORMATS = (
    _format(lambda place, columns: chat_example(place, columns, dialogue(columns)), "messages", "messages"),
    _format(lambda place, columns: chat_example(place, columns, dialogue(columns)), "sharegpt", "conversations"),
    _format(_alpaca, "alpaca", "instruction output"),
    _format(partial(answered, prompt="prompt", answer="completion"), "prompt_completion", "prompt completion"),
    _format(_question_answer, "question_answer", "question answer", "question answers"),
    _format(_text_label, "text_label", "text label"),
    _format(lambda place, columns: Example(place, text=((string_of(columns, "text"), True),)), "text", "text"),
    _format(
        _preference,
        "preference",
        "chosen rejected",
        "messages chosen rejected",
        "conversations chosen rejected",
        "prompt chosen rejected",
        "instruction chosen rejected",
        "question chosen rejected",
        "messages label",
        "conversations label",
        "prompt completion label",
        "messages kto_tag",
        "conversations kto_tag",
        "prompt completion kto_tag",
        "instruction output kto_tag",
        "question answer kto_tag",
    ),
    _format(_stepwise, "stepwise", "prompt completions labels", "prompt completions"),
    _format(_conversation_tree, "conversation_tree", "prompt message_tree_id"),
)
_COLUMNS = (
    *("messages", "conversations", "instruction", "input", "output", "prompt", "completion", "question", "answer"),
    *("answers", "text", "label", "chosen", "rejected", "message_tree_id", "context", "system", "tools", "history"),
    *("completions", "labels", "tie", "kto_tag", "functions", *media.COLUMNS, WEIGHT, MARGIN),
)
