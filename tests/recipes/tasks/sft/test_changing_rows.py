"""Trainings whose rows are rewritten or cut from step to step: resumed, in other micro-batches, and switched off."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.conftest import trains
from tests.run_files import read_losses, read_metrics, read_scores, write_lines
from tests.stopping import stop_after
from tests.workbench.training.distributed import layouts
from workbench.config.sections.curriculum_config import LengthWarmUpConfig
from workbench.errors import Stopped

RECIPE = """
recipe: sft
model: {{id: {model}, weights: float32}}
adapter: {{method: lora, rank: 4, alpha: 8, dropout: 0.1}}
data: {{train: {train}, held_out: 0.2}}
batch: {{size: 6}}
train: {{steps: 12, learning_rate: 2.0e-3}}
evaluate: {{every: null, answers: 0, probe: 0}}
save: {{every: 4}}
"""
LABELLED = "recipe=classify"
AUGMENT = [LABELLED, "data.augment.operators=[drop_words, swap_words, insert_words, punctuation, typos]"]
LENGTH = ["data.length_warm_up.start=16", "data.length_warm_up.until=0.7", "data.format=text"]
Train = Callable[..., Path]


@pytest.fixture
def train(tmp_path: Path, short_stories: str) -> Train:
    words = np.random.default_rng(0).choice(["the", "cat", "dog", "sat", "tree"], size=(30, 60))
    rows = [
        {"text": f"{' '.join(row[: 8 + n])} {n}", "label": "cat" if n % 2 else "dog"} for n, row in enumerate(words)
    ]
    return trains(tmp_path, RECIPE, model=short_stories, train=write_lines(tmp_path / "rows.jsonl", rows))


@pytest.mark.slow
@pytest.mark.parametrize("words", [AUGMENT, LENGTH], ids=["augment", "length"])
def test_a_resumed_run_has_the_same_bits_and_micro_batches_the_same_losses(
    train: Train, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train(*words, name="whole")
    with monkeypatch.context() as patch:
        stop_after(patch, 6)
        with pytest.raises(Stopped):
            train(*words, name="broken")
    broken = train(*words, name="broken", resume=True)
    trained = [load_file(run / "adapter" / "adapter_model.safetensors") for run in (whole, broken)]
    assert all(torch.equal(tensor, trained[1][name]) for name, tensor in trained[0].items())
    assert read_losses(broken) == read_losses(whole)
    small = train(*words, "batch.tokens_per_device=128", name="small")
    np.testing.assert_allclose(read_losses(small), read_losses(whole), rtol=1e-4)
    assert [each["tokens"] for each in read_metrics(small)] == [each["tokens"] for each in read_metrics(whole)]


def test_what_is_never_rewritten_is_as_without_it(train: Train) -> None:
    plain, never = train(LABELLED, name="plain"), train(*AUGMENT, "data.augment.probability=1e-9", name="never")
    always = train(*AUGMENT, "data.augment.probability=1", name="always")
    assert read_losses(plain) == read_losses(never) and read_losses(always)[0] != read_losses(plain)[0]
    scores = [read_scores(run)["before"] for run in (plain, always)]
    assert scores[0] == scores[1], "held-out rows are read as they are"


def test_steps_read_as_much_of_their_rows_as_the_pace_says(train: Train) -> None:
    whole, cut = read_metrics(train("data.format=text", name="whole")), read_metrics(train(*LENGTH, name="cut"))
    limits = [LengthWarmUpConfig(start=16, until=0.7).limit(step, steps=12, longest=10**6) for step in range(12)]
    assert limits[0] == 16 and cut[0]["tokens"] <= 6 * 16
    for limit, mine, plain in zip(limits, cut, whole, strict=True):
        assert mine["tokens"] - mine["supervised_tokens"] == plain["tokens"] - plain["supervised_tokens"], "rows"
        assert mine["tokens"] < plain["tokens"] if limit == 16 else mine["tokens"] <= plain["tokens"]
    assert [each["tokens"] for each in cut[9:]] == [each["tokens"] for each in whole[9:]]


@pytest.mark.nightly
def test_two_processes_train_as_one_does(train: Train, tmp_path: Path) -> None:
    curriculum = "data.curriculum.by"
    jobs = {
        "augment": AUGMENT,
        "length": LENGTH,
        "perplexity": ["data.format=text", f"{curriculum}=perplexity"],
        "self-paced": ["data.format=text", f"{curriculum}=self_paced"],
    }
    for name, words in jobs.items():
        train(*words, name=f"{name} alone")
    layouts.in_processes(tmp_path, [(name, words, None) for name, words in jobs.items()])
    for name in jobs:
        np.testing.assert_allclose(
            read_losses(tmp_path / name), read_losses(tmp_path / f"{name} alone"), rtol=1e-4, err_msg=name
        )


@pytest.mark.slow
def test_folds_in_a_bank_are_rewritten_as_each_alone(train: Train) -> None:
    words = [*AUGMENT[1:], "recipe=crossval", "of=classify", "data.held_out=0.05", "folds.k=2"]
    runs = [train(*words, f"folds.together={how}", name=f"folds-{how}") for how in ("true", "false")]
    folds = [sorted(run.rglob("repeat-*/metrics.jsonl")) for run in runs]
    assert len(folds[0]) == len(folds[1]) == 2
    for mine, theirs in zip(*folds, strict=True):
        np.testing.assert_allclose(read_losses(mine.parent), read_losses(theirs.parent), rtol=1e-3)
