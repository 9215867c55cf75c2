"""Techniques of training: a run with one is the same in any micro-batches and after a stop, and another without."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.conftest import trains
from tests.run_files import read_losses
from tests.stopping import stop_after
from workbench.errors import Stopped

RECIPE = """
recipe: sft
model: {{id: {model}, weights: float32, compute: float32}}
adapter: {{method: lora, rank: 4, alpha: 8}}
data: {{train: {train}, held_out: 0.1}}
batch: {{size: 8, packing: false, tokens_per_device: 4000}}
train: {{steps: 6, learning_rate: 5.0e-3}}
evaluate: {{every: null, answers: 0}}
save: {{every: 2}}
"""
FULL = ("adapter={method: full}", "train.learning_rate=1e-3")
TECHNIQUES: dict[str, tuple[str, ...]] = {
    "mixout": ("regularise.mixout=0.3",),
    "mixout of all weights": ("regularise.mixout=0.3", *FULL, "model.weights=bfloat16", "model.compute=bfloat16"),
    "layer drop": ("layer_drop.rate=0.5", "layer_drop.ramp=5"),
    "layer drop of all weights": ("layer_drop={rate: 0.3, rates: even, ramp: null}", *FULL),
    "token drop": ("token_drop.keep=0.4", "adapter.dropout=0.2"),
    "patch drop of all weights": ("token_drop={keep: 0.5, until: null}", *FULL),
    "r-drop": ("regularise.r_drop=5", "adapter.dropout=0.3"),
    "rounded weights": ("train.rounded=int4", *FULL),
    "stacking": ("grow={at: [0.4], factor: 5}", *FULL),
    "stacking in half precision": (
        "grow={at: [0.4], factor: 5}",
        *FULL,
        "model.weights=bfloat16",
        "model.compute=bfloat16",
    ),
}
pytestmark = pytest.mark.slow


@pytest.fixture
def train(
    request: pytest.FixtureRequest, tmp_path: Path, stories: str, short_stories: str, questions: Path
) -> Callable[..., Path]:
    """Over all blocks where the technique is about their number."""
    blocks = any(
        word.startswith(("layer_drop", "token_drop", "grow")) for word in request.node.callspec.params["words"]
    )
    return trains(tmp_path, RECIPE, model=stories if blocks else short_stories, train=questions)


@pytest.mark.nightly(but=["token drop"])
@pytest.mark.parametrize("words", TECHNIQUES.values(), ids=TECHNIQUES)
def test_micro_batches_recomputing_and_a_stop_change_nothing(
    train: Callable[..., Path], words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train(*words, name="whole")
    rel = 2e-2 if "model.compute=bfloat16" in words else 2e-5
    small = train(*words, "batch.tokens_per_device=150", "train.checkpointing=true", name="small")
    assert read_losses(small) == pytest.approx(read_losses(whole), rel=rel)
    with monkeypatch.context() as patch:
        stop_after(patch, step=3)
        with pytest.raises(Stopped):
            train(*words, name="stopped")
    found = train(*words, name="stopped", resume=True)
    assert read_losses(found) == read_losses(whole)
    tensors, wanted = (load_file(next((run / "adapter").glob("*.safetensors"))) for run in (found, whole))
    assert all(torch.equal(tensors[name], wanted[name]) for name in wanted)
    techniques = ("regularise", "layer_drop", "token_drop", "grow", "train.rounded")
    kept = [word for word in words if not word.startswith(techniques)]
    assert read_losses(train(*kept, name="without")) != pytest.approx(read_losses(whole), rel=1e-4)
