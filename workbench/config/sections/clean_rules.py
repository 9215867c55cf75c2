"""Names of the rules that judge rows of text, as `data.clean` has them; workbench/data/text/quality has the rules."""

from __future__ import annotations

ANSWER_RULES = ("answer_repeats_prompt", "refusal", "empty_turn")
"""Rules that ask about turns and answers."""
DUPLICATE_RULES = ("exact_duplicate", "near_duplicate")
"""Rules that keep the first of several rows."""
CLEAN_RULES = (
    "gopher_words",
    "gopher_word_length",
    "gopher_symbols",
    "gopher_bullets",
    "gopher_ellipses",
    "gopher_alphabetic",
    "gopher_stop_words",
    "gopher_duplicate_lines",
    "gopher_duplicate_paragraphs",
    "gopher_duplicate_line_characters",
    "gopher_duplicate_paragraph_characters",
    "gopher_top_2_gram",
    "gopher_top_3_gram",
    "gopher_top_4_gram",
    "gopher_duplicate_5_grams",
    "gopher_duplicate_6_grams",
    "gopher_duplicate_7_grams",
    "gopher_duplicate_8_grams",
    "gopher_duplicate_9_grams",
    "gopher_duplicate_10_grams",
    "c4_terminal_punctuation",
    "c4_short_lines",
    "c4_sentences",
    "c4_lorem_ipsum",
    "c4_curly_brackets",
    "c4_javascript",
    "c4_policies",
    "symbols",
    "broken_characters",
    "other_language",
    *ANSWER_RULES,
    *DUPLICATE_RULES,
)
