"""The members that fit are the most of which a dry run says so."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from workbench.planning.plan import MOST, that_fit

BYTES: dict[str, Callable[[int], int]] = {
    "even": lambda many: 1000 + 70 * many,
    "uneven": lambda many: 1000 + 70 * many + 900 * (many > 6),
    "steeper": lambda many: 1000 + 70 * many + many**2,
    "flatter": lambda many: 1000 + round(300 * math.sqrt(many)),
}


@pytest.mark.parametrize("memory", [900, 1100, 1300, 1500, 2300, 2700])
@pytest.mark.parametrize("needed", BYTES.values(), ids=BYTES)
def test_no_more_fit_and_no_fewer(needed: Callable[[int], int], memory: int) -> None:
    found = that_fit(needed, few=2, memory=memory)
    wanted = max((many for many in range(1, 200) if needed(many) <= memory), default=0)
    if wanted <= MOST:
        assert found.count == wanted
        assert found.count == 0 or found.known[found.count] == needed(found.count)
    else:
        assert found.count > MOST


def test_beyond_what_is_tried_bytes_grow_by_the_member() -> None:
    found = that_fit(BYTES["even"], few=2, memory=1_001_000)
    assert found.count == 1_000_000 // 70 and found.each == 70
    assert max(found.known) == MOST, "no dry run of thousands"
    assert "14,285 adapters like these" in found.sentence
