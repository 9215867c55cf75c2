"""Python files of a user's own: `plugins`, run before a configuration is read, and what other keys name."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from workbench.errors import ConfigError


def load(paths: Any) -> None:
    """Run each file once in this process; what is no list of paths is told where it is parsed.

    Raises:
        ConfigError: a file is not there, or fails; the message says where.
    """
    whole = isinstance(paths, (list, tuple)) and all(isinstance(path, (str, Path)) for path in paths)
    for path in paths if whole else ():
        module(Path(path), key="plugins")


def module(path: Path, *, key: str) -> ModuleType:
    """Run a user's file once in this process; returns its module.

    Raises:
        ConfigError: it is not there, or fails; the message names the `key` of the configuration, and the line.
    """
    source = path.expanduser().resolve()
    name = f"workbench_plugin_{source.stem}_{abs(hash(str(source)))}"
    if name in sys.modules:
        return sys.modules[name]
    if source.suffix != ".py" or not os.path.isfile(source):
        raise ConfigError(f"{key}: {path} is no Python file. Write the path of one, such as my_code.py.")
    spec = importlib.util.spec_from_file_location(name, source)
    assert spec is not None and spec.loader is not None
    plugin = importlib.util.module_from_spec(spec)
    sys.modules[name] = plugin
    try:
        spec.loader.exec_module(plugin)
    except Exception as error:  # a user's code: whatever it raises, it cannot be used
        del sys.modules[name]
        raise failed(path, error, key=key) from error
    return plugin


def function(path: Path, name: str, signature: str, *, key: str) -> Callable[..., Any]:
    """The function of that name in a user's file.

    Raises:
        ConfigError: There is none, which the message tells with its signature, or `module` raises it.
    """
    user_function: Callable[..., Any] | None = vars(module(path, key=key)).get(name)
    if not callable(user_function):
        raise ConfigError(f"{key}: {path} defines no function {name}. Write `{signature}` in it.")
    return user_function


def failed(path: Path, error: BaseException, *, key: str) -> ConfigError:
    """Error for an exception that a user's file raised."""
    source = path.expanduser().resolve()
    trace, line_number = error.__traceback__, None
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == str(source):
            line_number = trace.tb_lineno
        trace = trace.tb_next
    line_number = error.lineno if isinstance(error, SyntaxError) else line_number
    line = f", line {line_number}" if line_number else ""
    return ConfigError(f"{key}: {path}{line}: {type(error).__name__}: {error}. Correct the file.")


def fingerprints(paths: Sequence[Path]) -> dict[str, str]:
    """SHA-256 of each file, for the manifest; one that is not there is refused by what reads it."""
    there = [path for path in paths if path.expanduser().is_file()]
    return {str(path): hashlib.sha256(path.expanduser().read_bytes()).hexdigest() for path in there}
