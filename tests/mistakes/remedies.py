"""What a message tells a person to write, tried."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO

from workbench.config import reference
from workbench.errors import WorkbenchError
from workbench.recipes.load import load
from workbench.recipes.verbs.check import check

_SENTENCE = re.compile(r"\b[Ww]rite (.+?)(?:\.(?:\s|$)|; |$)")
_VALUE = r"'[^']*'|\{(?:[^{}]|\{[^{}]*\})*\}|\[[^\]]*\]|[^\s,;'`\"()]*[^\s,;.'`\"()]"
_WORD = re.compile(rf"(?<![\w.-])([a-z_]+(?:\.\w+)*)=({_VALUE})")
_LEAVE = re.compile(r"[Ll]eave ([a-z_]+(?:\.\w+)*) out")
_FILL_IN = re.compile(r"[A-Z]{2,}|\.\.\.")


def ways_out(message: str) -> Iterator[list[str]]:
    """Each way out that a message names, as `key=value` words to write; not those that a person has to fill in."""
    for sentence in _SENTENCE.findall(" ".join(message.split())):
        for way in re.split(r",? or (?=[a-z_.]+=|leave|with|another)", sentence):
            words = [f"{key}={value}" for key, value in _WORD.findall(way)]
            # A key without a value is to be filled in, and so is one that is to stand before another.
            whole = (
                not re.search(r"\b[a-z]+\.[a-z_]+(?![\w.=])", way) and "before it" not in way and "and leave" not in way
            )
            if words and whole and not any(_FILL_IN.search(word) for word in words):
                yield from _choices(words)


def _choices(words: list[str]) -> Iterator[list[str]]:
    """One list for each value of `key=a|b|c`."""
    several = next((word for word in words if "|" in word), None)
    if several is None:
        yield words
        return
    key, _, values = several.partition("=")
    for value in values.split("|"):
        yield from _choices([f"{key}={value}" if word is several else word for word in words])


def assert_keys(message: str) -> None:
    """See that a message names whole keys: a part of one, such as `zero=0`, would be refused on a command line."""
    for way in ways_out(message):
        for word in way:
            assert _known(word.partition("=")[0]), f"{word}: not a key of a recipe. {message}"


def assert_remedies(command: str, message: str) -> None:
    """See that what a message says to write, or to leave out, mends the mistake that reading a recipe finds.

    Args:
        command: The recipe and its overrides.
    """
    assert_keys(message)
    if "fleet.members." in message:
        return  # to be written into the section of the member
    recipe, *overrides = shlex.split(command)
    for way in ways_out(message):
        assert _told(recipe, [*overrides, *way]) != message, f"{command}: {way} changes nothing. {message}"
    for key in _LEAVE.findall(message):
        less = [word for word in overrides if not re.match(rf"{re.escape(key)}[=.]", word)]
        if len(less) < len(overrides):
            assert _told(recipe, less) != message, f"{command}: leaving {key} out changes nothing. {message}"


def assert_remedies_of_rows(words: Sequence[str], message: str) -> None:
    """See that what a message about rows or a model says to write mends it, as `check` finds, and can be read.

    Args:
        words: The command, of which only `run` and `check` are tried, and only where `check` finds the mistake.
    """
    if words[0] not in ("run", "check") or "write it there" in message:
        return
    if "--out" in words:
        words = [*words[: words.index("--out")], *words[words.index("--out") + 2 :]]
    recipe, overrides, said = words[1], list(words[2:]), " ".join(message.split())
    if unread := _told(recipe, overrides):
        for way in ways_out(unread):
            assert _told(recipe, [*overrides, *way]) != unread, f"{words}: {way} changes nothing. {unread}"
        return
    for way in dict.fromkeys(map(tuple, ways_out(message))):
        # Another method is written in place of the first one's section.
        kept = [each for each in overrides if not (each.startswith("adapter") and "adapter.method=" in way[0])]
        written = [*kept, *(each.replace("'", "") for each in way)]
        if (before := _found(recipe, overrides)) and before in said:
            assert not _told(recipe, written), f"{words}: {way} cannot be read: {_told(recipe, written)} {message}"
            after = _found(recipe, written)
            assert _but_numbers(after) != _but_numbers(before), f"{words}: {way} changes nothing. {message}"


def _found(recipe: str, overrides: list[str]) -> str:
    """What `check` refuses, in one line; empty where it finds nothing."""
    try:
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            check(recipe, overrides)
    except WorkbenchError as error:
        return " ".join(str(error).split())
    return ""


def _but_numbers(message: str) -> str:
    return re.sub(r"\d[\d.,]*", "0", message)


def _known(key: str) -> bool:
    """Whether a recipe has this key; of an item of a list its own name is enough."""
    return any(
        each.key.endswith(f"[].{key}")
        or re.fullmatch(re.escape(each.key).replace("NAME", r"\w+").replace(r"\[\]", r"(\.\d+)?"), key)
        for each in reference.settings()
    )


def _told(recipe: str, overrides: list[str]) -> str:
    try:
        load(recipe, overrides)
    except WorkbenchError as error:
        return str(error)
    return ""
