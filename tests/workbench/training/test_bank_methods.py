"""A bank of unlike methods trains each member as if it were alone, however the rows are computed, and resumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import tiny
from tests.workbench.training.test_bank_trainer import assert_same, head_outputs
from tests.workbench.training.together import (
    LabelledSet,
    Silent,
    Texts,
    Together,
    Trained,
    bert,
    class_outputs,
    section,
)
from workbench.errors import Stopped

METHODS: list[dict[str, Any]] = [
    {"method": "houlsby", "dropout": 0.3, "activation": "gelu", "width": 6},
    {"dropout": 0.3},
    {"method": "ia3"},
    {"method": "dora", "dropout": 0.2},
]
CONFIGS = [section(seed=seed, steps=3 + seed, size=4 + seed, adapter=each) for seed, each in enumerate(METHODS)]


@pytest.mark.nightly(but=["llama"])
@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_each_member_learns_what_it_learns_alone(kind: str, tmp_path: Path) -> None:
    """In several micro-batches, of padded and of packed rows; members end one after the other."""
    llama = tiny("Llama").double().requires_grad_(False) if kind == "llama" else bert()
    of, outputs = (Texts, head_outputs) if kind == "llama" else (LabelledSet, class_outputs)
    data = [of(23 + seed, seed) for seed in range(4)]

    def fit(name: str, chosen: slice, **how: Any) -> Trained:
        return Together(llama, data[chosen], CONFIGS[chosen], tmp_path / name, outputs, **how).fit()

    single = [fit(str(number), slice(number, number + 1), tokens=10_000) for number in range(4)]
    wanted = Trained([each.losses[0] for each in single], [each.tensors[0] for each in single])
    assert [len(curve) for curve in wanted.losses] == [3, 4, 5, 6]
    for tokens, packed in ((60, False), (10_000, True)):
        if not packed or kind == "llama":
            found = fit(f"{tokens}-{packed}", slice(0, 4), tokens=tokens, packed=packed)
            assert_same(found, wanted, losses=1e-5, adapters=1e-4)


@pytest.mark.slow
def test_activations_that_are_computed_again_change_nothing(tmp_path: Path) -> None:
    llama, data = tiny("Llama").double().requires_grad_(False), [Texts(23, seed) for seed in range(4)]
    again = [
        each.model_copy(update={"train": each.train.model_copy(update={"checkpointing": True})}) for each in CONFIGS
    ]
    found, wanted = (
        Together(llama, data, configs, tmp_path / name, head_outputs, tokens=200).fit()
        for name, configs in (("again", again), ("kept", CONFIGS))
    )
    assert_same(found, wanted, losses=1e-9, adapters=1e-9)


def test_stopped_in_the_middle_and_resumed_it_ends_in_the_same_bits(tmp_path: Path) -> None:
    data = [LabelledSet(20, seed) for seed in range(4)]
    whole = Together(bert(), data, CONFIGS, tmp_path / "whole", class_outputs).fit()
    broken = Together(bert(), data, CONFIGS, tmp_path / "broken", class_outputs)
    with pytest.raises(Stopped):
        broken.fit(Silent(stop_after=4))
    found = broken.fit(resume=True)
    assert found.losses == whole.losses
    for tensors, wanted in zip(found.tensors, whole.tensors, strict=True):
        assert tensors.keys() == wanted.keys() and all(torch.equal(tensors[name], wanted[name]) for name in wanted)
