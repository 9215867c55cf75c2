"""The section `classes`: kind of label, text that the model reads, balancing of classes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from string import Formatter
from typing import Annotated, Literal, NamedTuple

from pydantic import Field, NonNegativeFloat, PositiveFloat, field_validator, model_validator

from workbench.schema import Section

Kind = Literal["one", "several", "number", "pair"]

PAIR_FIELDS = ("prompt", "response_a", "response_b")
_TEXTS = {"pair": "{prompt}\n\nResponse A:\n{response_a}\n\nResponse B:\n{response_b}"}
_SHARES = {"pair": {"prompt": 1.0, "response_a": 2.0, "response_b": 2.0}}


class Piece(NamedTuple):
    """Literal text of a template, and the column that follows it, if one does."""

    literal: str
    field: str | None


RARE = 0.25
"""Share of the rows of an average class below which a class is rare."""


class ClassesConfig(Section):
    """Labels of rows, how texts become one input, and unequal classes."""

    kind: Kind = "one"
    """Kind of label: one class, several classes (or none), a number, or which of two responses won (a, b, tie)."""
    text: str | None = None
    """Template of the model's input, made of columns: "{title}\\n{body}". Default: {text}; pairs: all three."""
    shares: dict[str, PositiveFloat] = Field(default_factory=dict)
    """How columns divide data.max_tokens where a row is too long: {title: 1, body: 4}. Each keeps at least its share.

    By default all alike; for pairs a response has twice the prompt's.
    """
    keep: Literal["start", "end", "ends", "middle"] = "start"
    """Part of a column that stays when it is cut: its start, its end, half of each, or its middle."""
    columns: tuple[str, ...] = ()
    """Columns that are classes, with 1 in a row that has the class and 0 elsewhere (one-hot): exactly one 1 where
    `kind` is one, any number where it is several. Empty: one column, `label`."""
    separator: str | None = Field(default=None, min_length=1)
    """Separator of the classes of a label, such as ",", where `kind` is several and labels are not lists."""
    every_class: bool = True
    """The held-out rows must show every class; false accepts classes that are learnt but not measured."""
    weights: Literal["none", "balanced", "effective"] = "none"
    """Rows of rare classes count more: by 1 / count, or by the effective number of rows, which is milder."""
    beta: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """For `weights` effective: how much further rows of a class still add; 0 weighs all classes alike."""
    gamma: NonNegativeFloat = 0.0
    """Focal loss: rows that are already right count (1 - p)^gamma; 0 is cross-entropy."""
    smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of a label that is spread over all classes."""
    logit_adjustment: NonNegativeFloat = 0.0
    """Strength with which the classes' log frequencies are added to the logits in training; 1 is the usual."""
    sampling: Literal["auto", "none", "even", "over", "under"] = "auto"
    """Every class is drawn equally often in an epoch: `even` as many rows as there are, `over` as often as the most
    frequent class has rows, `under` as the rarest. `none` draws each row once.

    `auto` is `even` for rows of which a class has less than a quarter of its equal share and nothing else here answers
    that, else `none`. Why: else such a class is never predicted (scripts/bench/README.md#unequal-classes).
    """

    @field_validator("text")
    @classmethod
    def _template(cls, text: str | None) -> str | None:
        return None if text is None else checked_template(text)

    @model_validator(mode="after")
    def _consistent(self) -> ClassesConfig:
        balancing = {
            "weights": self.weights != "none",
            "sampling": self.sampling not in ("auto", "none"),
            "logit_adjustment": self.logit_adjustment > 0,
        }
        chosen = [name for name, is_on in balancing.items() if is_on]
        if len(chosen) > 1:
            raise ValueError(f"{' and '.join(chosen)} both balance the classes. Keep one of them.")
        if self.kind in ("several", "number") and chosen:
            raise ValueError(f"{chosen[0]} is for labels that are one class; kind is {self.kind}. Leave it out.")
        if self.kind == "number" and (self.gamma or self.smoothing):
            raise ValueError("gamma and smoothing are for classes; kind is number. Leave them out.")
        if self.columns and (self.kind not in ("one", "several") or self.separator is not None):
            also = "separator" if self.separator is not None else f"kind {self.kind}"
            raise ValueError(f"columns hold 1 or 0 for a class each, and {also} is for one column. Leave one out.")
        if self.columns and (len(set(self.columns)) < len(self.columns) or len(self.columns) < 2):
            raise ValueError("columns are several, each named once. Write columns=[a,b], or leave it out for `label`.")
        if self.separator is not None and self.kind != "several":
            raise ValueError(
                f"separator is for kind several; kind is {self.kind}. Leave it out, or write kind: several."
            )
        if self.kind == "pair" and not set(PAIR_FIELDS) <= set(self.fields):
            raise ValueError(f"text must hold {{{'}, {'.join(PAIR_FIELDS)}}} where kind is pair.")
        if self.shares and set(self.shares) != set(self.fields):
            raise ValueError(
                f"shares must name the columns that text names: {', '.join(self.fields)}; "
                f"found {', '.join(sorted(self.shares))}."
            )
        return self

    @property
    def template(self) -> str:
        """The template of the text that the model reads."""
        return self.text or _TEXTS.get(self.kind, "{text}")

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """The template taken apart."""
        return _taken_apart(self.template)

    @property
    def fields(self) -> tuple[str, ...]:
        """Columns that the model reads, in their order."""
        return tuple(piece.field for piece in self.pieces if piece.field is not None)

    @property
    def parts(self) -> tuple[float, ...]:
        """Share of the tokens that each field keeps; they sum to 1."""
        given = self.shares or (_SHARES.get(self.kind, {}) if self.text is None else {})
        raw = [given.get(name, 1.0) for name in self.fields]
        return tuple(each / sum(raw) for each in raw)

    @property
    def label(self) -> str:
        """The column of the label, before data.columns renames it."""
        return "winner" if self.kind == "pair" else "label"

    @property
    def labels(self) -> tuple[str, ...]:
        """The columns of the label: `label`, or one for each class."""
        return self.columns or (self.label,)


def rarest(counts: Sequence[int]) -> int | None:
    """Index of the class with the fewest rows, where that is less than a quarter of its equal share; else None."""
    fewest = min(range(len(counts)), key=counts.__getitem__)
    return fewest if counts[fewest] < RARE * sum(counts) / len(counts) else None


@lru_cache
def _taken_apart(template: str) -> tuple[Piece, ...]:
    # Asked for by every row, several times.
    return tuple(Piece(literal, name) for literal, name, *_ in Formatter().parse(template))


def checked_template(text: str) -> str:
    """`text`; raises ValueError where it does not name each of one or more columns once, in braces."""
    try:
        fields = list(Formatter().parse(text))
    except ValueError as error:
        raise ValueError(f'{error}. Write columns in braces, such as "{{title}} {{body}}".') from None
    names = [name for _, name, *_ in fields if name is not None]
    if not names:
        raise ValueError('names no column. Write columns in braces, such as "{title} {body}".')
    for _, name, spec, conversion in fields:
        if name is not None and (not name.isidentifier() or spec or conversion):
            raise ValueError(
                f"`{{{name}}}` is no plain column name in braces. Rename it with data.columns={{NAME: found}}."
            )
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"duplicate column {twice[0]}. Name each column once.")
    return text
