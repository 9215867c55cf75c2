"""What a policy freezes, and the log of it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conftest import trains
from tests.run_files import read_lines
from tests.workbench.training.freezing.fits import assert_same_bits, build, configured, interrupted, train
from workbench.config.freeze_config import FreezeConfig, LayerPlan, Moment, Observation
from workbench.errors import ConfigError
from workbench.runs import run_directory
from workbench.training.freezing import freezer as freezing
from workbench.training.trainer import Trainer

FULL: dict[str, Any] = {"method": "full"}
LORA: dict[str, Any] = {"method": "lora", "rank": 3, "alpha": 6}


def held(fit: Trainer) -> int:
    """Bytes of all tensors of the optimizer's state."""
    states = fit.member.optimizer.state.values()
    return sum(value.nbytes for state in states for value in state.values() if isinstance(value, Tensor))


@pytest.mark.parametrize("family", ["Llama", "GPT2", "Bert"])
def test_what_is_frozen_for_good_has_no_master_no_gradient_and_no_state(family: str, tmp_path: Path) -> None:
    model = build(family)
    before = {name: each.clone() for name, each in model.state_dict().items()}
    found = train(model, configured(adapter=FULL, freeze={"policy": "static"}), tmp_path)
    freezer, fit = found.fit.freezer, found.fit
    frozen = {name for name, layer in freezer.layers.items() if layer <= 2}
    assert frozen == freezer.frozen and freezer.depth == 2
    assert fit.masters.named().keys() == fit.member.trainable.keys() == freezer.layers.keys() - frozen
    after = fit.model.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in frozen)
    changed = [name for name in before if name in freezer.layers and not torch.equal(after[name], before[name])]
    assert {freezer.layers[name] for name in changed} == {3, 4, 5}
    named = dict(fit.model.named_parameters())
    assert all(named[name].grad is None and not named[name].requires_grad for name in frozen)
    assert set(fit.member.optimizer.state) == {named[name] for name in freezer.layers.keys() - frozen}


def test_optimizer_bytes_fall_by_the_share_that_is_frozen(tmp_path: Path) -> None:
    model = build("Llama", tie_word_embeddings=False)
    whole = train(model, configured(adapter=FULL, train={"steps": 1}), tmp_path / "whole")
    half = train(model, configured(adapter=FULL, train={"steps": 1}, freeze={"policy": "static"}), tmp_path / "half")
    sizes = {name: each.numel() for name, each in whole.fit.member.trainable.items()}
    frozen = sum(sizes[name] for name in half.fit.freezer.frozen)
    moments = 2 * 4 * (sum(sizes.values()) - frozen)
    assert moments <= held(half.fit) <= moments + 8 * len(sizes)  # and a count for each
    assert held(half.fit) / held(whole.fit) == pytest.approx(1 - frozen / sum(sizes.values()), abs=2e-3)


def test_an_adapter_has_nothing_below_the_line() -> None:
    every = freezing.attach(build("Llama"), configured(adapter=LORA), seed=3)
    found = freezing.attach(build("Llama"), configured(adapter=LORA, freeze={"policy": "static"}), seed=3)
    assert set(every.layers.values()) == {1, 2, 3, 4} and found.depth == 2
    assert found.layers == {name: layer for name, layer in every.layers.items() if layer > 2}
    assert {name for name in found.model.state_dict() if "lora" in name} == found.layers.keys()


POLICIES: list[dict[str, Any]] = [
    {"policy": "static"},
    {"policy": "gradual", "until": 1.0},
    {"policy": "freezeout", "first": 0.2},
    {"policy": "autofreeze", "every": 1},
    {"policy": "egeria", "every": 1, "window": 2, "tolerance": 5.0},
    {"policy": "lisa", "every": 2, "active": 1},
]
ON_A_DECODER = ("static", "freezeout", "autofreeze")
"""Policies that resume on an encoder as others do."""


