"""Trainings whose rows are drawn by their losses: the same for any micro-batches, killed and resumed or not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.conftest import trains
from tests.run_files import read_losses, read_metrics, write_lines
from tests.stopping import stop_after
from workbench.errors import Stopped
from workbench.training.sampling.loss_based import ImportanceSampling

RECIPE = """
recipe: sft
model: {{id: {model}, weights: float32}}
adapter: {{method: lora, rank: 4, alpha: 8, dropout: 0.1}}
data: {{train: {train}, held_out: 0.1, limit: 40}}
batch: {{size: 8}}
train: {{steps: 18, learning_rate: 2.0e-3}}
evaluate: {{every: null, answers: 0}}
save: {{every: 7}}
"""
SAMPLERS = ["infobatch", "importance", "selective"]


@pytest.fixture
def train(tmp_path: Path, short_stories: str, questions: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    # On these rows it would never pay.
    monkeypatch.setattr(ImportanceSampling, "looks", property(lambda self: self._step % 3 > 0))
    return trains(tmp_path, RECIPE, model=short_stories, train=questions)


def adapter(run: Path) -> dict[str, Tensor]:
    return load_file(run / "adapter" / "adapter_model.safetensors")


@pytest.mark.nightly(but=["importance"])
@pytest.mark.slow
@pytest.mark.parametrize("by", SAMPLERS)
def test_a_resumed_run_has_the_same_bits_and_micro_batches_the_same_losses(
    train: Callable[..., Path], by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    on = f"data.sampling.by={by}"
    whole = train(on, name="whole")
    with monkeypatch.context() as patch:
        stop_after(patch, 10)
        with pytest.raises(Stopped):
            train(on, name="broken")
    broken = train(on, name="broken", resume=True)
    assert all(torch.equal(tensor, adapter(whole)[name]) for name, tensor in adapter(broken).items())
    assert read_losses(broken) == read_losses(whole)
    small = train(on, "batch.tokens_per_device=256", name="small")
    np.testing.assert_allclose(*(read_losses(run) for run in (small, whole)), rtol=1e-4)
    drawn = pd.read_parquet(whole / "dynamics.parquet")["visits"]
    assert drawn.nunique() > 1, "rows come unequally often"


def test_what_a_step_logs_is_the_weighted_mean_over_its_tokens(train: Callable[..., Path]) -> None:
    """With a rate of next to nothing the model stands still: the mean of pruned passes is near that of whole ones."""
    run = train("data.sampling.by=infobatch", "adapter.dropout=0", "train.learning_rate=1e-12", "train.steps=60")
    metrics = pd.DataFrame(read_metrics(run))
    whole, pruned = metrics.iloc[:5], metrics[metrics["drawn_share"] < 1]
    wanted = np.average(whole["loss"], weights=whole["supervised_tokens"])
    found = np.average(pruned["loss"], weights=pruned["supervised_tokens"])
    assert found == pytest.approx(wanted, rel=0.01)
    visits = load_file(next(run.glob("checkpoints/step-*60")) / "dynamics.safetensors")
    late = torch.isin(visits["step"], torch.tensor(pruned["step"].tolist(), dtype=torch.int32))
    early = visits["step"] <= 5
    assert visits["loss"][late].mean() > 1.05 * visits["loss"][early].mean(), "without weights it would not be"


@pytest.mark.nightly(but=["selective"])
@pytest.mark.parametrize("by", SAMPLERS)
def test_labelled_rows_are_sampled_too(tmp_path: Path, short_stories: str, train: Callable[..., Path], by: str) -> None:
    rows = [{"text": f"The {name} has {n} legs.", "label": name} for n in range(15) for name in ("cat", "dog")]
    write_lines(tmp_path / "labels.jsonl", rows)
    text = {"recipe": "classify", "train": f"{tmp_path}/labels.jsonl"}
    overrides = [f"recipe={text['recipe']}", f"data.train={text['train']}", "data.limit=null", "data.held_out=0.2"]
    run = train(*overrides, "train.steps=12", f"data.sampling.by={by}")
    assert len(read_metrics(run)) == 12 and pd.read_parquet(run / "dynamics.parquet")["visits"].nunique() > 1
