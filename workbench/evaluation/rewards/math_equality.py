"""Compares mathematical expressions by math-verify, in a process of its own: arithmetic such as 9^9^9^9 takes for ever,
in code that no thread and no handler of a signal can stop."""

from __future__ import annotations

import importlib.util
import json
import logging
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Sequence

_SECONDS = 5.0  # for one pair
_MEMORY = 4 * 2**30  # bytes of address space


def installed() -> bool:
    """Whether the library is."""
    return importlib.util.find_spec("math_verify") is not None


def equal(pairs: Sequence[tuple[str, str]]) -> list[bool | None]:
    """Whether the second LaTeX expression of each pair equals the first, which is the right one; None: the first has no
    meaning. A pair that takes too long or too much memory is not equal."""
    verdicts: list[bool | None] = []
    while len(verdicts) < len(pairs):
        process = subprocess.run(
            [sys.executable, "-B", __file__], input=json.dumps(pairs[len(verdicts) :]), capture_output=True, text=True
        )
        if process.returncode > 0:
            raise RuntimeError(process.stderr)
        verdicts += [json.loads(line) for line in process.stdout.splitlines()]
        verdicts += [False] if process.returncode else []  # the pair at which the kernel ended it
    return verdicts


def _main() -> None:
    import math_verify

    logging.disable()  # the library writes about pairs that it cannot read
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    for pair in json.load(sys.stdin):
        signal.setitimer(signal.ITIMER_REAL, _SECONDS)  # without a handler, SIGALRM ends the process
        try:
            latex = (re.sub(r"√([0-9.]+)", r"\\sqrt{\1}", each).replace("∞", r"\infty ") for each in pair)
            right, own = (math_verify.parse(f"${each}$", parsing_timeout=None) for each in latex)
            same = math_verify.verify(right, own, timeout_seconds=None, allow_set_relation_comp=True) if right else None
        except MemoryError:
            same = False
        print(json.dumps(same), flush=True)


if __name__ == "__main__":
    _main()
