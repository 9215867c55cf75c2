"""Prompts to which a model writes the answers itself: rows of all formats, without the answer that they may have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from workbench.data.rows import RawRow, read_rows
from workbench.data.text import chat, formats, prompts
from workbench.data.text.chat import Encoded, LossOn
from workbench.data.text.formats import Example
from workbench.data.text.wrapped_encoder import WrappedEncoder
from workbench.errors import WorkbenchError


@dataclass(frozen=True)
class PromptEncoder(WrappedEncoder):
    """Writes the prompt of an example as `base` writes conversations, and behind it the token that ends an answer.

    That token is the only one that carries loss, so that a row knows where an answer begins and how it ends.
    """

    def reader(self, source: str, columns: Mapping[str, str]) -> Iterator[RawRow]:
        """Yield the rows of a source, whose columns `columns` renames, with a placeholder where there is no answer."""
        for row in read_rows(source):
            yield replace(row, columns=_answered(row.columns, columns))

    def conversion(self, name: str, place: str, columns: Mapping[str, Any]) -> Example | None:
        """The prompt of a row, with a placeholder as its answer."""
        example = formats.of_format(name, place, prompts.with_answer(dict(columns)))
        return None if example is None else prompts.with_placeholder(prompts.without_answer(example))

    @property
    def identity(self) -> list[Any]:
        """All that the written tokens depend on, besides the tokenizer."""
        return ["prompts", *self.base.identity]

    def expanded(self, example: Example, *, loss_on: LossOn) -> list[Example]:
        """The example alone."""
        return [example]

    def encode(self, example: Example, *, loss_on: LossOn) -> Encoded:
        """The prompt's ids, and the one that ends an answer."""
        return _prompt_of(self.base.encode(example, loss_on="last"))

    def encode_many(self, examples: Sequence[Example], *, loss_on: LossOn) -> list[Encoded | WorkbenchError]:
        """`encode` of each example, as `chat.outcomes`."""
        encoded = self.base.encode_many(examples, loss_on="last")
        return [each if isinstance(each, WorkbenchError) else _prompt_of(each) for each in encoded]


def _answered(columns: dict[str, Any], renames: Mapping[str, str]) -> dict[str, Any]:
    """The columns of a file, to which an answer is added where its format needs one."""
    known = formats.renamed(columns, renames)
    added = {name: value for name, value in prompts.with_answer(known).items() if name not in known}
    return {**columns, **{renames.get(name, name): value for name, value in added.items()}}


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
    )
