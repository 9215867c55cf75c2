"""Rows of several sets: each row is scored once with its own, whatever order they are in."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from workbench.data import named_sets

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Mixed:
    sources: tuple[str, ...]
    source_N: Ints


def test_each_set_is_scored_on_its_own_rows_in_their_order() -> None:
    value_N = np.random.default_rng(0).normal(size=12)
    rows = Mixed(("a", "b", "none"), np.asarray([0, 1, 1, 0, 1, 1, 0, 1, 1, 1, 0, 1]))
    parts = named_sets.rows_by_set(rows)
    assert list(parts) == ["a", "b"], "a set without rows has no score"
    assert sorted(np.concatenate(list(parts.values())).tolist()) == list(range(12))
    found = named_sets.scored(rows, lambda own: {"loss": float(value_N[own].mean()), "first": float(value_N[own[0]])})
    assert list(found) == ["loss[a]", "first[a]", "loss[b]", "first[b]"]
    np.testing.assert_allclose((4 * found["loss[a]"] + 8 * found["loss[b]"]) / 12, value_N.mean())
    assert found["first[b]"] == value_N[1]
    assert named_sets.held_out_losses({"loss": 1.0, **found}).keys() == {"held_out_loss[a]", "held_out_loss[b]"}


def test_one_set_has_no_scores_beside_those_of_all_rows() -> None:
    rows = Mixed((), np.zeros(0, dtype=np.int64))
    assert named_sets.rows_by_set(rows) == {}
    assert named_sets.scored(rows, lambda own: {"loss": 0.0}) == {}
    assert named_sets.titled("loss", "") == "loss"
