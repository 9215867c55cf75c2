"""Rules of text quality by name: what each measures of a row, and between which limits the row is fine.

Sources: the filter of MassiveText for web documents (Rae et al. 2021, "Gopher", appendix A.1.1, and table A1 on
repetition), the Colossal Clean Crawled Corpus (Raffel et al. 2020, "T5", section 2.2), and our own rules for
conversations. C4 drops lines, then pages; here a row is flagged where none of its lines would stay, or where the page
would go. Of C4's rules, the list of bad words is left out, as none ships under a licence that fits, and the one on
spans of three sentences, as duplicates of whole rows are found otherwise.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import Literal, NamedTuple

from workbench.data.folds.duplicates import normalised
from workbench.data.text import media
from workbench.data.text.formats import Example

LANGUAGE_LETTERS = 40  # fewest letters of a text whose language is identified
LANGUAGE_CHARACTERS = 600  # characters by which it is identified
NO_LANGUAGE = "zxx"  # ISO 639 for no linguistic content, such as code or formulae


UNSPACED = ("Han", "Hiragana", "Katakana", "Thai", "Lao", "Khmer", "Myanmar", "Tibetan")
"""Scripts that write no spaces between words, so that rules on words say nothing of them."""

_BROKEN = re.compile("\ufffd|[\u00c2\u00c3][\u0080-\u00bf]|\u00e2\u20ac.|\u00ef\u00bb\u00bf")
"""The replacement character, and UTF-8 that was read as Latin-1 or Windows-1252: é becomes Ã©, a quote â€œ."""


@lru_cache(maxsize=65536)
def _script(character: str) -> str:
    if not character.isalpha():
        return ""
    name = unicodedata.name(character, "").partition(" ")[0]
    return {"CJK": "Han", "FULLWIDTH": "Latin", "HALFWIDTH": "Katakana"}.get(name, name.capitalize())


LONGEST_GRAM = 10  # words of the longest sequences that rules look for


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
        shown: Names the pictures of the row; rows with others are no duplicates.
    """

    def __init__(
        self,
        place: str,
        text: str,
        *,
        turns: tuple[str, ...] = (),
        exchanges: tuple[Exchange, ...] = (),
        sides: tuple[RowText, ...] = (),
        shown: str = "",
    ) -> None:
        self.place, self.text, self.turns, self.exchanges, self.shown = place, text, turns, exchanges, shown
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
        """Letters of each script, the most frequent first; the first word of a letter's Unicode name is its script."""
        letter_counts: Counter[str] = Counter()
        for character, count in Counter(self.text).items():
            if script := _script(character):
                letter_counts[script] += count
        return dict(letter_counts.most_common())

    @cached_property
    def is_spaced(self) -> bool:
        """Whether most of its letters are of scripts that write spaces between words."""
        unspaced = sum(count for script, count in self.scripts.items() if script in UNSPACED)
        return 2 * unspaced <= sum(self.scripts.values())

    @cached_property
    def language(self) -> str:
        """ISO 639 code of the likeliest language; empty for fewer than LANGUAGE_LETTERS letters.

        By py3langid: 4 MB with its model (97 languages, no network, no pickle), BSD licence. Lingua is surer of single
        words, but its models are 25 times as large; langdetect is slower and random. All are often wrong about texts of
        a few words.
        """
        if sum(self.scripts.values()) < LANGUAGE_LETTERS:
            return ""
        import py3langid  # takes as long to import as all other rules

        return str(py3langid.classify(self.text[:LANGUAGE_CHARACTERS])[0])


def _paragraphs(text: str) -> list[str]:
    return [part for part in map(str.strip, re.split(r"\n\s*\n", text)) if part]


def row_text_of_texts(place: str, texts: Sequence[str]) -> RowText:
    """A row of texts that are compared."""
    return RowText(place, "\n".join(texts), sides=tuple(RowText(place, text) for text in texts))


