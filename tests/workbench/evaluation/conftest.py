"""A small tokenised set."""

from __future__ import annotations

import numpy as np
import pyarrow
import pytest

from workbench.data.text.tokenized_set import TokenizedSet, TokenTable


@pytest.fixture
def rows() -> TokenizedSet:
    """Five rows of unequal length over 64 tokens; the first one carries loss in two stretches."""
    chance = np.random.default_rng(0)
    masks = ["00110011", "0111", "000000111111", "01", "1111"]
    columns = {
        "input_ids": [chance.integers(3, 64, len(mask)).tolist() for mask in masks],
        "supervised": [[each == "1" for each in mask] for mask in masks],
        "digest": list(range(len(masks))),
        "place": [f"rows.jsonl, row {number + 1}" for number in range(len(masks))],
        "length": [len(mask) for mask in masks],
        "source": [0] * len(masks),
        "block": [0] * len(masks),
        "pictures": [""] * len(masks),
        "targets": [mask[1:].count("1") for mask in masks],
    }
    return TokenizedSet(TokenTable(pyarrow.table(columns)), np.arange(len(masks)), "rows.jsonl", "0" * 64)
