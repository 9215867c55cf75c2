"""A run is a pure function of its configuration: micro-batches, checkpointing and restarts change nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import workbench
from tests.conftest import trains
from tests.run_files import read_losses, read_metrics, read_scores
from tests.stopping import stop_after
from tests.workbench.training.freezing.fits import build, configured
from tests.workbench.training.freezing.fits import train as train_tiny
from workbench.data.batching import Indices
from workbench.errors import ResumeError, Stopped, TrainingError
from workbench.runs.ranks import Ranks
from workbench.training import checkpoints, trainer
from workbench.training.adapter_trainer import AdapterTrainer

RECIPE = """
recipe: sft
model: {{id: {model}, weights: float32}}
adapter: {{method: lora, rank: 4, alpha: 8}}
data: {{train: {train}, held_out: 0.1}}
batch: {{size: 8}}
train: {{steps: 20, learning_rate: 2.0e-3}}
evaluate: {{every: null, answers: 0}}
save: {{every: null}}
"""


@pytest.fixture
def train(tmp_path: Path, short_stories: str, questions: Path) -> Callable[..., Path]:
    return trains(tmp_path, RECIPE, model=short_stories, train=questions)


def _adapter(run: Path) -> torch.Tensor:
    tensors = load_file(run / "adapter" / "adapter_model.safetensors")
    return torch.cat([tensors[name].flatten() for name in sorted(tensors)])


def _assert_same_curve(run: Path, reference: Path) -> None:
    torch.testing.assert_close(
        torch.tensor(read_losses(run), dtype=torch.float64),
        torch.tensor(read_losses(reference), dtype=torch.float64),
        rtol=1e-5,
        atol=0,
    )
    found, wanted = _adapter(run), _adapter(reference)
    assert (found - wanted).norm() <= 1e-4 * wanted.norm()


def test_same_curve_for_any_micro_batch_and_with_checkpointing(train: Callable[..., Path]) -> None:
    """20 steps over 108 rows in batches of 8: the 14th batch is partial and the second epoch begins.

    The learning rate is ten times the default. At fifty times, Adam amplifies rounding to about 2e-5, past the bound.
    """
    whole = train("batch.tokens_per_device=100000", name="whole")
    assert len(read_losses(whole)) == 20
    assert read_losses(whole)[-1] < 0.7 * read_losses(whole)[0]
    assert {record["tokens"] for record in read_metrics(whole)} != {read_metrics(whole)[0]["tokens"]}
    longest = _longest(whole)
    one = train(f"batch.tokens_per_device={longest}", name="one")
    recomputed = train("train.checkpointing=true", f"batch.tokens_per_device={4 * longest}", name="recomputed")
    for run in (one, recomputed):
        _assert_same_curve(run, whole)


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")  # the compiler warns about itself
def test_compiled_layers_learn_the_same(train: Callable[..., Path], short_stories: str) -> None:
    """Batches of several lengths meet one compiled program; fused kernels round differently, no more.

    Rows are not as many as a head is wide: sizes that are equal when a program is compiled stay equal in it.
    """
    words = ["train.steps=4", "batch.size=6", "adapter.targets=[v_proj, down_proj]", f"model.id={short_stories}"]
    eager = train(*words, name="eager")
    compiled = train(*words, "train.compile=true", name="compiled")
    assert len({record["tokens"] for record in read_metrics(eager)}) > 1
    torch.testing.assert_close(torch.tensor(read_losses(compiled)), torch.tensor(read_losses(eager)), rtol=1e-4, atol=0)
    assert (_adapter(compiled) - _adapter(eager)).norm() <= 1e-2 * _adapter(eager).norm()


@pytest.mark.nightly
def test_full_fine_tuning_has_the_same_curve_for_any_micro_batch(train: Callable[..., Path]) -> None:
    full = ["adapter={method: full}", "train.learning_rate=1e-3", "train.steps=8"]
    whole = train(*full, "batch.tokens_per_device=100000", name="whole")
    parts = train(*full, f"batch.tokens_per_device={_longest(whole)}", name="parts")
    torch.testing.assert_close(torch.tensor(read_losses(parts)), torch.tensor(read_losses(whole)), rtol=1e-5, atol=0)
    found, wanted = (load_file(run / "adapter" / "model.safetensors") for run in (parts, whole))
    for name, tensor in wanted.items():
        assert (found[name] - tensor).norm() <= 1e-4 * tensor.norm()


def test_a_budget_below_the_longest_row_is_refused(train: Callable[..., Path]) -> None:
    with pytest.raises(workbench.errors.ConfigError, match=r"below the longest example \(\d+ tokens, questions.jsonl"):
        train("batch.tokens_per_device=10")


def test_running_out_of_memory_repeats_the_step_in_smaller_pieces(
    train: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    calm = train("batch.tokens_per_device=100000", name="calm")
    original, tokens = trainer.Trainer.backward, []

    def scarce(self: trainer.Trainer, rows: Indices, parts: Any = None, *, step: int) -> torch.Tensor:
        tokens.append(self.tokens)
        loss = original(self, rows, parts, step=step)
        if self.member.progress.step == 3 and self.tokens > 1000:
            raise torch.OutOfMemoryError("fake")  # after gradients were added up
        return loss

    monkeypatch.setattr(trainer.Trainer, "backward", scarce)
    hurt = train("batch.tokens_per_device=100000", name="hurt")
    assert tokens[0] == 100_000 and tokens[-1] <= 1000
    _assert_same_curve(hurt, calm)


@pytest.mark.parametrize(("wanted", "kept"), [("auto", 45), (90, None)])
def test_what_fitted_while_training_is_remembered_where_the_run_chose_it(
    wanted: str | int, kept: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path))
    config = configured(train={"steps": 1}, batch={"size": 4, "tokens_per_device": wanted})
    fit = train_tiny(build("Llama"), config, tmp_path / "run").fit
    assert fit._remembered.read() is None
    fit._go_on_with(45)
    assert fit._remembered.read() == (kept and (kept, False))
    assert fit._largest_that_fits(90) == (kept or 90)  # a pass over the longest rows, as an accelerator begins with


@pytest.mark.parametrize(("family", "recomputes"), [("Bert", True), ("Llama", False)])
def test_a_prefix_that_needs_no_cache_is_recomputed_where_one_example_does_not_fit(
    family: str, recomputes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configured(adapter={"method": "p-tuning-v2", "virtual_tokens": 3}, train={"steps": 1})
    fit = train_tiny(build(family), config, tmp_path / "run").fit
    tried: list[object] = []

    def trial(_: object) -> None:
        tried.append(fit.keeping.now)
        if fit.keeping.now is not True:
            raise torch.OutOfMemoryError("fake")

    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path))
    monkeypatch.setattr(fit, "_trial", trial)
    if recomputes:
        assert fit._largest_that_fits(45) == fit._longest and dict.fromkeys(tried) == dict.fromkeys(
            [False, "elementwise", 0.5, True]
        )
        assert any(getattr(each, "gradient_checkpointing", False) for each in fit.freezer.backbone.modules())
    else:
        with pytest.raises(TrainingError):
            fit._largest_that_fits(45)
        assert set(tried) == {False}


def test_running_out_of_memory_in_the_optimizer_never_applies_a_step_twice(
    train: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    original, taken = torch.optim.AdamW.step, []

    def scarce(self: torch.optim.AdamW, closure: Any = None) -> None:
        original(self)
        taken.append(1)
        if len(taken) == 4:
            raise torch.OutOfMemoryError("fake")

    monkeypatch.setattr(torch.optim.AdamW, "step", scarce)
    with pytest.raises(TrainingError, match=r"Out of memory in the optimizer, at step 4\.\n.* --resume"):
        train("save.every=2", name="hurt")
    assert len(taken) == 4
    resumed = train("save.every=2", name="hurt", resume=True)
    _assert_same_curve(resumed, train(name="calm"))


def test_one_of_several_devices_that_runs_out_of_memory_says_what_fits(
    train: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def scarce(self: trainer.Trainer, rows: Indices, parts: Any = None, *, step: int) -> torch.Tensor:
        self.ranks = Ranks(0, 2)
        raise torch.OutOfMemoryError("fake")

    monkeypatch.setattr(trainer.Trainer, "backward", scarce)
    with pytest.raises(TrainingError, match=r"on every device\.\n.*workbench run .* batch\.tokens_per_device=50000"):
        train("batch.tokens_per_device=100000")


def test_a_loss_that_is_not_finite_stops_the_run(train: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    original = AdapterTrainer.update

    def poisoned(self: AdapterTrainer, loss: float, norm: float, rows: Indices) -> dict[str, Any] | None:
        return original(self, float("nan") if self.progress.step == 6 else loss, norm, rows)

    monkeypatch.setattr(AdapterTrainer, "update", poisoned)
    with pytest.raises(TrainingError) as caught:
        train("save.every=2")
    text = str(caught.value)
    assert "The loss is not finite at step 7" in text and "questions.jsonl, row" in text and "step-00000006" in text
    assert "Lower train.learning_rate" in text


def test_an_exploding_loss_stops_the_run(train: Callable[..., Path]) -> None:
    with pytest.raises(TrainingError, match=r"Lower train\.learning_rate"):
        train("train.learning_rate=30", "train.max_grad_norm=1000", "schedule.warmup=0.5", "train.steps=60")


def test_patience_stops_early_and_the_best_adapter_is_shipped(
    train: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = trainer.Trainer.work

    def worse_after_six(self: trainer.Trainer) -> checkpoints.Progress:
        real = self.held_out_loss
        self.held_out_loss = lambda: real() + (100.0 if self.member.progress.step > 6 else 0.0)
        return original(self)

    monkeypatch.setattr(trainer.Trainer, "work", worse_after_six)
    run = train("evaluate.every=2", "evaluate.patience=3", "save.ship=best")
    held_out = {r["step"]: r["held_out_loss"] for r in read_metrics(run) if "held_out_loss" in r}
    assert held_out[2] > held_out[4] > held_out[6] and list(held_out) == [2, 4, 6, 8, 10, 12]
    assert len(read_metrics(run)) == 12
    assert (run / "checkpoints" / "step-00000012").exists()  # where it ended, so that a resume does nothing again
    best = checkpoints.read_tensors(run / "checkpoints" / "best", "trainable")
    scores = read_scores(run)
    assert scores["after"]["loss"] == pytest.approx(held_out[6], rel=1e-4)
    assert sum(tensor.numel() for tensor in best.values()) == _adapter(run).numel()


def test_a_stopped_run_resumes_to_the_same_bits(train: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    dropout = "adapter.dropout=0.1"
    straight = train(dropout, "save.every=5", name="straight")
    with monkeypatch.context() as patch:
        stop_after(patch, 7)
        with pytest.raises(Stopped, match="after step 7 of 20"):
            train(dropout, "save.every=5", name="broken")
    broken = train(dropout, "save.every=5", name="broken", resume=True)
    assert [record["step"] for record in read_metrics(broken)] == list(range(1, 21))
    assert read_losses(broken) == read_losses(straight)
    assert torch.equal(_adapter(broken), _adapter(straight))


def test_resume_refuses_what_is_not_the_same_run(train: Callable[..., Path], tmp_path: Path) -> None:
    train("train.steps=2")
    with pytest.raises(ResumeError, match="already holds a run"):
        train("train.steps=2")
    with pytest.raises(ResumeError, match=r"train.learning_rate: 0.002 there, 0.5 asked for"):
        train("train.steps=2", "train.learning_rate=0.5", resume=True)
    with pytest.raises(ResumeError, match="holds no run to resume"):
        train(name="nowhere", resume=True)
    assert not (tmp_path / "nowhere").exists()


def test_a_run_that_failed_before_a_checkpoint_may_be_mended_in_place(train: Callable[..., Path]) -> None:
    with pytest.raises(workbench.errors.ConfigError, match="below the longest example"):
        train("train.steps=2", "batch.tokens_per_device=10")
    assert len(read_metrics(train("train.steps=2"))) == 2


def _longest(run: Path) -> int:
    return int(json.loads((run / "manifest.json").read_text())["data"]["train"]["lengths"][-1])
