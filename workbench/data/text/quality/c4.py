"""Rules of the Colossal Clean Crawled Corpus for web pages (Raffel et al. 2020, "T5", section 2.2).

C4 drops lines, and then pages; a row is flagged where no line of it would stay, or the page would go. Its list of bad
words is left out, as none ships under a licence that fits; its rule on spans of three sentences, as duplicates of whole
rows are found otherwise.
"""

from __future__ import annotations

import re

from workbench.data.text.quality.row_texts import RowText

TERMINAL = (".", "!", "?", '"', "\u201d", "\u3002", "\uff01", "\uff1f")
"""Ends of sentences, with those of Chinese and Japanese."""
LINE_WORDS = 5
"""Least words of a line. Versions of the paper say 3 words and 5 sentences, or 5 and 3, as C4's code and rows do."""
LEAST_SENTENCES = 3
POLICIES = ("terms of use", "privacy policy", "cookie policy", "uses cookies", "use of cookies", "use cookies")

_SENTENCE = re.compile("[.!?]+[\"'\u201d\u2019)]*(?=\\s|$)|[\u3002\uff01\uff1f]+")


def terminal_punctuation(row: RowText) -> float | None:
    """Lines that end in a terminal punctuation mark."""
    return float(sum(line.endswith(TERMINAL) for line in row.lines))


def long_lines(row: RowText) -> float | None:
    """Lines of at least LINE_WORDS words."""
    return float(sum(len(line.split()) >= LINE_WORDS for line in row.lines)) if row.is_spaced else None


def sentences(row: RowText) -> float | None:
    """Sentences, by their ends."""
    return float(len(_SENTENCE.findall(row.text)))


def lorem_ipsum(row: RowText) -> float | None:
    """How often the placeholder text comes."""
    return float(row.text.lower().count("lorem ipsum"))


def curly_brackets(row: RowText) -> float | None:
    """Opening curly brackets, which stand in programs."""
    return float(row.text.count("{"))


def javascript(row: RowText) -> float | None:
    """Lines with the word Javascript."""
    return float(sum("javascript" in line.lower() for line in row.lines))


def policies(row: RowText) -> float | None:
    """Lines with a phrase of a notice on terms or cookies."""
    return float(sum(any(phrase in line.lower() for phrase in POLICIES) for line in row.lines))
