"""Rows that `data.clean` leaves out, and by which rules."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.data.text.quality import cleaning
from workbench.data.text.quality.row_texts import Exchange, RowText
from workbench.errors import DataError

PARTS = {"c4_curly_brackets": "{", "c4_javascript": "javascript", "c4_lorem_ipsum": "lorem ipsum"}


SOME = st.sets(st.sampled_from(sorted(PARTS)))


@given(st.lists(SOME, min_size=1, max_size=12), SOME.filter(bool))
def test_a_row_goes_where_any_rule_flags_it(wrong: list[set[str]], rules: set[str]) -> None:
    wrong = [*wrong, set()]
    rows = [RowText(f"row {at}", "fine " + " ".join(PARTS[rule] for rule in bad)) for at, bad in enumerate(wrong)]
    found = cleaning.find("x", iter(rows), sorted(rules))
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
    found = cleaning.find_in_sources(list(sources.items()), ["exact_duplicate", "refusal"])
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
    a, b = cleaning.find_in_sources(list(sources.items()), rules)
    assert a.counts["other_language"] == 0 and b.counts == {
        "other_language": 1,
        "exact_duplicate": 1,
        "near_duplicate": 1,
    }
    assert b.places == {"b1", "b2"}


def test_it_says_how_many_by_which_rule() -> None:
    rows = [RowText("a", "{ javascript"), RowText("b", "{"), RowText("c", "fine")]
    found = cleaning.find("x", rows, ["c4_javascript", "c4_curly_brackets"])
    assert found.sentence == ("data.clean left 2 of 3 training rows out: c4_javascript 1, c4_curly_brackets 2.")
    assert found.facts()["left_out"] == 2 and len(found.facts()["flags"]) == 3


def test_nothing_left_names_the_rule_that_takes_most() -> None:
    with pytest.raises(
        DataError, match=r"none of its 2 rows .*; gopher_words, made for web documents, flags 2 of them"
    ):
        cleaning.find("x", [RowText("a", "{"), RowText("b", "")], ["c4_curly_brackets", "gopher_words"])


def test_rules_on_answers_need_answers() -> None:
    with pytest.raises(DataError, match="refusal, which judge answers"):
        cleaning.find("x", [RowText("a", "text")], ["refusal"])
    rows = [RowText("a", "b", exchanges=(Exchange("b", "I must decline."),)), RowText("c", "d")]
    assert cleaning.find("x", rows, ["refusal"]).places == {"a"}


def test_check_tells_of_many() -> None:
    fine = [RowText(str(at), f"Row {at} is fine.") for at in range(99)]
    assert cleaning.outlook([*fine, RowText("x", "....")]) == []
    (said,) = cleaning.outlook([*fine[:90], *[RowText("x", "....")] * 10])
    assert said.startswith("Of the first 100 training rows 10% are flagged (symbols 10, exact_duplicate 9)")
