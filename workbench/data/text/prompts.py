"""Rows to answer, in the formats of training rows, without the answer that they may have.

Legend: N prompts, M samples of an epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from workbench.config import DataConfig, TrainingSections
from workbench.data import mixture, resampling
from workbench.data.batching import Indices
from workbench.data.mixture import MixedRows
from workbench.data.rows import RawRow, read_rows
from workbench.data.text import chat, formats
from workbench.data.text.chat import Encoded, LossOn
from workbench.data.text.formats import Example
from workbench.data.text.row_encoder import WrappedEncoder
from workbench.data.text.tokenized_set import TokenizedSet
from workbench.errors import DataError, WorkbenchError

_ANSWERS = {"instruction": "output", "prompt": "completion", "question": "answer"}
PROMPT = "{prompt}"
"""Stands in a wording for the prompt as it is."""
_PLACEHOLDER = "?"  # answer of a row that has none, so that it fits its format; it is dropped again


def read_prompts(source: str, config: DataConfig, skipped: list[str] | None = None) -> Iterator[Example]:
    """Yield the rows of `source` without their last answer; see `read_questions`."""
    return (example for example, _ in read_questions(source, config, skipped))


def turns_of(columns: Mapping[str, Any]) -> Sequence[str]:
    """What a user says turn by turn in a row of MT-Bench's form, whose `turns` is a list of texts; none of others."""
    turns = columns.get("turns")
    return turns if isinstance(turns, list) and all(isinstance(each, str) for each in turns) else ()


def first_turn(row: RawRow, config: DataConfig) -> Example | None:
    """As `question`, but of a row in MT-Bench's form its first turn."""
    if turns := turns_of(row.columns):
        return Example(row.place, messages=({"role": "user", "content": turns[0]},))
    return question(row, config)


def read_questions(
    source: str,
    config: DataConfig,
    skipped: list[str] | None = None,
    *,
    convert: Callable[[RawRow, DataConfig], Example | None] | None = None,
) -> Iterator[tuple[Example, Mapping[str, Any]]]:
    """Yield the rows of `source` without their last answer, each with all of its columns, by their names in the file.
    Raises DataError: a row has nothing to answer (the message names file and row), or no row is left. `skipped`:
    reasons of rows that `config.on_bad_row` leaves out are appended. `convert`: in place of `question`."""
    skipped = [] if skipped is None else skipped
    question_count = 0
    rows = list(read_rows(source, config))
    if not rows:
        raise DataError(f"{source}: holds no rows to answer. Write it again, or name another one.")
    for row in rows:
        try:
            example = (convert or question)(row, config)
        except DataError as error:
            if config.on_bad_row == "refuse":
                raise
            skipped.append(str(error))
        else:
            if example is not None:
                question_count += 1
                yield formats.located(example, formats.folder_of(source)), row.columns
    if not question_count:
        reason = f"The last one: {skipped[-1]}" if skipped else "All are labelled as bad answers."
        raise DataError(f"{source}: none of its rows can be answered. {reason}")


def question(row: RawRow, config: DataConfig) -> Example | None:
    """A row without its last answer; None for an answer that is labelled as not preferred."""
    for name in (*_ANSWERS, "messages", "conversations"):
        if (in_file := config.columns.get(name, name)) != name and in_file not in row.columns and not row.mistake:
            known = ", ".join(f"`{each}`" for each in row.columns)
            raise DataError(
                f"{row.place}: data.columns reads `{name}` from `{in_file}`, which it lacks. It has: {known}."
            )
    columns = formats.renamed(row.columns, config.columns)
    bare = config.model_copy(update={"columns": {}})
    example = formats.convert(RawRow(row.place, with_answer(columns), row.mistake), bare)
    return None if example is None else without_answer(example)


def with_answer(columns: dict[str, Any]) -> dict[str, Any]:
    """Columns with an answer, so that they fit their format: a placeholder where they have none."""
    columns = formats.with_turns(columns)
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
    """The example without its last answer. Raises DataError: nothing comes before that."""
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


def own_answer(row: RawRow, config: DataConfig) -> str | None:
    """The last answer that a row holds, by its format, or its column `answer`; None where it holds none."""
    columns = formats.with_turns(formats.renamed(row.columns, config.columns))
    if with_answer(columns) != columns:
        return None if columns.get("answer") is None else str(columns["answer"])
    example = formats.convert(replace(row, columns=columns), config.model_copy(update={"columns": {}}))
    if example is None:
        return None
    said = [str(message["content"]) for message in example.messages if message["role"] == "assistant"]
    return said[-1] if said else "".join(text for text, answers in example.text if answers)