def test_badam_begins_anew_in_each_block(tmp_path: Path) -> None:
    """Only what trains has moments, and each count of steps begins with the turn of its block."""
    turns: dict[int, list[int]] = {}

    def look(fit: Trainer) -> None:
        for name, each in fit.masters.named().items():
            layer, state = fit.freezer.layers[name], fit.member.optimizer.state.get(each)
            assert (state is not None) == fit.freezer.plan.trains[layer] and name not in fit.member._evicted
            if state is not None and layer != 5:
                turns.setdefault(layer, []).append(int(state["step"]))

    config = configured(adapter=FULL, freeze={"policy": "badam", "every": 2, "order": "ascending"}, train={"steps": 12})
    train(build("Llama", tie_word_embeddings=False), config, tmp_path, look=look)
    assert set(turns) == {1, 2, 3, 4} and set(turns[1]) == {1, 2} == set(turns[2])
    assert turns[1].count(1) == 2 * turns[3].count(1), "the first block had two turns"


@pytest.mark.nightly(but="each value once")
@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: str(policy["policy"]))
@pytest.mark.parametrize("adapter", [LORA, FULL], ids=["lora", "full"])
def test_only_what_the_plan_lets_train_changes_in_a_step(
    policy: dict[str, Any], adapter: dict[str, Any], tmp_path: Path
) -> None:
    """And the optimizer keeps nothing in memory for the rest, nor does any of it hold a gradient."""
    values: list[dict[str, Tensor]] = []
    frozen_layers: list[set[int]] = []

    def look(fit: Trainer) -> None:
        named = fit.masters.named()
        values.append({name: each.detach().clone() for name, each in named.items()})
        trains = fit.freezer.plan.trains
        frozen_layers.append({layer for layer, on in enumerate(trains) if not on})
        state = fit.member.optimizer.state
        for name, each in named.items():
            if not trains[fit.freezer.layers[name]]:
                assert each not in state and not dict(fit.model.named_parameters())[name].requires_grad
            assert each.grad is None

    config = configured(adapter=adapter, freeze=policy, train={"epochs": 3}, evaluate={"every": None})
    fit = train(build("Llama", tie_word_embeddings=False), config, tmp_path, look=look).fit
    changed_when = _changes(values, fit.freezer.layers)
    for frozen, changed in zip(frozen_layers[1:], changed_when, strict=True):
        assert not changed & frozen
        alive = set(fit.freezer.layers.values()) - frozen
        assert changed >= alive - {0} or policy["policy"] in ("freezeout", "static")
    assert any(frozen for frozen in frozen_layers)


def _changes(values: list[dict[str, Tensor]], layers: Mapping[str, int]) -> list[set[int]]:
    """Layers that changed in each step from the second on."""
    return [
        {layers[name] for name in after if not torch.equal(after[name], before[name])}
        for before, after in pairwise(values)
    ]


def test_gradual_unfreezing_thaws_from_the_top(tmp_path: Path) -> None:
    """Four blocks over twelve steps: block i at the share (4 - i) / 4, the embeddings at the end."""
    first: dict[int, int] = {}
    start = {name: each.clone() for name, each in build("Llama", tie_word_embeddings=False).named_parameters()}

    def look(fit: Trainer) -> None:
        for name, layer in fit.freezer.layers.items():
            if not torch.equal(fit.masters.named()[name], start[name]):
                first.setdefault(layer, fit.member.progress.step)

    config = configured(
        adapter=FULL, freeze={"policy": "gradual", "until": 1.0}, train={"steps": 12}, schedule={"warmup": 0.0}
    )
    train(build("Llama", tie_word_embeddings=False), config, tmp_path, look=look)
    assert first == {5: 1, 4: 1, 3: 4, 2: 7, 1: 10}


