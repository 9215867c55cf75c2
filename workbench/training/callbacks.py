"""Callbacks of a run: its progress, and requests to stop; for a bank as if it were one run."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol


class Callback(Protocol):
    """Receives the progress of a run, and may ask it to stop."""

    def step(self, record: dict[str, Any], *, total: int) -> None:
        """A step was done; `record` is its line of metrics.jsonl."""

    def say(self, text: str) -> None:
        """Show a sentence to the user."""

    def stop_requested(self) -> bool:
        """Whether to finish the step, save, and end."""


class Silent(Callback):
    """A callback that shows nothing and never asks a run to stop."""

    def step(self, record: dict[str, Any], *, total: int) -> None:
        return

    def say(self, text: str) -> None:
        return

    def stop_requested(self) -> bool:
        return False


SILENT = Silent()
"""For runs that show nothing."""


class BankProgress:
    """Reports a bank to a callback as one run: mean loss, one held-out loss, tokens of all members together.

    The step is that of the member with the most steps left, with which the bank ends.

    Args:
        names: Displayed name of each member, by its name in the bank.
        held_out: Makes one number of the latest held-out losses of the members that train: the lowest where rows are
            the same.
    """

    def __init__(
        self, callback: Callback, names: Mapping[str, str], *, held_out: Callable[[Collection[float]], float] = min
    ) -> None:
        self._callback, self._names, self._held_out = callback, names, held_out
        self._round: dict[str, tuple[dict[str, Any], int]] = {}
        self._evaluated: dict[str, float] = {}
        """Latest held-out loss of each member that trained in the last step."""
        self._trained: set[str] = set()

    def step(self, record: dict[str, Any], *, total: int) -> None:
        """Collect the step of a member; the step before it is reported once all members have done it."""
        if record["member"] in self._round:
            self.flush()
        self._round[record["member"]] = (record, total)

    def say(self, text: str) -> None:
        """Show a sentence, with displayed names."""
        known = "|".join(map(re.escape, self._names))
        self._callback.say(re.sub(known, lambda match: self._names[match[0]], text) if known else text)

    def stop_requested(self) -> bool:
        """Whether to finish the step, save, and end."""
        return self._callback.stop_requested()

    def flush(self) -> None:
        """Report the last step of all members; with a held-out loss where one is new, or other members train."""
        if not self._round:
            return
        records = [record for record, _ in self._round.values()]
        shown, total = max(self._round.values(), key=lambda each: each[1] - int(each[0]["step"]))
        now = {name: record["held_out_loss"] for name, (record, _) in self._round.items() if "held_out_loss" in record}
        before = {name: loss for name, loss in self._evaluated.items() if name in self._round}
        changed = bool(now) or (bool(self._trained) and self._trained != set(self._round))
        self._evaluated, self._trained, self._round = before | now, set(self._round), {}
        summary = {
            **shown,
            "loss": sum(record["loss"] for record in records) / len(records),
            "tokens_per_second": sum(record["tokens_per_second"] for record in records),
        }
        summary.pop("held_out_loss", None)
        if changed:
            losses = self._evaluated.values()
            summary["held_out_loss"] = self._held_out(losses) if losses else None
        self._callback.step(summary, total=total)
