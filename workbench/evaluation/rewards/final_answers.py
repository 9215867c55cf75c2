r"""The final answer of a text: a number where it is one, else a mathematical expression such as a set or a root.

It stands behind the last `####` or in the last `\boxed{}`; else it is the last number, bracketed list or formula.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple

_MARK = "####"
"""GSM8K writes the result after it."""
_PLAIN_NUMBER = r"(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][-+]?[0-9]{1,3}\b)?"
_NUMBER = rf"(?:[0-9]{{1,3}}(?:[, '][0-9]{{3}})+(?![0-9])(?:\.[0-9]+)?(?:[eE][-+]?[0-9]{{1,3}}\b)?|{_PLAIN_NUMBER})"
"""The same, also with grouped digits."""
_POWER = r"\s?\^\s?[({]?([-+]?[0-9]{1,3})[)}]?"
_ONE_NUMBER = re.compile(
    rf"([-+]?)\s?(?:({_NUMBER})\s+(?=[0-9]+\s?/))?({_NUMBER})(?:{_POWER})?(?:\s?\*\s?10{_POWER})?(?:\s?/\s?({_NUMBER}))?"
)
"""Sign, whole part of a mixed number, number, its power, power of ten, denominator."""
_ALONE = r"(?<!\^)(?<![^\W0-9])(?<![0-9][.,:])(?<![0-9])"
"""It is no exponent, and no letter or digit stands before it."""


def _run(number: str, *, alone: str = "") -> str:
    """The pattern of numbers that signs join to one expression."""
    term = rf"√?{number}(?:{_POWER.replace('([', '(?:[')})?!?"
    joint = r"\s?[/*÷:]\s?[-+]?|\s[-+]\s|-|\s(?=[0-9]+\s?/)"
    return rf"(?:(?<![\w.)])[-+]\s?)?{alone}{term}(?:(?:{joint}){term})*"


_ITEM = rf"\s*(?:{_run(f'(?:{_PLAIN_NUMBER})')}|[-+]?∞)\s*"
_LIST = rf"[\[({{]{_ITEM}(?:[,;]{_ITEM})+[\])}}]"
_FINAL = re.compile(rf"{_LIST}(?:\s*\\cup\s*{_LIST})*|{_run(_NUMBER, alone=_ALONE)}")
_FORMULA = re.compile(
    r"\$\$?((?:[^$a-zA-Z\\]|\\[a-zA-Z]+|\\[^a-zA-Z]|(?<![a-zA-Z])[a-zA-Z](?![a-zA-Z]))+)\$|"
    r"\\\(((?:[^\\]|\\[^()])+)\\\)|\\\[((?:[^\\]|\\[^\[\]])+)\\\]"
)
_CONTINUES = re.compile(
    r"\s?[√π^!∞\\±]|[.,:'][0-9]|[xyzn](?!\w)|\s?(?:hundred|thousand|million|billion|trillion|dozen)"
)
"""What makes the number before it a part of a longer expression."""
_SIGNS = re.compile(r"[\\^√π∞∈<>≤≥±!|{}\[\]]")
_COMMAND = re.compile(r"\\(?:begin|end)\{\w+\}|\\[a-zA-Z]+")
_UNIT = r"(?<![^\W\d])((?:[kcdmnμ]?m|s|in|ft|yd|mi|units?|inch(?:es)?|feet|met(?:er|re)s?))"
_SPELLINGS: tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...] = (
    (r"[¼-¾⅐-⅞]", lambda found: " " + unicodedata.normalize("NFKC", found[0])),
    (r"[⁰¹²³⁴-⁹⁻]+", lambda found: "^" + unicodedata.normalize("NFKC", found[0])),
    (r"[\u2212\u2013]", "-"),
    (r"\u2044", "/"),
    (r"[\u00a0\u2009\u202f]", " "),
    (r"\\(?:text|mathrm|mbox|textbf|mathbf)\s*\{([^{}]*)\}", r" \1 "),
    (r"\\(?:left|right)(?![a-zA-Z])|\\!", ""),
    (r"\^\{?\\circ\}?|°", ""),
    (r"\{,\}", ","),
    (r"(?<=[0-9])\\,(?=[0-9]{3})", ","),
    (r"\\([$%{},;: ])", r" \1"),
    (rf"\\[dtc]?frac\s*(?:\{{(-?{_NUMBER})\}}|([0-9]))\s*(?:\{{({_NUMBER})\}}|([0-9]))", r" \1\2/\3\4 "),
    (r"\\(?:times|cdot)(?![a-zA-Z])|[\u00d7·]", "*"),
    (r"\u222a", r"\\cup "),
    (r"\\infty(?![a-zA-Z])", "∞"),
    (r"(?<=[0-9])\*\*(?=[-0-9])", "^"),
    (rf"{_UNIT}\s?\^[({{]?-?[0-9]+[)}}]?", r"\1"),
)
"""Ways to write a sign, in LaTeX and in Unicode, and the plain one. Powers of units are left out."""


class FinalAnswer(NamedTuple):
    """A number, or else an expression."""

    number: Fraction | None
    expression: str
    percent: bool = False

    def equals(self, other: FinalAnswer, *, tolerance: float) -> bool:
        """Whether two numbers are equal. 50 % equals 0.5, and also 50."""
        if self.number is None or other.number is None:
            return False
        difference = self.number - other.number
        if self.percent != other.percent:
            percent, plain = (self.number, other.number) if self.percent else (other.number, self.number)
            difference = min(difference, percent / 100 - plain, key=abs)
        return abs(difference) <= Fraction(str(tolerance))


def of_answer(text: str) -> FinalAnswer | None:
    """The final answer of what a model wrote; None: there is none."""
    part, boxed = _part(text)
    if boxed:
        return _whole(part)
    plain = _plain(part)
    found = list(_FINAL.finditer(plain))
    formulas = list(_FORMULA.finditer(part))
    if formulas and not _FINAL.search(_plain(part[formulas[-1].end() :])):
        return _whole(next(filter(None, formulas[-1].groups())))
    return _read(plain, found[0 if _MARK in text else -1]) if found else None


def of_reference(text: str) -> FinalAnswer | None:
    """The right answer of a row; None: it is neither one number nor one expression."""
    return _whole(_part(text)[0])


def number_in(text: str) -> Fraction | None:
    """The number that is the final answer of a text; None: it is none, or no number."""
    final = of_answer(text)
    return None if final is None else final.number


def _part(text: str) -> tuple[str, bool]:
    """What stands behind the last mark or in the last box, and whether it is a box."""
    _, mark, behind = text.rpartition(_MARK)
    _, box, boxed = text.rpartition("\\boxed{")
    if mark or not box:
        return behind, False
    depth = 1
    for place, sign in enumerate(boxed):
        depth += (sign == "{") - (sign == "}")
        if depth == 0:
            return boxed[:place], True
    return boxed, True


def _plain(text: str) -> str:
    for pattern, spelling in _SPELLINGS:
        text = re.sub(pattern, spelling, text)
    return text


def _whole(part: str) -> FinalAnswer | None:
    """All of a text as one number or one expression; None: it has several numbers, or words beside an expression."""
    plain = _plain(part).strip(" \n.$").removeprefix("\\(").removesuffix("\\)").strip()
    found = list(_FINAL.finditer(plain))
    if len(found) == 1:
        final = _read(plain, found[0])
        rest = plain[: found[0].start()] + plain[found[0].end() :]
        if not _SIGNS.search(rest) and (final.number is not None or found[0][0][0] in "([{"):
            return final
    words = re.search(r"[^\W\d_]{2}", _COMMAND.sub(" ", plain))
    return FinalAnswer(None, part.strip(" \n.$")) if _SIGNS.search(plain) and not words else None


def _read(plain: str, found: re.Match[str]) -> FinalAnswer:
    before, expression, behind = plain[: found.start()], found[0], plain[found.end() :]
    part = _CONTINUES.match(behind) or before.endswith("{")
    one = None if part else _ONE_NUMBER.fullmatch(expression)
    if part:
        glued = re.match(r"\S*", before[::-1]), re.match(r"\S*", behind)
        assert glued[0] and glued[1], "both patterns match nothing, too"
        expression = glued[0][0][::-1] + expression + glued[1][0].rstrip(".,")
    return FinalAnswer(
        None if one is None else _value(*one.groups()),
        expression.replace("{", "\\{").replace("}", "\\}") if expression[0] == "{" else expression,
        bool(re.match(r"\s?(?:%|per ?cent)", behind)),
    )


def _value(sign: str, whole: str, top: str, power: str, ten: str, bottom: str) -> Fraction | None:
    def exact(number: str) -> Fraction:
        return Fraction(re.sub(r"[, ']", "", number))

    try:
        value = exact(top) ** int(power or 1) * Fraction(10) ** int(ten or 0) / exact(bottom or "1")
    except (ZeroDivisionError, ValueError):  # or thousands of digits
        return None
    value += exact(whole or "0")
    return -value if sign == "-" else value
