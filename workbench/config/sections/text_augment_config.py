"""The section `data.augment`; workbench/data/labelled/text_reader.py carries it out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, field_validator

from workbench.schema import ConsistentSection

OperatorName = Literal[
    "drop_words", "swap_words", "insert_words", "punctuation", "typos", "lower", "upper", "no_punctuation"
]
NOISY: tuple[OperatorName, ...] = ("drop_words", "swap_words", "insert_words", "punctuation", "typos")
"""Operators that change a share of a text; the others change all of it, always in the same way."""


class TextAugmentConfig(ConsistentSection):
    """Labelled texts are rewritten while they are trained on, in another way in each pass; their labels stay.

    What a text becomes depends on the seed, the pass and the text alone.
    """

    operators: tuple[OperatorName, ...] = ()
    """Ways to rewrite a text, of which each rewriting draws one; empty: off. By EDA (Wei and Zou 2019): `drop_words`,
    `swap_words` exchanges two words, `insert_words` puts a word of the text at another place too (EDA takes a synonym).
    By AEDA (Karimi et al. 2021): `punctuation` puts in marks. As test-time views: `typos`, `lower`, `upper`,
    `no_punctuation`. Words are what spaces separate; a column of a single word keeps it."""
    probability: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Chance of a row in a pass to be rewritten."""
    noise: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """Share of a column's words that are dropped, moved, repeated or get a mark, or of its letters and digits that get
    a typo; at least one."""

    @field_validator("operators")
    @classmethod
    def _different(cls, names: tuple[OperatorName, ...]) -> tuple[OperatorName, ...]:
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"{', '.join(twice)} appears twice. Name each operator once.")
        return names

    def _contradictions(self) -> Iterator[str]:
        given = [key for key in ("probability", "noise") if key in self.model_fields_set]
        changed = [key for key in given if self.differs(key)]
        if changed and not self.operators:
            yield (
                f"{' and '.join(changed)} of rewriting, and no operator is named. "
                "Write data.augment.operators=[drop_words], or leave data.augment out."
            )
        elif "noise" in changed and not set(self.operators) & set(NOISY):
            yield f"noise is for {', '.join(NOISY)}. Name one of them, or leave noise out."

    @property
    def is_on(self) -> bool:
        """Whether any text is rewritten."""
        return bool(self.operators)
