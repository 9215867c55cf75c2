"""Repetition in a text: the measures of table A1 of Rae et al. (2021, "Gopher"), as shares of lines and characters.

A part that comes several times counts from its second time on; characters that several n-grams share count once.
Characters are those of words, without spaces.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from workbench.data.text.quality.row_texts import RowText


def duplicate_lines(row: RowText) -> float | None:
    """Share of lines that repeat an earlier one."""
    return _repeated(row.lines)


def duplicate_paragraphs(row: RowText) -> float | None:
    """Share of paragraphs that repeat an earlier one."""
    return _repeated(row.paragraphs)


def duplicate_line_characters(row: RowText) -> float | None:
    """Share of the characters that stand in repeated lines."""
    return _repeated_characters(row.lines)


def duplicate_paragraph_characters(row: RowText) -> float | None:
    """Share of the characters that stand in repeated paragraphs."""
    return _repeated_characters(row.paragraphs)


def top_gram(row: RowText, *, n: int) -> float | None:
    """Share of the characters in the most frequent n-gram of words; 0 where none comes twice."""
    if not row.is_spaced or not row.words:
        return None
    if row.longest_repeat < n:
        return 0.0
    grams = row.grams(n)
    counts = Counter(grams)
    most = max(counts.values())
    longest = max(
        (gram for gram, count in counts.items() if count == most), key=lambda gram: (len("".join(gram)), gram)
    )
    return _covered(row.words, [at for at, gram in enumerate(grams) if gram == longest], n)


def duplicate_grams(row: RowText, *, n: int) -> float | None:
    """Share of the characters in n-grams of words that came before."""
    if not row.is_spaced or not row.words:
        return None
    if row.longest_repeat < n:
        return 0.0
    seen: set[tuple[str, ...]] = set()
    starts = []
    for at, gram in enumerate(row.grams(n)):
        if gram in seen:
            starts.append(at)
        seen.add(gram)
    return _covered(row.words, starts, n)


def _covered(words: Sequence[str], starts: Sequence[int], n: int) -> float:
    covered = {at for start in starts for at in range(start, start + n)}
    return sum(len(words[at]) for at in covered) / sum(map(len, words))


def _repeated(parts: Sequence[str]) -> float | None:
    return 1 - len(set(parts)) / len(parts) if parts else None


def _repeated_characters(parts: Sequence[str]) -> float | None:
    return 1 - sum(map(len, set(parts))) / sum(map(len, parts)) if parts else None
