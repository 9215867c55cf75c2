"""The rules by name: what each measures, and between which limits a row is fine."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from workbench.data.text.quality import answers, c4, characters, gopher, repetition
from workbench.data.text.quality.row_texts import RowText

Source = Literal["Gopher", "C4", "workbench"]
MAX_SYMBOLS = 0.4


@dataclass(frozen=True)
class Rule:
    """A measure of a row, which flags it below `least` and above `most`."""

    name: str
    says: str
    """A flagged row, in words."""
    source: Source
    measure: Callable[[RowText], float | None]
    """None where it says nothing of a row."""
    least: float = -math.inf
    most: float = math.inf

    def value(self, row: RowText) -> float | None:
        """The measured value of a row that is flagged, by any of its sides; None for one that is not."""
        values = map(self.measure, row.sides)
        return next((each for each in values if each is not None and not self.least <= each <= self.most), None)


def _gopher(name: str, says: str, measure: Callable[[RowText], float | None], least: float, most: float) -> Rule:
    return Rule(f"gopher_{name}", says, "Gopher", measure, least, most)


def _repeated(name: str, says: str, measure: Callable[[RowText], float | None], most: float) -> Rule:
    return _gopher(name, f"more than {100 * most:.0f} % of {says}", measure, -math.inf, most)


def _c4(
    name: str, says: str, measure: Callable[[RowText], float | None], least: float = 0, most: float = math.inf
) -> Rule:
    return Rule(f"c4_{name}", says, "C4", measure, least, most)


def _own(name: str, says: str, measure: Callable[[RowText], float | None], most: float = 0) -> Rule:
    return Rule(name, says, "workbench", measure, most=most)


_TOP_GRAMS = {2: 0.20, 3: 0.18, 4: 0.16}
_DUPLICATE_GRAMS = {5: 0.15, 6: 0.14, 7: 0.13, 8: 0.12, 9: 0.11, 10: 0.10}

_ALL = (
    _gopher("words", "fewer than 50 or more than 100,000 words", gopher.words, 50, 100_000),
    _gopher("word_length", "words have fewer than 3 or more than 10 letters on average", gopher.word_length, 3, 10),
    _gopher("symbols", "more than one hash sign or ellipsis for 10 words", gopher.symbols, 0, 0.1),
    _gopher("bullets", "more than 90 % of lines begin with a bullet", gopher.bullets, 0, 0.9),
    _gopher("ellipses", "more than 30 % of lines end with an ellipsis", gopher.ellipses, 0, 0.3),
    _gopher("alphabetic", "fewer than 80 % of words have a letter", gopher.alphabetic, 0.8, 1),
    _gopher(
        "stop_words",
        "fewer than two of " + ", ".join(sorted(gopher.STOP_WORDS)),
        gopher.stop_words,
        gopher.LEAST_STOP_WORDS,
        math.inf,
    ),
    _repeated("duplicate_lines", "its lines repeat earlier ones", repetition.duplicate_lines, 0.30),
    _repeated("duplicate_paragraphs", "its paragraphs repeat earlier ones", repetition.duplicate_paragraphs, 0.30),
    _repeated(
        "duplicate_line_characters", "its text stands in repeated lines", repetition.duplicate_line_characters, 0.20
    ),
    _repeated(
        "duplicate_paragraph_characters",
        "its text stands in repeated paragraphs",
        repetition.duplicate_paragraph_characters,
        0.20,
    ),
    *(
        _repeated(
            f"top_{n}_gram",
            f"its text is one sequence of {n} words, repeated",
            partial(repetition.top_gram, n=n),
            most,
        )
        for n, most in _TOP_GRAMS.items()
    ),
    *(
        _repeated(
            f"duplicate_{n}_grams",
            f"its text stands in repeated sequences of {n} words",
            partial(repetition.duplicate_grams, n=n),
            most,
        )
        for n, most in _DUPLICATE_GRAMS.items()
    ),
    _c4("terminal_punctuation", "no line ends in a terminal punctuation mark", c4.terminal_punctuation, 1),
    _c4("short_lines", "no line has five words", c4.long_lines, 1),
    _c4("sentences", "fewer than three sentences", c4.sentences, c4.LEAST_SENTENCES),
    _c4("lorem_ipsum", "placeholder text", c4.lorem_ipsum, most=0),
    _c4("curly_brackets", "a curly bracket, as in programs", c4.curly_brackets, most=0),
    _c4("javascript", "a line with the word Javascript", c4.javascript, most=0),
    _c4("policies", "a notice on terms, privacy or cookies", c4.policies, most=0),
    _own(
        "symbols",
        "more than 40 % of characters are neither letters nor digits",
        lambda row: characters.symbol_share(row.text),
        MAX_SYMBOLS,
    ),
    _own("broken_characters", "characters that a wrong decoding left", lambda row: characters.broken(row.text)),
    _own("answer_repeats_prompt", "an answer holds its whole prompt, or the last line of it", answers.repeats_prompt),
    _own("refusal", "an answer that begins with a refusal", answers.refuses),
    _own("empty_turn", "a turn without a letter or a digit", answers.empty_turns),
)
RULES: dict[str, Rule] = {rule.name: rule for rule in _ALL}
"""Rules that judge a row by itself."""
SET_RULES: dict[str, str] = {
    "other_language": "another language than most rows",
    "exact_duplicate": "equals an earlier row, but for case, spaces and punctuation",
    "near_duplicate": "nearly equals an earlier row",
}
"""Rules that compare a row with the others, with what a flagged row is."""
