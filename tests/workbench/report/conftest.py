"""Here the plots of reports are drawn."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module", autouse=True)
def frames() -> None:
    """Plots as they are, in place of empty frames."""
