"""Runs whose blocks are stacked: equal in any micro-batches and after a stop anywhere, a stock model at the end."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import workbench
from tests.conftest import MINILM, save_tiny, trains, write_questions
from tests.run_files import read_losses, read_metrics, read_scores
from tests.stopping import stop_after
from tests.workbench.training.distributed.layouts import in_processes
from tests.workbench.training.test_techniques import RECIPE
from workbench import report
from workbench.errors import ConfigError, Stopped

GROWN_AT, STEPS = 3, 6
WORDS = ("adapter={method: full}", "train.learning_rate=1e-3", "grow.at=[0.5]")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def four_blocks(tmp_path_factory: pytest.TempPathFactory, stories: str) -> str:
    """Folder of the first four of stories260K's five blocks."""
    folder = tmp_path_factory.mktemp("four") / "stories"
    model = AutoModelForCausalLM.from_pretrained(stories)
    del model.model.layers[4:]
    model.config.num_hidden_layers = 4
    model.save_pretrained(folder)
    for file in Path(stories).iterdir():
        if not (folder / file.name).exists():
            (folder / file.name).write_bytes(file.read_bytes())
    return str(folder)


@pytest.fixture
def train(tmp_path: Path, four_blocks: str, questions: Path) -> Callable[..., Path]:
    return trains(tmp_path, RECIPE, model=four_blocks, train=questions)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, four_blocks: str) -> Path:
    """A run that nothing stops. Read only, but for its report."""
    folder = tmp_path_factory.mktemp("whole")
    questions = write_questions(folder / "questions.jsonl", [f"{n + 1}" + " it is" * (n % 7) for n in range(120)])
    return trains(folder, RECIPE, model=four_blocks, train=questions)(*WORDS, name="whole")


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "adapter" / "model.safetensors")


def test_three_micro_batches_give_one_curve_and_a_stock_model_says_when_it_grew(
    train: Callable[..., Path], whole: Path
) -> None:
    for tokens in (400, 120):
        assert read_losses(train(*WORDS, f"batch.tokens_per_device={tokens}", name=f"{tokens}")) == pytest.approx(
            read_losses(whole), rel=2e-5
        )
    assert [line["blocks"] for line in read_metrics(whole)] == [2] * GROWN_AT + [4] * (STEPS - GROWN_AT)
    manifest = json.loads((whole / "manifest.json").read_text())
    assert manifest["grow"] == {"first": 2, "stackings": [{"step": GROWN_AT, "blocks": 4}]}
    model = AutoModelForCausalLM.from_pretrained(whole / "adapter")
    assert model.config.num_hidden_layers == 4 == len(model.model.layers)
    report.write(whole)
    assert "2 of 4 blocks" in (whole / "report.html").read_text()


@pytest.mark.nightly(but=["3"])
@pytest.mark.parametrize("step", [GROWN_AT - 1, GROWN_AT, GROWN_AT + 1])
def test_a_stop_before_at_and_after_the_stacking_changes_no_bit(
    train: Callable[..., Path], whole: Path, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        stop_after(patch, step=step)
        with pytest.raises(Stopped):
            train(*WORDS, name="stopped")
    found = train(*WORDS, name="stopped", resume=True)
    assert read_losses(found) == read_losses(whole)
    assert all(torch.equal(weights(found)[name], each) for name, each in weights(whole).items())
    manifests = [json.loads((run / "manifest.json").read_text())["grow"] for run in (found, whole)]
    assert manifests[0] == manifests[1]


def test_off_a_run_is_what_it_is_without_the_section(train: Callable[..., Path]) -> None:
    plain, off = train(*WORDS[:2], name="plain"), train(*WORDS[:2], "grow.at=[]", name="off")
    assert read_losses(off) == read_losses(plain) and not any("blocks" in line for line in read_metrics(off))
    assert all(torch.equal(weights(off)[name], each) for name, each in weights(plain).items())
    assert "grow" not in json.loads((off / "manifest.json").read_text())


def test_the_best_values_are_of_the_grown_model(train: Callable[..., Path]) -> None:
    """Held-out losses from before the stacking are compared with none after it."""
    words = (
        "evaluate.every=1",
        "save.ship=best",
        "train.learning_rate=3e-3",
    )  # high enough that the jump is not made up for
    run = train(*WORDS, *words, name="best")
    after = {line["step"]: line["held_out_loss"] for line in read_metrics(run)[GROWN_AT:]}
    assert min(line["held_out_loss"] for line in read_metrics(run)) < min(after.values())
    scores = read_scores(run)
    assert scores["after"]["loss"] == pytest.approx(min(after.values()), rel=1e-4)


def test_a_run_stacked_twice_grows_by_its_factor_each_time(train: Callable[..., Path]) -> None:
    blocks = [line["blocks"] for line in read_metrics(train(*WORDS[:2], "grow.at=[0.2, 0.6]", name="twice"))]
    assert blocks == [1, 1, 2, 2, 4, 4]
    assert [after / before for before, after in pairwise(blocks) if after != before] == [2, 2]


def test_a_run_without_a_step_after_the_stacking_is_refused(train: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match="of 2 steps none begins"):
        train(*WORDS[:2], "grow.at=[0.8]", "train.steps=2", name="short")


@pytest.mark.usefixtures("train")
def test_two_processes_stack_what_one_does(whole: Path, tmp_path: Path) -> None:
    in_processes(tmp_path, [("both", list(WORDS), None)])
    assert read_losses(tmp_path / "both") == pytest.approx(read_losses(whole), rel=2e-5)
    torch.testing.assert_close(weights(tmp_path / "both"), weights(whole), rtol=1e-3, atol=1e-5)


def test_a_student_of_some_blocks_grows_beside_its_teacher(train: Callable[..., Path], stories: str) -> None:
    teacher = ("recipe=distill", f"distill.teacher.id={stories}", f"model.id={stories}")
    run = train(*WORDS, *teacher, "distill.student={layers: [0, 4]}", name="student")
    assert [line["blocks"] for line in read_metrics(run)] == [1] * GROWN_AT + [2] * (STEPS - GROWN_AT)
    assert AutoModelForCausalLM.from_pretrained(run / "adapter").config.num_hidden_layers == 2


def test_members_of_a_sweep_grow_as_they_do_alone(train: Callable[..., Path]) -> None:
    alone = train(*WORDS, "evaluate.every=3", name="alone")
    words = ("recipe=sweep", "of=sft", "sweep.over={train.learning_rate: [1e-3, 3e-3]}", "evaluate.every=3")
    sweep = train(*WORDS, *words, name="sweep")
    assert read_losses(sweep / "members" / "learning_rate=0.001") == read_losses(alone)


def test_a_classifier_grows(tmp_path: Path) -> None:
    bert = save_tiny(
        tmp_path / "bert", "Bert", "SequenceClassification", MINILM, num_hidden_layers=2, max_position_embeddings=128
    )
    words = [*WORDS, f"model.id={bert}", "data.limit=200", "train.steps=6", "train.epochs=null", "evaluate.probe=0"]
    run = workbench.run("classify/quickstart", words, out=tmp_path / "run", quiet=True)
    assert [line["blocks"] for line in read_metrics(run)] == [1] * GROWN_AT + [2] * (STEPS - GROWN_AT)
    model = AutoModelForSequenceClassification.from_pretrained(run / "adapter")
    assert model.config.num_hidden_layers == 2 and torch.isfinite(torch.tensor(read_losses(run))).all()
