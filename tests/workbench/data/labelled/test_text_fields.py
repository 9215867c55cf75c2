"""However long the other columns are, no column disappears, and a row that fits is the tokenizer's own."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from tests.conftest import MINILM, STORIES
from workbench.config.sections.classes_config import ClassesConfig
from workbench.data.labelled.text_fields import ROWS, FieldTokenizer, allocate
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


@pytest.mark.parametrize("count", [0, 1, ROWS - 1, ROWS, ROWS + 1])
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
