"""Where the tests of an accelerator run: on one, or on the CPU in a rehearsal."""

from __future__ import annotations

import os

import pytest
import torch

from workbench.models import backbones

REHEARSAL = "WORKBENCH_REHEARSAL" in os.environ
"""Whether `scripts/gpu/prove.sh --rehearse` runs them on a CPU."""
FEW = os.environ.get("WORKBENCH_REHEARSAL") == "few"
"""Whether it does so without `--whole`: a cover of the cases."""
HERE = torch.cuda.is_available()
needs_device = pytest.mark.skipif(
    not (HERE or REHEARSAL), reason="no accelerator here (scripts/gpu/prove.sh --rehearse)"
)
"""Mark of every file in this folder."""
DEVICE = backbones.device()


def gpu_alone(reason: str) -> pytest.MarkDecorator:
    """Mark of a test that a CPU cannot stand in for; `reason` says why."""
    return pytest.mark.skipif(not HERE, reason=f"on an accelerator alone: {reason}")


def needs(package: str) -> None:
    """Skip a test whose package is not installed."""
    pytest.importorskip(package, reason=f"{package} is not installed here (scripts/gpu/wheels.sh)")
