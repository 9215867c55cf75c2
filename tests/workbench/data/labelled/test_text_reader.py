"""Rows of several columns as tokens, truncated by their shares, and texts that training augments."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from tests.conftest import MINILM, STORIES
from workbench.config.sections.classes_config import ClassesConfig
from workbench.config.sections.text_augment_config import NOISY, TextAugmentConfig
from workbench.data.labelled.text_reader import (
    TOKENISED_AT_ONCE,
    AugmentedTexts,
    FieldTokenizer,
    TokenRows,
    allocate,
    rewritten,
)
from workbench.data.starter import FOLDER
from workbench.errors import DataError

TOKENIZERS = {name: AutoTokenizer.from_pretrained(path) for name, path in (("bert", MINILM), ("starter", str(FOLDER)))}
TOKENIZERS["stories"] = AutoTokenizer.from_pretrained(str(STORIES))
TEMPLATE = "Title: {title}\nBody: {body} End of it. {note}"
words = st.lists(st.sampled_from(["apple", "bee", "cloudy", "Ümläut", "😀", "42", "don't"]), max_size=60).map(" ".join)


@given(
    lengths=st.lists(st.integers(0, 50), min_size=1, max_size=5),
    raw=st.lists(st.floats(0.05, 10), min_size=5, max_size=5),
    slack=st.integers(0, 100),
)
def test_every_field_keeps_its_share(lengths: list[int], raw: list[float], slack: int) -> None:
    parts = [each / sum(raw[: len(lengths)]) for each in raw[: len(lengths)]]
    full = sum(map(bool, lengths))
    budget = full + slack
    kept = allocate(lengths, parts, budget)
    assert sum(kept) == min(budget, sum(lengths)), "no token is wasted"
    for length, part, count in zip(lengths, parts, kept, strict=True):
        assert min(length, 1 + int(part * slack + 1e-9) if length else 0) <= count <= length


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(sorted(TOKENIZERS)),
    fields=st.tuples(words, words, words),
    keep=st.sampled_from(["start", "end", "ends", "middle"]),
)
def test_a_long_row_keeps_the_template_and_some_of_each_column(
    name: str, fields: tuple[str, str, str], keep: str
) -> None:
    config = ClassesConfig.model_validate({"text": TEMPLATE, "keep": keep})
    tokenizer = TOKENIZERS[name]
    writer = FieldTokenizer(tokenizer, config, max_tokens=64)
    (written,) = writer.encode([fields], ["row 1"])
    whole = tokenizer(writer.text(fields))["input_ids"]
    assert writer.text(fields) == TEMPLATE.format(title=fields[0], body=fields[1], note=fields[2])
    if len(whole) <= 64:
        assert not written.truncated and written.input_ids.tolist() == whole
        return
    assert written.truncated and len(written.input_ids) == 64
    rest = iter(whole)
    assert all(token in rest for token in written.input_ids.tolist()), "tokens left out, none changed or moved"
    text = tokenizer.decode(written.input_ids, skip_special_tokens=True).lower()
    assert re.search(r"title ?:.*body ?:.*end of it ?\.", text, flags=re.DOTALL)


@pytest.mark.parametrize("count", [0, 1, TOKENISED_AT_ONCE - 1, TOKENISED_AT_ONCE, TOKENISED_AT_ONCE + 1])
def test_rows_that_are_tokenised_together_do_not_matter(count: int) -> None:
    writer = FieldTokenizer(TOKENIZERS["starter"], ClassesConfig(), max_tokens=8)
    texts = [f"card {'number ' * (n % 9)}{n}" for n in range(count)]
    found = writer.encode(((text,) for text in texts), map(str, range(count)))
    assert len(found) == count and found.truncated_N.any() == (count > 9)
    for row in {0, count // 2, count - 1} if count else ():
        (alone,) = writer.encode([(texts[row],)], [""])
        assert found[row].input_ids.tolist() == alone.input_ids.tolist() and found[row].truncated == alone.truncated


@pytest.mark.parametrize("name", sorted(TOKENIZERS))
def test_shares_and_ends(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    row = (" ".join(f"a{n}" for n in range(80)), " ".join(f"b{n}" for n in range(80)))
    kept = {}
    for keep in ("start", "end", "ends"):
        config = ClassesConfig.model_validate({"text": "{one}. {two}", "shares": {"one": 1, "two": 3}, "keep": keep})
        (written,) = FieldTokenizer(tokenizer, config, max_tokens=100).encode([row], [""])
        kept[keep] = tokenizer.decode(written.input_ids, skip_special_tokens=True)
        ones = tokenizer(kept[keep].split(".")[0], add_special_tokens=False)["input_ids"]
        assert len(ones) == pytest.approx(25, abs=3)
    assert kept["start"].lstrip().startswith("a0 ") and "b0 " in kept["start"] and "b79" not in kept["start"]
    assert kept["end"].rstrip().endswith("b79") and "a79" in kept["end"] and "a0 " not in kept["end"]
    assert all(each in kept["ends"] for each in ("a0 ", "a79", "b0 ", "b79"))


def test_a_template_that_leaves_no_room_is_refused() -> None:
    config = ClassesConfig.model_validate({"text": "one two three four five six seven {a} {b}"})
    writer = FieldTokenizer(TOKENIZERS["bert"], config, max_tokens=10)
    with pytest.raises(DataError, match=r"rows.csv, row 3: data.max_tokens=10 leaves no token .* Raise it"):
        writer.encode([("much " * 20, "more " * 20)], ["rows.csv, row 3"])
    assert np.array_equal(writer.encode([("much", "")], [""])[0].input_ids[[0, -1]], [101, 102])


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
