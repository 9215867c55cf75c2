"""Rows that rules flag, and rows that `data.clean` leaves out."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.data.text.formats import Example
from workbench.data.text.media import KEY, MARK, Media
from workbench.data.text.quality import cleaning, rules
from workbench.data.text.quality.rules import Exchange, RowText
from workbench.errors import DataError

PARTS = {"c4_curly_brackets": "{", "c4_javascript": "javascript", "c4_lorem_ipsum": "lorem ipsum"}


SOME = st.sets(st.sampled_from(sorted(PARTS)))


@given(st.lists(SOME, min_size=1, max_size=12), SOME.filter(bool))
def test_a_row_goes_where_any_rule_flags_it(wrong: list[set[str]], rules: set[str]) -> None:
    wrong = [*wrong, set()]
    rows = [RowText(f"row {at}", "fine " + " ".join(PARTS[rule] for rule in bad)) for at, bad in enumerate(wrong)]
    found = cleaning.clean("x", iter(rows), sorted(rules))
    assert found.kept([row.place for row in rows]).tolist() == [not bad & rules for bad in wrong]
    assert found.counts == {rule: sum(rule in bad for bad in wrong) for rule in sorted(rules)}
    assert found.rows == len(rows)


@given(st.lists(st.lists(st.sampled_from("abcd"), min_size=1), min_size=1, max_size=3), st.booleans())
def test_of_duplicates_in_several_sources_the_first_stays(letters: list[list[str]], lower: bool) -> None:
    texts = [[f"unique {number}", *own] for number, own in enumerate(letters)]
    sources = {
        f"s{number}": [
            RowText(f"row {at}", text if lower else text.title(), exchanges=(Exchange(text, text),))
            for at, text in enumerate(own)
        ]
        for number, own in enumerate(texts)
    }
    found = cleaning.clean_sources(list(sources.items()), ["exact_duplicate", "refusal"])
    kept = [
        [row.text.lower() for row, stays in zip(rows, own.kept([row.place for row in rows]), strict=True) if stays]
        for rows, own in zip(sources.values(), found, strict=True)
    ]
    every = [text for own in texts for text in own]
    assert [text for own in kept for text in own] == list(dict.fromkeys(every))
    assert sum(own.counts["exact_duplicate"] for own in found) == len(every) - len(set(every))
    assert [own.rows for own in found] == [len(own) for own in texts]


def test_a_language_is_common_within_a_source_and_duplicates_are_sought_beyond_it() -> None:
    english = "The quick brown fox jumps over the lazy dog near the river bank. "
    german = "Der schnelle braune Fuchs springt heute gerne ueber den faulen Hund am Ufer. "
    sources = {
        "a": [RowText(f"a{at}", f"{english * 3}{word}") for at, word in enumerate(("One thing.", "Quite another!"))],
        "b": [
            RowText("b0", german * 3),
            RowText("b1", f"{german * 3}Zwei."),
            RowText("b2", f"{english * 3}One thing."),
        ],
    }
    rules = ["other_language", "exact_duplicate", "near_duplicate"]
    a, b = cleaning.clean_sources(list(sources.items()), rules)
    assert a.counts["other_language"] == 0 and b.counts == {
        "other_language": 1,
        "exact_duplicate": 1,
        "near_duplicate": 1,
    }
    assert b.places == {"b1", "b2"}


def test_it_says_how_many_by_which_rule() -> None:
    rows = [RowText("a", "{ javascript"), RowText("b", "{"), RowText("c", "fine")]
    found = cleaning.clean("x", rows, ["c4_javascript", "c4_curly_brackets"])
    assert found.sentence == ("data.clean left 2 of 3 training rows out: c4_javascript 1, c4_curly_brackets 2.")
    assert found.facts()["left_out"] == 2 and len(found.facts()["flags"]) == 3


def test_nothing_left_names_the_rule_that_takes_most() -> None:
    with pytest.raises(
        DataError, match=r"none of its 2 rows .*; gopher_words, made for web documents, flags 2 of them"
    ):
        cleaning.clean("x", [RowText("a", "{"), RowText("b", "")], ["c4_curly_brackets", "gopher_words"])


def test_rules_on_answers_need_answers() -> None:
    with pytest.raises(DataError, match="refusal, which judge answers"):
        cleaning.clean("x", [RowText("a", "text")], ["refusal"])
    rows = [RowText("a", "b", exchanges=(Exchange("b", "I must decline."),)), RowText("c", "d")]
    assert cleaning.clean("x", rows, ["refusal"]).places == {"a"}


def test_check_tells_of_many() -> None:
    fine = [RowText(str(at), f"Row {at} is fine.") for at in range(99)]
    assert cleaning.outlook([*fine, RowText("x", "....")]) == []
    (said,) = cleaning.outlook([*fine[:90], *[RowText("x", "....")] * 10])
    assert said.startswith("Of the first 100 training rows 10% are flagged (symbols 10, exact_duplicate 9)")


ENGLISH = "The dog did not sleep in the house tonight, but outside under the old tree."
GERMAN = "Der Hund schlief heute nicht im Haus, sondern draußen unter dem alten Baum."


def _rows(*texts: str) -> list[RowText]:
    return [RowText(f"row {number}", text) for number, text in enumerate(texts, start=1)]


def test_the_first_of_equal_rows_stays() -> None:
    rows = _rows("A cat.", "A dog.", "a  CAT!", "A cat.")
    found = cleaning.flags_by_comparison(rows, ["exact_duplicate"])
    assert [(flag.place, flag.note) for flag in found] == [("row 3", "row 1"), ("row 4", "row 1")]


def test_near_duplicates_are_not_counted_as_exact() -> None:
    rows = _rows(ENGLISH, ENGLISH.upper(), ENGLISH.replace("old", "elder"), GERMAN)
    assert [flag.place for flag in cleaning.flags_by_comparison(rows, ["near_duplicate"])] == ["row 3"]


def test_questions_on_one_passage_are_no_duplicates() -> None:
    passage = " ".join(np.random.default_rng(0).permutation([f"word{n}" for n in range(200)]))
    asked = ["Who lived in the old stone house?", "Why did nobody believe the fisherman?"]
    rows = [
        RowText(f"row {at}", f"{passage}\n\n{question}\nx", exchanges=(Exchange(f"{passage}\n\n{question}", "x"),))
        for at, question in enumerate([*asked, asked[0]], start=1)
    ]
    assert not cleaning.flags_by_comparison(rows[:2], ["near_duplicate"])
    assert cleaning.flags_by_comparison(rows, ["exact_duplicate"])[0].place == "row 3"


def test_the_language_of_most_rows_decides() -> None:
    found = cleaning.flags_by_comparison(_rows(ENGLISH, ENGLISH + "!", GERMAN, "Hund"), ["other_language"])
    assert [(flag.place, flag.note) for flag in found] == [("row 3", "de, not en")]
    assert not cleaning.flags_by_comparison(_rows(GERMAN), ["other_language"])


def test_order_of_rules_changes_nothing() -> None:
    rows = _rows("{", ENGLISH, "lorem ipsum {")
    names = ["c4_curly_brackets", "c4_lorem_ipsum"]
    assert set(cleaning.flags_by_row(rows, names)) == set(cleaning.flags_by_row(rows, names[::-1]))


def test_the_same_question_about_another_picture_is_no_duplicate() -> None:
    def row(number: int, picture: object) -> rules.RowText:
        part = Media("image", picture, None)
        asked = {"role": "user", "content": f"{MARK}What colour is the shape?", KEY: [part]}
        messages = (asked, {"role": "assistant", "content": "Blue."})
        return rules.row_text_of_example(Example(f"row {number}", messages=messages))

    rows = [row(number, picture) for number, picture in enumerate(["a.png", "b.png", b"PNG", b"JPEG", "a.png", b"PNG"])]
    flags = cleaning.flags_by_comparison(rows, ["exact_duplicate", "near_duplicate"])
    assert [(flag.row, flag.rule) for flag in flags] == [(4, "exact_duplicate"), (5, "exact_duplicate")]
