"""Every different row has one batch, whatever is asked for first."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from tests.conftest import tiny
from tests.workbench.training.freezing.prefixes import stack
from tests.workbench.training.together import LabelledSet, Texts
from workbench.training.freezing.cached_prefix import CachedPrefix, UnpaddedRows, reader
from workbench.training.freezing.hidden_state_store import MemoryStore
from workbench.training.freezing.prefix_cache import PrefixBatches

Read = Callable[[Mapping[str, Any]], UnpaddedRows | None]


class Twice(LabelledSet):
    """Its second half repeats its first."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._rows[self.rows // 2 :] = self._rows[: self.rows // 2]
        self.lengths = np.array([len(row) for row in self._rows])


class Paired(LabelledSet):
    """Each example is two rows, the second one that of the next example."""

    def batch(self, indices: np.ndarray[Any, Any], *, epoch: int = 0) -> Any:
        both = np.stack([indices, (indices + 1) % self.rows], axis=1).reshape(-1)
        return super().batch(both, epoch=epoch)


def _keys(read: Read, rows: Texts) -> list[bytes]:
    found = read(rows.batch(np.arange(len(rows))).inputs)
    assert found is not None
    return found.keys


def test_each_row_is_in_one_batch_which_all_rows_of_it_name() -> None:
    """Rows come twice in a set, and those of one set in another again."""
    read = reader(tiny("Bert", head="MaskedLM"), trailing=0)
    sets = [Twice(24, 1), LabelledSet(15, 2), Twice(24, 1)]
    found = PrefixBatches(sets, read, tokens=60)
    keys = {key for rows in sets for key in _keys(read, rows)}
    seen: dict[bytes, frozenset[bytes]] = {}
    for key in keys:
        rows = found.of(key)
        assert rows is not None and key in rows.keys and len(set(rows.keys)) == len(rows.keys)
        assert len(rows.keys) * max(rows.lengths) <= 60
        seen[key] = frozenset(rows.keys)
    assert all(seen[other] == batch for batch in seen.values() for other in batch)
    assert sum(len(batch) for batch in set(seen.values())) == len(keys) == 12 + 15
    assert len(set(seen.values())) > 4
    assert found.of(bytes(16)) is None


def test_rows_of_examples_that_have_several_are_in_one_batch_each() -> None:
    read, rows = reader(tiny("Bert", head="MaskedLM"), trailing=0), Paired(14, 3)
    found = PrefixBatches([rows, rows], read, tokens=60)
    batches = {key: found.of(key) for key in _keys(read, rows)}
    seen = {key: frozenset(each.keys) for key, each in batches.items() if each is not None}
    assert len(seen) == 14 and all(len(set(each.keys)) == len(each.keys) for each in batches.values() if each)
    assert all(seen[other] == batch for batch in seen.values() for other in batch)
    assert sum(len(batch) for batch in set(seen.values())) == 14


def test_what_is_kept_of_a_row_is_the_same_whichever_row_came_first(stories: str) -> None:
    """Single rows and all at once, whose products have other shapes and so other last bits."""
    model = AutoModelForCausalLM.from_pretrained(stories).requires_grad_(False).eval()
    rows = Texts(17, 1, vocabulary=500)
    read = reader(model, trailing=0)

    def kept(order: list[np.ndarray[Any, Any]], *, dealt: bool) -> list[torch.Tensor]:
        states = MemoryStore(torch.float32)
        batch_of = PrefixBatches([rows], read, tokens=30).of if dealt else (lambda _: None)
        cached = CachedPrefix(model, blocks=stack(model), depth=3, states=states, batch_of=batch_of)
        cached.install()
        try:
            with torch.no_grad():
                for indices in order:
                    model(**rows.batch(indices).inputs)
        finally:
            cached.remove()
        assert cached.computed == 17
        return [states.get([key], length) for key, length in zip(_keys(read, rows), rows.lengths, strict=True)]

    together, alone = [np.arange(17)], [np.array([row]) for row in range(16, -1, -1)]
    first, second = kept(together, dealt=True), kept(alone, dealt=True)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    loose = kept(alone, dealt=False)
    assert not all(torch.equal(a, b) for a, b in zip(first, loose, strict=True)), "bits never depend on the shape here"
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(first, loose, strict=True))
