"""The section of averages: what it refuses, and in which words."""

from __future__ import annotations

from typing import Any

import pytest

from workbench.config.sections.average_config import AverageConfig
from workbench.errors import ConfigError
from workbench.schema import parse

OTHER: dict[str, Any] = {"decay": 0.9, "start": 0.5, "every": 7, "k": 3, "ridge": 0.1, "device": "cpu"}
"""A value of each setting that is not the default."""
KNOWN = {
    "none": set(),
    "ema": {"decay", "device"},
    "swa": {"start", "every", "device"},
    "lawa": {"start", "every", "k", "device"},
    "rna": {"start", "every", "k", "ridge", "device"},
}


def test_off_unless_a_method_is_named() -> None:
    assert AverageConfig().method == "none"


@pytest.mark.parametrize("method", KNOWN)
@pytest.mark.parametrize("setting", OTHER)
def test_a_method_takes_its_own_settings_only(method: str, setting: str) -> None:
    values = {"method": method, setting: OTHER[setting]}
    if setting in KNOWN[method]:
        config = parse(AverageConfig, values, source="my.yaml")
        assert getattr(config, setting) == OTHER[setting]
    else:
        with pytest.raises(ConfigError, match=f"{setting} is for .*, not for {method}") as caught:
            parse(AverageConfig, values, source="my.yaml")
        assert f"or leave average.{setting} out" in str(caught.value)


@pytest.mark.parametrize("method", KNOWN)
def test_what_is_written_out_is_read_again(method: str) -> None:
    config = parse(AverageConfig, {"method": method}, source="my.yaml")
    assert parse(AverageConfig, config.model_dump(), source="my.yaml") == config


@pytest.mark.parametrize(("values", "begin"), [({}, 0.75), ({"start": 0.0}, 0.0), ({"start": 0.5}, 0.5)])
def test_swa_begins_late_unless_told_otherwise(values: dict[str, Any], begin: float) -> None:
    assert parse(AverageConfig, {"method": "swa", **values}, source="my.yaml").begin == begin
    assert AverageConfig(method="lawa").begin == AverageConfig(method="ema").begin == 0


@pytest.mark.parametrize(
    ("values", "cure"),
    [
        ({"method": "emma"}, "method: expected 'none', 'ema', 'swa', 'lawa' or 'rna'"),
        ({"method": "ema", "decay": 1}, "decay: expected less than 1"),
        ({"method": "lawa", "k": 1}, "k: expected greater than or equal to 2"),
        ({"method": "swa", "start": 1}, "start: expected less than 1"),
        ({"method": "swa", "device": "gpu"}, "device: expected 'same' or 'cpu'"),
        ({"method": "swa", "from": 0.5}, "from: unknown key"),
        ({"method": "ema", "k": 3}, "k is for rna and lawa, not for ema. Write average.method=lawa"),
        ({"method": "swa", "decay": 0.9}, "decay is for ema, not for swa. Write average.method=ema"),
        (
            {"every": 5},
            "every is for swa, rna and lawa, not for none. Write average.method=lawa, or leave average.every",
        ),
    ],
)
def test_mistakes_name_their_cure(values: dict[str, Any], cure: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(AverageConfig, values, source="my.yaml")
    assert cure in str(caught.value)


def test_all_contradictions_are_told_at_once() -> None:
    with pytest.raises(
        ConfigError, match=r"(?s)every is for swa, rna and lawa, not for ema\..*k is for rna and lawa, not for ema"
    ):
        parse(AverageConfig, {"method": "ema", "every": 5, "k": 3}, source="my.yaml")
