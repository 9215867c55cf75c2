"""Conversations and raw texts as rules read them."""

from __future__ import annotations

from dataclasses import replace

from workbench.data.text.formats import Example
from workbench.data.text.quality import row_texts
from workbench.data.text.quality.row_texts import Exchange, RowText


def _chat(*turns: tuple[str, str]) -> Example:
    return Example("p", messages=tuple({"role": role, "content": content} for role, content in turns))


def test_answers_have_the_prompt_before_them() -> None:
    said = [("user", "A"), ("assistant", "B"), ("user", "C"), ("assistant", "D")]
    row = row_texts.of_example(_chat(("system", "Be kind."), *said))
    assert row.exchanges == (Exchange("A", "B"), Exchange("C", "D"))
    assert row.text == "A\nB\nC\nD" and row.turns == ("A", "B", "C", "D")


def test_calls_of_tools_are_no_answers() -> None:
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    example = Example("p", messages=({"role": "user", "content": "A"}, call, {"role": "tool", "content": "7"}))
    row = row_texts.of_example(example)
    assert row.exchanges == () and row.turns == ("A",)


def test_raw_texts() -> None:
    assert row_texts.of_example(Example("p", text=(("all of it", True),))).exchanges == ()
    asked = row_texts.of_example(Example("p", text=(("2 + 2 = ", False), ("4", True))))
    assert asked.text == "2 + 2 = 4" and asked.exchanges == (Exchange("2 + 2 = ", "4"),)


def test_compared_answers_are_sides_of_one_row() -> None:
    chosen, rejected = (_chat(("user", "A"), ("assistant", answer)) for answer in ("Good.", "Bad."))
    raw, other = (Example("p", text=(("A\n", False), (answer, True))) for answer in ("Good.", "Bad."))
    for pair in (replace(chosen, rejected=rejected), replace(raw, rejected=other)):
        row = row_texts.of_example(pair)
        assert row.text == "A\nGood.\nBad." and [side.text for side in row.sides] == ["A\nGood.", "A\nBad."]
        assert row.exchanges[-1].answer == "Good.", "the answer that is learnt"
        assert row.asked_and_answered == "A\nBad.\nA\nGood."
    assert [side.text for side in row_texts.of_texts("p", ("x", "y", "z")).sides] == ["x", "y", "z"]
    single = RowText("p", "x")
    assert single.sides == (single,)


def test_the_question_of_a_passage_stands_last() -> None:
    row = RowText("", "", exchanges=(Exchange("A long passage.\n\nOf two parts.\n\nWho?", "He."),))
    assert row.asked_and_answered == "Who?\nHe."


def test_scripts_and_languages() -> None:
    assert RowText("", "Grüße, мир!").scripts == {"Latin": 5, "Cyrillic": 3}
    assert not RowText("", "床前明月光 ok").is_spaced and RowText("", "123").is_spaced
    assert RowText("", "Too short to tell").language == ""
    assert RowText("", "Der Hund schläft heute nicht im Haus, sondern draußen unter dem Baum.").language == "de"
