"""Rows that repeat others, or are in another language."""

from __future__ import annotations

import numpy as np

from workbench.data.text.quality import flagging
from workbench.data.text.quality.row_texts import Exchange, RowText

ENGLISH = "The dog did not sleep in the house tonight, but outside under the old tree."
GERMAN = "Der Hund schlief heute nicht im Haus, sondern draußen unter dem alten Baum."


def _rows(*texts: str) -> list[RowText]:
    return [RowText(f"row {number}", text) for number, text in enumerate(texts, start=1)]


def test_the_first_of_equal_rows_stays() -> None:
    rows = _rows("A cat.", "A dog.", "a  CAT!", "A cat.")
    found = flagging.by_comparison(rows, ["exact_duplicate"])
    assert [(flag.place, flag.note) for flag in found] == [("row 3", "row 1"), ("row 4", "row 1")]


def test_near_duplicates_are_not_counted_as_exact() -> None:
    rows = _rows(ENGLISH, ENGLISH.upper(), ENGLISH.replace("old", "elder"), GERMAN)
    assert [flag.place for flag in flagging.by_comparison(rows, ["near_duplicate"])] == ["row 3"]


def test_questions_on_one_passage_are_no_duplicates() -> None:
    passage = " ".join(np.random.default_rng(0).permutation([f"word{n}" for n in range(200)]))
    asked = ["Who lived in the old stone house?", "Why did nobody believe the fisherman?"]
    rows = [
        RowText(f"row {at}", f"{passage}\n\n{question}\nx", exchanges=(Exchange(f"{passage}\n\n{question}", "x"),))
        for at, question in enumerate([*asked, asked[0]], start=1)
    ]
    assert not flagging.by_comparison(rows[:2], ["near_duplicate"])
    assert flagging.by_comparison(rows, ["exact_duplicate"])[0].place == "row 3"


def test_the_language_of_most_rows_decides() -> None:
    found = flagging.by_comparison(_rows(ENGLISH, ENGLISH + "!", GERMAN, "Hund"), ["other_language"])
    assert [(flag.place, flag.note) for flag in found] == [("row 3", "de, not en")]
    assert not flagging.by_comparison(_rows(GERMAN), ["other_language"])


def test_order_of_rules_changes_nothing() -> None:
    rows = _rows("{", ENGLISH, "lorem ipsum {")
    names = ["c4_curly_brackets", "c4_lorem_ipsum"]
    assert set(flagging.by_rows(rows, names)) == set(flagging.by_rows(rows, names[::-1]))
