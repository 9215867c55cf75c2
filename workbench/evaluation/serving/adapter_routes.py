"""How the rows of a batch come to their adapters: several adapters in one pass, or one adapter a pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

import torch
from torch import nn

from workbench.adapters.banks.bank import Bank
from workbench.adapters.banks.bank_layers import MemberRows
from workbench.adapters.multi_adapter import BARE
from workbench.models.shared_model import SharedModel

OWN = "own"
"""The member that is a model's only adapter, or the fully trained model itself."""


class AdapterRoutes(Protocol):
    """A model whose rows go through adapters."""

    model: nn.Module
    members: tuple[str, ...]
    """Names of what rows may go through, BARE for the backbone alone among them."""
    shapes: tuple[str, ...]
    """Those of them whose matrices have other sizes than those of the ones before."""
    mixes: bool
    """Whether one pass may have rows of several members."""

    def rows(self, rows: Sequence[MemberRows]) -> AbstractContextManager[None]:
        """Inside, the rows of a batch, one token each, go through these members in this order."""

    def stock(self, member: str) -> AbstractContextManager[None]:
        """Inside, whole texts go through one member, as PEFT computes it."""


class BankRoutes:
    """A bank: LoRA adapters over one backbone, all in one pass."""

    mixes = True

    def __init__(self, bank: Bank) -> None:
        self.model: nn.Module = bank.model
        self._bank = bank
        self._name_members()

    def _name_members(self) -> None:
        self.members: tuple[str, ...] = (*self._bank.members, BARE)
        sizes: dict[tuple[torch.Size, ...], str] = {}
        for name in self._bank.members:
            sizes.setdefault(tuple(each.shape for each in self._bank.parameters_of(name).values()), name)
        self.shapes: tuple[str, ...] = tuple(sizes.values())

    def join(self, folder: Path) -> str:
        """One more member, the adapter in `folder`; raises as `bank.load` does."""
        member = self._bank.join(folder)
        self._name_members()
        return member

    def leave(self, member: str) -> None:
        """Forget a member."""
        self._bank.leave(member)
        self._name_members()

    @contextmanager
    def rows(self, rows: Sequence[MemberRows]) -> Iterator[None]:
        """See AdapterRoutes."""
        with torch.inference_mode(), self._bank.route(rows, length=1):
            yield

    @contextmanager
    def stock(self, member: str) -> Iterator[None]:
        """See AdapterRoutes."""
        with torch.inference_mode(), self._bank.only(member):
            yield


class SingleRoutes:
    """One adapter of any kind, or none; rows with and without it take turns."""

    mixes = False

    def __init__(self, model: nn.Module, *, bare: bool) -> None:
        """Take a model in evaluation mode.

        Args:
            bare: Whether its backbone is served as well, without the adapter.
        """
        self.model = model
        self.members: tuple[str, ...] = (OWN, BARE) if bare else (OWN,)
        self.shapes: tuple[str, ...] = self.members
        self._shared = SharedModel(model)

    @contextmanager
    def rows(self, rows: Sequence[MemberRows]) -> Iterator[None]:
        """See AdapterRoutes."""
        with self.stock(rows[0].member):
            yield

    @contextmanager
    def stock(self, member: str) -> Iterator[None]:
        """See AdapterRoutes."""
        with self._shared.inference() if member == OWN else self._shared.without_adapters():
            yield
