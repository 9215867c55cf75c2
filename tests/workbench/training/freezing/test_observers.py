"""A policy sees what was measured, in a resumed run too."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.conftest import tiny
from tests.workbench.training.freezing.fits import assert_same_bits, build, configured, interrupted, train
from workbench.config.freeze_config import Observation
from workbench.data.batching import MicroBatch, Row, collate, encoder_inputs
from workbench.training.freezing import freezer as freezing
from workbench.training.freezing import observers
from workbench.training.freezing.cached_prefix import parts
from workbench.training.freezing.freezer import Freezer
from workbench.training.freezing.observers import GradientSums, Plasticity
from workbench.training.trainer import Trainer

LAYERS = {"embed": 0, "one.weight": 1, "one.bias": 1, "two": 2, "three": 3, "norm": 4}
"""Of three blocks."""


def parameters() -> dict[str, nn.Parameter]:
    torch.manual_seed(0)
    return {name: nn.Parameter(torch.randn(3, 2)) for name in LAYERS}


def step(trainable: dict[str, nn.Parameter], *, seed: int, frozen: tuple[str, ...] = ()) -> dict[str, Tensor]:
    """New gradients; those that are frozen get none."""
    generator = torch.Generator().manual_seed(seed)
    drawn = {name: torch.randn(3, 2, generator=generator) for name in trainable}
    for name, parameter in trainable.items():
        parameter.grad = None if name in frozen else drawn[name].clone()
    return drawn


def test_the_norm_is_that_of_the_sum_of_an_interval() -> None:
    trainable = parameters()
    sums = GradientSums(LAYERS, trainable, blocks=3)
    for interval in range(2):
        drawn = []
        for seed in range(4):
            drawn.append(step(trainable, seed=10 * interval + seed, frozen=("embed", "two")))
            sums.look()
        found = sums.finish()
        total = {name: sum(each[name] for each in drawn).abs().sum().item() for name in LAYERS}
        assert math.isnan(found[0]) and math.isnan(found[2])
        assert found[1] == pytest.approx(total["one.weight"] + total["one.bias"], rel=1e-6)
        assert found[3:] == pytest.approx((total["three"], total["norm"]), rel=1e-6)


def test_gradients_that_are_freed_or_changed_afterwards_do_not_matter() -> None:
    trainable = parameters()
    sums = GradientSums(LAYERS, trainable, blocks=3)
    drawn = step(trainable, seed=1)
    sums.look()
    for parameter in trainable.values():
        assert parameter.grad is not None
        parameter.grad.mul_(100)
        parameter.grad = None
    sums.look()
    assert sums.finish()[2] == pytest.approx(drawn["two"].abs().sum().item(), rel=1e-6)
    assert all(math.isnan(norm) for norm in sums.finish()), "an interval without a gradient"


def test_sums_go_on_after_a_resume_as_if_nothing_had_been() -> None:
    trainable = parameters()
    whole = GradientSums(LAYERS, trainable, blocks=3)
    for seed in range(3):
        step(trainable, seed=seed, frozen=("embed",))
        whole.look()
    resumed = GradientSums(LAYERS, trainable, blocks=3)
    resumed.load({name: total.clone() for name, total in whole.state().items()})
    assert "embed" not in whole.state(), "what does not train takes no memory"
    for sums in (whole, resumed):
        for seed in range(3, 6):
            step(trainable, seed=seed, frozen=("embed",))
            sums.look()
    both = [torch.tensor(sums.finish()) for sums in (whole, resumed)]
    assert torch.equal(both[0][1:], both[1][1:])


def test_loading_does_not_change_what_was_loaded() -> None:
    trainable, saved = parameters(), {"two": torch.ones(6)}
    sums = GradientSums(LAYERS, trainable, blocks=3)
    sums.load(saved)
    step(trainable, seed=0)
    sums.look()
    assert torch.equal(saved["two"], torch.ones(6))


def test_a_sample_of_the_gradients_stands_for_all() -> None:
    trainable = {"two": torch.nn.Parameter(torch.zeros(700, 900))}
    sums, whole = GradientSums(LAYERS, trainable, blocks=3), torch.zeros(700, 900)
    for seed in range(3):
        trainable["two"].grad = torch.randn(700, 900, generator=torch.Generator().manual_seed(seed))
        whole += trainable["two"].grad
        sums.look()
    assert sum(each.numel() for each in sums.state().values()) <= 2 * observers.SAMPLED
    assert sums.finish()[LAYERS["two"]] == pytest.approx(float(whole.abs().sum()), rel=0.1)


def written_out(a_BLD: Tensor, b_BLE: Tensor) -> float:
    """The loss of Tung & Mori, element by element."""
    rows, total = len(a_BLD), 0.0
    for i in range(rows):
        likeness = []
        for states in (a_BLD, b_BLE):
            products = [float((states[i] * states[j]).sum()) for j in range(rows)]
            length = math.sqrt(sum(value**2 for value in products))
            likeness.append([value / length for value in products])
        total += sum((x - y) ** 2 for x, y in zip(*likeness, strict=True))
    return total / rows**2


def blocks(weights: list[Tensor]) -> Callable[[], list[Tensor]]:
    """A chain of three blocks over fixed rows."""
    inputs = torch.randn(4, 5, 6, generator=torch.Generator().manual_seed(2))

    def outputs() -> list[Tensor]:
        found, states = [], inputs
        for weight in weights:
            states = torch.tanh(states @ weight)
            found.append(states)
        return found

    return outputs


def test_plasticity_is_the_loss_to_an_interval_ago_and_a_resume_changes_nothing() -> None:
    weights = [torch.randn(6, 6, generator=torch.Generator().manual_seed(n)) for n in range(3)]
    outputs, trains = blocks(weights), (False, False, True, True, True)
    watch = Plasticity(outputs)
    watch.begin()
    for interval in range(3):
        before = outputs()
        saved = {name: tensor.clone() for name, tensor in watch.state().items()}
        weights[1] += 0.1 / (interval + 1)
        after = outputs()
        resumed = Plasticity(outputs)
        resumed.load(saved)
        found = watch.finish(trains)
        assert [math.isnan(value) for value in found] == [True, True, False, False, True]
        expected = [written_out(x, y) for x, y in zip(after, before, strict=True)]
        assert found[2:4] == pytest.approx(expected[1:], rel=1e-5) and min(found[2:4]) > 0
        assert resumed.finish(trains)[2:4] == found[2:4]
    assert watch.finish(trains)[2:4] == (0, 0), "nothing moved"


def test_a_checkpoint_before_the_first_look_holds_nothing() -> None:
    watch = Plasticity(list)
    assert watch.state() == {}
    watch.load({})
    with pytest.raises(AssertionError, match="comes first"):
        watch.finish(())


FULL: dict[str, Any] = {"method": "full"}
PLASTIC: dict[str, Any] = {"policy": "egeria", "every": 2, "window": 2, "tolerance": 5.0}


def test_a_policy_that_freezes_nothing_changes_nothing(tmp_path: Path) -> None:
    model, never = build("Llama", blocks=2), {"policy": "egeria", "every": 2, "tolerance": 1e-12}
    watched = train(model, configured(freeze=never), tmp_path / "watched")
    plain = train(model, configured(), tmp_path / "plain")
    for record in watched.records:
        assert record.pop("frozen_layers") == 0
    assert_same_bits(watched, plain)


def _same(observed: tuple[Observation, ...], wanted: tuple[Observation, ...]) -> bool:
    return [each.step for each in observed] == [each.step for each in wanted] and all(
        a == b or (math.isnan(a) and math.isnan(b))
        for one, other in zip(observed, wanted, strict=True)
        for a, b in zip(one.values, other.values, strict=True)
    )


def test_sums_of_gradients_are_those_of_the_interval_before_they_are_clipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written out a second time: plain gradients of each batch, at the values that each step began with."""
    monkeypatch.setattr(observers, "SAMPLED", 10**9)  # all of them
    model = build("Llama", tie_word_embeddings=False)
    config = configured(
        adapter=FULL,
        freeze={"policy": "autofreeze", "every": 3, "cache": "off"},
        train={"epochs": 3, "max_grad_norm": 1e-3},
    )
    sums: dict[str, Tensor] = {}
    wanted: list[list[float]] = []

    def add(fit: Trainer) -> None:
        """The gradients of the step to come: the policy may freeze more before it, which leaves the rest as it is."""
        rows = fit.member.batch()
        for parameter in fit.model.parameters():
            parameter.requires_grad_(True)
        (fit.loss(fit.train.batch(rows), 1 / fit.train.supervised[rows].sum().item())).backward()
        for name, parameter in fit.model.named_parameters():
            sums[name] = sums.get(name, 0) + parameter.grad
            parameter.grad = None

    def look(fit: Trainer) -> None:
        if fit.member.progress.step % 3 == 0:
            layers = fit.freezer.layers
            wanted.append([sum(float(sums[n].abs().sum()) for n in sums if layers[n] == each) for each in range(6)])
            sums.clear()
        if fit.member.live:
            add(fit)

    found = train(model, config, tmp_path, look=look).fit.freezer.seen
    assert [each.step for each in found] == [3, 6, 9, 12]
    compared = 0
    for observation, values in list(zip(found, wanted, strict=True))[1:]:  # the first step was not looked at
        for value, known in zip(observation.values, values, strict=True):
            assert math.isnan(value) or value == pytest.approx(known, rel=1e-4)
            compared += not math.isnan(value)
    assert compared > 6


