"""Forward and backward passes of a step read no value of a tensor, for which a host would wait for its accelerator.

One read is left, in transformers: at the beginning of each forward pass it looks whether positions begin again, by
which it knows packed rows. Branches for accelerators alone, which a CPU does not come to, are not watched here.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.conftest import trains
from workbench.models import output_heads
from workbench.training.bank_trainer import BankTrainer
from workbench.training.trainer import Trainer

RECIPE = """
recipe: sft
model: {{id: {model}, weights: float32, compute: float32}}
adapter: {{method: lora, rank: 4, alpha: 8}}
data: {{train: {train}, held_out: 0.1}}
batch: {{size: 8, tokens_per_device: 200, packing: false}}
train: {{steps: 3, learning_rate: 1.0e-3}}
evaluate: {{every: null, answers: 0}}
save: {{every: null}}
"""
LIBRARY = "transformers/masking_utils.py"
"""Where transformers reads whether rows are packed."""
aten = torch.ops.aten
READS = {aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten._unique2, aten.equal, aten.unique_consecutive}
"""Operations whose result, or whose shape, a host has to know before it goes on."""
WAYS: dict[str, tuple[str, ...]] = {
    "lora": (),
    "lora with dropout": ("adapter.dropout=0.1",),
    "full": ("adapter={method: full}", "train.learning_rate=1e-4"),
    "a bank": ("recipe=sweep", "sweep.over.seed=[0,1]", "evaluate.every=1"),
    "a student": ("recipe=distill", "distill.teacher.id=backbone"),
}


class Reads(TorchDispatchMode):
    """Where values were read."""

    def __init__(self) -> None:
        super().__init__()
        self.places: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        masks = func.overloadpacket in (aten.index, aten.index_put, aten.index_put_) and any(
            isinstance(each, torch.Tensor) and each.dtype == torch.bool for each in args[1]
        )
        if func.overloadpacket in READS or masks:
            stack = [each for each in traceback.extract_stack()[:-1] if "/torch/" not in each.filename]
            self.places.append(f"{func} at {stack[-1].filename}:{stack[-1].lineno}")
        return func(*args, **(kwargs or {}))


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    """Reads in forward and backward passes of all steps."""
    found = Reads()

    def watched(work: Callable[..., Any]) -> Callable[..., Any]:
        def within(*args: Any, **named: Any) -> Any:
            with found:
                return work(*args, **named)

        return within

    monkeypatch.setattr(Trainer, "backward", watched(Trainer.backward))
    monkeypatch.setattr(BankTrainer, "backward", watched(BankTrainer.backward))
    return found


@pytest.mark.nightly(but=["lora with dropout", "full", "a bank", "a student"])
@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_passes_read_nothing(
    way: tuple[str, ...], reads: Reads, tmp_path: Path, short_stories: str, questions: Path
) -> None:
    with output_heads.whole_last_block(True):  # it counts positions on a CPU alone: test_synchronisation_on_cuda.py
        trains(tmp_path, RECIPE, model=short_stories, train=questions)(*way)
    assert reads.places, "passes were watched"
    assert not {place for place in reads.places if LIBRARY not in place}


def test_a_read_is_noticed() -> None:
    values, found = torch.arange(4.0), Reads()
    with found:
        assert float(values.sum()) == 6
        assert bool((values > 2).any())
        assert len(values[values > 2]) == 1 and len(values.nonzero()) == 3
    assert len(found.places) == 4
