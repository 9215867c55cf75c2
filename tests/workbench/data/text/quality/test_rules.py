"""Each rule flags what its paper describes, at its paper's limit, and leaves plain prose alone."""

from __future__ import annotations

import pytest

from workbench.config.sections.clean_rules import ANSWER_RULES, CLEAN_RULES, DUPLICATE_RULES
from workbench.data.text.quality.row_texts import Exchange, RowText
from workbench.data.text.quality.rules import RULES, SET_RULES

PROSE = """\
The old fisherman lived alone with his two dogs in a small stone house at the end of the bay. Every morning he walked
down to the harbour to see what the night had brought, and every evening he told the children of the village about it.
They did not always believe him. One day in autumn, when storms come early, he found a bottle with a letter in it!
Nobody could read the strange writing, so they took it to the teacher. "This is a recipe for soup," she said at last.
"""


def _flagged(text: str, **parts: tuple[Exchange, ...]) -> set[str]:
    row = RowText("", text, **parts)
    return {name for name, rule in RULES.items() if rule.value(row) is not None}


def test_names_are_those_of_the_configuration() -> None:
    assert set(CLEAN_RULES) == {*RULES, *SET_RULES}
    assert len(set(CLEAN_RULES)) == len(CLEAN_RULES)
    assert set(DUPLICATE_RULES) < set(SET_RULES) and set(ANSWER_RULES) < set(RULES)


def test_prose_is_not_flagged() -> None:
    assert not _flagged(PROSE)


def test_a_row_is_flagged_by_any_of_its_sides_and_not_for_what_they_share() -> None:
    shared = "\n".join(f"Line {number} of what both answers begin with." for number in range(4))
    row = RowText("", f"{shared}\n{shared}", sides=(RowText("", shared), RowText("", f"{shared} {{")))
    assert RULES["c4_curly_brackets"].value(row) == 1 and RULES["gopher_duplicate_lines"].value(row) is None


def _words(count: int) -> str:
    return " ".join(f"wort{number}" for number in range(count))


@pytest.mark.parametrize(
    ("rule", "fine", "flagged"),
    [
        ("gopher_words", _words(50), _words(49)),
        ("gopher_words", _words(100_000), _words(100_001)),
        ("gopher_word_length", "abc abc abc", "abc abc ab"),
        ("gopher_word_length", "abcdefghij " * 3, "abcdefghij " * 3 + "abcdefghijk"),
        ("gopher_symbols", _words(19) + " ##", _words(19) + " ###"),
        ("gopher_symbols", _words(20) + "... ...", _words(19) + "...... ..."),
        ("gopher_bullets", "- a\n" * 9 + "b", "- a\n" * 10 + "\u2022 b"),
        ("gopher_ellipses", "a...\n" * 3 + "b\n" * 7, "a\u2026\n" * 4 + "b\n" * 6),
        ("gopher_alphabetic", "a b c d 5", "a b c 4 5"),
        ("gopher_stop_words", "The end of it", "The end, the end"),
        ("gopher_duplicate_lines", "a\na\na\nb\nc\nd\ne", "a\na\na\na\nb\nc"),
        ("gopher_duplicate_paragraphs", "a\n\na\n\nb\n\nc", "a\n\na\n\na\n\nb"),
        ("c4_terminal_punctuation", "Title\nA sentence.", "Title\nNo sentence"),
        ("c4_short_lines", "one\nall of the five words", "one\nno more than four"),
        ("c4_sentences", "A. B! C?", "A. B!"),
        ("c4_lorem_ipsum", "lorem", "Lorem ipsum dolor"),
        ("c4_curly_brackets", "(a)", "{a}"),
        ("c4_javascript", "java script", "Enable JavaScript."),
        ("c4_policies", "a policy", "Our Privacy Policy"),
        ("symbols", "abc--", "abc---"),
        ("broken_characters", "café", "cafÃ©"),
        ("broken_characters", "“so”", "â€œso"),
        ("broken_characters", "fi", "\ufffdi"),
    ],
)
def test_limits(rule: str, fine: str, flagged: str) -> None:
    assert rule not in _flagged(fine)
    assert rule in _flagged(flagged)


def test_rules_on_words_leave_scripts_without_spaces_alone() -> None:
    assert not {name for name in _flagged("床前明月光\uff0c疑是地上霜\u3002" * 4) if "word" in name or "gram" in name}


def test_stop_words_are_english() -> None:
    german = "Der Hund schläft heute nicht im Haus, sondern draußen unter dem alten Baum."
    assert "gopher_stop_words" not in _flagged(german)


@pytest.mark.parametrize(
    ("prompt", "answer", "rule"),
    [
        ("What is the capital city of France?", "what is the capital city of france Paris", "answer_repeats_prompt"),
        ("A long passage.\n\nWho lived in the house?", "Who lived in the house? A king.", "answer_repeats_prompt"),
        ("Hello", "hello!", "answer_repeats_prompt"),
        ("How?", "I\u2019m sorry, but I can\u2019t do this.", "refusal"),
        ("How?", "As an AI language model, I have no taste.", "refusal"),
        ("How?", "...", "empty_turn"),
    ],
)
def test_answers(prompt: str, answer: str, rule: str) -> None:
    assert rule in _flagged(f"{prompt}\n{answer}", exchanges=(Exchange(prompt, answer),))


@pytest.mark.parametrize(
    ("prompt", "answer"),
    [
        ("Who?", "Who knows. A king."),
        ("What is the capital city of France?", "The capital city of France is Paris."),
        ("May I?", "Say that you are sorry, but do not do it again. He cannot help it."),
    ],
)
def test_answers_that_are_fine(prompt: str, answer: str) -> None:
    assert not _flagged(f"{prompt}\n{answer}", exchanges=(Exchange(prompt, answer),)) & set(ANSWER_RULES)


def test_rules_on_answers_say_nothing_of_texts() -> None:
    assert all(RULES[name].measure(RowText("", PROSE)) is None for name in ANSWER_RULES)
