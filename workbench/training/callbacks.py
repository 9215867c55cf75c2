"""Callbacks of a run: its progress, and requests to stop."""

from __future__ import annotations

from typing import Any, Protocol


class Callback(Protocol):
    """Receives the progress of a run."""

    def step(self, record: dict[str, Any], *, total: int) -> None:
        """A step was done; `record` is its line of metrics.jsonl."""

    def say(self, text: str) -> None:
        """A sentence for the person who runs this."""

    def stop_requested(self) -> bool:
        """Whether to finish the step, save, and end."""


class Silent:
    """A callback that shows nothing and never asks a run to stop."""

    def step(self, record: dict[str, Any], *, total: int) -> None:
        """Ignore a step."""

    def say(self, text: str) -> None:
        """Ignore a sentence."""

    def stop_requested(self) -> bool:
        """Never."""
        return False
