"""An error between two steps: nothing that was learnt until then is lost."""

from __future__ import annotations

from workbench.data.batching import Indices
from workbench.errors import WorkbenchError
from workbench.training.adapter_trainer import AdapterTrainer


def rows(member: AdapterTrainer) -> Indices:
    """Rows of the next step; where they cannot be had, as a reward of them fails, a checkpoint is written first."""
    try:
        return member.batch()
    except WorkbenchError:
        if member.progress.step:
            member.save(keep=member.task.config.save.keep)
        raise
