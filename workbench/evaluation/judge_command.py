"""A program of the user's that says which of two answers is better: JSON lines in, a line for each out."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from workbench.data.rows import excerpt
from workbench.data.text.generated_answers import Answer
from workbench.errors import ConfigError

VERDICTS = {"1": 1, "2": 2, "0": 0}
"""The first answer is better, the second one, neither."""


def verdicts(command: str, pairs: Sequence[tuple[Answer, Answer]], *, timeout: float) -> list[int]:
    """Judgements of pairs of answers by a program: 1, 2 or 0.

    It reads lines `{"prompt": ..., "messages": [...], "first": ..., "second": ..., "row": {...}}` from its standard
    input, and writes a line `1`, `2` or `0` for each.

    Args:
        command: Program and arguments; no shell reads it.
        timeout: Seconds for all pairs.

    Raises:
        ConfigError: It cannot be started, fails, takes too long, or writes something else.
    """
    lines = "".join(json.dumps(_line(*pair), default=str) + "\n" for pair in pairs)
    output_lines = _run(command, lines, timeout).split("\n")
    judgements = [line.strip() for line in output_lines if line.strip()]
    if len(judgements) != len(pairs):
        raise _error(
            command, f"wrote {len(judgements)} lines for {len(pairs)} pairs. Let it write 1, 2 or 0 for each line"
        )
    for number, verdict in enumerate(judgements):
        if verdict not in VERDICTS:
            raise _error(command, f"wrote {excerpt(verdict)} in line {number + 1}. Let it write 1, 2 or 0 (neither)")
    return [VERDICTS[verdict] for verdict in judgements]


def _line(first: Answer, second: Answer) -> dict[str, Any]:
    asked: dict[str, Any] = {"prompt": first.prompt, "messages": list(first.messages), "row": dict(first.row)}
    return asked | {"first": first.text, "second": second.text}


def _run(command: str, text: str, timeout: float) -> str:
    try:
        process = subprocess.Popen(
            shlex.split(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
    except (OSError, ValueError, IndexError) as error:
        raise _error(command, f"cannot be started ({error}). Name a program and its arguments") from None
    with process:  # closes its pipes, however it ends
        try:
            out, errors = process.communicate(text, timeout=timeout)
        except subprocess.TimeoutExpired:
            raise _error(command, f"took more than {timeout:g} s. Make it faster, or raise --judge-timeout") from None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode:
        last = (errors.strip().splitlines() or ["it wrote no reason"])[-1]
        raise _error(command, f"ended with status {process.returncode}: {last}. Correct it")
    return out


def _error(command: str, problem: str) -> ConfigError:
    return ConfigError(f"--judge {command!r} {problem}.")
