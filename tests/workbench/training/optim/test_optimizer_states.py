"""Optimizer states are saved, loaded and evicted bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from workbench.config import RunConfig
from workbench.config.freeze_config import FreezeConfig
from workbench.config.sections.optimizer_config import OF_WHOLE_MATRICES, Name
from workbench.training.optim import optimizers
from workbench.training.optim.optimizer_states import EvictedStates, evaluating, load_state, state_tensors

PAGED = ("paged_adamw", "paged_adamw8bit")
CASES = [(name, every) for name in get_args(Name) for every in (None, 5) if (name, every) != ("schedule_free", 5)]
LATE = 4
"""The step from which one of the parameters gets gradients."""


class Moving(FreezeConfig):
    """A policy whose plan changes."""

    policy: Literal["moving"] = "moving"  # type: ignore[assignment]


class Training:
    """Parameters of two blocks, and gradients that depend on the parameters and on the step."""

    def __init__(self, name: str, *, freeze: FreezeConfig | None = None, **settings: Any) -> None:
        settings = {"momentum": 0.9, **settings} if name == "sgd" else settings
        settings = {"rank_every": 6, **settings} if name in ("galore", "apollo", "apollo_mini") else settings
        settings = {"rank": 3, **settings} if name in ("galore", "apollo") else settings
        self.config = RunConfig.model_validate(
            {
                "recipe": "sft",
                "data": {"train": "x.jsonl"},
                "adapter": {"method": "full" if name in OF_WHOLE_MATRICES else "lora"},
                "optimizer": {"name": name, **settings},
                "schedule": {"name": "constant"},
                "train": {"learning_rate": 1e-2, "weight_decay": 0.1},
                "freeze": freeze or FreezeConfig(),
            }
        )
        device = torch.device("cuda" if name in PAGED else "cpu")
        torch.manual_seed(0)
        shapes = {"large": (64, 80), "small": (6, 4), "late": (5, 3), "vector": (7,), "single": ()}
        self.trainable = {name: nn.Parameter(torch.randn(shape).to(device)) for name, shape in shapes.items()}
        layers = {"large": 1, "small": 1, "late": 2, "vector": 2, "single": 2}
        made = optimizers.groups(self.trainable, self.config, layers=layers, blocks=2, fresh=())
        self.optimizer = optimizers.build(made, self.config)

    def run(self, start: int, end: int, *, only: Mapping[str, Any] | None = None) -> None:
        for step in range(start, end):
            for name, parameter in self.trainable.items():
                if (only is None or name in only) and (name != "late" or step >= LATE):
                    chance = torch.Generator().manual_seed(hash((len(name), step)))
                    noise = torch.randn(parameter.shape, generator=chance)
                    parameter.grad = parameter.detach() * 0.1 + noise.to(parameter.device)
            for group in self.optimizer.param_groups:
                group["lr"] = 1e-2 / (step + 1) * group["rate_factor"]
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)

    def saved(self, folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """What a checkpoint of it holds, read back."""
        files = {"trainable": dict(self.trainable), "optimizer": state_tensors(self.optimizer, self.trainable)}
        for stem, tensors in files.items():
            save_file({key: value.detach().contiguous() for key, value in tensors.items()}, folder / stem)
        return load_file(folder / "trainable"), load_file(folder / "optimizer")

    def load(self, values: Mapping[str, Tensor], states: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, parameter in self.trainable.items():
                parameter.copy_(values[name])
        load_state(self.optimizer, self.trainable, states)


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[key]) for key, value in one.items())


def copied(optimizer: torch.optim.Optimizer, names: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in state_tensors(optimizer, names).items()}


@pytest.mark.parametrize(("name", "lookahead"), [case for case in CASES if case[0] not in PAGED])
def test_goes_on_to_the_same_bits(name: str, lookahead: int | None, tmp_path: Path) -> None:
    """Saved before and after the late parameter joins, and where soap is between two of its bases."""
    settings = {} if lookahead is None else {"lookahead": lookahead}
    whole = Training(name, **settings)
    whole.run(0, 23)
    for at in (LATE - 1, 13):
        first, second = Training(name, **settings), Training(name, **settings)
        first.run(0, at)
        second.load(*first.saved(tmp_path))
        assert same(state_tensors(first.optimizer, first.trainable), state_tensors(second.optimizer, second.trainable))
        second.run(at, 23)
        assert same(second.trainable, whole.trainable)
        assert same(state_tensors(second.optimizer, second.trainable), state_tensors(whole.optimizer, whole.trainable))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="pages need an NVIDIA GPU")
@pytest.mark.parametrize(("name", "lookahead"), [case for case in CASES if case[0] in PAGED])
def test_paged_states_go_on_to_the_same_bits(name: str, lookahead: int | None, tmp_path: Path) -> None:
    test_goes_on_to_the_same_bits(name, lookahead, tmp_path)


@pytest.mark.parametrize("name", [name for name in get_args(Name) if name not in PAGED])
def test_all_that_is_saved_decides(name: str, tmp_path: Path) -> None:
    """With any one of its kinds changed the training goes elsewhere: nothing is saved in vain, and nothing ignored."""
    whole = Training(name)
    whole.run(0, 24)
    first = Training(name)
    first.run(0, 13)
    values, states = first.saved(tmp_path)
    unread = {"step#"} if name in ("lars", "lion", "lamb") else set()
    for kind in {key.rpartition("|")[2] for key, value in states.items() if value.numel()} - unread:
        changed = {key: value + 1 if key.endswith(f"|{kind}") else value for key, value in states.items()}
        other = Training(name)
        other.load(values, changed)
        other.run(13, 24)
        assert not same(other.trainable, whole.trainable), kind


def test_the_keys_of_adamw() -> None:
    training = Training("adamw")
    training.run(0, LATE + 1)
    kinds = ("step", "exp_avg", "exp_avg_sq")
    expected = {f"{name}|{kind}" for name in training.trainable for kind in kinds}
    assert state_tensors(training.optimizer, training.trainable).keys() == expected


@pytest.mark.parametrize("name", [name for name in get_args(Name) if name not in (*PAGED, "schedule_free")])
def test_a_layer_that_rests_goes_on_where_it_stopped(name: str) -> None:
    """Its state is taken out, the other layer trains, and it is put back: as if only the steps of its own had been."""
    training, alone = Training(name, freeze=Moving()), Training(name, freeze=Moving())
    resting = {key: training.trainable[key] for key in ("large", "small")}
    training.run(0, 6)
    kept = copied(training.optimizer, resting)
    for parameter in resting.values():
        training.optimizer.state.pop(parameter, None)
    training.run(6, 9, only={"late": 0, "vector": 0})
    states = copied(training.optimizer, training.trainable)
    assert not any(key.startswith(("large|", "small|")) for key in states)
    load_state(training.optimizer, resting, {key: value.clone() for key, value in kept.items()})
    assert same(state_tensors(training.optimizer, resting), kept)
    others = {key: value for key, value in states.items() if key.startswith(("late|", "vector|"))}
    now = state_tensors(training.optimizer, training.trainable)
    assert others and same({key: now[key] for key in others}, others)
    training.run(9, 11)
    alone.run(0, 6)
    alone.run(9, 11)
    assert all(torch.equal(training.trainable[key], alone.trainable[key]) for key in resting)


# ---- what is evaluated


class Refreshed:
    """Counts how often the parameters were copied to where they compute."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self) -> None:
        self.times += 1


