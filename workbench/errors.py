"""Mistakes that a person can mend. The command line prints them without a traceback and exits with 2."""

from __future__ import annotations

import errno

_EXHAUSTED = ("cannot allocate memory", "can't allocate memory", "not enough memory", "out of memory")


def out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, of the device or of the host, whatever library says so."""
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    return isinstance(error, Exception) and any(words in str(error).lower() for words in _EXHAUSTED)


def unnameable(error: BaseException) -> str | None:
    """What to write in place of a name that the system does not take, whoever asked for it; None for other errors."""
    if isinstance(error, OSError) and error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
        name = str(error.filename)
        return f"{name[:60]}{'...' if len(name) > 60 else ''}: {error.strerror}. Write a shorter one."
    if isinstance(error, UnicodeEncodeError) and error.reason == "surrogates not allowed":
        return f"{error.object[:60]!r} holds half of a character, which no file name or text has. Write it anew."
    if isinstance(error, ValueError) and "null byte" in str(error):
        return "A name holds a null byte, which no file name has. Write it anew."
    return None


class WorkbenchError(Exception):
    """Base of every error that is the user's to mend: the message says what, where, and what to write."""


class ConfigError(WorkbenchError):
    """A recipe, an override or a command-line argument is wrong."""

    mistakes: tuple[tuple[str, str], ...] = ()
    """Place and cure of each mistake of a recipe, where the message lists several."""


class DataError(WorkbenchError):
    """A data file cannot be read, a row is malformed, or a split would teach or measure nothing."""


class BackboneError(WorkbenchError):
    """A backbone or tokenizer cannot be loaded, or does not fit what the recipe asks of it."""


class ResumeError(WorkbenchError):
    """A run directory is in use, is another run's, or holds no valid checkpoint."""


class FileError(WorkbenchError):
    """A file cannot be written, or one that the workbench wrote is damaged."""


class TrainingError(WorkbenchError):
    """Training itself failed: the loss is no longer finite, or exploded."""


class Stopped(Exception):
    """A run ended on request with a valid checkpoint; the command line exits with 3."""