def test_plasticity_compares_outputs_with_those_of_an_interval_ago(tmp_path: Path) -> None:
    """Written out a second time, with the outputs of the blocks themselves."""
    outputs: list[list[Tensor]] = []

    def look(fit: Trainer) -> None:
        if fit.member.progress.step % 2 == 0:
            outputs.append(_outputs(fit))

    config = configured(adapter=FULL, freeze={**PLASTIC, "tolerance": 1e-9}, train={"epochs": 2})
    fit = train(build("Bert"), config, tmp_path, look=look).fit
    found, mask = fit.freezer.seen, fit.train.batch(np.arange(8)).inputs["attention_mask"].bool()
    assert [each.step for each in found] == [2, 4, 6, 8]
    for number in (1, 2, 3):
        pairs = zip(outputs[number - 1], outputs[number], strict=True)
        wanted = [written_out(before * mask[..., None], after * mask[..., None]) for before, after in pairs]
        assert found[number].values[1:-1] == pytest.approx(wanted, rel=1e-3, abs=1e-10)
        assert math.isnan(found[number].values[0]) and math.isnan(found[number].values[-1])


def _outputs(fit: Trainer) -> list[Tensor]:
    """Of each block, for the first eight rows."""
    found: list[Tensor] = []
    hooks = [
        block.register_forward_hook(lambda _, __, output: found.append(parts(output)[0].detach().clone()))
        for block in fit.freezer.blocks
    ]
    fit.model.eval()
    with torch.no_grad():
        fit.model(**fit.train.batch(torch.arange(8).numpy()).inputs)
    fit.model.train()
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.nightly(but="each value once")
@pytest.mark.parametrize(
    "policy",
    [{"policy": "autofreeze", "every": 2}, PLASTIC],
    ids=["gradients", "activations"],
)
@pytest.mark.parametrize("cache", ["off", "memory"])
def test_a_resumed_run_has_seen_the_same(policy: dict[str, Any], cache: str, tmp_path: Path) -> None:
    """Stopped in the middle of an interval."""
    config = configured(adapter=FULL, freeze={**policy, "cache": cache}, train={"epochs": 3})
    model = build("Bert")
    whole = train(model, config, tmp_path / "whole").fit.freezer
    broken = interrupted(model, config, tmp_path / "broken", after=5).fit.freezer
    assert len(whole.seen) == 6 and _same(broken.seen, whole.seen) and broken.plan == whole.plan
    assert whole.depth > 0, "the policy did nothing"