def reworded(example: Example, wording: str) -> Example:
    """An example without its answer, `wording` with its prompt in place of PROMPT: its raw text, or its user's last
    turn. Raises DataError: a conversation has none."""
    if wording == PROMPT:
        return example
    if example.text:
        return replace(example, text=((wording.replace(PROMPT, example.whole_text), False),))
    messages = list(example.messages)
    last = max((number for number, each in enumerate(messages) if each["role"] == "user"), default=None)
    if last is None:
        raise DataError(f"{example.place}: a wording is for what a user asks, and no user does. Leave --wording out.")
    messages[last] = {**messages[last], "content": wording.replace(PROMPT, str(messages[last]["content"]))}
    return replace(example, messages=tuple(messages))


@dataclass(frozen=True)
class PromptEncoder(WrappedEncoder):
    """Writes the prompt of an example as `base` writes conversations, and behind it the token that ends an answer.

    That token is the only one that carries loss, so that a row knows where an answer begins and how it ends.
    """

    tools: tuple[dict[str, Any], ...] = ()
    """Tools that every prompt offers, as a template reads them."""

    def reader(self, source: str, config: DataConfig) -> Iterator[RawRow]:
        """Yield the rows of a source, with a placeholder where there is no answer."""
        columns = config.columns
        for row in read_rows(source, config):
            known = formats.renamed(row.columns, columns)
            answered = with_answer(known)
            added = {columns.get(name, name): value for name, value in answered.items() if name not in known}
            gone = {columns.get(name, name) for name in known if name not in answered}
            kept = {name: value for name, value in row.columns.items() if name not in gone}
            yield replace(row, columns={**kept, **added})

    def conversion(self, name: str, place: str, columns: Mapping[str, Any]) -> Example | None:
        """The prompt of a row, with a placeholder as its answer."""
        example = formats.of_format(name, place, with_answer(dict(columns)))
        if example is None:
            return None
        example = without_answer(example)
        if self.tools and example.text:
            raise DataError("is raw text, which has no turns for tools. Name its column `question`, or write messages.")
        if self.tools and example.tools:
            raise DataError("has `tools` of its own beside reinforce.tools. Leave them out with data.ignore='[tools]'.")
        example = replace(example, tools=self.tools or example.tools)
        if example.text:
            return replace(example, text=(*((text, False) for text, _ in example.text), (_PLACEHOLDER, True)))
        return replace(example, messages=(*example.messages, {"role": "assistant", "content": _PLACEHOLDER}))

    @property
    def identity(self) -> list[Any]:
        return ["prompts", *self.base.identity, *([list(self.tools)] if self.tools else [])]

    def encode(self, example: Example, *, loss_on: LossOn) -> Encoded:
        """The prompt's ids, and the one that ends an answer."""
        return _prompt_of(self.base.encode(example, loss_on="last"))

    def encode_many(self, examples: Sequence[Example], *, loss_on: LossOn) -> list[Encoded | WorkbenchError]:
        encoded = self.base.encode_many(examples, loss_on="last")
        return [each if isinstance(each, WorkbenchError) else _prompt_of(each) for each in encoded]


def _prompt_of(whole: Encoded) -> Encoded:
    """The ids before the last run of tokens that carry loss, and the last of those."""
    last = len(whole.supervised) - 1 - whole.supervised[::-1].index(True)
    begins = np.flatnonzero(~np.asarray(whole.supervised[:last]))
    start = int(begins[-1]) + 1 if len(begins) else 0
    end = whole.input_ids[last]
    return chat.Encoded(
        input_ids=[*whole.input_ids[:start], end],
        supervised=[False] * start + [True],
        end_positions=(start,) if last in whole.end_positions else (),
        bos=whole.bos and start > 0,
        pictures=whole.pictures,
        last_picture=whole.last_picture,
    )


@dataclass(frozen=True, eq=False)
class MixedPrompts(MixedRows[TokenizedSet]):
    """Prompts whose number `prompt + repeat * N` stands for a prompt sampled `repeat` times before in its epoch."""

    @cached_property
    def numbered(self) -> TokenizedSet:
        """The prompt of each number."""
        return self.rows.subset(np.tile(np.arange(len(self.rows)), self.most_draws))

    def table(self, epoch: int) -> Indices:
        """The number of each draw of an epoch (M,)."""
        return resampling.numbered(super().table(epoch), rows=len(self.rows), seed=self.seed, epoch=epoch)


def sampled_prompts(prompts: TokenizedSet, config: TrainingSections) -> TokenizedSet | MixedPrompts:
    """The training prompts as `data.sources` and `data.mix` say; `prompts` themselves where there is one source."""
    return MixedPrompts(prompts, *mixture.plan(prompts, config)) if config.data.sources else prompts