def row_text_of_example(example: Example) -> RowText:
    """A row that a language model learns, or of answers that are compared."""
    if example.rejected is not None:
        chosen = row_text_of_example(replace(example, rejected=None))
        rejected = row_text_of_example(example.rejected)
        other = rejected.exchanges[-1:]
        text = "\n".join([chosen.text, *([each.answer for each in other] or [rejected.text])])
        exchanges, sides = (*other, *chosen.exchanges), (chosen, rejected)
        return RowText(chosen.place, text, exchanges=exchanges, sides=sides, shown=chosen.shown)
    if not example.messages:
        pieces = [text for text, _ in example.text]
        asked = "".join(text for text, loss in example.text if not loss)
        answered = "".join(text for text, loss in example.text if loss)
        return RowText(
            example.place, "".join(pieces), exchanges=(Exchange(asked, answered),) if asked and answered else ()
        )
    messages = [message for message in example.messages if message["role"] in ("user", "assistant")]
    turns = tuple(message["content"] for message in messages if not message.get("tool_calls"))
    turn_exchanges, asked = [], ""
    for message in messages:
        if message["role"] == "user":
            asked = message["content"]
        elif not message.get("tool_calls"):
            turn_exchanges.append(Exchange(asked, message["content"]))
    text, shown = "\n".join(filter(None, turns)), media.identity(example.messages)
    return RowText(example.place, text, turns=turns, exchanges=tuple(turn_exchanges), shown=shown)


LEAST_STOP_WORDS = 2
STOP_WORDS = frozenset(("the", "be", "to", "of", "and", "that", "have", "with"))
BULLETS = ("\u2022", "\u2023", "\u25cf", "\u25e6", "\u25aa", "-", "\u2013", "*")
ELLIPSES = ("...", "\u2026")
TERMINAL = (".", "!", "?", '"', "\u201d", "\u3002", "\uff01", "\uff1f")
"""Ends of sentences, with those of Chinese and Japanese."""
LINE_WORDS = 5
"""Fewest words of a line. Versions of the paper say 3 words and 5 sentences, or 5 and 3, as C4's code and rows do."""
LEAST_SENTENCES = 3
POLICIES = ("terms of use", "privacy policy", "cookie policy", "uses cookies", "use of cookies", "use cookies")
MAX_SYMBOLS = 0.4
PROMPT_WORDS = 5
"""A shorter prompt, such as a name, may rightly stand in its answer; it is repeated where it is the whole answer."""
OPENING = 300  # characters of an answer in which it would refuse
REFUSALS = (
    "as an ai language model",
    "as a language model",
    "as an ai assistant",
    "as an artificial intelligence",
    "i am just an ai",
    "im just an ai",
    "im sorry but i cant",
    "im sorry but i cannot",
    "i am sorry but i cannot",
    "i am sorry but i cant",
    "sorry i cant assist",
    "i cannot assist with",
    "i cant assist with",
    "i cannot help with that",
    "i cant help with that",
    "i am not able to assist",
    "im not able to assist",
    "i am unable to assist",
    "im unable to assist",
    "i cannot fulfill",
    "i cant fulfill",
    "i must decline",
    "i cannot provide information on",
    "it would not be appropriate for me",
)  # phrases with which chat models refuse or excuse themselves, in English, without case and punctuation
_SENTENCE = re.compile("[.!?]+[\"'\u201d\u2019)]*(?=\\s|$)|[\u3002\uff01\uff1f]+")

Source = Literal["Gopher", "C4", "workbench"]
Measure = Callable[[RowText], float | None]  # a number measured of a row; None where the measure says nothing about it


@dataclass(frozen=True)
class Rule:
    """A measure of a row, which flags it below `least` and above `most`."""

    name: str
    says: str  # a flagged row, in words
    source: Source
    measure: Measure
    least: float = -math.inf
    most: float = math.inf

    def value(self, row: RowText) -> float | None:
        """The measured value of a row that is flagged, by any of its sides; None for one that is not."""
        values = map(self.measure, row.sides)
        return next((each for each in values if each is not None and not self.least <= each <= self.most), None)


def _of_words(measure: Callable[[RowText], float]) -> Measure:
    """A measure of words, which says nothing about rows without any or in scripts without spaces."""
    return lambda row: measure(row) if row.is_spaced and row.words else None


def _share(true: Sequence[bool]) -> float | None:
    return sum(true) / len(true) if true else None


def _stop_words(row: RowText) -> float | None:
    """Different English stop words; None for other languages, which the paper had filtered out before."""
    count = len(STOP_WORDS & {word.strip(".,;:!?\"'()").lower() for word in row.words})
    return float(count) if count >= LEAST_STOP_WORDS or row.language in ("en", "") else None


