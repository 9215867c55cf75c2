"""Groups and rates by parameter, and steps of each optimizer against its paper's formula, written a second time."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any, Literal, get_args

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from tests.workbench.training.optim import formulas
from workbench.config import RunConfig
from workbench.config.freeze_config import FreezeConfig
from workbench.config.sections.optimizer_config import OF_WHOLE_MATRICES, Name
from workbench.errors import ConfigError
from workbench.training.optim import optimizers

CPU = torch.device("cpu")
ON_CPU = [name for name in get_args(Name) if not name.startswith("paged_")]
RATES = {"adafactor": 1e-2, "sgd": 0.3, "lars": 1.0, "lamb": 1e-2, "lion": 3e-4}
"""Rates that lower the loss, where it is not 1e-3."""


class Moving(FreezeConfig):
    """A policy whose plan changes."""

    policy: Literal["moving"] = "moving"  # type: ignore[assignment]


def settled(optimizer: Mapping[str, Any] | None = None, **sections: Any) -> RunConfig:
    whole = {"adapter": {"method": "full"}} if (optimizer or {}).get("name") in OF_WHOLE_MATRICES else {}
    return RunConfig.model_validate(
        {
            "recipe": "sft",
            "data": {"train": "x.jsonl"},
            **whole,
            "optimizer": dict(optimizer or {}),
            "train": {"learning_rate": 1e-2, "weight_decay": 0.1},
            **sections,
        }
    )


def made(config: RunConfig, trainable: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
    """An optimizer over parameters of block 1."""
    layers = dict.fromkeys(trainable, 1)
    return optimizers.build(optimizers.groups(trainable, config, layers=layers, blocks=1, fresh=()), config)


def weights() -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"wide": (4, 6), "tall": (5, 3), "vector": (5,)}
    return {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in shapes.items()}


def gradients(steps: int = 6) -> formulas.Steps:
    generator = torch.Generator().manual_seed(1)
    return [{name: torch.randn(p.shape, generator=generator) for name, p in weights().items()} for _ in range(steps)]


def stepped(optimizer: torch.optim.Optimizer, trainable: Mapping[str, nn.Parameter], steps: formulas.Steps) -> None:
    for step, found in enumerate(steps):
        for name, parameter in trainable.items():
            parameter.grad = found[name].clone()
        for group in optimizer.param_groups:
            group["lr"] = formulas.rate(step) * group["rate_factor"]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


# ---- groups


def test_the_default_is_one_fused_adamw_of_two_groups() -> None:
    optimizer = made(settled(), weights())
    assert type(optimizer) is torch.optim.AdamW and optimizer.defaults["fused"]
    found = [(group["rate_factor"], group["weight_decay"], group["layer"]) for group in optimizer.param_groups]
    assert found == [(1.0, 0.1, None), (1.0, 0.0, None)]
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 1]


LAYERS = {"embed.weight": 0, "block.0.lora_A.w": 1, "block.0.lora_B.w": 1, "block.1.bias": 2, "norm.weight": 3}


def _named() -> dict[str, nn.Parameter]:
    shapes = {name: (2,) if name.endswith(("bias", "norm.weight")) else (2, 2) for name in [*LAYERS, "head.weight"]}
    return {name: nn.Parameter(torch.ones(shape)) for name, shape in shapes.items()}


def test_rates_by_layer_method_and_head() -> None:
    config = settled(
        {"layer_decay": 0.5, "head_rate": 3.0}, adapter={"method": "lora+", "rank": 2, "alpha": 4, "rate_ratio": 16}
    )
    named = _named()
    found = optimizers.groups(named, config, layers=LAYERS, blocks=2, fresh={"head.weight"})
    of = {id(parameter): group for group in found for parameter in group["params"]}
    factors = {name: of[id(parameter)]["rate_factor"] for name, parameter in named.items()}
    assert factors == {
        "embed.weight": 0.5**3,
        "block.0.lora_A.w": 0.5**2,
        "block.0.lora_B.w": 16 * 0.5**2,
        "block.1.bias": 0.5,
        "norm.weight": 1.0,
        "head.weight": 3.0,
    }
    assert {name: of[id(parameter)]["layer"] for name, parameter in named.items()} == {**LAYERS, "head.weight": 3}
    decays = {name: of[id(parameter)]["weight_decay"] for name, parameter in named.items()}
    assert decays == {name: 0.0 if parameter.ndim == 1 else 0.1 for name, parameter in named.items()}


def test_groups_know_their_layer_only_where_rates_move_by_layer() -> None:
    still, moving = (
        optimizers.groups(_named(), config, layers=LAYERS, blocks=2, fresh=())
        for config in (settled(), settled(freeze=Moving()))
    )
    assert {group["layer"] for group in still} == {None} and len(still) == 2
    assert [group["layer"] for group in moving] == [0, 1, 2, 3, 3] and len(moving) == 5
    assert sum(len(group["params"]) for group in moving) == len(_named())


def test_the_rate_grows_with_the_batch() -> None:
    batch = {"batch": {"size": 128}}
    assert optimizers.peak_rate(settled(**batch)) == 1e-2
    assert optimizers.peak_rate(settled({"scaling": "linear", "reference_batch": 32}, **batch)) == 4e-2
    assert optimizers.peak_rate(settled({"scaling": "sqrt", "reference_batch": 32}, **batch)) == 2e-2


# ---- formulas, in float64


FORMULAS: dict[str, tuple[formulas.Formula, dict[str, Any], float]] = {
    "adamw": (formulas.adamw, {"betas": [0.8, 0.95], "eps": 1e-6}, 1e-6),
    # 8 bits have three digits of each moment; these parameters are small and keep all of them.
    "adamw8bit": (formulas.adamw, {"betas": [0.8, 0.95], "eps": 1e-6}, 1e-6),
    "sgd": (formulas.sgd, {"momentum": 0.7}, 1e-6),
    "lion": (formulas.lion, {}, 1e-6),
    "lamb": (formulas.lamb, {}, 2e-6),
    "lars": (formulas.lars, {}, 1e-6),
    "adafactor": (formulas.adafactor, {}, 1e-6),
    "schedule_free": (formulas.schedule_free, {}, 2e-6),
    # torch orthogonalises in bfloat16
    "muon": (formulas.muon, {"momentum": 0.9}, 3e-3),
    "galore": (formulas.galore, {"rank": 2, "rank_every": 3}, 2e-6),
    "apollo": (formulas.apollo, {"rank": 2, "rank_every": 3}, 2e-6),
    "apollo_mini": (formulas.apollo_mini, {"rank_every": 3}, 2e-5),
    "adam_mini": (formulas.adam_mini, {}, 1e-6),
    # the roots of nearly singular averages in float32
    "shampoo": (formulas.shampoo, {"betas": [0.8, 0.9], "eps": 1e-6, "curvature_every": 3}, 5e-5),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_steps_are_those_of_the_paper(name: str) -> None:
    formula, settings, tolerance = FORMULAS[name]
    schedule = {"schedule": {"name": "constant"}} if name == "schedule_free" else {}
    trainable = weights()
    expected = {key: parameter.detach().double() for key, parameter in trainable.items()}
    optimizer = made(settled({"name": name, **settings}, **schedule), trainable)
    stepped(optimizer, trainable, gradients())
    formula(expected, gradients(), {"wide": 0.1, "tall": 0.1, "vector": 0.0})
    for key, parameter in trainable.items():
        assert (parameter - expected[key]).abs().max() < tolerance, key
        assert (parameter - weights()[key]).abs().max() > 3 * tolerance, key


@pytest.mark.parametrize("name", ["lamb", "lars"])
def test_trust_ratios_of_weights_that_start_at_zero_are_those_of_the_paper(name: str) -> None:
    """LoRA's B: its first step has the ratio 1, so that it does not stay where it is."""
    B, expected = nn.Parameter(torch.zeros(4, 6)), {"B": torch.zeros(4, 6).double()}
    steps: formulas.Steps = [{"B": each["wide"]} for each in gradients()]
    stepped(made(settled({"name": name}), {"B": B}), {"B": B}, steps)
    FORMULAS[name][0](expected, steps, {"B": 0.1})
    assert (B - expected["B"]).abs().max() < 2e-6 < 1e-3 < expected["B"].abs().max()


