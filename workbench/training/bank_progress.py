"""Progress of a bank: one line for all members, with their names where they differ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workbench.training.callbacks import Callback


class BankProgress:
    """Reports a bank to a callback as one run: mean loss, lowest held-out loss, tokens of all members together.

    Args:
        names: Displayed name of each member, by its name in the bank.
    """

    def __init__(self, callback: Callback, names: Mapping[str, str]) -> None:
        self._callback = callback
        self._names = names
        self._round: dict[str, dict[str, Any]] = {}
        self._total = 0

    def step(self, record: dict[str, Any], *, total: int) -> None:
        """Collect the step of a member; the step before it is reported once all members have done it."""
        if record["member"] in self._round:
            self.flush()
        self._round[record["member"]] = record
        self._total = max(self._total, total)

    def say(self, text: str) -> None:
        """Show a sentence, with displayed names."""
        for member, name in self._names.items():
            text = text.replace(member, name)
        self._callback.say(text)

    def stop_requested(self) -> bool:
        """Whether to finish the step, save, and end."""
        return self._callback.stop_requested()

    def flush(self) -> None:
        """Report the last step of all members."""
        records = list(self._round.values())
        if not records:
            return
        self._round = {}
        held_out = [record["held_out_loss"] for record in records if "held_out_loss" in record]
        summary = {
            **max(records, key=lambda record: int(record["step"])),
            "loss": sum(record["loss"] for record in records) / len(records),
            "tokens_per_second": sum(record["tokens_per_second"] for record in records),
        }
        self._callback.step({**summary, "held_out_loss": min(held_out)} if held_out else summary, total=self._total)
