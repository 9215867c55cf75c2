"""A run over a 2:4 backbone: each verb that loads it prunes alike, and a resumed run is the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from workbench.adapters import anatomy
from workbench.adapters.weights import semi_structured
from workbench.config import RunConfig
from workbench.errors import ConfigError, Stopped
from workbench.models import exported
from workbench.planning.solver import formats
from workbench.recipes.verbs.export import export
from workbench.recipes.verbs.merge import merge
from workbench.recipes.verbs.run import run as run_config
from workbench.runs import run_directory
from workbench.training.callbacks import Silent

SPARSE = {"weights": "bfloat16", "compute": "float32", "sparsity": "2:4"}


class Halting(Silent):
    """Asks for an end after two steps."""

    def __init__(self) -> None:
        self._now = 0

    def step(self, record: dict[str, Any], *, total: int) -> None:
        self._now = record["step"]

    def stop_requested(self) -> bool:
        return self._now >= 2


def test_every_verb_prunes_alike(save_run: Callable[..., Path], short_stories: str, tmp_path: Path) -> None:
    run = save_run(model={"id": short_stories, **SPARSE})
    shipped = exported.load(run, run_directory.read_config(run))
    model: Any = shipped.model
    kept_OI = anatomy.dense_weight(model.base_model.model.model.layers[0].mlp.up_proj.base_layer)
    again_OI = kept_OI.clone()
    semi_structured.drop_smaller(again_OI)
    assert torch.equal(again_OI, kept_OI) and int((kept_OI == 0).sum()) >= kept_OI.numel() // 2
    # From the files in float32, which the run stores in bfloat16: the same weights are gone.
    merged = merge(run, out=tmp_path / "merged", weights="float32")
    assert "pruned 2:4, plus adapter" in merged.sentence and merged.agreement.kl < 1e-3
    assert "scatter_" in export(run, to="peft", out=tmp_path / "peft").usage
    with pytest.raises(ConfigError, match=r"all its weights.*Write --merge"):
        export(run, to="vllm", out=tmp_path / "vllm")


def test_a_plan_does_not_pack_what_is_pruned() -> None:
    config = RunConfig.model_validate({"recipe": "sft", "data": {"train": "rows.jsonl"}})
    assert formats(config) == ["auto", "nf4"]
    pruned = config.model_copy(update={"model": config.model.model_copy(update={"sparsity": "2:4"})})
    assert formats(pruned) == ["auto"]


@pytest.mark.slow
def test_a_resumed_run_is_the_same(tmp_path: Path, short_stories: str) -> None:
    rows = "".join(f'{{"prompt": "{n} and one", "completion": " is {n + 1}."}}\n' for n in range(40))
    (tmp_path / "rows.jsonl").write_text(rows)
    config = RunConfig.model_validate(
        {
            "recipe": "sft",
            "model": {"id": short_stories, **SPARSE},
            "adapter": {"method": "lora", "rank": 2},
            "data": {"train": str(tmp_path / "rows.jsonl")},
            "batch": {"size": 8},
            "train": {"steps": 4, "learning_rate": 1e-2},
            "evaluate": {"every": None, "answers": 2, "max_new_tokens": 4},
            "save": {"every": None},
        }
    )
    whole, halted = tmp_path / "whole", tmp_path / "halted"
    run_config(config, out=whole, resume=False, callback=Silent())
    with pytest.raises(Stopped):
        run_config(config, out=halted, resume=False, callback=Halting())
    run_config(config, out=halted, resume=True, callback=Silent())
    files = [folder / "adapter" / "adapter_model.safetensors" for folder in (whole, halted)]
    assert files[0].read_bytes() == files[1].read_bytes()