def test_eight_bits_go_nearly_where_adamw_goes() -> None:
    ends = []
    for name in ("adamw", "adamw8bit"):
        torch.manual_seed(0)
        trainable = {"w": nn.Parameter(torch.zeros(64, 128))}
        steps = [{"w": torch.randn(64, 128)} for _ in range(8)]
        optimizer = made(settled({"name": name}), trainable)
        stepped(optimizer, trainable, steps)
        ends.append(trainable["w"].detach())
        kinds = {value.dtype for value in optimizer.state[trainable["w"]].values() if isinstance(value, Tensor)}
        assert (torch.uint8 in kinds) == (name == "adamw8bit")
    assert 0 < (ends[0] - ends[1]).norm() / ends[0].norm() < 0.03


# ---- every optimizer


def _config(name: str, **settings: Any) -> RunConfig:
    schedule = {"schedule": {"name": "constant"}} if name == "schedule_free" else {}
    return settled(
        {"name": name, **settings}, train={"learning_rate": RATES.get(name, 1e-3), "weight_decay": 0.0}, **schedule
    )


@pytest.mark.parametrize("name", ON_CPU)
def test_lowers_the_loss_of_a_real_model(name: str, stories: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(stories, dtype=torch.float32)
    trainable = dict(model.named_parameters())
    layers = {key: int(key.split(".")[2]) + 1 if ".layers." in key else 0 for key in trainable}
    config = _config(name)
    optimizer = optimizers.build(optimizers.groups(trainable, config, layers=layers, blocks=5, fresh=()), config)
    ids_BL = torch.arange(3, 35).view(2, 16)
    losses = []
    for _ in range(8):
        loss = model(input_ids=ids_BL, labels=ids_BL).loss
        losses.append(loss.item())
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = optimizers.peak_rate(config) * group["rate_factor"]
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0] - 0.3, losses


