"""Which layers of two models meet, and what is refused: layers that are not there or cannot be compared."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conftest import tiny
from tests.workbench.distillation.matched import LARGER, term
from workbench.config.sections.distill_config import MatchConfig
from workbench.distillation.feature_matching import FeatureMatching, require_layers
from workbench.errors import ConfigError


@pytest.mark.parametrize(
    ("layers", "sizes", "wanted"),
    [
        ("last", (2, 6), {2: 6}),
        ("uniform", (3, 6), {1: 2, 2: 4, 3: 6}),
        ("uniform", (4, 6), {1: 2, 2: 3, 3: 5, 4: 6}),
        ("uniform", (3, 3), {1: 1, 2: 2, 3: 3}),
        ("uniform", (5, 2), {1: 1, 2: 1, 3: 1, 4: 2, 5: 2}),
        ({1: 5}, (4, 6), {1: 5}),
    ],
)
@pytest.mark.parametrize("what", ["hidden_mse", "relation"])
def test_which_layers_meet(layers: Any, sizes: tuple[int, int], wanted: dict[int, int], what: str) -> None:
    ends = [tiny("Llama", num_hidden_layers=size) for size in sizes]
    matching = FeatureMatching([term(what, layers=layers)], *ends, seed=0)
    name = "model.layers.{}" + ("" if what == "hidden_mse" else ".self_attn.q_proj")
    if layers == "uniform" and what == "hidden_mse":
        (own, *_), *rest = [(pair.student[0], pair.teacher[0]) for pair in matching.pairs]
        assert own.read and own.path == "model.layers.0"
    else:
        rest = [(pair.student[0], pair.teacher[0]) for pair in matching.pairs]
    found = {own.path: other.path for own, other in rest}
    assert found == {name.format(own - 1): name.format(other - 1) for own, other in wanted.items()}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"what": "hidden_mse", "layers": {3: 1}}, r"match\.1\.layers: the student has no layer 3 .*Write 0 to 2"),
        ({"what": "hidden_mse", "layers": {2: 9}}, r"the teacher has no layer 9 .*Write 0 to 3, 0 being what enters"),
        ({"what": "relation", "layers": {0: 1}}, r"the student has no layer 0 for relation. Write 1 to 2"),
        ({"what": "attention", "layers": {1: 0}}, r"the teacher has no layer 0 for attention. Write 1 to 3"),
        ({"what": "relation", "layers": {}}, r"match\.1\.layers: names no layer"),
    ],
)
def test_layers_that_are_not_there(settings: dict[str, Any], message: str) -> None:
    student, teacher = tiny("Bert", head="MaskedLM"), tiny("Bert", head="MaskedLM", **LARGER)
    terms = [term("hidden_mse"), MatchConfig.model_validate(settings)]
    for refuse in (
        lambda: require_layers(terms, 2, 3),
        lambda: FeatureMatching(terms, student, teacher, seed=0),
    ):
        with pytest.raises(ConfigError, match=message):
            refuse()


@pytest.mark.parametrize(
    ("settings", "student", "teacher", "message"),
    [
        ({"what": "attention"}, ("Llama", {}), ("Llama", {}), r"0\.what=attention: LlamaForCausalLM .*what=relation"),
        ({"what": "attention"}, ("GPT2", {"num_attention_heads": 2}), ("GPT2", {}), r"has 2 .* teacher 4.*relation"),
        ({"what": "relation"}, ("Llama", {}), ("Falcon", {}), r"layer 2 of FalconForCausalLM .*what=hidden_mse or"),
        (
            {"what": "relation", "heads": 3},
            ("Llama", {}),
            ("Llama", {}),
            r"0\.heads: .* are 16, 32 wide, which 3 heads do not cut evenly. Write one of 1, 2, 4, 8, 16\.",
        ),
        (
            {"what": "relation"},
            ("GPT2", {"hidden_size": 36}),
            ("GPT2", {"hidden_size": 40, "num_attention_heads": 8}),
            r"36, 40 wide, which 8 heads .*one of 1, 2, 4\.",
        ),
    ],
)
def test_what_cannot_be_compared(settings: dict[str, Any], student: Any, teacher: Any, message: str) -> None:
    ends = [tiny(name, **own) for name, own in (student, teacher)]
    with pytest.raises(ConfigError, match=message):
        FeatureMatching([MatchConfig.model_validate(settings)], *ends, seed=0)
