"""The glossary: words that people bring from elsewhere are explained, with settings and commands that exist."""

from __future__ import annotations

from collections import Counter

import pytest

from workbench.cli import render
from workbench.config import glossary, reference
from workbench.errors import ConfigError

KEYS = {each.key for each in reference.settings()}


def test_every_line_of_the_page_is_a_term_with_a_place() -> None:
    lines = [line for line in glossary.PAGE.read_text().splitlines() if line.startswith("| ")]
    assert len(glossary.terms()) == len(lines) - 1 > 70
    assert all(term.where and term.meaning.endswith(".") for term in glossary.terms())
    twice = [word for word, n in Counter(word for term in glossary.terms() for word in term.words).items() if n > 1]
    assert twice == []


def test_its_settings_exist_and_may_have_the_values_that_it_shows() -> None:
    for term in glossary.terms():
        for place in set(term.where) - set(term.commands):
            key, equals, value = place.partition("=")
            assert key in KEYS, place
            assert not equals or any(value in each.words for each in reference.look_up(key)), place


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ("nf4", "model.weights=nf4"),
        ("4-bit", "model.weights=nf4"),
        ("quantization", "model.weights=nf4"),
        ("wandb", "trackers"),
        ("gguf", "workbench export RUN --to gguf"),
        ("early stopping", "evaluate.patience"),
        ("Gradient_Accumulation", "batch.tokens_per_device"),
        ("gradient-checkpointing", "train.checkpointing"),
        ("bank", "fleet.members"),
        ("folds", "folds.k"),
        ("max_seq_length", "data.max_tokens"),
    ],
)
def test_a_word_from_elsewhere_is_answered(asked: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    render.terms(glossary.find(asked))
    assert told in capsys.readouterr().out


def test_a_value_finds_its_setting_and_a_key_is_no_term() -> None:
    assert [each.key for each in reference.look_up("flash_attention_2")] == ["model.attention"]
    assert [each.key for each in reference.look_up("PowerSGD")] == ["distributed.compression.gradients"]
    assert reference.is_key("folds") and reference.is_key("data.sources.mine.weight")
    assert not reference.is_key("fold") and glossary.find("no such word") == []


@pytest.mark.parametrize(
    ("asked", "meant"),
    [("quantisatoin", "quantisation"), ("erly stopping", "early stopping"), ("learning rte", "learning rate")],
)
def test_a_misspelt_word_is_held_against_words_and_methods_too(asked: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"Did you mean .*`{meant}`"):
        reference.look_up(asked)
