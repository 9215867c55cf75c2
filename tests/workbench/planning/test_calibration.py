"""Predicted times by a clock that counts operations: then they are known exactly."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import nn

from workbench.planning.calibration import GUESSED_ERROR, MEASURED_ERROR, Calibration
from workbench.planning.flop_counter import Operations
from workbench.planning.kernels import Kernel, Kernels, Like
from workbench.planning.work import Part, StepWork

CPU = torch.device("cpu")
ENOUGH = 1e18


@pytest.fixture
def operations() -> Iterator[Operations]:
    """Counted from now on."""
    with Operations() as counted:
        yield counted


def _calls(compute: Callable[[], object]) -> list[Kernel]:
    with Kernels() as kernels:
        compute()
    return kernels.calls


def _work(*parts: tuple[list[Kernel], float], update: list[Kernel] | None = None, new: float = 1.0) -> StepWork:
    found = [Part(calls, share, {each: new for each in calls if each.flops}, list) for calls, share in parts]
    return StepWork(found, update or [], recomputes=False)


def test_a_step_takes_what_its_kernels_take(llama: nn.Module, operations: Operations) -> None:
    def step(length: int) -> Callable[[], object]:
        return lambda: (
            llama(input_ids=torch.ones(2, length, dtype=torch.int64), use_cache=False).logits.sum().backward()
        )

    parts, taken = [], []
    for length in (5, 9):
        before = operations.count
        parts.append(_calls(step(length)))
        taken.append(operations.count - before)
    matrix = torch.ones(8, 8)
    update = _calls(lambda: matrix @ matrix)
    calibration = Calibration(CPU, seconds=ENOUGH, clock=lambda: float(operations.count))
    timed = calibration.timed(_work((parts[0], 2.5), (parts[1], 0.5), update=update))
    assert timed.seconds == pytest.approx(2.5 * taken[0] + 0.5 * taken[1] + 2 * 8**3)
    assert timed.error == MEASURED_ERROR


def test_what_time_was_too_short_for_is_guessed_from_what_is_alike(operations: Operations) -> None:
    calibration = Calibration(CPU, seconds=1, clock=lambda: float(operations.count))
    small, large = torch.ones(64, 64), torch.ones(256, 256)
    known = _work((_calls(lambda: large @ large), 1.0))
    guess = calibration.timed(_work((_calls(lambda: (large @ large, small @ small)), 1.0)))
    exact = calibration.timed(known)
    assert exact.seconds == 2 * 256**3 and exact.error == MEASURED_ERROR  # what takes most is measured first
    assert MEASURED_ERROR < guess.error < GUESSED_ERROR
    assert guess.seconds == pytest.approx(2 * 256**3 + 2 * 64**3, rel=0.1)


def test_a_kernel_that_cannot_be_called_is_guessed() -> None:
    matrix = torch.ones(300, 300)
    (product,) = _calls(lambda: matrix @ matrix)
    broken = replace(product, given=(Like((2, 3), (3, 1), torch.float32, CPU),) * 2)
    timed = Calibration(CPU, seconds=0.1).timed(_work(([broken], 1.0)))
    assert timed.seconds > 0 and timed.error == pytest.approx(GUESSED_ERROR, rel=0.2)


def test_first_calls_count_where_shapes_are_new() -> None:
    matrix = torch.ones(16, 16)
    calls = _calls(lambda: (matrix @ matrix, matrix @ matrix))
    calibration = Calibration(CPU)
    product = calls[0]
    calibration.first[product] = 10.0
    work = _work((calls, 1.0))
    new = calibration.timed(work).seconds
    old = calibration.timed(_work((calls, 1.0), new=0.0)).seconds
    assert 9.9 < new - old < 10.0


def test_nothing_is_left_behind() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    noise = _calls(lambda: torch.nn.functional.dropout(torch.ones(50), 0.5, training=True))
    torch.set_rng_state(before)
    weight = torch.ones(4, requires_grad=True)
    Calibration(CPU, seconds=0.1).timed(_work((noise + _calls(lambda: (weight * 2).sum().backward()), 1.0)))
    assert torch.equal(torch.get_rng_state(), before)
