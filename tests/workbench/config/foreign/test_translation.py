"""Settings of another tool's file get an outcome each, at any depth."""

from __future__ import annotations

from typing import Any

import pytest

from workbench.config.foreign.translation import Translation, no_effect, told
from workbench.errors import ConfigError

FILE = {"a": 1, "b": {"c": [{"d": 2}, {"d": None}], "e.f": "x"}, "g": [], "h_1": True, "h_2": 0}


def test_settings_are_left_by_their_paths_until_they_have_an_outcome() -> None:
    translation = Translation(FILE)
    assert translation.left == {"a": 1, "b.c[0].d": 2, "b.c[1].d": None, "b.'e.f'": "x", "g": [], "h_1": True, "h_2": 0}
    translation.move("a", "train.steps", Translation.whole)
    translation.at("b.c[0]").apply({"d": told("look here."), "z": told("never.")})
    translation.apply(no_effect("h_*"))
    translation.finish()
    assert translation.recipe == {"train": {"steps": 1}}
    assert translation.report() == {
        "Look at": ["b.c[0].d: 2: look here."],
        "No equivalent": ["b.'e.f': x"],
        "Decided here, or without effect on what is learnt": ["h_1, h_2, b.c[1].d, g"],
        "Translated": ["a -> train.steps"],
    }


def test_a_setting_that_is_told_and_has_a_place_is_named_once() -> None:
    translation = Translation({"a": 1})
    translation.look("look.", "a", "a")
    translation.give("seed", 1, "a")
    assert translation.looks == ["a: 1: look."] and not translation.translated


@pytest.mark.parametrize(
    "read,value",
    [
        *((Translation.number, value) for value in (True, [], {"a": 1}, "x", "", float("nan"), 10**400, "1e999")),
        *((Translation.whole, value) for value in (0.5, "1.5", True)),
        *((Translation.flag, value) for value in (1, "true", [True])),
        *((Translation.text, value) for value in (True, ["x"], {})),
        *((Translation.texts, value) for value in (True, 1, [1], ["a", None], {"a": 1})),
        *((Translation.entries, value) for value in (1, ["a"], [{}], {"a": 1}, [{"a": 1}, None])),
    ],
)
def test_a_value_of_another_kind_is_refused_by_its_path(read: Any, value: Any) -> None:
    settings = Translation({"s": {"k": value}}).at("s")
    if value == "":
        assert read(settings, "k") is None
    else:
        with pytest.raises(ConfigError, match=r"^s\.k: expected "):
            read(settings, "k")


def test_a_deep_value_is_refused() -> None:
    deep: Any = {}
    for _ in range(5_000):
        deep = {"a": deep or 1}
    with pytest.raises(ConfigError, match="nested too deeply"):
        Translation(deep)
