"""cuDNN may compute attention where rows have one length, and nowhere else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.workbench.training.freezing.fits import build, configured, train
from workbench.models import cudnn_attention
from workbench.training.trainer import Trainer

enabled = torch.backends.cuda.cudnn_sdp_enabled


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    before = enabled()
    yield
    torch.backends.cuda.enable_cudnn_sdp(before)


@pytest.mark.parametrize(
    ("lengths", "may"),
    [([[7, 7, 7]], True), ([[7, 8]], False), ([[7, 7], [7]], True), ([[7, 7], [8, 8]], False)],
)
def test_rows_of_one_length_alone(lengths: list[list[int]], may: bool) -> None:
    with cudnn_attention.allowed([np.array(each) for each in lengths]):
        assert enabled() == may
    assert not enabled()


def test_a_training_asks_by_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, steps = list[tuple[bool, bool]](), Trainer._steps

    def noting(self: Trainer, began: float) -> None:
        same = int(self.train.lengths.min()) == int(self.train.lengths.max())
        seen.append((enabled(), same))
        steps(self, began)

    monkeypatch.setattr(Trainer, "_steps", noting)
    train(build("Llama"), configured(train={"steps": 1}), tmp_path / "run")
    ((may, same),) = seen
    assert may == same and not enabled()
