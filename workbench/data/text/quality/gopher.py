"""Rules of MassiveText's quality filter for web documents (Rae et al. 2021, "Gopher", appendix A.1.1).

Each function measures one thing; `rules` has the paper's limits. None stands where a measure says nothing of a text.
"""

from __future__ import annotations

from collections.abc import Sequence

from workbench.data.text.quality.row_texts import RowText

LEAST_STOP_WORDS = 2
STOP_WORDS = frozenset(("the", "be", "to", "of", "and", "that", "have", "with"))
BULLETS = ("\u2022", "\u2023", "\u25cf", "\u25e6", "\u25aa", "-", "\u2013", "*")
ELLIPSES = ("...", "\u2026")


def words(row: RowText) -> float | None:
    """Words."""
    return float(len(row.words)) if row.is_spaced else None


def word_length(row: RowText) -> float | None:
    """Mean characters of a word."""
    return sum(map(len, row.words)) / len(row.words) if row.is_spaced and row.words else None


def symbols(row: RowText) -> float | None:
    """Hash signs or ellipses, whichever are more, for each word."""
    if not row.is_spaced or not row.words:
        return None
    return max(row.text.count("#"), sum(map(row.text.count, ELLIPSES))) / len(row.words)


def bullets(row: RowText) -> float | None:
    """Share of lines that begin with a bullet."""
    return _share(row.lines, [line.startswith(BULLETS) for line in row.lines])


def ellipses(row: RowText) -> float | None:
    """Share of lines that end with an ellipsis."""
    return _share(row.lines, [line.endswith(ELLIPSES) for line in row.lines])


def alphabetic(row: RowText) -> float | None:
    """Share of words with a letter."""
    return _share(row.words, [any(map(str.isalpha, word)) for word in row.words]) if row.is_spaced else None


def stop_words(row: RowText) -> float | None:
    """Different English stop words; None for other languages, which the paper had filtered out before."""
    stop_count = len(STOP_WORDS & {word.strip(".,;:!?\"'()").lower() for word in row.words})
    return float(stop_count) if stop_count >= LEAST_STOP_WORDS or row.language in ("en", "") else None


def _share(parts: Sequence[str], true: Sequence[bool]) -> float | None:
    return sum(true) / len(parts) if parts else None
