"""Judged answers as token ids: both answers of a pair as rows of their own, cut together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from workbench.config import DataConfig
from workbench.data.text import chat, judged_answers
from workbench.data.text.chat import Encoded, LossOn
from workbench.data.text.formats import Conversion, Example, Reader
from workbench.data.text.wrapped_encoder import WrappedEncoder
from workbench.errors import DataError


@dataclass(frozen=True)
class JudgedEncoder(WrappedEncoder):
    """Writes judged answers as `base` writes conversations."""

    conversion: Conversion = judged_answers.convert
    """How rows are read."""
    reader: Reader | None = None
    """They are those of the file."""

    @property
    def identity(self) -> list[Any]:
        """All that the written tokens depend on, besides the tokenizer."""
        return ["judged", *self.base.identity]

    def expanded(self, example: Example, *, loss_on: LossOn) -> list[Example]:
        """The chosen and the rejected answer, or the one that there is.

        Raises:
            DataError: An answer is several messages, and the template drops the reasoning of all but the last.
        """
        sides = [example] if example.rejected is None else [example, example.rejected]
        examples = []
        for number, side in enumerate(sides, start=1):
            part, *others = self.base.expanded(replace(side, rejected=None), loss_on=loss_on)
            if others:
                raise DataError(
                    f"{example.place}: an answer of several messages has reasoning, of which the chat template writes "
                    "that of the last message alone. Leave the reasoning of the others out, or write "
                    "data.on_bad_row=skip."
                )
            place = example.place if len(sides) == 1 else f"{example.place}, answer {number} of 2"
            examples.append(replace(part, place=place, weight=example.weight, margin=example.margin, tie=example.tie))
        return examples


def cut(parts: Sequence[Example], wholes: Sequence[Encoded], config: DataConfig) -> list[Encoded]:
    """Judged answers to one prompt, cut to data.max_tokens: on the left all lose as much of the prompt, and no answer.

    Raises:
        DataError: Cutting leaves no prompt, no answer, or no difference.
    """
    place, most = parts[0].place.removesuffix(", answer 1 of 2"), config.max_tokens
    if len(wholes) == 2 and wholes[0].input_ids == wholes[1].input_ids:
        raise DataError(
            f"{place}: both answers have the same tokens: there is nothing to prefer. Remove the row, or write "
            "data.on_bad_row=skip."
        )
    excess = max(len(whole.input_ids) for whole in wholes) - most
    if excess <= 0:
        return list(wholes)
    if config.truncate == "left":
        # At least one token is left to predict the answer's first one from.
        room = min(prompt_length(whole) - int(whole.bos) for whole in wholes) - 1
        if excess > room:
            raise DataError(
                f"{place}: its longer answer leaves no room for a prompt in data.max_tokens={most}. Write "
                f"data.max_tokens={most + excess - room} or more, data.truncate=right, or data.on_bad_row=skip."
            )
        return [chat.truncate(each, max_tokens=len(each.input_ids) - excess, side="left") for each in wholes]
    cuts = [chat.truncate(each, max_tokens=most, side="right") for each in wholes]
    if not all(any(each.supervised[1:]) for each in cuts):
        raise DataError(
            f"{place}: cutting to data.max_tokens={most} leaves no answer. Write a larger data.max_tokens, "
            "data.truncate=left, or data.on_bad_row=skip."
        )
    if len(cuts) == 2 and cuts[0].input_ids == cuts[1].input_ids:
        differ = next(
            (at for at, (a, b) in enumerate(zip(*(each.input_ids for each in wholes), strict=False)) if a != b), most
        )
        raise DataError(
            f"{place}: its answers differ from token {differ + 1} on, and cutting to data.max_tokens={most} removes "
            f"the difference. Write data.max_tokens={differ + 1} or more, data.truncate=left, or data.on_bad_row=skip."
        )
    return cuts


def prompt_length(encoded: Encoded) -> int:
    """Tokens before the first that carries loss."""
    return int(np.argmax(encoded.supervised))
