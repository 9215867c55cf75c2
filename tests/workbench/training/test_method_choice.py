"""Weights that are chosen before the first step: the same in a resumed run and for any micro-batch; pruned ones too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.workbench.training.freezing.fits import Trained, assert_same_bits, build, configured, interrupted, train
from workbench.adapters import SparseTuning
from workbench.errors import Stopped
from workbench.training.trainer import Trainer

SPARSE: dict[str, Any] = {"adapter": {"method": "sparse", "share": 0.05, "rows": 5}}
ALONG: dict[str, Any] = {"adapter": {"method": "lora-ga", "rank": 3, "alpha": 6, "rows": 5}}
PRUNED: dict[str, Any] = {"adapter": {"method": "full", "sparsity": 0.5}}


def _places(trained: Trained) -> dict[str, list[int]]:
    return {path: each.tolist() for path, each in SparseTuning().chosen(trained.fit.model).items()}  # type: ignore[arg-type]


def test_chosen_weights_are_those_of_the_run_wherever_it_stopped(tmp_path: Path) -> None:
    model = build("Llama", blocks=2, tie_word_embeddings=False)
    whole = train(model, configured(**SPARSE), tmp_path / "whole")
    resumed = interrupted(model, configured(**SPARSE), tmp_path / "parts", after=3)
    assert_same_bits(resumed, whole)
    assert _places(resumed) == _places(whole)
    small = train(model, configured(**SPARSE, batch={"tokens_per_device": 20}), tmp_path / "small")
    assert _places(small) == _places(whole) and small.losses == pytest.approx(whole.losses, rel=1e-5)


@pytest.mark.nightly(but=["compute1"])
@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
def test_a_start_along_gradients_is_that_of_the_run_wherever_it_stopped(compute: torch.dtype, tmp_path: Path) -> None:
    """Also for what remembers where values began; only the rows that it looks at decide it."""
    model = build("Llama", blocks=2, tie_word_embeddings=False)
    holding = {"optimizer": {"l2_start": 0.1}, "regularise": {"mixout": 0.2}}
    config = configured(**ALONG, **holding)
    whole = train(model, config, tmp_path / "whole", compute=compute)
    resumed = interrupted(model, config, tmp_path / "parts", after=3, compute=compute)
    assert_same_bits(resumed, whole)
    for found in (whole, resumed):
        starts, (member, mixout) = found.fit.choice.state(), (found.fit.member, found.fit.step_noise.mixout)
        assert starts and all(bool(each.any()) for each in starts.values())
        assert member.start and member.start.keys() == mixout.start.keys()  # changes of the start, which begin at zero
        assert not any(each.any() for each in [*member.start.values(), *mixout.start.values()])
    if compute is torch.float32:
        small = train(model, configured(**ALONG, batch={"tokens_per_device": 20}), tmp_path / "small")
        large = train(model, configured(**ALONG, batch={"tokens_per_device": 400}), tmp_path / "large")
        assert small.losses == pytest.approx(large.losses, rel=1e-5)


@pytest.mark.parametrize("section", [SPARSE, ALONG], ids=["sparse", "lora-ga"])
def test_looking_leaves_no_gradient_behind(section: dict[str, Any], tmp_path: Path) -> None:
    """With masters of values that compute in half precision, too, which gather gradients."""
    model = build("Llama", blocks=2, tie_word_embeddings=False)
    fit = train(model, configured(**section, train={"steps": 1, "epochs": 1}), tmp_path, compute=torch.bfloat16).fit
    fit.choice.make()
    assert all(each.grad is None for each in [*fit.masters, *fit.model.parameters()])


def test_a_resumed_run_takes_the_places_of_its_checkpoint(tmp_path: Path) -> None:
    """Not those that gradients would say on the machine that resumes it, whose last bits may be others."""
    model = build("Llama", blocks=2, tie_word_embeddings=False)
    moved = []

    def shift(fit: Trainer) -> None:
        if fit.member.progress.step == 1:
            for each in fit.choice.state().values():
                each.copy_(each.flip(0))
        moved.append(_flat(fit))

    with pytest.raises(Stopped):
        train(model, configured(**SPARSE), tmp_path, stop_after=2, look=shift)
    again = train(model, configured(**SPARSE), tmp_path, resume=True)
    assert np.array_equal(_flat(again.fit), moved[-1])


def _flat(fit: Trainer) -> np.ndarray[Any, Any]:
    return np.concatenate([each.numpy() for each in fit.choice.state().values()])


def test_a_pruned_model_stays_sparse_to_the_end_and_resumes(tmp_path: Path) -> None:
    model, config = build("Llama", blocks=2, tie_word_embeddings=False), configured(**PRUNED, train={"epochs": 1})
    whole = train(model, config, tmp_path / "whole", compute=torch.bfloat16)
    for name, each in whole.shipped.items():
        assert not (zero := (each == 0)).any() or int(zero.sum()) == each.numel() // 2, name
        assert bool(zero.any()) == ("_proj" in name), name
    assert_same_bits(interrupted(model, config, tmp_path / "parts", after=2, compute=torch.bfloat16), whole)
