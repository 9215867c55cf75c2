"""Trainings whose rows or tokens count by their losses: what a step computes, and what changes nothing of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.conftest import trains
from tests.stopping import stop_after
from tests.workbench.training.distributed import layouts
from workbench.data.text import tokenized
from workbench.data.text.chat import ChatEncoder
from workbench.data.text.tokenized_set import TokenizedSet
from workbench.distillation import teachers
from workbench.errors import ResumeError, Stopped
from workbench.recipes.load import load
from workbench.recipes.verbs.check import check
from workbench.training.sampling import loss_based

RECIPE = """
recipe: sft
model: {{id: {model}, weights: float32, compute: float32}}
adapter: {{method: lora, rank: 4, alpha: 8, dropout: 0.1}}
data: {{train: {train}, held_out: 0.1, limit: 30, sampling: {{}}}}
batch: {{size: 8}}
train: {{steps: 8, learning_rate: 2.0e-3}}
evaluate: {{every: null, answers: 0}}
save: {{every: 3}}
"""
Run = Callable[..., Path]


@pytest.fixture
def train(tmp_path: Path, short_stories: str, questions: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path / "cache"))
    return trains(tmp_path, RECIPE, model=short_stories, train=questions)


@pytest.fixture
def ways(stories: str) -> dict[str, list[str]]:
    """The backbone has the first two of the reference's five blocks."""
    tokens = ["data.sampling.by=tokens", f"data.sampling.reference={stories}"]
    return {"tilted": ["data.sampling.by=tilted", "data.sampling.tilt=2"], "tokens": tokens}


def adapter(run: Path) -> dict[str, Tensor]:
    return load_file(run / "adapter" / "adapter_model.safetensors")