def test_schedule_free_shows_the_average_of_its_steps() -> None:
    """At one rate, without decay: the mean of all z (Defazio et al. 2024, section 2)."""
    training = Training("schedule_free")
    parameter = training.trainable["small"]
    points = []
    for group in training.optimizer.param_groups:
        group["weight_decay"] = 0.0
    for step in range(6):
        torch.manual_seed(step)
        parameter.grad = torch.randn(parameter.shape)
        training.optimizer.step()
        points.append(training.optimizer.state[parameter]["z"].clone())
    before, refresh = parameter.detach().clone(), Refreshed()
    with evaluating(training.optimizer, refresh=refresh):
        torch.testing.assert_close(parameter.detach(), torch.stack(points).mean(dim=0))
        assert refresh.times == 1
    assert torch.equal(parameter, before) and refresh.times == 2


def test_lookahead_shows_the_slow_weights_and_comes_back_whatever_happens() -> None:
    training = Training("sgd", lookahead=3)
    training.run(0, 6)
    at_sync = {name: parameter.detach().clone() for name, parameter in training.trainable.items()}
    training.run(6, 8)
    after = {name: parameter.detach().clone() for name, parameter in training.trainable.items()}
    refresh = Refreshed()
    with pytest.raises(RuntimeError), evaluating(training.optimizer, refresh=refresh):
        assert same(training.trainable, at_sync)
        raise RuntimeError
    assert same(training.trainable, after) and not same(at_sync, after) and refresh.times == 2


