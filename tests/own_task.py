"""A task of a user's own, known to the tests that need it and to no other."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from workbench.config import RunConfig, task_facts


@contextmanager
def forgotten_afterwards() -> Iterator[None]:
    """Tasks that files of `plugins` register within it are unknown after it; these files run again when asked for."""
    known = set(task_facts.TASKS)
    try:
        yield
    finally:
        for name in set(task_facts.TASKS) - known:
            del sys.modules[task_facts.TASKS.pop(name).module], RunConfig.__pydantic_fields__[name]
        RunConfig.model_rebuild(force=True)
