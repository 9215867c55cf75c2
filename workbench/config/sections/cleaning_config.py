"""Names of the rules of `data.clean`, which workbench/data/text/quality has, and the section `data.decontaminate`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from workbench.schema import Section, Unit

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


class DecontaminateConfig(Section):
    """Training rows that hold the text of evaluation rows, found by their common n-grams.

    `data.overlap` finds equal rows and is always on; this also finds copies with other case, punctuation and spaces,
    inside longer rows, and in part."""

    action: Literal["off", "keep", "drop", "refuse"] = "off"
    """Do not look, list contaminated training rows and keep them, drop them from training, or end the run."""
    ngram: Annotated[int, Field(ge=3, le=50), Unit("words")] = 8
    """Words of an n-gram (characters, where a script has no spaces); a shorter text counts only as a whole. Tülu 3
    compares 8 words, GPT-3 8 to 13; more words forgive chance phrases, fewer find changed copies."""
    share: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of the words of an evaluation row's prompt or answer that common n-grams must cover, as in Tülu 3."""
    against: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Evaluation files or hub data sets besides data.held_out and data.test; they are compared, not scored."""

    @model_validator(mode="after")
    def _used(self) -> DecontaminateConfig:
        twice = sorted({name for name in self.against if self.against.count(name) > 1})
        if twice:
            raise ValueError(f"against names {twice[0]} twice. Name it once.")
        if self.action == "off" and self.against:
            raise ValueError(
                "against is compared by no one with action=off. Write data.decontaminate.action=drop, refuse or keep."
            )
        return self
