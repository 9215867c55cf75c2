"""A set that would teach nothing, never teach to stop, or measure nothing is refused before the first step."""

from __future__ import annotations

import numpy as np
import pyarrow
import pytest

from workbench.data.splits import Splits
from workbench.data.text.text_checks import require_ends, require_teaching
from workbench.data.text.token_table import TokenTable
from workbench.data.text.tokenized_set import TokenizedSet
from workbench.errors import DataError


def _tokens(source: str, targets: list[int], ends: list[int]) -> TokenizedSet:
    table = TokenTable(pyarrow.table({"targets": targets, "ends": ends}))
    return TokenizedSet(table, np.arange(len(targets)), source, "0" * 64)


GOOD = _tokens("good.jsonl", [5, 0], [1, 0])


def test_one_row_that_teaches_is_enough() -> None:
    require_teaching(Splits(GOOD, GOOD, None))
    require_ends(Splits(GOOD, GOOD, None))


@pytest.mark.parametrize(
    ("train", "held_out", "expected"),
    [
        (([0, 0], [0, 0]), None, "bad.jsonl: no token carries loss. Look at `workbench check`"),
        (([5, 3], [0, 0]), None, "bad.jsonl: no supervised token ends a turn"),
        (None, ([0], [0]), "bad.jsonl: no held-out token carries loss"),
    ],
)
def test_what_teaches_nothing_is_refused_by_name(
    train: tuple[list[int], list[int]] | None, held_out: tuple[list[int], list[int]] | None, expected: str
) -> None:
    splits = [_tokens("bad.jsonl", *columns) if columns else GOOD for columns in (train, held_out)]
    with pytest.raises(DataError) as caught:
        require_teaching(Splits(splits[0], splits[1], None))
        require_ends(Splits(splits[0], splits[1], None))
    assert str(caught.value).startswith(expected)
