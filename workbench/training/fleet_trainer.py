"""The loop over a fleet: a bank that members leave when they have ended, and that others join between two steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from workbench.adapters.banks.bank import Bank
from workbench.training import packing
from workbench.training.adapter_trainer import TrainTask
from workbench.training.bank_trainer import BankTrainer, Objective
from workbench.training.freezing.freezer import Freezer
from workbench.training.row_losses import RowLossWatch


class FleetTrainer(BankTrainer):
    """Trains the members of a bank until one of them ends. Then all have saved, and the bank may change.

    The members that stay keep their values and optimizers where they are. A process that was killed since begins with
    the members that there were at that moment, `begun` saying where each stood, and goes on with the same bits.

    Args:
        every: Tasks of all that will ever train here: how rows are laid out must not depend on who is there.
        options: As of `BankTrainer`.
    """

    def __init__(
        self,
        bank: Bank,
        train_tasks: Sequence[TrainTask],
        *,
        every: Sequence[TrainTask],
        compute: torch.dtype,
        reads_packed: bool,
        **options: Any,
    ) -> None:
        super().__init__(bank, train_tasks, compute=compute, reads_packed=reads_packed, **options)
        self._compute = compute
        self._resumed = False
        self.arrangement = packing.of_bank(
            every, self.freezer.backbone, reads_packed=reads_packed, tokens=self.tokens, compute=compute
        )

    def work_until_one_ends(self) -> list[str]:
        """Train, and return the names of those that came to their end or failed; raises Stopped as `work` does."""
        if not self._resumed:
            self._resume()
            self._resumed = True
        self.prepare()
        with self._computing() as began:
            while all(member.live for member in self.members.values()):
                self._step(dict(self.members), began)
        return [name for name, member in self.members.items() if not member.live]

    def join(self, name: str, task: TrainTask, objective: Objective, *, freezer: Freezer) -> None:
        """Take a member that the bank has begun.

        Args:
            freezer: Of the bank's model as it is with this member.
        """
        self.freezer = freezer
        self.masters.add(self.bank.parameters_of(name), self._compute)
        self.objectives[name], self.row_losses[name], self.begun[name] = objective, RowLossWatch(), 0
        self.members[name] = self.member(name, task)

    def leave(self, name: str) -> None:
        """Forget a member, its optimizer included, which the bank has still."""
        self.masters.forget(self.bank.parameters_of(name))
        for known in (self.members, self.objectives, self.row_losses, self.begun):
            del known[name]
