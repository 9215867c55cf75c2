"""Settings that sparse training does not go with, and what to write instead."""

from __future__ import annotations

from collections.abc import Iterator

from workbench.adapters import Full
from workbench.config.optimizer_config import MIX_VALUES
from workbench.config.run_sections import RunSections


def mistakes(config: RunSections) -> Iterator[str]:
    """Where weights that are pruned would not stay zero."""
    adapter, optimizer = config.adapter, config.optimizer
    if isinstance(adapter, Full) and adapter.sparsity is not None and optimizer.name in MIX_VALUES:
        yield (
            f"optimizer.name={optimizer.name} moves a weight by the gradients of others, and adapter.sparsity keeps "
            "weights at zero. Write optimizer.name=adamw, or leave adapter.sparsity out."
        )
