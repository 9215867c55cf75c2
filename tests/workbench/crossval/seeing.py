"""Made-up predictions of several views, each with so much noise."""

from __future__ import annotations

import numpy as np

from workbench.data.labelled.labels import Labels

ONE = Labels("one", ("a", "b", "c"))
SEVERAL = Labels("several", ("a", "b", "c"))
NUMBER = Labels("number", ("value",), mean=10.0, scale=4.0)
ROWS = 600


def said(labels: Labels, noises: list[float], *, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Values (V, N, C) of views with so much noise each, and targets (N, C); N is ROWS."""
    chance = np.random.default_rng(seed)
    if labels.kind == "number":
        signal = chance.normal(size=(ROWS, 1))
        targets = signal.astype(np.float32)
    elif labels.kind == "several":
        targets = (chance.random((ROWS, 3)) < 0.4).astype(np.float32)
        signal = 2.0 * targets - 1.0
    else:
        targets = np.eye(3, dtype=np.float32)[chance.integers(0, 3, ROWS)]
        signal = 1.5 * targets
    return np.stack([labels.values(signal + noise * chance.normal(size=signal.shape)) for noise in noises]), targets