def _alphabetic(row: RowText) -> float | None:
    return _share([any(map(str.isalpha, word)) for word in row.words]) if row.is_spaced else None


def repeated_share(parts: Sequence[str]) -> float | None:
    """Share of the parts that repeat an earlier one; a part that comes several times counts from its second time on."""
    return 1 - len(set(parts)) / len(parts) if parts else None


def repeated_characters(parts: Sequence[str]) -> float | None:
    """Share of all characters that stand in parts that repeat an earlier part."""
    return 1 - sum(map(len, set(parts))) / sum(map(len, parts)) if parts else None


def top_gram(row: RowText, *, n: int) -> float | None:
    """Share of the characters in the most frequent n-gram of words; 0 where none comes twice.

    Characters are those of words, without spaces; those that several n-grams share count once.
    """
    if not row.is_spaced or not row.words:
        return None
    if row.longest_repeat < n:
        return 0.0
    grams = row.grams(n)
    counts = Counter(grams)
    most = max(counts.values())
    longest = max((gram for gram in counts if counts[gram] == most), key=lambda gram: (len("".join(gram)), gram))
    return _covered(row.words, [at for at, gram in enumerate(grams) if gram == longest], n)


def duplicate_grams(row: RowText, *, n: int) -> float | None:
    """Share of the characters in n-grams of words that came before; counted as in `top_gram`."""
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


def _symbol_share(row: RowText) -> float | None:
    """Share of characters, spaces aside, that are neither letters, marks nor digits; None where there are none."""
    counts = Counter(character for character in row.text if not character.isspace())
    symbols = sum(count for character, count in counts.items() if unicodedata.category(character)[0] not in "LMN")
    return symbols / counts.total() if counts else None


def _repeats_prompt(row: RowText) -> float | None:
    """Largest share of an answer that is its prompt, or its prompt's last line, word by word; None without answers."""

    def share(exchange: Exchange) -> float:
        answer = normalised(exchange.answer)
        asked = {normalised(exchange.prompt), normalised((exchange.prompt.strip().splitlines() or [""])[-1])}
        ratios = [
            len(prompt) / len(answer)
            for prompt in asked
            if prompt and (prompt == answer or (len(prompt.split()) >= PROMPT_WORDS and f" {prompt} " in f" {answer} "))
        ]
        return max(ratios, default=0.0)

    return max(map(share, row.exchanges), default=None)


def _refusals(row: RowText) -> float | None:
    """Answers that open with a refusal; None without answers."""
    if not row.exchanges:
        return None
    openings = [normalised(each.answer[:OPENING]) for each in row.exchanges]
    return float(sum(any(phrase in opening for phrase in REFUSALS) for opening in openings))


def _empty_turns(row: RowText) -> float | None:
    """Turns without a letter or a digit; None without turns."""
    turns = row.turns or [part for exchange in row.exchanges for part in exchange]
    return float(sum(not any(map(str.isalnum, turn)) for turn in turns)) if turns else None


def _gopher(name: str, says: str, measure: Measure, least: float, most: float = math.inf) -> Rule:
    return Rule(f"gopher_{name}", says, "Gopher", measure, least, most)


def _repetition(name: str, says: str, measure: Measure, most: float) -> Rule:
    return _gopher(name, f"more than {100 * most:.0f} % of {says}", measure, -math.inf, most)


def _c4(name: str, says: str, measure: Callable[[RowText], int], least: float = 0, most: float = math.inf) -> Rule:
    return Rule(f"c4_{name}", says, "C4", lambda row: float(measure(row)), least, most)


def _own(name: str, says: str, measure: Measure, most: float = 0) -> Rule:
    return Rule(name, says, "workbench", measure, most=most)


def _hash_signs_or_ellipses(row: RowText) -> float:
    return max(row.text.count("#"), sum(map(row.text.count, ELLIPSES))) / len(row.words)


def _long_lines(row: RowText) -> float | None:
    return float(sum(len(line.split()) >= LINE_WORDS for line in row.lines)) if row.is_spaced else None


