"""Python files of a user's own, run before a configuration is read: they register adapter methods."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

from workbench.errors import ConfigError


def load(paths: Sequence[str | Path]) -> None:
    """Run each file once in this process.

    Raises:
        ConfigError: a file is not there, or fails; the message says where.
    """
    for path in map(Path, paths):
        source = path.expanduser().resolve()
        name = f"workbench_plugin_{source.stem}_{abs(hash(str(source)))}"
        if name in sys.modules:
            continue
        if source.suffix != ".py" or not source.is_file():
            raise ConfigError(f"plugins: {path} is no Python file. Write the path of one, such as my_method.py.")
        spec = importlib.util.spec_from_file_location(name, source)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except Exception as error:  # a user's code: whatever it raises, it cannot be used
            del sys.modules[name]
            line = _line(error, source)
            raise ConfigError(f"plugins: {path}{line}: {type(error).__name__}: {error}. Mend the file.") from error


def _line(error: Exception, source: Path) -> str:
    """The line of the file that failed."""
    trace, found = error.__traceback__, None
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == str(source):
            found = trace.tb_lineno
        trace = trace.tb_next
    found = error.lineno if isinstance(error, SyntaxError) else found
    return f", line {found}" if found else ""


def fingerprints(paths: Sequence[Path]) -> dict[str, str]:
    """SHA-256 of each file, for the manifest."""
    return {str(path): hashlib.sha256(path.expanduser().read_bytes()).hexdigest() for path in paths}
