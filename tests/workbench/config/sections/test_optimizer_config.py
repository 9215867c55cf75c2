"""Section `optimizer`: contradictions in words, and the rate that goes with a batch."""

from __future__ import annotations

from typing import Any, Literal, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.config.freeze_config import FreezeConfig
from workbench.config.sections.optimizer_config import KNOWN, Name, OptimizerConfig
from workbench.config.sections.schedule_config import ScheduleConfig
from workbench.errors import ConfigError
from workbench.schema import parse


class Moving(FreezeConfig):
    """A policy whose plan changes."""

    policy: Literal["moving"] = "moving"  # type: ignore[assignment]


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"name": "adam"}, "expected 'adamw'"),
    ({"momentum": 0.9}, "adamw has no momentum. Leave optimizer.momentum out, or write optimizer.name=sgd|muon|lars."),
    ({"name": "sgd", "betas": [0.9, 0.99], "eps": 1e-8}, "sgd has no betas."),
    ({"name": "sgd", "betas": [0.9, 0.99], "eps": 1e-8}, "sgd has no eps."),
    ({"name": "lion", "eps": 1e-8}, "lion has no eps."),
    ({"betas": [0.9, 1.0]}, "less than 1"),
    ({"name": "schedule_free", "betas": [0.0, 0.99]}, "Write optimizer.betas=[0.9, 0.999]."),
    ({"name": "schedule_free", "lookahead": 5}, "Leave optimizer.lookahead out"),
    ({"sam": 0.0}, "greater than 0"),
    ({"sam_every": 2}, "Write optimizer.sam=0.05"),
    ({"lookahead": 1}, "greater than or equal to 2"),
    ({"lookahead_alpha": 0.8}, "Write optimizer.lookahead=5"),
    ({"layer_decay": 1.2}, "less than or equal to 1"),
    ({"scaling": "sqrt"}, "Write optimizer.reference_batch=32."),
    ({"reference_batch": 32}, "Write optimizer.scaling=sqrt"),
    ({"l1": -1.0}, "greater than or equal to 0"),
    ({"noise_scale": 0}, "greater than 0"),
]


@pytest.mark.parametrize(("values", "text"), MISTAKES)
def test_mistakes_say_what_to_write(values: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(OptimizerConfig, values, source="my.yaml")
    assert text in str(caught.value)


@pytest.mark.parametrize("name", get_args(Name))
def test_every_optimizer_takes_what_it_has(name: Name) -> None:
    values = {"betas": (0.8, 0.95), "eps": 1e-7, "momentum": 0.5}
    config = OptimizerConfig(name=name, **{key: values[key] for key in KNOWN[name]})  # type: ignore[arg-type]
    assert config.given == {key: values[key] for key in KNOWN[name]}
    assert OptimizerConfig(name=name).given == {}


CONSTANT, FALLING = ScheduleConfig(name="constant"), ScheduleConfig()
MISFITS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"name": "schedule_free"}, {"schedule": FALLING}, "averages instead. Write schedule.name=constant."),
    ({"name": "schedule_free"}, {"freeze": Moving()}, "Write optimizer.name=adamw, or leave freeze out."),
    ({"lookahead": 5}, {"freeze": Moving()}, "Write optimizer.lookahead=null, or leave freeze out."),
    ({"name": "lars"}, {"method": "adalora"}, "Write optimizer.name=adamw, or adapter.method=lora."),
    ({"noise_scale": 10}, {"batch": 1}, "Write batch.size=2 or more"),
    ({"name": "galore"}, {"method": "lora"}, "Write optimizer.name=adamw, or adapter.method=full."),
]
FITTING: dict[str, Any] = {"schedule": CONSTANT, "freeze": FreezeConfig(), "batch": 32, "method": "full"}


@pytest.mark.parametrize(("values", "around", "text"), MISFITS)
def test_what_does_not_go_with_the_run_says_what_to_write(
    values: dict[str, Any], around: dict[str, Any], text: str
) -> None:
    config = OptimizerConfig(**values)
    (mistake,) = config.misfits(**{**FITTING, **around})
    assert text in mistake
    assert list(config.misfits(**FITTING)) == []


@given(rate=st.floats(1e-6, 1), batch=st.integers(1, 4096), reference=st.integers(1, 4096))
def test_rates_follow_the_batch(rate: float, batch: int, reference: int) -> None:
    """Goyal et al. 2017: linear; Krizhevsky 2014: its root, so that twice the root is the whole."""
    assert OptimizerConfig().scaled(rate, batch=batch) == rate
    linear = OptimizerConfig(scaling="linear", reference_batch=reference)
    root = OptimizerConfig(scaling="sqrt", reference_batch=reference)
    assert linear.scaled(rate, batch=batch) == pytest.approx(rate * batch / reference)
    assert root.scaled(root.scaled(rate, batch=batch), batch=batch) == pytest.approx(linear.scaled(rate, batch=batch))
    assert linear.scaled(rate, batch=reference) == rate
