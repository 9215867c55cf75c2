"""Averages along a run against the formulas of their papers, written a second time over recorded values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from workbench import adapters
from workbench.adapters import Lora
from workbench.config.sections.average_config import AverageConfig
from workbench.training import checkpoints
from workbench.training.checkpoints import Progress
from workbench.training.master_weights import MasterWeights
from workbench.training.optim import schedules, weight_averaging
from workbench.training.optim.weight_averaging import WeightAverage

METHODS: dict[str, dict[str, Any]] = {
    "ema": {"decay": 0.8},
    "swa": {"start": 0.2, "every": 2},
    "lawa": {"k": 3, "every": 2},
    "rna": {"k": 4, "every": 2},
}
TINY = {"rtol": 1e-5, "atol": 1e-6}

everies = st.one_of(st.integers(1, 12), st.floats(0.02, 0.9))
starts = st.floats(0, 0.95)
lengths = st.integers(1, 60)
seeds = st.integers(0, 1000)


def _trajectory(steps: int, seed: int = 0) -> NDArray[np.float32]:
    """Values of 6 numbers after each of `steps` steps, a random walk."""
    walk = np.random.default_rng(seed).normal(size=(steps, 6)).cumsum(axis=0)
    return walk.astype(np.float32)


def _parameters() -> dict[str, nn.Parameter]:
    return {"layers.0.weight": nn.Parameter(torch.zeros(2, 2)), "bias": nn.Parameter(torch.zeros(2))}


@torch.no_grad()
def _set(parameters: dict[str, nn.Parameter], row: NDArray[np.float32]) -> None:
    """In place, as an optimizer does."""
    parameters["layers.0.weight"].copy_(torch.from_numpy(row[:4].copy()).view(2, 2))
    parameters["bias"].copy_(torch.from_numpy(row[4:].copy()))


def _made(method: str, parameters: dict[str, nn.Parameter], **values: Any) -> WeightAverage:
    return WeightAverage(AverageConfig(method=method, **values), parameters)


def _walk(average: WeightAverage, trajectory: NDArray[np.float32], *, done: int = 0, until: int | None = None) -> None:
    """Go on from step `done`; the run is as long as the trajectory."""
    steps = len(trajectory)
    for step in range(done, steps if until is None else until):
        _set(dict(average.trainable), trajectory[step])
        average.update(step + 1, before=step / steps, after=(step + 1) / steps)


def _flat(values: dict[str, Tensor]) -> NDArray[np.float64]:
    return torch.cat([values["layers.0.weight"].flatten(), values["bias"]]).double().numpy()


def _found(method: str, trajectory: NDArray[np.float32], **values: Any) -> NDArray[np.float64]:
    average = _made(method, _parameters(), **values)
    _walk(average, trajectory)
    return _flat(average.values())


def _samples(steps: int, every: int | float, start: float) -> list[int]:
    """Rows of the trajectory that are sampled."""
    return [step - 1 for step in sorted(schedules.moments(every, steps)) if step / steps >= start]


# ---- formulas


@given(decay=st.floats(0.01, 0.9999), steps=lengths, seed=seeds)
def test_ema_weighs_a_step_by_what_the_later_ones_keep_of_it(decay: float, steps: int, seed: int) -> None:
    """The weight of step i is (1 - d_i) times all later d, with d_t = min(decay, t / (t + 9)) and d_1 = 0."""
    trajectory = _trajectory(steps, seed)
    kept = [0.0] + [min(decay, t / (t + 9)) for t in range(2, steps + 1)]
    weights = np.array([(1 - kept[i]) * np.prod(kept[i + 1 :]) for i in range(steps)])
    assert weights.sum() == pytest.approx(1)
    np.testing.assert_allclose(_found("ema", trajectory, decay=decay), weights @ trajectory, **TINY)


@given(every=everies, start=starts, steps=lengths, seed=seeds)
def test_swa_is_the_mean_of_the_samples_since_its_start(
    every: int | float, start: float, steps: int, seed: int
) -> None:
    """Izmailov et al. 2018, algorithm 1."""
    trajectory = _trajectory(steps, seed)
    expected = trajectory[_samples(steps, every, start)].astype(np.float64).mean(axis=0)
    np.testing.assert_allclose(_found("swa", trajectory, every=every, start=start), expected, **TINY)


@given(k=st.integers(2, 8), every=everies, start=starts, steps=lengths, seed=seeds)
def test_lawa_is_the_mean_of_the_latest_samples(
    k: int, every: int | float, start: float, steps: int, seed: int
) -> None:
    """Kaddour 2022, section 2."""
    trajectory = _trajectory(steps, seed)
    expected = trajectory[_samples(steps, every, start)[-k:]].astype(np.float64).mean(axis=0)
    np.testing.assert_allclose(_found("lawa", trajectory, k=k, every=every, start=start), expected, **TINY)


@given(k=st.integers(2, 6), ridge=st.floats(1e-4, 10), steps=st.integers(3, 40), seed=seeds)
def test_rna_weighs_samples_so_that_their_steps_add_up_to_least(k: int, ridge: float, steps: int, seed: int) -> None:
    """Scieur et al. 2016, equation 5: no other weights with sum 1 have a smaller |R c|^2 / |R'R| + ridge |c|^2."""
    trajectory = _trajectory(steps, seed)
    kept = trajectory[-k:].astype(np.float64)
    R, ends = np.diff(kept, axis=0).T, kept[1:]
    size = np.linalg.norm(R.T @ R, 2)
    # By Lagrange's multiplier, in one system.
    count = len(ends)
    system = np.block([[2 * (R.T @ R / size + ridge * np.eye(count)), np.ones((count, 1))], [np.ones(count), 0.0]])
    c = np.linalg.solve(system, np.append(np.zeros(count), 1.0))[:count]
    np.testing.assert_allclose(_found("rna", trajectory, k=k, every=1, ridge=ridge), c @ ends, rtol=1e-4, atol=1e-4)


