"""Whole runs on the accelerator: restarts, memory that runs out, pages, caches, banks, and what is made of a run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from tests.gpu.conftest import losses, records
from tests.gpu.devices import DEVICE, FEW, HERE, gpu_alone, needs, needs_device
from workbench.cli.verbs import app
from workbench.data.batching import Indices
from workbench.runs.run_directory import hardware
from workbench.training.trainer import Trainer

pytestmark = needs_device

Train = Callable[..., Path]
HALF = ("model.weights=bfloat16", "model.compute=bfloat16")


def adapter(run: Path) -> dict[str, torch.Tensor]:
    (file,) = (run / "adapter").glob("*model.safetensors")
    return load_file(file)


def test_a_run_is_that_of_a_cpu(train: Train, on_cpu: Callable[[], AbstractContextManager[None]]) -> None:
    with on_cpu():
        wanted = losses(train(name="cpu"))
    run = train(name="here")
    assert losses(run) == pytest.approx(wanted, rel=1e-3)
    facts = json.loads((run / "manifest.json").read_text())["hardware"]
    assert facts == hardware() and facts["device"] == DEVICE.type
    assert all(record["peak_bytes"] > 0 for record in records(run))
    assert ("GPU memory" in (run / "report.html").read_text()) == HERE


@pytest.mark.parametrize("weights", ["float32", "bfloat16", "nf4"])
def test_a_resumed_run_ends_at_the_same_bits(weights: str, train: Train) -> None:
    if FEW and weights != "bfloat16":
        pytest.skip("a rehearsal goes on with bfloat16 alone")
    if weights == "nf4":
        needs("bitsandbytes")
    words = (f"model.weights={weights}", "model.compute=auto", "adapter.dropout=0.1")
    words += ("train.deterministic=true",)
    whole = train(*words, name="whole")
    shutil.copytree(whole, whole.parent / "half")
    shutil.rmtree(whole.parent / "half" / "checkpoints" / "step-00000006")
    shutil.rmtree(whole.parent / "half" / "adapter")
    resumed = train(*words, name="half", resume=True)
    assert losses(resumed) == losses(whole)
    one, other = adapter(whole), adapter(resumed)
    assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def test_micro_batches_are_halved_where_memory_runs_out(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    calm = train("batch.tokens_per_device=2000", name="calm")
    backward, tried = Trainer.backward, list[int]()

    def scarce(self: Trainer, rows: Indices, parts: Any = None, *, step: int) -> torch.Tensor:
        tried.append(self.tokens)
        loss = backward(self, rows, parts, step=step)
        if step == 2 and self.tokens > 1000:
            _take_all_memory()
        return loss

    monkeypatch.setattr(Trainer, "backward", scarce)
    assert losses(train("batch.tokens_per_device=2000", name="hurt")) == pytest.approx(losses(calm), rel=1e-4)
    assert tried[0] == 2000 and tried[-1] <= 1000


def _take_all_memory() -> None:
    """Ask for more memory than there is; a CPU, which would give it, raises what an accelerator raises."""
    if HERE:
        torch.empty(2 * torch.cuda.mem_get_info()[1], dtype=torch.uint8, device="cuda")
    raise torch.OutOfMemoryError("no accelerator said so")


@gpu_alone("a CPU computes constant micro-batches, and ends the process that takes too much")
def test_the_largest_micro_batch_that_fits_is_found(tmp_path: Path) -> None:
    import workbench

    words = ["batch.size=256", "train.steps=2", "train.epochs=null", "evaluate={every: null, answers: 0}"]
    free = workbench.run("sft/quickstart", words, out=tmp_path / "free", quiet=True)
    taken = json.loads((free / "manifest.json").read_text())["peak_bytes"]
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(taken / 2 / total)
    try:
        tight = workbench.run("sft/quickstart", words, out=tmp_path / "tight", quiet=True)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    tokens = [json.loads((run / "manifest.json").read_text())["batch"]["tokens_per_device"] for run in (tight, free)]
    assert tokens[0] < tokens[1]
    assert losses(tight) == pytest.approx(losses(free), rel=1e-2)


@gpu_alone("pages move between an NVIDIA GPU and its host")
@pytest.mark.parametrize("name", ["paged_adamw", "paged_adamw8bit"])
def test_pages(name: str, train: Train) -> None:
    needs("bitsandbytes")
    wanted = losses(train(f"optimizer.name={'adamw' if name == 'paged_adamw' else 'adamw8bit'}", name="plain"))
    assert losses(train(f"optimizer.name={name}", name="paged")) == pytest.approx(wanted, rel=1e-3)


@pytest.mark.parametrize("name", ["adamw8bit", "muon", "adafactor"])
def test_other_optimizers(name: str, train: Train, on_cpu: Callable[[], AbstractContextManager[None]]) -> None:
    if FEW and name != "adamw8bit":
        pytest.skip("a rehearsal takes adamw8bit alone")
    if name == "adamw8bit":
        needs("bitsandbytes")
    words = [f"optimizer.name={name}", *(["adapter={method: full}"] if name == "muon" else [])]
    with on_cpu():
        wanted = losses(train(*words, name="cpu"))
    assert losses(train(*words, name="here")) == pytest.approx(wanted, rel=1e-2)


@pytest.mark.parametrize("words", [(), ("train.checkpointing=true",), ("train.compile=true",)], ids=str)
def test_half_precision(words: tuple[str, ...], train: Train) -> None:
    if FEW and words:
        pytest.skip("a rehearsal takes the plain way alone")
    assert losses(train(*HALF, *words, name="half")) == pytest.approx(losses(train(name="whole")), rel=2e-2)


def test_a_prefix_cache_changes_nothing(train: Train) -> None:
    words = ("freeze={policy: static, layers: 0.5, cache: %s}", "train.steps=20")
    without, cached = (train(words[0] % cache, words[1], name=cache.strip("'")) for cache in ("'off'", "memory"))
    assert losses(cached) == pytest.approx(losses(without), rel=1e-4)


def test_a_bank_is_that_of_a_cpu(train: Train, on_cpu: Callable[[], AbstractContextManager[None]]) -> None:
    words = ("recipe=sweep", "sweep.over.seed=[0,1]", "evaluate.every=1")

    def members(bank: Path) -> list[float]:
        return [loss for path in sorted(bank.rglob("metrics.jsonl")) for loss in losses(path.parent)]

    with on_cpu():
        wanted = members(train(*words, name="cpu"))
    assert len(wanted) >= 12
    assert members(train(*words, name="here")) == pytest.approx(wanted, rel=1e-3)


def test_verbs_that_read_a_run(train: Train, tmp_path: Path) -> None:
    run = str(train(*HALF, name="run"))
    told = {}
    for verb, *words in (
        ("evaluate", run),
        ("generate", run, "What comes after 3?"),
        ("merge", run, "--out", str(tmp_path / "merged")),
        ("doctor",),
    ):
        done = CliRunner().invoke(app, [verb, *words])
        assert done.exit_code == 0, done.output
        told[verb] = done.output
    assert (tmp_path / "merged" / "config.json").exists() and told["generate"].strip()
    assert ("cuda:0" in told["doctor"]) == HERE
