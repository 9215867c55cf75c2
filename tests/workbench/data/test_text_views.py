"""A view says the same of a row wherever it stands, changes what it names, and is refused where it changes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tests.conftest import MINILM, STORIES
from workbench.config import RunConfig
from workbench.config.sections.classes_config import ClassesConfig
from workbench.config.sections.tta_config import TtaConfig
from workbench.data import tta_views
from workbench.data.labelled import labelled_data
from workbench.data.labelled.labelled_data import LabelledSet
from workbench.data.labelled.labels import Labels
from workbench.data.labelled.record_table import EncodedTexts, LabelledRecord
from workbench.data.labelled.records import RecordSource
from workbench.data.labelled.text_reader import TextReader, TokenRows
from workbench.data.rows import RawRow
from workbench.data.starter import FOLDER
from workbench.data.tta_views import TextView
from workbench.errors import ConfigError, DataError

PATHS = {"bert": MINILM, "starter": str(FOLDER), "stories": str(STORIES)}
TOKENIZERS: dict[str, PreTrainedTokenizerBase] = {
    name: AutoTokenizer.from_pretrained(path) for name, path in PATHS.items()
}
WINNER = Labels("pair", ("a", "b", "tie"))
ANIMAL = Labels("one", ("cat", "dog"))
PAIR = {"kind": "pair"}
LONG = " ".join(f"w{number}" for number in range(90))


def record(*fields: str, row: int = 1) -> LabelledRecord:
    return LabelledRecord(RawRow(f"rows.csv, row {row}"), fields, None)


def labelled(
    records: list[LabelledRecord], config: RunConfig, tokenizer: PreTrainedTokenizerBase, labels: Labels
) -> LabelledSet:
    source = RecordSource("rows.csv", "0", tuple(records))
    return labelled_data.encode(source, reader(config, tokenizer), labels)


def reader(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> TextReader:
    return TextReader(tokenizer, config.data, config.classes, config.duplicates)


def tokens(
    view: TextView, records: list[LabelledRecord], tokenizer: PreTrainedTokenizerBase, *, max_tokens: int
) -> EncodedTexts:
    """Tokens of rows in a view."""
    config = RunConfig.model_validate(
        {"recipe": "classify", "data": {"train": "rows.csv", "max_tokens": max_tokens}, "classes": view.classes}
    )
    rows = LabelledSet(
        tuple(records),
        TokenRows(EncodedTexts.of(())),
        np.zeros((len(records), 2)),
        np.ones(len(records)),
        "rows.csv",
        "0",
    )
    seen = view.rows(rows, reader(config, tokenizer)).inputs
    assert isinstance(seen, TokenRows)
    return seen.encoded


def settled(classes: dict[str, Any], max_tokens: int = 64) -> RunConfig:
    data = {"train": "rows.csv", "max_tokens": max_tokens}
    return RunConfig.model_validate({"recipe": "classify", "data": data, "classes": classes})


def made(tta: dict[str, Any], classes: dict[str, Any] | None = None, *, labels: Labels = ANIMAL) -> list[TextView]:
    config = ClassesConfig.model_validate(classes or {})
    example = record(*(f"some {name}" for name in config.fields))
    return tta_views.text_views(TtaConfig.model_validate(tta), config, labels, seed=3, example=example)


def one(tta: dict[str, Any], classes: dict[str, Any] | None = None, *, labels: Labels = ANIMAL) -> TextView:
    (view,) = made(tta, classes, labels=labels)
    return view


texts = st.lists(
    st.text(st.sampled_from("abc XYZ.!?\u00e9\U0001f600"), min_size=1, max_size=40).filter(str.strip),
    min_size=1,
    max_size=6,
)


@settings(max_examples=25, deadline=None)
@given(texts=texts, name=st.sampled_from(sorted(TOKENIZERS)), numbers=st.permutations(range(6)))
def test_a_row_is_seen_alike_wherever_it_stands(texts: list[str], name: str, numbers: list[int]) -> None:
    records = [record(text, row=number) for number, text in enumerate(texts)]
    order = [number for number in numbers if number < len(records)]
    for view in made({"views": ["lower", "no_punctuation", "typos", "drop_words", "tail"], "copies": 2, "noise": 0.3}):
        together = tokens(view, records, TOKENIZERS[name], max_tokens=16)
        apart = tokens(view, [records[number] for number in order], TOKENIZERS[name], max_tokens=16)
        for number, other in zip(order, apart, strict=True):
            assert np.array_equal(together[number].input_ids, other.input_ids)
            assert len(other.input_ids) > len(TOKENIZERS[name]("")["input_ids"]), "no row is left without its text"


def test_copies_differ_from_each_other_and_between_seeds() -> None:
    row = record("Why was my second card payment declined in the shop?")
    config = TtaConfig.model_validate({"views": ["typos", "drop_words"], "copies": 3, "noise": 0.3})
    found = [
        (view.name, view.texts(row))
        for seed in (0, 1)
        for view in tta_views.text_views(config, ClassesConfig(), ANIMAL, seed=seed, example=row)
    ]
    assert [name for name, _ in found[:6]] == [f"{name} {n}" for name in ("typos", "drop_words") for n in (1, 2, 3)]
    assert len({texts for _, texts in found}) >= 11, "of 12; two may meet by chance"


@pytest.mark.parametrize("name", ["no_punctuation", "typos"])
def test_a_row_of_which_nothing_would_be_left_stays_plain(name: str) -> None:
    text = "?!" if name == "no_punctuation" else "x"
    (view,) = made({"views": [name]})
    seen = {view.texts(record(text))}
    assert all(text.strip() for (text,) in seen)
    pair = one({"views": ["no_punctuation"]}, PAIR, labels=WINNER)
    assert pair.texts(record("Who?", "Me!", "?")) == ("Who?", "Me!", "?"), "a response is never empty"
    two = one({"views": ["no_punctuation"]}, {"text": "{title} {body}"})
    assert two.texts(record("?", "Me!")) == ("", "Me"), "as the reader takes such rows"


@given(fields=st.tuples(*[st.text(min_size=1).filter(str.strip)] * 3), seed=st.integers(0, 99))
def test_swapping_twice_is_not_swapping(fields: tuple[str, str, str], seed: int) -> None:
    text = "{response_b} or {response_a}? {prompt}"
    for classes, given_fields in ((PAIR, fields), ({**PAIR, "text": text}, fields)):
        for names in (("a", "b", "tie"), ("a", "b")):
            view = one({"views": ["swap"]}, classes, labels=Labels("pair", names))
            row = record(*given_fields)
            once = view.texts(row)
            assert view.texts(record(*once)) == row.fields
            columns = dict(zip(view.classes.fields, once, strict=True))
            plain = dict(zip(view.classes.fields, row.fields, strict=True))
            assert columns["prompt"] == plain["prompt"] and columns["response_a"] == plain["response_b"]
            outputs_NC = np.random.default_rng(seed).normal(size=(5, len(names)))
            swapped_NC = view.outputs(outputs_NC)
            assert np.array_equal(view.outputs(swapped_NC), outputs_NC)
            assert np.array_equal(swapped_NC[:, 0], outputs_NC[:, 1])
            assert np.array_equal(swapped_NC[:, 2:], outputs_NC[:, 2:]), "a tie stays one"


@pytest.mark.parametrize(("names", "lacking"), [(("a", "tie"), "b"), (("b", "tie"), "a")])
def test_swap_needs_both_winners(names: tuple[str, ...], lacking: str) -> None:
    with pytest.raises(
        ConfigError, match=f"no training row has the label `{lacking}`.* Give rows where {lacking} wins, or leave"
    ):
        made({"views": ["swap"]}, PAIR, labels=Labels("pair", names))
    with pytest.raises(ConfigError, match=r"tta.views: swap exchanges two responses, and classes.kind is one"):
        made({"views": ["swap"]})


@pytest.mark.parametrize("name", sorted(TOKENIZERS))
def test_windows_keep_other_parts_of_long_rows_only(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    records = [record(LONG), record("short", row=2)]
    seen = {}
    for view in made({"views": ["head", "tail", "middle"]}, {"keep": "ends"}):
        long, short = tokens(view, records, tokenizer, max_tokens=60)
        assert long.truncated and len(long.input_ids) == 60
        assert short.input_ids.tolist() == tokenizer("short")["input_ids"]
        seen[view.name] = tokenizer.decode(long.input_ids, skip_special_tokens=True)
    assert "w0 " in seen["head"] and "w45" not in seen["head"] and "w89" not in seen["head"]
    assert "w45" in seen["middle"] and "w0 " not in seen["middle"] and "w89" not in seen["middle"]
    assert "w89" in seen["tail"] and "w45" not in seen["tail"] and "w0 " not in seen["tail"]


def test_a_template_reads_the_same_columns_in_its_order_with_the_same_shares() -> None:
    classes = {"text": "{title}. {body}", "shares": {"title": 1, "body": 3}}
    view = one({"views": ["templates"], "templates": ["Text: {body}\nTitle: {title}"]}, classes)
    tokenizer = TOKENIZERS["starter"]
    (written,) = tokens(view, [record("one", "two")], tokenizer, max_tokens=64)
    assert tokenizer.decode(written.input_ids) == "Text: two\nTitle: one"
    (written,) = tokens(view, [record("t " * 99, "b " * 99)], tokenizer, max_tokens=64)
    text = tokenizer.decode(written.input_ids)
    assert 2.5 < text.count("b") / text.removeprefix("Text: ").replace("Title: ", "").count("t") < 3.5
    assert one({"views": ["templates"], "templates": ["{prompt} {response_a} {response_b}"]}, PAIR).classes.parts == (
        0.2,
        0.4,
        0.4,
    )
    long = one({"views": ["templates"], "templates": ["very " * 30 + "{title} {body}"]}, classes)
    with pytest.raises(DataError, match=r"tta, view template 1: rows.csv, row 1: .* leaves no token"):
        tokens(long, [record("t " * 99, "b " * 99)], tokenizer, max_tokens=16)


def _useful(names: list[str], rows: LabelledSet, name: str) -> tuple[list[str], list[str]]:
    seen, notes = tta_views.useful_views(made({"views": names}), rows, reader(settled({}), TOKENIZERS[name]))
    return [view.name for view in seen], notes


def test_a_view_that_changes_nothing_is_left_out_with_a_sentence() -> None:
    config = settled({})
    records = [record("Where is my card?"), record("card", row=2)]
    bert, starter = (labelled(records, config, TOKENIZERS[name], ANIMAL) for name in ("bert", "starter"))
    seen, (note,) = _useful(["lower", "no_punctuation"], bert, "bert")
    assert seen == ["no_punctuation"]
    assert note.startswith("tta: view lower changes none of the 2 rows: the tokenizer gives") and "uncased" in note
    assert _useful(["lower", "upper", "no_punctuation"], starter, "starter") == (
        ["lower", "upper", "no_punctuation"],
        [],
    )
    seen, notes = _useful(["upper", "tail", "middle"], starter, "starter")
    assert seen == ["upper"] and all("row is longer than data.max_tokens" in note for note in notes) and len(notes) == 2


def test_views_that_all_change_nothing_are_refused_with_the_reason() -> None:
    config = settled({})
    records = [record("Where is my card?"), record("card", row=2)]
    bert, starter = (labelled(records, config, TOKENIZERS[name], ANIMAL) for name in ("bert", "starter"))
    with pytest.raises(DataError, match=r"rows.csv: view lower changes none .*uncased.*: leave lower out of tta.views"):
        _useful(["lower"], bert, "bert")
    plain = starter.subset(np.array([1]))
    with pytest.raises(DataError, match=r"view no_punctuation changes none of the 1 rows: no row has anything"):
        _useful(["no_punctuation"], plain, "starter")
    many = labelled(
        [record("Ok?", row=1), *[record("ok", row=row) for row in range(2, 150)]], config, TOKENIZERS["bert"], ANIMAL
    )
    with pytest.raises(
        DataError,
        match=r"view no_punctuation changes 1 of the 149 rows: .* must change 1% of the rows or more: leave",
    ):
        _useful(["no_punctuation"], many, "bert")
    assert _useful(["no_punctuation"], many.subset(np.arange(100)), "bert") == (["no_punctuation"], [])


def test_applying_a_view_leaves_everything_but_the_tokens() -> None:
    config = settled({})
    rows = labelled([record("Where is my card?")], config, TOKENIZERS["starter"], ANIMAL)
    starter = reader(config, TOKENIZERS["starter"])
    seen = one({"views": ["upper"]}).rows(rows, starter)
    assert starter.rendered(seen.inputs, 0) == "WHERE IS MY CARD?"
    assert seen.records == rows.records and seen.targets_NC is rows.targets_NC
    assert isinstance(seen.inputs, TokenRows)
    assert seen.lengths.tolist() == [len(seen.inputs.encoded[0].input_ids)] != rows.lengths.tolist()


def mine(folder: Path, code: str) -> dict[str, Any]:
    path = folder / "mine.py"
    path.write_text(code)
    return {"views": ["user"], "function": str(path)}


def test_a_users_views(tmp_path: Path) -> None:
    code = "def views(row):\n    return [{'text': row['text'] + mark} for mark in '?!']\n"
    first, second = made(mine(tmp_path, code))
    assert (first.name, second.name) == ("user 1", "user 2")
    assert first.texts(record("so")) == ("so?",) and second.texts(record("so")) == ("so!",)


@pytest.mark.parametrize(
    ("code", "wanted"),
    [
        ("x = 1", r"tta.function: .*mine.py defines no function views. Write `def views\(row"),
        ("def views(row): return []", "returned no view. Return a list of one or more rows"),
        ("def views(row): return row", r"returned \{'title': .* Return a list of rows"),
        ("def views(row): return ['a']", r"returned 'a' as a row. Return \{title, body\}, each with its text"),
        ("def views(row): return [{'title': 'a'}]", "returned a row without `body`. Return every column: title, body"),
        ("def views(row): return [{**row, 'body': 3}]", "returned 3 as `body`. Return text"),
        ("def views(row): return [{**row, 'boby': ''}]", r"returned a row with `boby`, which .* Did you mean `body`"),
        ("def views(row): return [row['boby']]", r"called with rows.csv, row 1: .*mine.py, line 1: KeyError: 'boby'"),
        (
            "import random\ndef views(row): return [{**row, 'title': str(random.random())}]",
            "returned other views when called again. Derive randomness from the row alone",
        ),
        ("def views(row): return [row]\ndef merge(p): return p[0]", r"defines merge\(\), .* write tta.merge=user"),
        ("def views(row) return", "line 1: SyntaxError"),
    ],
)
def test_mistakes_of_a_users_views(tmp_path: Path, code: str, wanted: str) -> None:
    with pytest.raises(ConfigError, match=wanted):
        made(mine(tmp_path, code), {"text": "{title} {body}"})


def test_a_user_gives_as_many_views_of_every_row(tmp_path: Path) -> None:
    view = one(mine(tmp_path, "def views(row): return [row] * (2 if 'long' in row['text'] else 1)"))
    with pytest.raises(
        ConfigError, match=r"called with rows.csv, row 7, returned 2 views, but 1 for rows.csv, row 1\. Return"
    ):
        tokens(view, [record("short", row=6), record("long", row=7)], TOKENIZERS["bert"], max_tokens=32)