PAIRS = [(name, every) for name in ON_CPU for every in (None, 2) if (name, every) != ("schedule_free", 2)]


@pytest.mark.parametrize(("name", "lookahead"), PAIRS)
def test_what_has_no_gradient_and_what_has_a_zero_one_stays(name: str, lookahead: int | None) -> None:
    trainable = weights()
    before = {key: parameter.detach().clone() for key, parameter in trainable.items()}
    optimizer = made(_config(name, **({"lookahead": lookahead} if lookahead else {})), trainable)
    for found in gradients(4):
        trainable["wide"].grad = found["wide"].clone()
        trainable["vector"].grad = torch.zeros(5)
        optimizer.step()
    assert trainable["tall"] not in optimizer.state and torch.equal(trainable["tall"], before["tall"])
    assert torch.equal(trainable["vector"], before["vector"])
    assert not torch.equal(trainable["wide"], before["wide"])


@pytest.mark.parametrize("name", ON_CPU)
def test_who_writes_over_gradients_is_refused_where_they_are_read_after_the_step(name: str) -> None:
    trainable = weights()
    config = _config(name)
    optimizer = made(config, trainable)
    for found in gradients(2):
        for key, parameter in trainable.items():
            parameter.grad = found[key].clone()
        optimizer.step()
    kept = all(torch.equal(parameter.grad, found[key]) for key, parameter in trainable.items())  # type: ignore[arg-type]
    refused = config.optimizer.misfits(schedule=config.schedule, freeze=config.freeze, batch=8, method="adalora")
    assert kept == (not any("writes over the gradients" in sentence for sentence in refused))


# ---- muon


def test_muon_is_for_matrices_of_the_blocks() -> None:
    named = {**_named(), "block.1.lora_E.w": nn.Parameter(torch.ones(4, 1))}
    config = settled({"name": "muon"})
    found = optimizers.groups(named, config, layers={**LAYERS, "block.1.lora_E.w": 2}, blocks=2, fresh={"head.weight"})
    (own,) = [group for group in found if group["inner"]]
    assert {id(p) for p in own["params"]} == {id(named[f"block.0.lora_{part}.w"]) for part in "AB"}


@pytest.mark.parametrize("name", ["muon", "galore", "apollo"])
def test_without_such_matrices_they_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"optimizer.name={name} .*optimizer.name=adamw"):
        made(settled({"name": name}), {"vector": nn.Parameter(torch.ones(3))})


# ---- less state


def test_state_is_as_small_as_said() -> None:
    """Bytes through those of AdamW: (R M + 2 R N) / 2 M N for GaLore, 2 R N / 2 M N for APOLLO, a half and M values."""
    M, N, R = 32, 48, 4
    found = {}
    for name in ("adamw", "galore", "apollo", "apollo_mini", "adam_mini"):
        config = settled({"name": name, **({"rank": R} if name in ("galore", "apollo") else {})})
        matrix = {"w": nn.Parameter(torch.ones(M, N))}
        found[name] = optimizers.state_bytes(
            optimizers.groups(matrix, config, layers={"w": 1}, blocks=1, fresh=()), config
        )
    assert found["galore"] == 4 * (R * M + 2 * R * N)
    assert found["apollo"] == 4 * (2 * R * N + 1) and found["apollo_mini"] == 4 * (2 * N + 1)
    assert found["adam_mini"] == 4 * (M * N + M) and found["adamw"] >= 4 * 2 * M * N


