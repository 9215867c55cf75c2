"""A row of text as rules of quality read it: its whole text, its turns, and its questions with their answers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

from workbench.data.text.formats import Example
from workbench.data.text.quality import characters, languages

LONGEST_GRAM = 10
"""Words of the longest sequences that rules look for."""


class Exchange(NamedTuple):
    """An answer and what was said before it."""

    prompt: str
    answer: str


class RowText:
    """The text of a row and its parts, each found once, when it is first asked for.

    Attributes:
        place: File and row.
        text: All that users and assistants say, or the raw text; no system prompt.
        turns: Turns of a conversation but those that only call tools; empty for raw text.
        exchanges: Answers with their prompts; empty where a row has no answers.
        sides: The row with each answer, or each text, that it compares with others; else itself.
    """

    def __init__(
        self,
        place: str,
        text: str,
        *,
        turns: tuple[str, ...] = (),
        exchanges: tuple[Exchange, ...] = (),
        sides: tuple[RowText, ...] = (),
    ) -> None:
        self.place, self.text, self.turns, self.exchanges = place, text, turns, exchanges
        self._sides = sides

    @property
    def sides(self) -> tuple[RowText, ...]:
        """See the class; not kept, as a row that holds itself is freed late."""
        return self._sides or (self,)

    @cached_property
    def words(self) -> list[str]:
        """Words between spaces."""
        return self.text.split()

    @cached_property
    def lines(self) -> list[str]:
        """Lines that are not empty, without spaces around them."""
        return [line for line in map(str.strip, self.text.splitlines()) if line]

    @cached_property
    def paragraphs(self) -> list[str]:
        """Paragraphs, between which lines are empty."""
        return _paragraphs(self.text)

    @cached_property
    def longest_repeat(self) -> int:
        """Words of the longest sequence that comes twice, as far as LONGEST_GRAM."""
        for n in range(1, LONGEST_GRAM + 1):
            grams = self.grams(n)
            if len(set(grams)) == len(grams):
                return n - 1
        return LONGEST_GRAM

    def grams(self, n: int) -> list[tuple[str, ...]]:
        """All sequences of `n` words, in their order."""
        return list(zip(*(self.words[offset:] for offset in range(n)), strict=False))

    @cached_property
    def asked_and_answered(self) -> str:
        """The last paragraph of each prompt, where its question stands, and each answer; the text without answers.

        Rows on one long passage are alike as texts, and differ here.
        """
        if not self.exchanges:
            return self.text
        return "\n".join("\n".join([*_paragraphs(prompt)[-1:], answer]) for prompt, answer in self.exchanges)

    @cached_property
    def scripts(self) -> dict[str, int]:
        """Letters of each script."""
        return characters.scripts(self.text)

    @cached_property
    def is_spaced(self) -> bool:
        """Whether most of its letters are of scripts that write spaces between words."""
        unspaced = sum(count for script, count in self.scripts.items() if script in characters.UNSPACED)
        return 2 * unspaced <= sum(self.scripts.values())

    @cached_property
    def language(self) -> str:
        """Code of the language; empty where too little is written to tell."""
        return languages.identify(self.text) if sum(self.scripts.values()) >= languages.LETTERS else ""


def _paragraphs(text: str) -> list[str]:
    return [part for part in map(str.strip, re.split(r"\n\s*\n", text)) if part]


def of_texts(place: str, texts: Sequence[str]) -> RowText:
    """A row of texts that are compared."""
    return RowText(place, "\n".join(texts), sides=tuple(RowText(place, text) for text in texts))


def _compared(chosen: RowText, rejected: RowText) -> RowText:
    """A row of two answers to one prompt, which stands in its text once."""
    other = rejected.exchanges[-1:]
    text = "\n".join([chosen.text, *([each.answer for each in other] or [rejected.text])])
    return RowText(chosen.place, text, exchanges=(*other, *chosen.exchanges), sides=(chosen, rejected))


def of_example(example: Example) -> RowText:
    """A row that a language model learns, or of answers that are compared."""
    if example.rejected is not None:
        return _compared(of_example(replace(example, rejected=None)), of_example(example.rejected))
    if not example.messages:
        pieces = [text for text, _ in example.text]
        asked = "".join(text for text, loss in example.text if not loss)
        answered = "".join(text for text, loss in example.text if loss)
        return RowText(
            example.place, "".join(pieces), exchanges=(Exchange(asked, answered),) if asked and answered else ()
        )
    messages = [message for message in example.messages if message["role"] in ("user", "assistant")]
    turns = tuple(message["content"] for message in messages if not message.get("tool_calls"))
    exchanges, asked = [], ""
    for message in messages:
        if message["role"] == "user":
            asked = message["content"]
        elif not message.get("tool_calls"):
            exchanges.append(Exchange(asked, message["content"]))
    return RowText(example.place, "\n".join(filter(None, turns)), turns=turns, exchanges=tuple(exchanges))