def test_a_state_is_read_as_it_was_written() -> None:
    """Before anything was seen, too, and with layers that do not train."""
    for seen, policy in product(((), (Observation(3, (math.nan, 1.0, 2.0, 3.0, 4.0, 0.5)),)), ("autofreeze", "egeria")):
        freezer = freezing.attach(build("Llama"), configured(adapter=FULL, freeze={"policy": policy}), seed=0)
        freezer.seen = seen
        watch = observers.of(freezer, dict(freezer.model.named_parameters()), _nothing)["freezing"]
        state = watch.state()
        freezer.seen = (Observation(9, (0.0,) * 6),)
        watch.load({name: tensor.clone() for name, tensor in state.items()})
        assert _same(freezer.seen, seen)
        assert watch.state().keys() == state.keys()


def _nothing() -> MicroBatch:
    raise AssertionError("nobody looks")


@pytest.mark.parametrize("name", ["Llama", "Bert"])
def test_padding_changes_nothing_that_is_seen(name: str) -> None:
    """The same rows, padded to their longest and far beyond."""
    freezer = freezing.attach(
        tiny(name, head="CausalLM" if name == "Llama" else "MaskedLM"), configured(adapter=FULL, freeze=PLASTIC), seed=0
    )
    draw = np.random.default_rng(0)
    rows = [Row(draw.integers(3, 64, size), np.arange(size) > 4) for size in (9, 6, 12)]
    batch = collate(rows)
    if name == "Bert":
        batch = replace(batch, inputs=encoder_inputs([row.input_ids for row in rows]), lengths_B=None)
    found = []
    for beyond in (0, 7):
        padded = replace(batch, inputs={key: F.pad(each, (0, beyond)) for key, each in batch.inputs.items()})
        watch = observers.of(freezer, {}, partial(_ran, freezer, padded))["freezing"]
        watch.on_gradients()
        found.append(watch.state()["reference"])
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)


def _ran(freezer: Freezer, batch: MicroBatch) -> MicroBatch:
    with torch.no_grad():
        freezer.model.eval()(**batch.inputs)
    return batch
