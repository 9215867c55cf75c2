"""Kernels that repeat themselves: asked for in training alone, refused in a sentence, and told at a resume."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.conftest import trains
from tests.stopping import stop_after
from workbench.config import RunConfig
from workbench.errors import ConfigError, Stopped
from workbench.runs import run_directory
from workbench.training import determinism
from workbench.training.trainer import Trainer

RECIPE = """
recipe: sft
model: {{id: {model}, weights: float32}}
adapter: {{method: lora, rank: 4}}
data: {{train: {train}, held_out: 0.1}}
batch: {{size: 8, tokens_per_device: 400}}
train: {{steps: 4, deterministic: {asked}}}
evaluate: {{every: null, answers: 0}}
"""
CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")


def config(asked: bool) -> RunConfig:
    return RunConfig.model_validate({"recipe": "sft", "data": {"train": "x.jsonl"}, "train": {"deterministic": asked}})


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (determinism.WORKSPACE, determinism.FLASH):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("asked", [True, False])
def test_a_training_computes_with_them_where_that_is_asked(
    asked: bool, tmp_path: Path, short_stories: str, questions: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, step = list[tuple[bool, bool]](), Trainer.step

    def stepping(self: Trainer, *arguments: object) -> object:
        seen.append((torch.are_deterministic_algorithms_enabled(), torch.backends.cuda.cudnn_sdp_enabled()))
        return step(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Trainer, "step", stepping)
    trains(tmp_path, RECIPE, model=short_stories, train=questions, asked=str(asked).lower())(name="run")
    assert len(seen) == 4 and {repeating for repeating, _ in seen} == {asked}
    assert not (asked and any(cudnn for _, cudnn in seen))
    assert not torch.are_deterministic_algorithms_enabled()
    assert (os.environ.get(determinism.WORKSPACE), os.environ.get(determinism.FLASH)) == (
        (":4096:8", "1") if asked else (None, None)
    )


def test_an_operation_without_such_a_kernel_is_named() -> None:
    def scatter() -> None:
        torch.zeros(4).put_(torch.tensor([0, 1]), torch.ones(2))

    refused = pytest.raises(ConfigError, match=r"train.deterministic: put_ does .* Write train.deterministic=false")
    with refused, determinism.kept(config(True)):
        scatter()
    with determinism.kept(config(False)):
        scatter()
    with pytest.raises(RuntimeError, match="another"), determinism.kept(config(True)):
        raise RuntimeError("another")
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_workspace_that_does_not_repeat_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(determinism.WORKSPACE, ":0:0")
    determinism.prepare(config(False))
    with pytest.raises(ConfigError, match=r"CUBLAS_WORKSPACE_CONFIG=:0:0 .* Write CUBLAS_WORKSPACE_CONFIG=:4096:8"):
        determinism.prepare(config(True))


@pytest.mark.parametrize(
    ("device", "asked", "before", "said"),
    [
        (CPU, False, "here", ""),
        (CUDA, True, "here", ""),
        (CUDA, False, "here", "train.deterministic=true"),
        (CUDA, True, "an A100", "taken on an A100, and this is here"),
        (CPU, False, "an EPYC", "up to rounding, not bit for bit"),
    ],
)
def test_what_a_resumed_run_holds_to(device: torch.device, asked: bool, before: str, said: str) -> None:
    sentence = determinism.of_resumed(config(asked), device, before={"name": before}, here={"name": "here"})
    assert said in sentence and bool(said) == bool(sentence)


def test_a_run_that_goes_on_on_another_device_says_so(
    tmp_path: Path, short_stories: str, questions: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train: Callable[..., Path] = trains(tmp_path, RECIPE, model=short_stories, train=questions, asked="false")
    here = run_directory.hardware()
    with monkeypatch.context() as patch:
        stop_after(patch, step=2)
        patch.setattr(run_directory, "hardware", lambda: {**here, "name": "an EPYC"})
        with pytest.raises(Stopped):
            train(name="run")
    run = train(name="run", resume=True)
    assert "The steps before were taken on an EPYC" in " ".join((run / "log.txt").read_text().split())
