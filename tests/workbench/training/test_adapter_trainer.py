"""Averages, budgets and optimizers of one adapter that trains: what is measured, and what ships."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.workbench.training.freezing.fits import assert_same_bits, build, configured, interrupted, train
from workbench.training.optim import schedules
from workbench.training.trainer import Trainer

AVERAGES: list[dict[str, Any]] = [
    {"method": "ema", "decay": 0.8},
    {"method": "swa", "start": 0.5, "every": 1},
    {"method": "lawa", "k": 3, "every": 2},
]


class Trajectory:
    """The values after each step."""

    def __init__(self) -> None:
        self.values: list[dict[str, Tensor]] = []

    def __call__(self, fit: Trainer) -> None:
        self.values.append({name: each.detach().clone() for name, each in fit.masters.named().items()})

    def mean(self, steps: list[int]) -> dict[str, Tensor]:
        """Of the values after these steps, counted from 1."""
        return {
            name: torch.stack([self.values[step - 1][name].double() for step in steps]).mean(0)
            for name in self.values[0]
        }

    def ema(self, decay: float) -> dict[str, Tensor]:
        """Of all of them."""
        found = {name: each.double() for name, each in self.values[0].items()}
        for count, values in enumerate(self.values[1:], start=1):
            kept = min(decay, (1 + count) / (10 + count))
            found = {name: kept * each + (1 - kept) * values[name].double() for name, each in found.items()}
        return found


def _wanted(average: dict[str, Any], trajectory: Trajectory) -> dict[str, Tensor]:
    """Of a run of 12 steps."""
    if average["method"] == "ema":
        return trajectory.ema(0.8)
    return trajectory.mean([6, 7, 8, 9, 10, 11, 12] if average["method"] == "swa" else [8, 10, 12])


RATES: list[dict[str, Any]] = [
    {"train": {"epochs": 3, "learning_rate": 1e-4}, "adapter": {"method": "full"}},
    {"train": {"epochs": 3, "learning_rate": 6e-2}},
]
"""One at which the average has the lower held-out loss, and one at which the last values have."""


@pytest.mark.nightly(but=["ema"])
@pytest.mark.parametrize("average", AVERAGES, ids=lambda average: str(average["method"]))
def test_the_better_of_average_and_last_values_ships(average: dict[str, Any], tmp_path: Path) -> None:
    better = set()
    for number, sections in enumerate(RATES):
        trajectory = Trajectory()
        config = configured(average=average, schedule={"name": "constant", "warmup": 0.0}, **sections)
        found = train(build("Llama"), config, tmp_path / str(number), look=trajectory)
        last = found.records[-1]
        averaged = last["averaged_held_out_loss"] < last["held_out_loss"]
        better.add(averaged)
        wanted = _wanted(average, trajectory) if averaged else trajectory.values[-1]
        for name, tensor in found.shipped.items():
            torch.testing.assert_close(tensor.double(), wanted[name].double(), rtol=1e-5, atol=1e-7)
        said = "Shipping the average" if averaged else "Shipping the values of the last"
        assert found.callback.said[-1].startswith(said)
    assert better == {True, False}, "only one case was tested"


def test_the_best_evaluation_ships_whosever_it_was(tmp_path: Path) -> None:
    trajectory = Trajectory()
    config = configured(
        average={"method": "lawa", "k": 2, "every": 1},
        train={"epochs": 3, "learning_rate": 6e-2},
        schedule={"name": "constant", "warmup": 0.0},
        evaluate={"every": 2},
        save={"ship": "best"},
    )
    found = train(build("Llama"), config, tmp_path, look=trajectory)
    losses = {
        (record["step"], key): record[key]
        for record in found.records
        for key in ("held_out_loss", "averaged_held_out_loss")
        if key in record
    }
    assert len(losses) == 12
    step, key = min(losses, key=lambda which: losses[which])
    wanted = trajectory.mean([step - 1, step]) if key.startswith("averaged") else trajectory.values[step - 1]
    for name, tensor in found.shipped.items():
        torch.testing.assert_close(tensor.double(), wanted[name].double(), rtol=1e-5, atol=1e-7)
    said = "the average at step" if key.startswith("averaged") else "step"
    assert found.callback.said[-1] == f"Shipping {said} {step}, which has the lowest held-out loss."


OPTIMIZERS: list[dict[str, Any]] = [
    {"sam": 0.05},
    {"sam": 0.05, "sam_every": 3},
    {"noise_scale": 2},
    {"lookahead": 3},
    {"name": "lamb"},
    {"name": "muon"},
    {"name": "soap"},
    {"name": "schedule_free"},
]
OF_MATRICES: list[dict[str, Any]] = [{"name": "galore", "rank": 4, "rank_every": 3}, {"name": "apollo", "rank": 4}]


@pytest.mark.nightly(but=["method=ema-decay=0.8", "sam=0.05-sam_every=3", "name=muon", "policy=badam-every=3"])
@pytest.mark.parametrize(
    "sections",
    [{"average": each} for each in AVERAGES]
    + [{"optimizer": each} for each in OPTIMIZERS]
    + [{"optimizer": each, "adapter": {"method": "full"}} for each in OF_MATRICES]
    + [{"freeze": {"policy": "badam", "every": 3}, "adapter": {"method": "full"}}],
    ids=lambda sections: "-".join(f"{key}={value}" for key, value in next(iter(sections.values())).items()),
)
def test_a_stopped_run_resumes_to_the_same_bits(sections: dict[str, Any], tmp_path: Path) -> None:
    free = sections.get("optimizer", {}).get("name") == "schedule_free"
    config = configured(**sections, schedule={"name": "constant"} if free else {}, evaluate={"every": 3})
    model = build("Llama")
    whole = train(model, config, tmp_path / "whole")
    assert_same_bits(interrupted(model, config, tmp_path / "broken", after=5), whole)


def test_the_rate_falls_where_the_held_out_loss_stalls_and_goes_on_falling_after_a_resume(tmp_path: Path) -> None:
    schedule = {"name": "plateau", "patience": 1, "drop": 0.5, "warmup": 0.0}
    config = configured(schedule=schedule, evaluate={"every": 1}, train={"steps": 10, "learning_rate": 0.3})
    model = build("Llama")
    whole = train(model, config, tmp_path / "whole")
    best, drops = math.inf, 0
    for record in whole.records:
        assert record["learning_rate"] == 0.3 * 0.5**drops
        drops += record["held_out_loss"] >= best
        best = min(best, record["held_out_loss"])
    assert drops >= 2, "nothing was asked of it"
    assert_same_bits(interrupted(model, config, tmp_path / "broken", after=6), whole)


@pytest.mark.nightly(but=["lisa-soap", "gradual-adamw8bit"])
@pytest.mark.parametrize("name", ["lamb", "soap", "lion", "adamw8bit"])
@pytest.mark.parametrize("policy", ["lisa", "gradual"])
def test_optimizers_that_count_in_groups_go_on_where_layers_freeze_and_thaw(
    policy: str, name: str, tmp_path: Path
) -> None:
    freeze = {"policy": "lisa", "every": 1, "active": 1} if policy == "lisa" else {"policy": "gradual", "until": 1.0}
    config = configured(optimizer={"name": name}, freeze=freeze, adapter={"method": "full"}, evaluate={"every": None})
    model = build("Llama", tie_word_embeddings=False)
    whole = train(model, config, tmp_path / "whole")
    assert_same_bits(interrupted(model, config, tmp_path / "broken", after=5), whole)
    assert all(math.isfinite(loss) for loss in whole.losses)


@pytest.mark.parametrize("tokens", [90, 400, 401, 1300])
def test_tokens_end_the_run_at_the_first_step_that_reaches_them(tokens: int, tmp_path: Path) -> None:
    """The schedule is of tokens then: each step's rate stands at the middle of its tokens, and the last at the end."""
    config = configured(budget={"tokens": tokens}, train={"epochs": None}, schedule={"warmup": 0.0})
    found = train(build("Llama"), config, tmp_path)
    counts = [record["tokens"] for record in found.records]
    assert sum(counts) >= tokens > sum(counts[:-1])
    done = 0
    for record in found.records:
        middle = min((done + record["tokens"] / 2) / tokens, 1)
        assert record["learning_rate"] == pytest.approx(3e-3 * schedules.factor(middle, config.schedule))
        done += record["tokens"]
    assert found.records[-1]["learning_rate"] <= 3e-3 * counts[-1] / tokens
    assert "held_out_loss" in found.records[-1] and found.fit.member.progress.share == 1


