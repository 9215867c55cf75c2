"""Progress of a bank: one line for all members, with their names where they differ."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

from workbench.training.callbacks import Callback


class BankProgress:
    """Reports a bank to a callback as one run: mean loss, one held-out loss, tokens of all members together.

    The step is that of the member with the most steps left, by whom the bank ends.

    Args:
        names: Displayed name of each member, by its name in the bank.
        held_out: One number for the latest held-out losses of those that train: the lowest where rows are the same.
    """

    def __init__(
        self,
        callback: Callback,
        names: Mapping[str, str],
        *,
        held_out: Callable[[Collection[float]], float] = min,
    ) -> None:
        self._callback = callback
        self._names = names
        self._held_out = held_out
        self._round: dict[str, tuple[dict[str, Any], int]] = {}
        self._evaluated: dict[str, float] = {}
        """Latest held-out loss of each member that has trained in the last step."""
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
        """Report the last step of all members; a held-out loss where one is new, or others train than before."""
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