_ALL = (
    _gopher(
        "words",
        "fewer than 50 or more than 100,000 words",
        lambda row: float(len(row.words)) if row.is_spaced else None,
        50,
        100_000,
    ),
    _gopher(
        "word_length",
        "words have fewer than 3 or more than 10 letters on average",
        _of_words(lambda row: sum(map(len, row.words)) / len(row.words)),
        3,
        10,
    ),
    _gopher("symbols", "more than one hash sign or ellipsis for 10 words", _of_words(_hash_signs_or_ellipses), 0, 0.1),
    _gopher(
        "bullets",
        "more than 90 % of lines begin with a bullet",
        lambda row: _share([line.startswith(BULLETS) for line in row.lines]),
        0,
        0.9,
    ),
    _gopher(
        "ellipses",
        "more than 30 % of lines end with an ellipsis",
        lambda row: _share([line.endswith(ELLIPSES) for line in row.lines]),
        0,
        0.3,
    ),
    _gopher("alphabetic", "fewer than 80 % of words have a letter", _alphabetic, 0.8, 1),
    _gopher("stop_words", "fewer than two of " + ", ".join(sorted(STOP_WORDS)), _stop_words, LEAST_STOP_WORDS),
    _repetition("duplicate_lines", "its lines repeat earlier ones", lambda row: repeated_share(row.lines), 0.30),
    _repetition(
        "duplicate_paragraphs", "its paragraphs repeat earlier ones", lambda row: repeated_share(row.paragraphs), 0.30
    ),
    _repetition(
        "duplicate_line_characters",
        "its text stands in repeated lines",
        lambda row: repeated_characters(row.lines),
        0.20,
    ),
    _repetition(
        "duplicate_paragraph_characters",
        "its text stands in repeated paragraphs",
        lambda row: repeated_characters(row.paragraphs),
        0.20,
    ),
    *(
        _repetition(f"top_{n}_gram", f"its text is one sequence of {n} words, repeated", partial(top_gram, n=n), most)
        for n, most in {2: 0.20, 3: 0.18, 4: 0.16}.items()
    ),
    *(
        _repetition(
            f"duplicate_{n}_grams",
            f"its text stands in repeated sequences of {n} words",
            partial(duplicate_grams, n=n),
            most,
        )
        for n, most in {5: 0.15, 6: 0.14, 7: 0.13, 8: 0.12, 9: 0.11, 10: 0.10}.items()
    ),
    _c4(
        "terminal_punctuation",
        "no line ends in a terminal punctuation mark",
        lambda row: sum(line.endswith(TERMINAL) for line in row.lines),
        1,
    ),
    Rule("c4_short_lines", "no line has five words", "C4", _long_lines, 1),
    _c4("sentences", "fewer than three sentences", lambda row: len(_SENTENCE.findall(row.text)), LEAST_SENTENCES),
    _c4("lorem_ipsum", "placeholder text", lambda row: row.text.lower().count("lorem ipsum"), most=0),
    _c4("curly_brackets", "a curly bracket, as in programs", lambda row: row.text.count("{"), most=0),
    _c4(
        "javascript",
        "a line with the word Javascript",
        lambda row: sum("javascript" in line.lower() for line in row.lines),
        most=0,
    ),
    _c4(
        "policies",
        "a notice on terms, privacy or cookies",
        lambda row: sum(any(phrase in line.lower() for phrase in POLICIES) for line in row.lines),
        most=0,
    ),
    _own("symbols", "more than 40 % of characters are neither letters nor digits", _symbol_share, MAX_SYMBOLS),
    _own(
        "broken_characters",
        "characters that a wrong decoding left",
        lambda row: float(len(_BROKEN.findall(row.text))),
    ),
    _own("answer_repeats_prompt", "an answer holds its whole prompt, or the last line of it", _repeats_prompt),
    _own("refusal", "an answer that begins with a refusal", _refusals),
    _own("empty_turn", "a turn without a letter or a digit", _empty_turns),
)
RULES: dict[str, Rule] = {rule.name: rule for rule in _ALL}  # rules that judge a row by itself
SET_RULES: dict[str, str] = {
    "other_language": "another language than most rows",
    "exact_duplicate": "equals an earlier row, but for case, spaces and punctuation",
    "near_duplicate": "nearly equals an earlier row",
}  # rules that compare a row with the others, with what a flagged row is
