"""Rewards of code by the tests of its row, which run in a sandbox."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from workbench.config.sections.rewards_config import UnitTestReward
from workbench.data.rows import excerpt
from workbench.data.text.generated_answers import Answer
from workbench.errors import DataError
from workbench.evaluation.rewards import sandbox
from workbench.evaluation.rewards.sandbox import SandboxLimits
from workbench.evaluation.rewards.verifiers import column, fenced

_MOST = 8
"""Answers that are tested at the same time, where `threads` is auto."""


class UnitTestVerifier:
    """The share of its row's tests that the code in an answer passes, or whether it passes all.

    Raises:
        ConfigError: The machine does not keep untrusted code in.
    """

    def __init__(self, config: UnitTestReward) -> None:
        self._config = config
        self._limits = SandboxLimits(config.seconds, int(config.memory), int(config.output))
        self._threads = min(_MOST, os.cpu_count() or 1) if config.threads == "auto" else config.threads
        sandbox.require(self._limits)

    def __call__(self, answers: Sequence[Answer]) -> list[float]:
        tests = [self._tests(answer) for answer in answers]
        with ThreadPoolExecutor(self._threads) as pool:
            return list(pool.map(self._score, answers, tests))

    def _tests(self, answer: Answer) -> list[str]:
        cell = column(answer, self._config.tests, kind="unit_tests")
        pieces = [cell] if isinstance(cell, str) else cell
        if not isinstance(pieces, list) or not pieces or not all(isinstance(each, str) for each in pieces):
            raise DataError(
                f"{answer.place}: `{self._config.tests}` must be Python code, or a list of pieces of it, found "
                f"{excerpt(cell)}. Correct the row, or name another column as `tests` of the reward."
            )
        return pieces

    def _score(self, answer: Answer, tests: list[str]) -> float:
        passed = sandbox.passed(fenced(answer.text), tests, self._limits)
        return float(all(passed)) if self._config.score == "all" else sum(passed) / len(passed)
