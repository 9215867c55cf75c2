"""Steps that grow with the measured noise: which rows they have, by the rule written a second time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.workbench.training.freezing.fits import assert_same_bits, build, configured, interrupted, train
from tests.workbench.training.sampling.samplers import Tokens
from workbench.config import RunConfig
from workbench.data.batching import Indices
from workbench.data.row_order import RowOrder
from workbench.runs.ranks import ALONE
from workbench.training.optim.noise_scale import NoiseEstimate, NoiseScale
from workbench.training.sampling.row_orders import GrowingBatch

ROWS = Tokens(np.full(23, 5))


def made(*, every: int = 1, most: int = 16) -> tuple[GrowingBatch, NoiseScale]:
    values: dict[str, Any] = {
        "recipe": "sft",
        "data": {"train": "rows.jsonl"},
        "batch": {"size": 3, "growth": most},
        "train": {"steps": 40},
        "optimizer": {"noise_scale": every},
    }
    order, noise = GrowingBatch(ROWS, RunConfig.model_validate(values), 40, ALONE), NoiseScale()
    order.hear(noise)
    return order, noise


def walked(order: GrowingBatch, noise: NoiseScale, scales: list[float], *, first: int = 0) -> list[Indices]:
    """Rows of each step, where the noise scale is each of these when it has been measured."""
    found = []
    for step, scale in enumerate(scales, start=first):
        noise.load(NoiseScale().state())
        noise.add(NoiseEstimate(1.0, scale))
        rows = order.rows(step)
        assert order.epoch(step) == sum(map(len, found)) // len(ROWS) or first
        assert rows.tolist()[: len(order.rows(step))] == order.rows(step).tolist(), "asked twice it is the same"
        ahead = order.ahead(step + 1)
        found.append(order.drawn(rows, None).rows)
        order.after_step(step + 1)
        assert ahead.tolist() == order.rows(step + 1)[: len(ahead)].tolist(), "what was known of the next step holds"
    return found


def test_a_step_doubles_where_the_noise_is_twice_the_batch_and_never_beyond_the_most() -> None:
    scales = [1, 5.9, 6, 6, 13, 40, 100, 1, 1]
    size, wanted = 3, []
    for scale in scales:
        wanted.append(size)
        size = min(2 * size, 16) if scale >= 2 * size else size
    order, noise = made()
    found = walked(order, noise, scales)
    left, expected = 23, []
    for each in wanted:  # the last step of a pass takes what is left of it
        expected.append(min(each, left))
        left = left - expected[-1] or 23
    assert [len(each) for each in found] == expected and order.metrics() == {"next_batch": 16}


def test_every_row_comes_once_in_a_pass() -> None:
    order, noise = made()
    drawn = np.concatenate(walked(order, noise, [1, 1, 20, 20, 20, 20, 20, 20]))
    for start in range(0, len(drawn) - 22, 23):
        assert sorted(drawn[start : start + 23]) == list(range(23))


def test_where_the_noise_is_small_rows_are_those_of_a_run_without_it() -> None:
    order, noise = made()
    plain = RowOrder(ROWS, order.config, 40)
    for step, rows in enumerate(walked(order, noise, [5.0] * 30)):
        assert rows.tolist() == plain.rows(step).tolist() and plain.epoch(step) == step // 8


def test_it_looks_only_where_noise_was_measured_and_goes_on_from_a_state() -> None:
    order, noise = made(every=3)
    found = walked(order, noise, [50.0] * 5)
    assert [len(each) for each in found] == [3, 6, 6, 6, 2], "steps 1 and 4 measure it, and a pass has 23 rows"
    other, heard = made(every=3)
    other.load({name: each.clone() for name, each in order.state().items()})
    assert [each.tolist() for each in walked(other, heard, [50.0] * 4, first=5)] == [
        each.tolist() for each in walked(order, noise, [50.0] * 4, first=5)
    ]


GROWING: dict[str, Any] = {
    "batch": {"size": 2, "growth": 8},
    "optimizer": {"noise_scale": 2},
    "train": {"steps": 10, "epochs": None},
}


def test_a_training_grows_resumes_and_does_not_depend_on_micro_batches(tmp_path: Path) -> None:
    model = build("Llama", blocks=2)
    whole = train(model, configured(**GROWING), tmp_path / "whole")
    assert whole.records[-1]["next_batch"] > 2, "it grows"
    assert_same_bits(interrupted(model, configured(**GROWING), tmp_path / "parts", after=5), whole)
    batch = {**GROWING["batch"], "tokens_per_device": 20}
    small = train(model, configured(**{**GROWING, "batch": batch}), tmp_path / "small")
    assert small.losses == pytest.approx(whole.losses, rel=1e-4)
    assert [each["tokens"] for each in small.records] == [each["tokens"] for each in whole.records]