@pytest.mark.parametrize(("steps", "tokens"), [(3, 10_000), (50, 300)])
def test_of_steps_and_tokens_the_earlier_ends_the_run(steps: int, tokens: int, tmp_path: Path) -> None:
    config = configured(budget={"tokens": tokens}, train={"steps": steps}, schedule={"warmup": 0.0})
    found = train(build("Llama"), config, tmp_path)
    read = sum(record["tokens"] for record in found.records)
    assert (len(found.losses) == steps) == (read < tokens) == (steps == 3)
    assert found.records[-1]["learning_rate"] < 3e-3 / 2
    assert found.callback.records[-1]["step"] == found.fit.member.total


def test_a_run_that_tokens_end_is_repeated_and_resumed_to_the_same_bits(tmp_path: Path) -> None:
    config = configured(budget={"tokens": 500}, train={"epochs": None}, evaluate={"every": 0.3}, save={"every": 0.2})
    model = build("Llama")
    whole, again = (train(model, config, tmp_path / name) for name in ("whole", "again"))
    assert_same_bits(again, whole)
    assert_same_bits(interrupted(model, config, tmp_path / "broken", after=4), whole)
    assert len(whole.held_out) == 4, "at 0.3, 0.6 and 0.9 of the tokens, and at the end"


@pytest.mark.parametrize(
    ("sections", "passes"),
    [
        ({"train": {"epochs": 3}}, 3.0),
        ({"train": {"steps": 6}}, 1.5),
        ({"train": {"epochs": None}, "budget": {"tokens": 425}}, None),
        ({"train": {"epochs": 1}, "budget": {"tokens": 100_000}}, 1.0),
    ],
)
def test_how_often_each_row_is_computed(sections: dict[str, Any], passes: float | None, tmp_path: Path) -> None:
    fit = train(build("Llama"), configured(**sections), tmp_path).fit
    read = fit.member.progress.tokens / int(fit.train.lengths.sum())
    assert fit.member.passes() == pytest.approx(read if passes is None else passes, abs=0.3 if passes is None else 1e-9)


def test_a_pass_that_begins_as_its_rows_are_drawn_reads_them_as_of_its_own_epoch(tmp_path: Path) -> None:
    """InfoBatch knows of a new pass only then, and the step before has looked ahead at it as of the old one."""
    member = train(build("Llama", blocks=1), configured(train={"epochs": 1}), tmp_path).fit.member

    class Late:
        number = 3

        def epoch(self, step: int) -> int:
            return self.number

    class Rows:
        def seen(self, *, epoch: int, step: int, steps: int | None = None) -> tuple[int, int]:
            return epoch, step

    member.order = order = Late()  # type: ignore[assignment]
    step = member.progress.step
    member.task.train.seen = Rows().seen  # type: ignore[method-assign, assignment]
    assert member.seen_after() == (3, step + 1)
    member.progress = replace(member.progress, step=step + 1)
    order.number = 4
    assert member.seen == (4, step + 1) and member.seen_after() == (4, step + 2)
