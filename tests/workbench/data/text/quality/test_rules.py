"""The quality rules: what each measures and flags; measures of repetition equal their definitions, written again."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.config.sections.cleaning_config import ANSWER_RULES, CLEAN_RULES, DUPLICATE_RULES
from workbench.data.text.formats import Example
from workbench.data.text.quality import rules
from workbench.data.text.quality.rules import RULES, SET_RULES, Exchange, RowText

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


WORDS = st.lists(st.sampled_from(["a", "bb", "ccc", "dddd"]), min_size=1, max_size=40)


def _share(words: list[str], starts: list[int], n: int) -> float:
    """Share of characters that lie in the n-grams at `starts`, each character counted once."""
    letters = [(at, letter) for at, word in enumerate(words) for letter in range(len(word))]
    return sum(any(start <= at < start + n for start in starts) for at, _ in letters) / len(letters)


@given(WORDS, st.integers(2, 6))
def test_duplicate_grams_are_those_that_came_before(words: list[str], n: int) -> None:
    grams = [words[at : at + n] for at in range(len(words) - n + 1)]
    again = [at for at, gram in enumerate(grams) if gram in grams[:at]]
    found = rules.duplicate_grams(RowText("", " ".join(words)), n=n)
    assert found == pytest.approx(_share(words, again, n))


@given(WORDS, st.integers(2, 4))
def test_the_top_gram_is_the_most_frequent_one(words: list[str], n: int) -> None:
    grams = [tuple(words[at : at + n]) for at in range(len(words) - n + 1)]
    most = max(map(grams.count, grams), default=0)
    shares = {
        _share(words, [at for at, gram in enumerate(grams) if gram == top], n)
        for top in grams
        if grams.count(top) == most
    }
    found = rules.top_gram(RowText("", " ".join(words)), n=n)
    assert found is not None and 0 <= found <= 1
    assert found == 0 if most < 2 else any(found == pytest.approx(share) for share in shares)


@given(WORDS)
def test_a_long_sequence_repeats_only_where_shorter_ones_do(words: list[str]) -> None:
    row = RowText("", " ".join(words))
    shares = [rules.duplicate_grams(row, n=n) for n in (5, 6, 7, 8)]
    assert all(shorter or not longer for shorter, longer in pairwise(shares))


@given(st.lists(st.text("xyz", min_size=1, max_size=4), min_size=1, max_size=12))
def test_lines_and_paragraphs_count_from_their_second_time(parts: list[str]) -> None:
    again = [part for at, part in enumerate(parts) if part in parts[:at]]
    characters = sum(map(len, again)) / sum(map(len, parts))
    lines, paragraphs = RowText("", "\n".join(parts)), RowText("", "\n\n".join(parts))
    assert rules.repeated_share(lines.lines) == pytest.approx(len(again) / len(parts))
    assert rules.repeated_share(paragraphs.paragraphs) == pytest.approx(len(again) / len(parts))
    assert rules.repeated_characters(lines.lines) == pytest.approx(characters)
    assert rules.repeated_characters(paragraphs.paragraphs) == pytest.approx(characters)


def test_texts_without_spaces_between_words_are_not_measured() -> None:
    assert rules.top_gram(RowText("", "床前明月光"), n=2) is None
    assert rules.duplicate_grams(RowText("", ""), n=5) is None


def _chat(*turns: tuple[str, str]) -> Example:
    return Example("p", messages=tuple({"role": role, "content": content} for role, content in turns))


def test_answers_have_the_prompt_before_them() -> None:
    said = [("user", "A"), ("assistant", "B"), ("user", "C"), ("assistant", "D")]
    row = rules.row_text_of_example(_chat(("system", "Be kind."), *said))
    assert row.exchanges == (Exchange("A", "B"), Exchange("C", "D"))
    assert row.text == "A\nB\nC\nD" and row.turns == ("A", "B", "C", "D")


def test_calls_of_tools_are_no_answers() -> None:
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    example = Example("p", messages=({"role": "user", "content": "A"}, call, {"role": "tool", "content": "7"}))
    row = rules.row_text_of_example(example)
    assert row.exchanges == () and row.turns == ("A",)


def test_raw_texts() -> None:
    assert rules.row_text_of_example(Example("p", text=(("all of it", True),))).exchanges == ()
    asked = rules.row_text_of_example(Example("p", text=(("2 + 2 = ", False), ("4", True))))
    assert asked.text == "2 + 2 = 4" and asked.exchanges == (Exchange("2 + 2 = ", "4"),)


def test_compared_answers_are_sides_of_one_row() -> None:
    chosen, rejected = (_chat(("user", "A"), ("assistant", answer)) for answer in ("Good.", "Bad."))
    raw, other = (Example("p", text=(("A\n", False), (answer, True))) for answer in ("Good.", "Bad."))
    for pair in (replace(chosen, rejected=rejected), replace(raw, rejected=other)):
        row = rules.row_text_of_example(pair)
        assert row.text == "A\nGood.\nBad." and [side.text for side in row.sides] == ["A\nGood.", "A\nBad."]
        assert row.exchanges[-1].answer == "Good.", "the answer that is learnt"
        assert row.asked_and_answered == "A\nBad.\nA\nGood."
    assert [side.text for side in rules.row_text_of_texts("p", ("x", "y", "z")).sides] == ["x", "y", "z"]
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
