"""Facts about a tokenised data set for the manifest and the report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from workbench.data.batching import Indices

MAX_BINS = 40


class DatasetFacts(Protocol):
    """Tokenised rows of one file, folder or hub data set."""

    @property
    def source(self) -> str: ...
    @property
    def fingerprint(self) -> str: ...
    @property
    def lengths(self) -> Indices: ...
    @property
    def truncated(self) -> int: ...
    @property
    def skipped(self) -> Sequence[str]: ...


def shared(rows: DatasetFacts, *, supervised_tokens: int) -> dict[str, Any]:
    """Source, rows, tokens, and a histogram of row lengths in tokens: edges `lengths`, heights `counts`."""
    counts, edges = np.histogram(rows.lengths, bins=min(MAX_BINS, max(1, len(np.unique(rows.lengths)))))
    return {
        "source": rows.source,
        "fingerprint": rows.fingerprint,
        "rows": len(rows.lengths),
        "tokens": int(rows.lengths.sum()),
        "supervised_tokens": supervised_tokens,
        "truncated": rows.truncated,
        "skipped": len(rows.skipped),
        "lengths": [round(float(edge), 1) for edge in edges],
        "counts": counts.tolist(),
    }
