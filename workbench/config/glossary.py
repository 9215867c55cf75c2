"""The field's words: what they mean here, and where they are met. `glossary.md` beside this file is the page."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PAGE = Path(__file__).with_suffix(".md")


@dataclass(frozen=True)
class Term:
    """A line of the page."""

    words: tuple[str, ...]
    """The word, and others that mean the same."""
    meaning: str
    where: tuple[str, ...]
    """Settings and commands."""

    @property
    def commands(self) -> list[str]:
        """Those of them that are commands."""
        return [each for each in self.where if each.startswith("workbench ")]


@cache
def terms() -> tuple[Term, ...]:
    """All of the page, as it stands there."""
    rows = (line.strip("| ").split(" | ") for line in PAGE.read_text(encoding="utf-8").splitlines() if line[:1] == "|")
    found = [
        Term(tuple(words.split(", ")), meaning, tuple(re.findall(r"`(.+?)`", where)))
        for words, meaning, where in (row for row in rows if len(row) == 3)
    ]
    return tuple(found[1:])  # the first is the head


def find(words: str) -> list[Term]:
    """Terms that a person means by some words, however they write them.

    >>> [term.words[0] for term in find("Gradient_Accumulation")]
    ['gradient accumulation']
    """
    return [term for term in terms() if _plain(words) in map(_plain, term.words)]


def _plain(words: str) -> str:
    return re.sub(r"[\s_-]+", " ", words.lower()).strip().removesuffix("s")
