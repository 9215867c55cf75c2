"""Masters that come and go with the layers that train change no bit of a training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.workbench.training.freezing.fits import assert_same_bits, build, configured, interrupted, train
from workbench.training.master_weights import MasterWeights
from workbench.training.trainer import Trainer

FULL: dict[str, Any] = {"method": "full"}
LISA: dict[str, Any] = {"policy": "lisa", "active": 1, "every": 2}


def test_lisa_in_half_precision_has_masters_of_what_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, config = (
        build("Llama", tie_word_embeddings=False),
        configured(adapter=FULL, freeze=LISA, train={"epochs": 3}),
    )
    away: list[set[str]] = []

    def look(fit: Trainer) -> None:
        assert isinstance(fit.masters, MasterWeights)
        away.append({name for name, master in fit.masters.named().items() if not master.requires_grad})
        assert away[-1] == fit.freezer.frozen == fit.masters._in_files.keys()

    found = train(model, config, tmp_path / "found", compute=torch.bfloat16, look=look)
    assert len({frozenset(each) for each in away}) > 1, "the same blocks always trained"
    broken = interrupted(model, config, tmp_path / "broken", after=5, compute=torch.bfloat16)
    monkeypatch.setattr(MasterWeights, "_move_to_file", lambda *_: None)
    wanted = train(model, config, tmp_path / "wanted", compute=torch.bfloat16)
    assert_same_bits(found, wanted)
    assert_same_bits(broken, wanted)