def test_each_layer_learns_at_the_rate_of_freezeout(tmp_path: Path) -> None:
    rates: list[dict[int | None, float]] = []

    def look(fit: Trainer) -> None:
        rates.append({group["layer"]: group["lr"] for group in fit.member.optimizer.param_groups})

    config = configured(
        adapter=FULL,
        freeze={"policy": "freezeout", "first": 0.3, "spacing": "cubic", "scaled": True},
        train={"steps": 10},
        schedule={"name": "constant", "warmup": 0.0},
    )
    found = train(build("Llama", tie_word_embeddings=False), config, tmp_path, look=look)
    for step, seen in enumerate(rates):
        plan = config.freeze.plan(Moment(step, step / 10, 0), blocks=4)
        assert seen == pytest.approx({layer: 3e-3 * rate for layer, rate in enumerate(plan.rates)})
        assert found.records[step]["learning_rate"] == pytest.approx(3e-3)
    assert rates[0][0] > rates[0][5] and rates[9][0] == 0 and rates[9][5] > 0


@pytest.mark.parametrize("adapter", [LORA, FULL], ids=["lora", "full"])
def test_what_lisa_freezes_leaves_the_memory_and_comes_back_to_the_bit(adapter: dict[str, Any], tmp_path: Path) -> None:
    """A block's moments are those of the last step in which it trained, and its count of steps goes on from there."""
    kept: dict[str, dict[str, Tensor]] = {}
    trained: dict[str, int] = {}
    away: set[str] = set()
    returned: set[int] = set()

    def look(fit: Trainer) -> None:
        named = fit.masters.named()
        for name, each in named.items():
            state = fit.member.optimizer.state.get(each)
            on = fit.freezer.plan.trains[fit.freezer.layers[name]]
            assert (state is not None) == on
            assert (name in fit.member._evicted) == (not on and name in trained)
            if on:
                assert state is not None
                if name in away:
                    returned.add(fit.freezer.layers[name])
                away.discard(name)
                trained[name] = trained.get(name, 0) + 1
                assert int(state["step"]) == trained[name]
                kept[name] = {key: value.clone() for key, value in state.items()}
            elif name in trained:
                away.add(name)
                found = fit.member._evicted.state()
                assert all(torch.equal(found[f"{name}|{key}"], value) for key, value in kept[name].items())

    config = configured(adapter=adapter, freeze={"policy": "lisa", "every": 2, "active": 1}, train={"steps": 16})
    fit = train(build("Llama", tie_word_embeddings=False), config, tmp_path, look=look).fit
    assert len({fit.freezer.layers[name] for name in trained} - {0, 5}) >= 3 and returned, "nothing was asked of it"
    assert not (tmp_path / "evicted").exists(), "nothing is left behind"


@pytest.mark.nightly(but=["Llama-autofreeze", "Llama-egeria", "Llama-freezeout", "Bert-gradual", "Bert-lisa"])
@pytest.mark.parametrize(
    ("family", "policy"),
    [
        pytest.param(
            family,
            policy,
            id=f"{family}-{policy['policy']}",
            marks=pytest.mark.nightly if family == "Bert" and policy["policy"] in ON_A_DECODER else (),
        )
        for family in ("Llama", "Bert")
        for policy in POLICIES
    ],
)
def test_a_stopped_run_resumes_to_the_same_bits(family: str, policy: dict[str, Any], tmp_path: Path) -> None:
    """The decoder with LoRA, the encoder with all of its weights; stopped inside of an interval."""
    model = build(family)
    config = configured(adapter=LORA if family == "Llama" else FULL, freeze=policy, train={"epochs": 3})
    whole = train(model, config, tmp_path / "whole")
    assert_same_bits(interrupted(model, config, tmp_path / "broken", after=7), whole)


def test_how_long_the_line_stays_is_what_the_plan_says() -> None:
    model = build("Llama")
    config = configured(adapter=FULL, freeze={"policy": "freezeout", "first": 0.2})
    freezer = freezing.attach(model, config, seed=0)
    freezer.follow(step=0, share=0.0)
    assert freezer.depth == 0 and freezer.lasts() == pytest.approx(0.4, abs=0.02)  # t_1 = 0.4: embeddings alone, before
    freezer.follow(step=50, share=0.5)
    assert freezer.depth == 1 and freezer.lasts() == pytest.approx(0.2, abs=0.02)
    freezer.follow(step=99, share=0.99)
    assert freezer.depth == 3 and freezer.lasts() == pytest.approx(0.2, abs=0.02)
    static = freezing.attach(build("Llama"), configured(adapter=FULL, freeze={"policy": "static"}), seed=0)
    assert static.depth == 2 and static.lasts() == pytest.approx(1.0)


