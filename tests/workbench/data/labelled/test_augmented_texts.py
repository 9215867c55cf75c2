"""Texts that training rewrites: a function of seed, pass and text, as often as asked for, and never to nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from tests.conftest import MINILM
from workbench.config.sections.classes_config import ClassesConfig
from workbench.config.sections.text_augment_config import NOISY, TextAugmentConfig
from workbench.data.labelled.augmented_texts import AugmentedTexts, rewritten
from workbench.data.labelled.text_fields import FieldTokenizer
from workbench.data.labelled.token_rows import TokenRows

ALL = ("drop_words", "swap_words", "insert_words", "punctuation", "typos", "lower", "upper", "no_punctuation")
TEXTS = [(f"The {name}, it is said, has {number} legs and a tail.",) for number in range(20) for name in ("Cat", "Dog")]


def config(**values: Any) -> TextAugmentConfig:
    return TextAugmentConfig.model_validate({"operators": ALL, **values})


@pytest.fixture(scope="module")
def rows() -> AugmentedTexts:
    encoder = FieldTokenizer(AutoTokenizer.from_pretrained(MINILM), ClassesConfig(), max_tokens=16)
    return AugmentedTexts(tuple(TEXTS), tuple(f"row {n}" for n in range(40)), config(), 0, encoder)


def test_it_is_a_function_of_seed_pass_and_text() -> None:
    said = {
        (seed, epoch): [rewritten(text, config(), seed=seed, epoch=epoch) for text in TEXTS]
        for seed in (0, 1)
        for epoch in (0, 1)
    }
    again = [rewritten(text, config(), seed=0, epoch=1) for text in reversed(TEXTS)]
    assert said[0, 1] == again[::-1]
    assert len({str(each) for each in said.values()}) == 4


@pytest.mark.parametrize("probability", [0.2, 0.7, 1.0])
def test_rows_are_rewritten_as_often_as_asked_for_and_by_all_operators_alike(probability: float) -> None:
    counts = dict.fromkeys(("lower", "upper", "no_punctuation", "other"), 0)
    for epoch in range(100):
        for (text,) in TEXTS:
            (found,) = rewritten((text,), config(probability=probability), seed=3, epoch=epoch)
            if found != text:
                plain = {
                    text.lower(): "lower",
                    text.upper(): "upper",
                    text.replace(",", "").rstrip("."): "no_punctuation",
                }
                counts[plain.get(found, "other")] += 1
    total = sum(counts.values()) / 4000
    assert total == pytest.approx(probability, abs=4 * np.sqrt(0.25 / 4000) + 0.01)
    assert [counts[name] / 4000 / probability for name in list(counts)[:3]] == pytest.approx([1 / 8] * 3, abs=0.04)


@given(st.lists(st.text(st.sampled_from("aB .,!\u4e2d"), max_size=20), min_size=1, max_size=3), st.integers(0, 50))
def test_no_column_is_emptied(texts: list[str], epoch: int) -> None:
    found = rewritten(tuple(texts), config(probability=1.0, noise=0.9), seed=0, epoch=epoch)
    assert len(found) == len(texts)
    assert all(after.strip() or not before.strip() for before, after in zip(texts, found, strict=True))


def test_rows_are_the_same_wherever_they_stand(rows: AugmentedTexts) -> None:
    chosen = np.array([7, 3, 30])
    for epoch in (0, 1, 0, 2, 1):  # passes that were forgotten meanwhile too
        whole, part = rows.tokens(epoch), rows.take(chosen).tokens(epoch)
        joined = rows.take(chosen).concatenated(rows.take(chosen[:1])).tokens(epoch)
        assert [each.input_ids.tolist() for each in part] == [whole[row].input_ids.tolist() for row in chosen]
        assert [each.input_ids.tolist() for each in list(joined)[3:]] == [whole[7].input_ids.tolist()]


def test_a_pass_has_the_tokens_of_its_texts_cut_as_all_are(rows: AugmentedTexts) -> None:
    plain = TokenRows(rows.encoder.encode(rows.texts, rows.places), rows)
    seen = plain.rewritten(epoch=1, progress=0.5)
    wanted = rows.encoder.encode([rewritten(text, rows.config, seed=0, epoch=1) for text in TEXTS], rows.places)
    assert [each.tolist() for each in seen.arrays()] == [each.input_ids.tolist() for each in wanted]
    assert seen.lengths.tolist() == [len(each.input_ids) for each in wanted] and seen.lengths.max() <= 16
    assert plain.differ(seen).any(), "it does something"
    for epoch in (None, 0, 1):  # whoever scores rows reads them as they are
        read = plain.batch(np.arange(40), epoch=epoch).inputs["input_ids"]
        assert np.array_equal(read, TokenRows(plain.encoded).batch(np.arange(40), epoch=None).inputs["input_ids"])


def test_without_operators_rows_are_themselves(rows: AugmentedTexts) -> None:
    plain = TokenRows(rows.encoder.encode(rows.texts, rows.places))
    assert plain.rewritten(epoch=3, progress=0.5) is plain
    assert not TextAugmentConfig().is_on and set(NOISY) < set(ALL)
    never = replace(rows, config=config(probability=1e-9), _known={})
    assert not len(never.changed(0)) and len(rows.changed(0)) > 5