def test_galore_of_all_dimensions_is_adam_in_rotated_coordinates() -> None:
    """With gradients that stay diagonal the coordinates are those of the matrix: AdamW, to the last bits but few."""
    ends = []
    for name, settings in (("adamw", {}), ("galore", {"rank": 99, "rank_scale": 1.0})):
        matrix = {"w": nn.Parameter(torch.ones(3, 3))}
        steps: formulas.Steps = [{"w": torch.diag(torch.tensor([3.0, 2.0, 1.0]) / (1 + step))} for step in range(5)]
        stepped(made(settled({"name": name, **settings}), matrix), matrix, steps)
        ends.append(matrix["w"].detach())
    torch.testing.assert_close(ends[0], ends[1])


def test_apollo_draws_the_same_whatever_was_drawn_before() -> None:
    ends = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        trainable = weights()
        stepped(made(settled({"name": "apollo", "rank": 2}), trainable), trainable, gradients())
        ends.append(trainable["wide"].detach())
    assert torch.equal(*ends)


# ---- penalties


def test_penalties_are_gradients_of_what_they_say() -> None:
    trainable, config = weights(), settled({"l1": 0.3, "l2": 0.2, "l2_start": 0.7})
    start = {key: each.detach() + 0.5 for key, each in weights().items() if each.ndim == 2}
    data = gradients(1)[0]
    for key, parameter in trainable.items():
        parameter.grad = data[key].clone()
    frozen = nn.Parameter(torch.ones(2, 2))
    optimizers.penalise({**trainable, "frozen": frozen}, config, start)
    again = weights()
    matrices = [parameter for parameter in again.values() if parameter.ndim == 2]
    loss = sum((parameter * data[key]).sum() for key, parameter in again.items())
    loss += sum(0.7 * (again[key] - value).square().sum() for key, value in start.items())
    loss += sum(0.3 * matrix.abs().sum() + 0.2 * matrix.square().sum() for matrix in matrices)
    assert isinstance(loss, Tensor)
    loss.backward()
    for key, parameter in trainable.items():
        torch.testing.assert_close(parameter.grad, again[key].grad)
    assert frozen.grad is None


def test_without_penalties_gradients_keep_their_bits() -> None:
    trainable = weights()
    for parameter in trainable.values():
        parameter.grad = torch.full_like(parameter, -0.0)
    optimizers.penalise(trainable, settled(), optimizers.starting_values(trainable, settled()))
    assert all(torch.signbit(parameter.grad).all() for parameter in trainable.values() if parameter.grad is not None)


# ---- what is needed


@pytest.mark.parametrize("name", get_args(Name))
def test_what_is_there_is_not_refused(name: str) -> None:
    optimizers.require(settled({"name": name}, schedule={"name": "constant"}), device=torch.device("cuda"))


@pytest.mark.parametrize("name", [*optimizers._FROM_PYTORCH_OPTIMIZER, *optimizers._FROM_BITSANDBYTES])
def test_a_missing_package_is_named_with_its_cure(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=rf"optimizer.name={name} .*optimizer.name=adamw.*pip install"):
        optimizers.require(settled({"name": name}, schedule={"name": "constant"}), device=torch.device("cuda"))


@pytest.mark.parametrize("name", ["paged_adamw", "paged_adamw8bit"])
def test_pages_need_an_nvidia_gpu(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"on cpu.*optimizer.name={name.removeprefix('paged_')}\."):
        optimizers.require(settled({"name": name}), device=CPU)


def test_eight_bits_are_refused_where_nothing_computes_them() -> None:
    with pytest.raises(ConfigError, match="does not work on mps"):
        optimizers.require(settled({"name": "adamw8bit"}), device=torch.device("mps"))


@pytest.mark.parametrize("name", ON_CPU)
def test_bytes_of_states_are_known_before_the_first_step(name: str) -> None:
    schedule = {"name": "constant"} if name == "schedule_free" else {}
    config, trainable = settled({"name": name}, schedule=schedule), weights()
    optimizer = made(config, trainable)
    wanted = optimizers.state_bytes(optimizer.param_groups, config)
    for group in optimizer.param_groups:
        group["lr"] = 1e-3
    for parameter in trainable.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    values = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    held = sum(value.numel() * value.element_size() for value in values)
    if name in ("adafactor", "adamw8bit"):
        assert held <= 1.1 * wanted
    else:
        assert held == wanted
