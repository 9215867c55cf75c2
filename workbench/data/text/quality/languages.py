"""Languages of texts, by py3langid: 4 MB with its model (97 languages, no network, no pickle), BSD licence.

Lingua is surer of single words, but its models are 25 times as large; langdetect is slower and random. Texts of a few
words are told wrongly by all of them, so they are not told at all.
"""

from __future__ import annotations

LETTERS = 40
"""Fewest letters of which a language is told."""
READ = 600
NO_LANGUAGE = "zxx"
"""ISO 639 for no linguistic content, such as code or formulae."""


def identify(text: str) -> str:
    """ISO 639 code of the likeliest language of the first READ characters."""
    import py3langid  # takes as long to import as all other rules

    code, _ = py3langid.classify(text[:READ])
    return str(code)
