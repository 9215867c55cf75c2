"""Checkpoints of shards: each process reads, hashes and writes its own part, and any other number of them goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.matrix import LAYOUTS
from tests.workbench.training.distributed import layouts
from tests.workbench.training.distributed.test_layouts import METHODS, write_recipe
from workbench.training import checkpoints

pytestmark = pytest.mark.slow

SLACK = 4096
"""Bytes of headers, of counts of steps, and of what does not divide by the number of processes."""


@pytest.mark.nightly(but=["zero3-fsdp2_3"])
@pytest.mark.parametrize(
    ("before", "after"),
    [("zero3", "fsdp2_3"), ("zero2", "zero3"), ("fsdp2_3", "zero1"), ("zero1", "zero2"), ("ddp", "zero3_cpu")],
)
def test_saved_by_four_processes_and_read_by_two_and_by_one_bit_for_bit(
    before: str, after: str, tmp_path: Path, short_stories: str
) -> None:
    write_recipe(tmp_path, Path(short_stories))
    words = [f"adapter={METHODS['full']}", "train.steps=2", "save.every=null", "evaluate.every=null"]
    layouts.in_processes(tmp_path, [("4", [*words, f"distributed={LAYOUTS[before]}"], None)], processes=4)
    for origin, name in (("4", "2"), ("2", "1")):
        job = (name, [*words, f"distributed={LAYOUTS[after]}"], origin)
        layouts.in_processes(tmp_path, [job], "checkpoints", processes=int(name))
    paths = {name: tmp_path / name / "checkpoints" / "step-00000002" for name in "421"}
    for stem in ("trainable", "optimizer"):
        found = {name: checkpoints.read_tensors(path, stem) for name, path in paths.items()}
        for name in "21":
            assert found[name].keys() == found["4"].keys()
            for key, value in found["4"].items():
                assert value.dtype == found[name][key].dtype and torch.equal(value, found[name][key]), key
    whole = sum(
        each.nbytes for each in (*found["1"].values(), *checkpoints.read_tensors(paths["1"], "trainable").values())
    )
    files = sum(each.stat().st_size for each in paths["4"].glob("*.safetensors"))
    by_rank = [json.loads((tmp_path / f"2.{rank}.json").read_text()) for rank in range(2)]
    for kind, total in (("read", whole), ("written", whole), ("verified", files)):
        own = [each[kind] for each in by_rank]
        assert sum(own) == pytest.approx(total, abs=SLACK), kind
        assert max(own) <= 0.6 * total, kind
    assert all(each["hashed"] == pytest.approx(each["written"], abs=4 * SLACK) for each in by_rank)