@pytest.mark.parametrize("name", [name for name in get_args(Name) if name not in (*PAGED, "schedule_free")])
def test_other_optimizers_show_what_they_train(name: str) -> None:
    training = Training(name)
    training.run(0, 3)
    before, refresh = {key: value.detach().clone() for key, value in training.trainable.items()}, Refreshed()
    with evaluating(training.optimizer, refresh=refresh):
        assert same(training.trainable, before)
    assert refresh.times == 0


def _tensors(name: str, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        f"{name}|exp_avg": torch.randn(3, 5, generator=generator).T,  # in columns
        f"{name}|step": torch.tensor(float(seed)),
        f"{name}|state1": torch.randint(0, 256, (7,), generator=generator, dtype=torch.uint8),
    }


def test_any_order_of_going_and_coming_returns_every_bit(tmp_path: Path) -> None:
    chance, evicted = np.random.default_rng(0), EvictedStates(tmp_path / "evicted")
    away: dict[str, dict[str, Tensor]] = {}
    for number in range(60):
        name = f"block.{chance.integers(6)}.weight"
        if name in away:
            wanted, found = away.pop(name), evicted.pop(name)
            assert found.keys() == wanted.keys()
            assert all(torch.equal(found[key], wanted[key]) for key in wanted)
            assert all(found[key].dtype == wanted[key].dtype for key in wanted)
        else:
            away[name] = _tensors(name, number)
            evicted.put(name, away[name])
        assert all((f"block.{block}.weight" in evicted) == (f"block.{block}.weight" in away) for block in range(6))
        state = evicted.state()
        assert set(state) == {key for tensors in away.values() for key in tensors}
        assert all(torch.equal(state[key], each) for tensors in away.values() for key, each in tensors.items())
        assert len([*(tmp_path / "evicted").iterdir()]) == len(away), "what came back is not left behind"


def test_to_forget_leaves_nothing_on_disk_and_goes_on(tmp_path: Path) -> None:
    evicted = EvictedStates(tmp_path / "evicted")
    evicted.clear()
    evicted.put("a", _tensors("a", 1))
    evicted.clear()
    assert "a" not in evicted and evicted.state() == {} and not (tmp_path / "evicted").exists()
    evicted.put("a", _tensors("a", 2))
    assert evicted.pop("a")["a|step"] == 2.0


def test_what_a_killed_process_left_is_not_taken_for_ones_own(tmp_path: Path) -> None:
    EvictedStates(tmp_path / "evicted").put("a", _tensors("a", 1))
    evicted = EvictedStates(tmp_path / "evicted")
    assert "a" not in evicted and evicted.state() == {}
    evicted.put("a", _tensors("a", 2))
    assert evicted.pop("a")["a|step"] == 2.0
