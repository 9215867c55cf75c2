"""Mistakes that a person can mend. The command line prints them without a traceback and exits with 2."""

from __future__ import annotations


class WorkbenchError(Exception):
    """Base of every error that is the user's to mend: the message says what, where, and what to write."""


class ConfigError(WorkbenchError):
    """A recipe, an override or a command-line argument is wrong."""


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