def test_rna_finds_the_end_of_a_linear_way() -> None:
    """Where x_(i+1) = A x_i + b, as many samples as A has values, and one, give the fixed point (section 2)."""
    rates, end = np.array([0.9, 0.5, 0.9, 0.5, 0.9, 0.5]), np.arange(1.0, 7.0)
    trajectory = (end + (rates ** np.arange(8)[:, None]) * 10).astype(np.float32)
    found = _found("rna", trajectory, k=4, every=1, ridge=1e-9)
    assert np.abs(found - end).max() < 0.05 < np.abs(trajectory[-1] - end).max() / 10


def test_rna_with_much_regularisation_is_lawa_of_a_sample_less() -> None:
    trajectory = _trajectory(20)
    rna = _found("rna", trajectory, k=5, every=1, ridge=1e9)
    np.testing.assert_allclose(rna, _found("lawa", trajectory, k=4, every=1), **TINY)


@pytest.mark.parametrize("method", METHODS)
@given(values=st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=6, max_size=6))
def test_what_never_moves_is_its_own_average_to_the_bit(method: str, values: list[float]) -> None:
    trajectory = np.tile(np.array(values, dtype=np.float32), (17, 1))
    assert np.array_equal(_found(method, trajectory, **METHODS[method]), trajectory[0].astype(np.float64))


@pytest.mark.parametrize(
    ("row", "matters"), [(0, False), (15, False), (16, False), (17, True), (18, False), (19, True)]
)
def test_lawa_forgets_to_the_bit_what_is_not_among_its_samples(row: int, matters: bool) -> None:
    trajectory, other = _trajectory(20), _trajectory(20)
    other[row] = 1e20
    found = [_found("lawa", values, k=2, every=2) for values in (trajectory, other)]
    assert np.array_equal(*found) is not matters


# ---- when there is one


@pytest.mark.parametrize(
    ("values", "first"),
    [
        ({"method": "ema"}, 1),
        ({"method": "swa"}, 75),
        ({"method": "swa", "start": 0.5, "every": 30}, 60),
        ({"method": "lawa"}, 1),
        ({"method": "lawa", "every": 0.25}, 25),
        ({"method": "lawa", "start": 0.9, "every": 70}, 100),
    ],
)
def test_it_is_ready_from_the_first_sample_on(values: dict[str, Any], first: int) -> None:
    trajectory = _trajectory(100)
    average = _made(parameters=_parameters(), **values)
    _walk(average, trajectory, until=first - 1)
    assert not average.ready
    _walk(average, trajectory, done=first - 1, until=first)
    assert average.ready and np.array_equal(_flat(average.values()), trajectory[first - 1].astype(np.float64))


# ---- the parameters hold it, and get their own back


@pytest.mark.parametrize("device", ["same", "cpu"])
@pytest.mark.parametrize("method", METHODS)
def test_applied_gives_back_every_bit(method: str, device: str) -> None:
    parameters = _parameters()
    average = _made(method, parameters, **METHODS[method], device=device)
    _walk(average, _trajectory(9))
    expected = _flat(average.values())
    odd = np.array([np.nan, -0.0, np.inf, 1e-45, -np.nan, 1.0], dtype=np.float32)
    _set(parameters, odd)
    before = {name: each.detach().view(torch.int32).clone() for name, each in parameters.items()}

    with average.applied():
        assert np.array_equal(_flat({name: each.detach() for name, each in parameters.items()}), expected)
    with pytest.raises(RuntimeError, match="in the block"), average.applied():
        raise RuntimeError("in the block")
    for name, each in parameters.items():
        assert torch.equal(each.detach().view(torch.int32), before[name])
    assert np.array_equal(_flat(average.values()), expected)


def test_what_a_block_does_to_the_parameters_is_undone_and_never_averaged() -> None:
    parameters = _parameters()
    average, trajectory = _made("ema", parameters, decay=0.8), _trajectory(9)
    _walk(average, trajectory)
    expected = _flat(average.values()).copy()
    with average.applied():
        _set(parameters, np.full(6, 100, dtype=np.float32))
    assert np.array_equal(_flat(average.values()), expected)
    assert np.array_equal(parameters["bias"].detach().numpy(), trajectory[-1, 4:])


