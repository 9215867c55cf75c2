"""Answers of several steps as token ids, of which the last token of each step is marked.

The text is tokenised as a whole, as generation sees it. A step ends with the last token in front of the next one: what
stands between them belongs to the earlier step. The last step ends with the row, whose last token a stock model reads.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

from workbench.data.rows import excerpt
from workbench.data.text import chat, stepwise
from workbench.data.text.chat import Encoded, LastAnswer, LossOn
from workbench.data.text.formats import Conversion, Example, Reader
from workbench.data.text.wrapped_encoder import WrappedEncoder
from workbench.errors import DataError, WorkbenchError


@dataclass(frozen=True)
class StepEncoder(WrappedEncoder):
    """Writes answers as `base` writes conversations, and marks the last token of each step as supervised."""

    separator: str = "\n"
    """Stands between the steps of a row."""
    labelled: bool = True
    """Whether rows have labels that are read. Without, a step that no token ends belongs to the next one, and none is
    refused: generated answers are what they are."""
    reader: Reader | None = None
    """They are those of the file."""

    @property
    def conversion(self) -> Conversion:
        """How rows are read."""
        return partial(stepwise.convert, self.separator, self.labelled)

    @property
    def identity(self) -> list[Any]:
        """All that the written tokens depend on, besides the tokenizer."""
        return ["steps", self.separator, self.labelled, *self.base.identity]

    def expanded(self, example: Example, *, loss_on: LossOn) -> list[Example]:
        """The one answer of a row."""
        return [example]

    def encode_many(self, examples: Sequence[Example], *, loss_on: LossOn) -> list[Encoded | WorkbenchError]:
        """`encode` of each example, as `chat.outcomes`."""
        return chat.outcomes(partial(self.encode, loss_on=loss_on), examples)

    def encode(self, example: Example, *, loss_on: LossOn) -> Encoded:
        """The example's ids, and which of them are the last of a step.

        Raises:
            DataError: A step is not in what the template writes, or shares a token with the next one.
        """
        encoded = self.base.encode(example, loss_on="last")
        written = self.base.answer_text(example)
        spans = _spans(example, written, strict=self.labelled)
        marks = [len(encoded.input_ids) - 1]
        for (_, stop), (following, _) in reversed(list(pairwise(spans))):
            last = bisect_right(written.tokens.ends, following) - 1
            if last >= 0 and written.tokens.ends[last] >= stop:
                marks.insert(0, last + written.added)
            elif self.labelled:
                between = excerpt(written.tokens.text[stop - 1 : following + 1])
                raise DataError(
                    f"{example.place}: a token reaches from a step into the next one, {between}, "
                    "so that no token ends the step. Write a reward.separator that is a token of its own, such as a "
                    "line break, or data.on_bad_row=skip."
                )
        supervised = [False] * len(encoded.input_ids)
        for mark in marks:
            supervised[mark] = True
        return replace(encoded, supervised=supervised, end_positions=())


def _spans(example: Example, written: LastAnswer, *, strict: bool) -> list[tuple[int, int]]:
    """The characters of each step; where not `strict`, without steps that are not found."""
    spans, place = list[tuple[int, int]](), written.start
    for number, step in enumerate(example.steps, start=1):
        at = written.tokens.text.find(step.strip(), place)
        if at >= 0:
            place = at + len(step.strip())
            spans.append((at, place))
        elif strict:
            raise DataError(
                f"{example.place}: the chat template changes step {number} of its answer, so that its end is not "
                "found. Give another template with model.chat_template=FILE, or write data.on_bad_row=skip."
            )
    return spans