@pytest.mark.parametrize("policy", ["autofreeze", "egeria"])
def test_a_policy_that_observes_decides_once_for_each_observation(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By measurements alone: whatever step they come at, the plan is that of all of them."""
    config = configured(adapter=FULL, freeze={"policy": policy})
    freezer, decide, asked = freezing.attach(build("Llama"), config, seed=0), type(config.freeze).plan, list[int]()

    def plan(self: FreezeConfig, moment: Moment, *, blocks: int) -> LayerPlan:
        asked.append(moment.step)
        return decide(self, moment, blocks=blocks)

    monkeypatch.setattr(type(config.freeze), "plan", plan)
    draw = torch.Generator().manual_seed(0)
    for step in range(40):
        freezer.follow(step=step, share=step / 40)
        assert freezer.plan == decide(config.freeze, Moment(0, 0.9, 7, freezer.seen), blocks=4)
        if step % 4 == 3:
            freezer.seen += (Observation(step + 1, tuple(torch.rand(6, generator=draw).tolist())),)
    assert asked == list(range(4, 40, 4))


def test_more_blocks_than_a_backbone_has_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"freeze\.active=9 is more than the 4 blocks"):
        freezing.attach(build("Llama"), configured(freeze={"policy": "lisa", "active": 9}), seed=0)


RECIPE = """
recipe: sft
model: {{id: {model}, weights: float32}}
adapter: {{method: lora, rank: 2}}
data: {{train: {train}, held_out: 0.1}}
batch: {{size: 4}}
train: {{steps: 8, learning_rate: 1.0e-2}}
freeze: {{policy: lisa, active: 1, every: 2}}
evaluate: {{every: null, answers: 0}}
save: {{every: 3, keep: 9}}
"""


@pytest.fixture
def run(tmp_path: Path, stories: str, questions: Path) -> Callable[..., Path]:
    return trains(tmp_path, RECIPE, model=stories, train=questions)


def _lines(path: Path) -> list[dict[str, Any]]:
    return read_lines(path / "layers.jsonl")


def test_each_change_is_what_the_policy_says(run: Callable[..., Path]) -> None:
    path = run()
    first, *others = _lines(path)
    assert [each["name"] for each in first["layers"]][:2] == ["before the blocks", "block 1"]
    config = run_directory.read_config(path)
    plans = [config.freeze.plan(Moment(step, step / 8, config.seed), blocks=5).trains for step in range(8)]
    digits = ["".join(str(int(each)) for each in plan) for plan in plans]
    expected = [(step + 1, now) for step, now in enumerate(digits) if step and now != digits[step - 1]]
    assert first["trains"] == digits[0] and [(each["step"], each["trains"]) for each in others] == expected
    assert expected


def test_a_resumed_run_goes_on_where_its_checkpoint_is(run: Callable[..., Path]) -> None:
    straight = run()
    text = (straight / "layers.jsonl").read_bytes()
    for name in ("checkpoints/step-00000008", "checkpoints/step-00000006", "adapter"):
        shutil.rmtree(straight / name)
    (straight / "layers.jsonl").write_bytes(text + b'{"step": 9, "tra')
    resumed = run(resume=True)
    assert (resumed / "layers.jsonl").read_bytes() == text


def test_a_table_that_was_half_written_is_written_again(run: Callable[..., Path]) -> None:
    path = run("freeze={policy: none}", "train.steps=2")
    text = (path / "layers.jsonl").read_bytes()
    shutil.rmtree(path / "adapter")
    (path / "layers.jsonl").write_bytes(text[:50])
    assert (run("freeze={policy: none}", "train.steps=2", resume=True) / "layers.jsonl").read_bytes() == text


def test_without_a_policy_there_is_one_line(run: Callable[..., Path]) -> None:
    (line,) = _lines(run("freeze={policy: none}", "train.steps=2"))
    assert set(line["trains"]) == {"1"} and line["step"] == 0