# ---- checkpoints


@settings(max_examples=15, deadline=None)
@given(method=st.sampled_from(sorted(METHODS)), cut=st.integers(0, 20), seed=seeds)
@example(method="lawa", cut=2, seed=0)  # its samples come from the file and from this run
def test_going_on_from_a_checkpoint_is_as_if_nothing_happened(
    method: str, cut: int, seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    trajectory, path = _trajectory(20, seed), tmp_path_factory.mktemp("run") / "step"
    whole = _made(method, _parameters(), **METHODS[method])
    _walk(whole, trajectory)

    before = _made(method, _parameters(), **METHODS[method])
    _walk(before, trajectory, until=cut)
    checkpoints.write(path, {"average": before.state()}, Progress(step=cut))
    after = _made(method, _parameters(), **METHODS[method])
    _walk(after, _trajectory(5, seed + 1))  # what it held before is forgotten
    after.load(checkpoints.read_tensors(path, "average"))
    assert after.ready == before.ready
    _walk(after, trajectory, done=cut)

    assert after.state().keys() == whole.state().keys()
    assert all(torch.equal(after.state()[name], value) for name, value in whole.state().items())
    assert np.array_equal(_flat(after.values()), _flat(whole.values()))


@pytest.mark.parametrize(("method", "copies"), [("ema", 1), ("swa", 1), ("lawa", 3)])
def test_it_keeps_no_more_copies_than_it_needs(method: str, copies: int) -> None:
    parameters = _parameters()
    average = _made(method, parameters, **METHODS[method])
    assert weight_averaging.copies(average.config, steps=30) == copies
    places = set()
    trajectory = _trajectory(30)
    for step in range(30):
        _walk(average, trajectory, done=step, until=step + 1)
        places |= {value.data_ptr() for name, value in average.state().items() if name != "count"}
    state = average.state()
    assert state["count"].dtype == torch.int64 and state["count"].ndim == 0
    assert len(state) == 1 + copies * len(parameters)
    assert len(places) == copies * len(parameters), "buffers are used again"


# ---- precision and place


def test_the_average_is_where_its_parameters_are() -> None:
    parameter = nn.Parameter(torch.zeros(3, device="meta"))
    average = _made("ema", {"a": parameter})
    average.update(1, before=0, after=0.5)
    average.update(2, before=0.5, after=1)
    assert average.values()["a"].device.type == "meta"


@pytest.mark.parametrize("method", METHODS)
def test_on_the_cpu_it_is_the_same(method: str) -> None:
    trajectory = _trajectory(30)
    found = [_found(method, trajectory, **METHODS[method], device=device) for device in ("same", "cpu")]
    assert np.array_equal(*found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_values_in_half_precision_are_no_masters(dtype: torch.dtype) -> None:
    with pytest.raises(AssertionError):
        WeightAverage(AverageConfig(method="ema"), {"a": nn.Parameter(torch.zeros(2, dtype=dtype))})


@pytest.mark.parametrize("method", [name for name in METHODS if name != "rna"])
def test_of_a_real_backbone_in_bfloat16_the_masters_are_averaged(method: str, stories: str) -> None:
    model = adapters.attach(AutoModelForCausalLM.from_pretrained(stories), Lora(rank=2, targets="attention"), seed=0)
    masters = MasterWeights(model, torch.bfloat16)
    model.to(torch.bfloat16)
    average = _made(method, masters.named(), **METHODS[method])
    optimizer, ids, recorded = torch.optim.AdamW(list(masters), lr=1e-2), torch.tensor([[1, 60, 5, 61, 9]]), []
    for step in range(8):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        masters.refresh()
        average.update(step + 1, before=step / 8, after=(step + 1) / 8)
        recorded.append({name: each.detach().clone() for name, each in masters.named().items()})

    kept = [min(0.8, t / (t + 9)) for t in range(1, 9)]
    weights = {
        "ema": [(1 - kept[i] if i else 1) * np.prod(kept[i + 1 :]) for i in range(8)],
        "swa": [0, 1 / 4, 0, 1 / 4, 0, 1 / 4, 0, 1 / 4],
        "lawa": [0, 0, 0, 1 / 3, 0, 1 / 3, 0, 1 / 3],
    }[method]
    for name, value in average.values().items():
        expected = sum(weight * values[name].double() for weight, values in zip(weights, recorded, strict=True))
        assert value.dtype == torch.float32
        torch.testing.assert_close(value.double(), expected, rtol=1e-5, atol=1e-7)

    def logits() -> Tensor:
        masters.refresh()
        with torch.no_grad():
            found: Tensor = model(input_ids=ids).logits
        return found

    raw = logits()
    with average.applied():
        assert not torch.equal(logits(), raw)
    assert torch.equal(logits(), raw)