def records(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def losses(run: Path) -> list[float]:
    return [each["loss"] for each in records(run)]


def training_rows(folder: Path, *words: str) -> TokenizedSet:
    config = load(folder / "recipe.yaml", words)
    tokenizer = AutoTokenizer.from_pretrained(config.model.id)
    return tokenized.load(config.data, tokenizer, ChatEncoder(tokenizer), seed=config.seed).train


def token_losses(model: str, rows: TokenizedSet) -> list[Tensor]:
    """Of the supervised tokens of each row, by transformers alone."""
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    found = []
    for row in (rows[number] for number in range(len(rows))):
        ids = torch.from_numpy(row.input_ids)
        with torch.no_grad():
            loss_L = F.cross_entropy(network(ids[None]).logits[0, :-1], ids[1:], reduction="none")
        found.append(loss_L[torch.from_numpy(row.supervised)[1:]])
    return found


def far_from_equal(excess: Tensor) -> tuple[Tensor, str]:
    """About 0.6 of the tokens, of which the last is as far above the next as there are, and the setting for it."""
    ranked = excess.sort(descending=True)
    low, high = len(excess) // 2, 7 * len(excess) // 10
    count = low + int((ranked.values[low - 1 : high - 1] - ranked.values[low:high]).argmax())
    return ranked.indices[:count], f"data.sampling.keep={count / len(excess)}"


@pytest.mark.nightly(but=["tilted"])
@pytest.mark.parametrize("way", ["tilted", "tokens"])
def test_a_resumed_run_has_the_same_bits_and_micro_batches_the_same_losses(
    train: Run, ways: dict[str, list[str]], way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    on = ways[way]
    whole = train(*on, name="whole")
    with monkeypatch.context() as patch:
        stop_after(patch, 4)
        with pytest.raises(Stopped):
            train(*on, name="broken")
    broken = train(*on, name="broken", resume=True)
    assert all(torch.equal(tensor, adapter(whole)[name]) for name, tensor in adapter(broken).items())
    assert losses(broken) == losses(whole)
    small = train(*on, "batch.tokens_per_device=128", "batch.packing=false", name="small")
    np.testing.assert_allclose(losses(small), losses(whole), rtol=1e-4)


def test_the_first_step_is_what_the_equations_say(
    train: Run, ways: dict[str, list[str]], tmp_path: Path, stories: str, short_stories: str
) -> None:
    """A step of all rows, whose adapter does nothing yet; written a second time in float64."""
    rows = training_rows(tmp_path)
    own, reference = token_losses(short_stories, rows), token_losses(stories, rows)
    excess = torch.cat(own) - torch.cat(reference)
    best, keep = far_from_equal(excess)
    every = [f"batch.size={len(rows)}", "train.steps=1"]
    kept, tilted = train(*ways["tokens"], keep, *every, name="kept"), train(*ways["tilted"], *every, name="tilted")
    assert losses(kept) == pytest.approx([float(torch.cat(own)[best].mean())], rel=1e-5)
    assert records(kept)[0]["excess_loss"] == pytest.approx(float(excess.mean()), rel=1e-4)
    mean_B, count_B = torch.stack([each.mean() for each in own]), torch.tensor([len(each) for each in own])
    weight_B = torch.exp(2 * mean_B) / (torch.exp(2 * mean_B) * count_B).sum()
    assert losses(tilted) == pytest.approx([float((weight_B * count_B * mean_B).sum())], rel=1e-5)


def test_a_reference_reads_once_and_a_changed_one_is_not_gone_on_with(
    train: Run, ways: dict[str, list[str]], tmp_path: Path, stories: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    on = ["data.sampling.by=tokens", f"data.sampling.reference={tmp_path / 'clean'}", "train.steps=2"]
    train("train.steps=2", f"model.id={stories}", name="clean")
    first = train(*on, name="first")
    with monkeypatch.context() as patch:
        patch.setattr(teachers, "alone", lambda *_: pytest.fail("its losses are known"))
        assert losses(train(*on, name="again")) == losses(first)
    assert losses(first) != losses(train("train.steps=2", name="even"))
    saved = tmp_path / "clean" / "adapter" / "adapter_model.safetensors"
    saved.write_bytes(saved.read_bytes()[:-4] + b"\0\0\0\0")
    with pytest.raises(ResumeError, match=r"\(reference\): other content"):
        train(*on, name="first", resume=True)


def test_a_reference_that_was_killed_goes_on_where_it_was(
    train: Run, ways: dict[str, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from workbench.cli.console import Terminal

    on = [*ways["tokens"], "train.steps=2"]
    monkeypatch.setattr(loss_based, "PART", 20)
    with monkeypatch.context() as patch:
        patch.setattr(Terminal, "stop_requested", lambda _: True)
        with pytest.raises(Stopped, match="what it has read so far is kept"):
            train(*on, name="broken")
    (folder,) = (tmp_path / "cache" / "reference").iterdir()
    kept = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    broken = train(*on, name="broken", resume=True)
    assert 0 < len(kept) < len(list(folder.iterdir()))
    assert all(path.stat().st_mtime_ns == written for path, written in kept.items())
    monkeypatch.setattr(loss_based, "PART", 2**20)
    assert losses(train(*on, name="whole")) == pytest.approx(losses(broken), rel=1e-5)


def test_weights_of_rows_and_the_choice_of_tokens_go_together(
    train: Run, ways: dict[str, list[str]], tmp_path: Path, stories: str, short_stories: str
) -> None:
    """A row's weight multiplies what is kept of it, and what is kept is divided by."""
    weighed = tmp_path / "weighed.jsonl"
    rows = [{"question": f"What is {n}?", "answer": "It is " * (1 + n % 4) + "so.", "w": 1 + n % 3} for n in range(30)]
    weighed.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [f"data.train={weighed}", "data.columns={weight: w}"]
    found = training_rows(tmp_path, *words)
    own, reference = token_losses(short_stories, found), token_losses(stories, found)
    best, keep = far_from_equal(torch.cat(own) - torch.cat(reference))
    weight_N = torch.from_numpy(np.repeat(found.weights, [len(each) for each in own]))
    wanted = (weight_N * torch.cat(own))[best].sum() / weight_N[best].sum()
    run = train(*ways["tokens"], keep, *words, f"batch.size={len(found)}", "train.steps=1")
    assert losses(run) == pytest.approx([float(wanted)], rel=1e-5)


def test_check_says_what_happens_and_a_plan_counts_it(train: Run, ways: dict[str, list[str]], tmp_path: Path) -> None:
    from workbench.recipes.verbs.plans.plan import plan

    notes = check(load(tmp_path / "recipe.yaml", ways["tokens"])).notes
    assert any("it reads the training rows once, before the first step" in note for note in notes)
    assert any("60% of a step's supervised tokens count" in note for note in notes)
    (note,) = check(load(tmp_path / "recipe.yaml", ways["tilted"])).notes[-1:]
    assert "rows of high loss count more, by exp(2 * loss); this is a bias" in note
    plain, looking = (plan(load(tmp_path / "recipe.yaml", each)) for each in ([], ways["tokens"]))
    assert looking.dry_run.flops_per_token > 1.2 * plain.dry_run.flops_per_token
    assert any("Before the training it reads" in each for each in looking.notes)


@pytest.mark.slow
def test_labels_of_rows_are_tilted_too(tmp_path: Path, train: Run, ways: dict[str, list[str]]) -> None:
    rows = [{"text": f"The {name} has {n} legs.", "label": name} for n in range(15) for name in ("cat", "dog")]
    (tmp_path / "labels.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["recipe=classify", f"data.train={tmp_path}/labels.jsonl", "data.held_out=0.2", "adapter.dropout=0"]
    whole = train(*words, *ways["tilted"], name="whole")
    parts = train(*words, *ways["tilted"], "batch.tokens_per_device=32", name="parts")
    np.testing.assert_allclose(losses(parts), losses(whole), rtol=1e-4)
    assert losses(whole) != losses(train(*words, name="even"))


@pytest.mark.nightly
@pytest.mark.slow
def test_two_processes_compute_what_one_does(
    train: Run, ways: dict[str, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each reads its share of the rows, with the reference too; the rows of a step go to both."""
    alone = {way: train(*on, "batch.packing=false", name=f"{way} alone") for way, on in ways.items()}
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path / "other"))
    jobs: list[tuple[str, list[str], str | None]] = [
        (f"{way} both", [*on, "batch.packing=false", "distributed={zero: 0}"], None) for way, on in ways.items()
    ]
    layouts.in_processes(tmp_path, jobs)
    for way, one in alone.items():
        np.testing.assert_allclose(losses(tmp_path / f"{way} both"), losses(one), rtol=1e-5)
