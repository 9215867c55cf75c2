"""Which layout a run takes that leaves it open, and when it keeps the one that it began with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from workbench.config import RunConfig
from workbench.config.yaml_text import dump_yaml
from workbench.recipes.load import load
from workbench.recipes.verbs import layout
from workbench.runs.ranks import ALONE

ROOMY = 10**12


def config(*words: str) -> RunConfig:
    return load("sft/quickstart", words)


def began(path: Path, devices: int, *words: str) -> Path:
    (path / "config.yaml").write_text(dump_yaml(config(*words).model_dump(mode="json", exclude_unset=True)))
    (path / "manifest.json").write_text(json.dumps({layout.NOTE: {"devices": devices}}))
    return path


def test_each_device_holds_all_where_that_plainly_fits() -> None:
    assert config().distributed.zero == config("distributed=auto").distributed.zero == "auto"
    found = layout.for_memory(config(), ROOMY, devices=2)
    assert found.config == config("distributed.zero=0") and "of weights and states" in found.why
    assert layout.decided(config(), ALONE).config.distributed.zero == 0
    assert found.told(2)["layout"] == "each device holds all" and not found.tried


@pytest.mark.parametrize("words", [["distributed.zero=2"], ["distributed={engine: fsdp2, zero: 3}"]])
def test_what_is_written_is_obeyed(words: list[str]) -> None:
    found = layout.decided(config(*words), ALONE)
    assert found.config == config(*words) and found.why == "as written"


def test_a_run_keeps_its_layout_on_as_many_devices(tmp_path: Path) -> None:
    begun = began(tmp_path, 2, "distributed={engine: fsdp2, zero: 3}")
    kept = layout.for_memory(config(), ROOMY, devices=2, begun=begun)
    assert kept.config.distributed.words == "fsdp2, zero=3" and kept.why == "as the run began"
    assert (
        layout.for_memory(config(), ROOMY, devices=4, begun=begun).config.distributed.words == "each device holds all"
    )


def test_only_what_was_left_open_is_as_the_run_began(tmp_path: Path) -> None:
    begun = began(tmp_path, 2, "distributed.zero=1", "train.checkpointing=0.5")
    kept = layout.for_memory(config(), ROOMY, devices=2, begun=begun).config
    assert kept.train.checkpointing == 0.5
    changed = layout.for_memory(config("train.checkpointing=true"), ROOMY, devices=2, begun=begun).config
    assert changed.train.checkpointing is True and changed.distributed.zero == 1
