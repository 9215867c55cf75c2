"""The methods with virtual tokens, through the whole recipe: trained, saved, scored, served."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import workbench
from tests.conftest import MINILM, save_tiny
from tests.run_files import read_losses, read_scores, write_lines
from workbench.errors import ConfigError
from workbench.recipes.load import load
from workbench.recipes.verbs import evaluate, generate
from workbench.recipes.verbs.check import check
from workbench.recipes.verbs.plans.plan import plan
from workbench.runs import run_directory

RATES = {"prompt": 0.03, "p-tuning": 0.01, "prefix": 0.01, "p-tuning-v2": 0.1}


def words(method: str, short_stories: str, questions: Path) -> list[str]:
    return [
        f"model.id={short_stories}",
        "model.weights=float32",
        f"adapter.method={method}",
        "adapter.virtual_tokens=8",
        f"data.train={questions}",
        "batch.size=8",
        "train.steps=12",
        f"train.learning_rate={RATES[method]}",
        "evaluate.answers=3",
        "evaluate.every=null",
        "evaluate.max_new_tokens=4",
    ]


@pytest.mark.nightly(but=["prefix", "p-tuning"])
@pytest.mark.parametrize("method", sorted(RATES))
def test_they_learn_and_what_was_saved_is_served(
    method: str, short_stories: str, questions: Path, tmp_path: Path
) -> None:
    given = words(method, short_stories, questions)
    run = workbench.run("sft/quickstart", given, out=tmp_path / "run", quiet=True)
    scores = read_scores(run)
    assert scores["after"]["loss"] < scores["before"]["loss"] - 0.05
    assert evaluate.evaluate(run, [])["loss"] == pytest.approx(scores["after"]["loss"], abs=1e-5)

    asked = tmp_path / "asked.jsonl"
    rows = [{"question": "What comes after 3?"}, {"question": "What comes after 4? Think about it. Think about it."}]
    write_lines(asked, rows)
    generate.predict(run, str(asked), out=tmp_path / "answers.jsonl", max_new_tokens=4)
    answers = [json.loads(line)["answer"] for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    alone = generate.generate(run, "What comes after 3?", max_new_tokens=4)
    assert alone.strip() == answers[0], "alone as in a padded batch"
    assert run_directory.read_config(run).adapter.method == method


@pytest.mark.nightly(but=["prompt"])
@pytest.mark.parametrize("method", ["prompt", "prefix"])
def test_the_curve_does_not_depend_on_micro_batches(
    method: str, short_stories: str, questions: Path, tmp_path: Path
) -> None:
    given = [*words(method, short_stories, questions), "train.steps=3", "evaluate.answers=0"]
    whole = workbench.run("sft/quickstart", given, out=tmp_path / "whole", quiet=True)
    parts = workbench.run("sft/quickstart", [*given, "batch.tokens_per_device=150"], out=tmp_path / "parts", quiet=True)
    assert read_losses(parts) == pytest.approx(read_losses(whole), rel=1e-4)


def test_virtual_tokens_take_positions(short_stories: str, questions: Path) -> None:
    given = [*words("prompt", short_stories, questions), "adapter.virtual_tokens=500"]
    text = r"made for at most 512, 500 of them for virtual tokens. Write data.max_tokens=12,"
    with pytest.raises(ConfigError, match=text):
        check(load("sft/quickstart", given))
    with pytest.raises(ConfigError, match=r"virtual_tokens=600: .* at most 512 tokens, .* Write .*virtual_tokens=51"):
        check(load("sft/quickstart", [*given, "adapter.virtual_tokens=600"]))


@pytest.mark.parametrize("method", ["prefix", "p-tuning-v2"])
def test_prefixes_of_an_encoder_take_no_positions(method: str, tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "bert", "Bert", "SequenceClassification", MINILM)
    words_of = " ".join(f"word{n * n}" for n in range(12))
    rows = [{"text": f"The sun of day {n}. {words_of}", "label": ("dry", "wet")[n % 2]} for n in range(60)]
    source = tmp_path / "rows.jsonl"
    write_lines(source, rows)
    given = [*words(method, model, source)[:3], "adapter.virtual_tokens=500", f"data.train={source}"]
    check(load("classify/quickstart", [*given, "data.held_out=0.2"]))


@pytest.mark.nightly(but=["p-tuning-v2"])
@pytest.mark.parametrize("method", ["prefix", "p-tuning-v2"])
def test_prefixes_of_an_encoder_decoder_learn_the_same_when_activations_are_recomputed(
    method: str, encoder_decoder: str, questions: Path, tmp_path: Path
) -> None:
    given = [*words(method, encoder_decoder, questions), "train.steps=4", "evaluate.answers=0"]
    plain = workbench.run("sft/quickstart", given, out=tmp_path / "plain", quiet=True)
    again = workbench.run("sft/quickstart", [*given, "train.checkpointing=true"], out=tmp_path / "again", quiet=True)
    assert read_losses(again) == pytest.approx(read_losses(plain), rel=1e-5)
    scores = read_scores(plain)
    assert evaluate.evaluate(plain, [])["loss"] == pytest.approx(scores["after"]["loss"], abs=1e-5)


@pytest.mark.nightly(but=["prefix"])
@pytest.mark.parametrize("method", ["prefix", "p-tuning-v2"])
def test_prefixes_of_an_encoder_learn_the_same_when_activations_are_recomputed(method: str, tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "bert", "Bert", "SequenceClassification", MINILM)
    rows = [{"text": f"The {('sun', 'rain')[n % 2]} of day {n}.", "label": ("dry", "wet")[n % 2]} for n in range(60)]
    source = tmp_path / "rows.jsonl"
    write_lines(source, rows)
    given = [*words(method, model, source)[:5], "data.held_out=0.2", "batch.size=8", "train.steps=4"]
    given += [f"train.learning_rate={RATES[method]}", "evaluate.every=null"]
    plain = workbench.run("classify/quickstart", given, out=tmp_path / "plain", quiet=True)
    again = workbench.run(
        "classify/quickstart", [*given, "train.checkpointing=true"], out=tmp_path / "again", quiet=True
    )
    assert read_losses(again) == pytest.approx(read_losses(plain), rel=1e-5)
    scores = read_scores(plain)
    assert evaluate.evaluate(plain, [])["loss"] == pytest.approx(scores["after"]["loss"], abs=1e-5)
    assert scores["after"]["loss"] != scores["before"]["loss"]


def test_recomputing_is_refused_where_the_prefix_stands_in_the_cache(short_stories: str, questions: Path) -> None:
    given = [*words("prefix", short_stories, questions), "train.checkpointing=true"]
    with pytest.raises(ConfigError, match=r"train.checkpointing does not go with adapter.method=prefix"):
        check(load("sft/quickstart", given))
    with pytest.raises(ConfigError, match=r"train.checkpointing does not go with adapter.method=prefix"):
        plan(load("sft/quickstart", given))
