"""The section `data.decontaminate`; workbench/data/text/decontamination.py carries it out."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from workbench.schema import Section, Unit


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
            raise ValueError("against is compared by no one with action=off. Write action=drop, refuse or keep.")
        return self
